"""How near the formulas of plan/memory.py come to peaks of memory that others have published (peaks.csv).

Most of those runs were not FSDP2's. What another system keeps in place of our weights, gradients, optimizer state and
logits is said in `SYSTEMS`; the rest, and its course through the schedule, is worked out as for our own runs. peaks.csv
has facts alone, with their sources: a row without a peak ran out of memory. Layers that a source does not state follow
from its count of parameters; recompute modes are those of ours that are nearest.
"""

import csv
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from models.config import ModelConfig
from parallel.config import Config
from parallel.layout import AXES, Layout, microbatch_count, resolve
from parallel.plan.activations import layer_activations, sizes
from parallel.plan.memory import Memory, moments
from parallel.plan.weights import held_parameters, rank_layers

FILE = Path(__file__).parent / "peaks.csv"
GPUS = {"A100_80GB": 80 * 2**30, "H100": 80 * 2**30, "H100_96GB": 96 * 2**30, "H200": 141e9, "B200": 180e9}


@dataclass(frozen=True)
class System:
    """Bytes that a rank of another system holds. A weight counts once per rank that has its tp and pp part."""

    per_weight: float | None = None
    """Weights, gradients and state that each data rank has whole; None is FSDP2, as here."""
    per_shared_weight: float = 0.0
    """The same, of what is dealt out over data ranks (with ZeRO 0, which none of it is)."""
    per_logit: float = 12.0
    """Logits of all tokens at once: in the type of computing, in fp32, and their gradients in both."""
    per_score: float = 0.0
    """Attention scores as a matrix, of the layer that goes backward."""
    buffers: float = 0.0
    products: float = 1.0
    """`selective:ops`: the share of the products of matrices that is kept."""
    gathers_again: bool = False
    """With sequence parallelism the whole sequence is gathered again for the backward pass, not kept."""
    splits_outputs: bool = False
    """What a stage hands on is kept in pieces by its tp ranks, from its forward to its backward pass."""
    keeps_in_pipeline: bool = False
    """In a pipeline weights stay gathered, and gradients whole, from the first microbatch of a step to its last."""


SYSTEMS = {
    # Logits whole; selective recomputation of "op" keeps every second product; ZeRO 3 does not reshard in a pipeline.
    "torchtitan": System(products=0.5, keeps_in_pipeline=True),
    # fp16 weights and gradients; fp32 weights, two moments and the gradients of its own shard; buckets of 5e8 elements
    # for reduction and gathering (DeepSpeed's defaults); attention without a fused kernel: scores, dropout's mask,
    # probabilities and a gradient. Its pipeline splits outputs over tp ranks (`pipe_partitioned`, by default).
    "deepspeed_fp16": System(2 + 2, 12 + 4, per_score=7, buffers=2 * 2 * 5e8, splits_outputs=True),
    # BF16_Optimizer: gradients are added up in fp32 besides.
    "deepspeed_bf16": System(2 + 2 + 4, 12, per_score=7, splits_outputs=True),
    # Weights and gradients in bf16, dealt out; the rest in the host's memory; Liger's loss makes no logits.
    "deepspeed_offload": System(0, 2 + 2, per_logit=0.0),
    # bf16 weights, fp32 gradients; fp32 weights and moments dealt out.
    "nanotron": System(2 + 4, 12, gathers_again=True),
}


@dataclass(frozen=True)
class Peak:
    """A published run."""

    source: str
    system: str
    gpu_bytes: float
    config: Config
    layout: Layout
    peak_bytes: float | None
    """None: it ran out of memory."""

    def predicted(self) -> float:
        """Bytes that the fullest rank asks of its GPU."""
        ranks = {0, min(1, self.layout.pp - 1), self.layout.pp - 1}
        return max(memory.needed for pp_rank in ranks for memory in self._moments(pp_rank))

    def _moments(self, pp_rank: int) -> Iterator[Memory]:
        config, layout, system = self.config, self.layout, SYSTEMS[self.system]
        size, place = sizes(config, layout), dict.fromkeys(AXES, 0) | {"pp": pp_rank}
        whole = sum(held_parameters(config, replace(layout, dp_shard=1, dp_replicate=1, cp=1), place).values())
        data_ranks = layout.dp * layout.cp if config.parallelism.zero else 1
        for memory in moments(config, layout, place):
            if "norm" in memory.moment:  # theirs are fused kernels, which make little on the way
                continue
            if system.per_weight is not None:
                states = whole * system.per_weight + whole * system.per_shared_weight / data_ranks
                gathers = config.parallelism.zero == 3
                memory = replace(
                    memory,
                    parameters=int(states),
                    gradients=0,
                    optimizer=0,
                    gathered=memory.gathered * gathers,
                    communication=memory.communication * gathers,
                )
            activations = memory.activations + system.buffers - self._not_kept(pp_rank)
            if memory.moment.startswith("loss"):
                if system.per_logit:
                    memory = replace(memory, loss=int(size.tokens * size.vocabulary * system.per_logit))
            elif memory.moment != "clipping":
                activations += system.per_score * config.data.micro_batch * size.heads * config.data.seq_len**2
            yield replace(memory, activations=max(int(activations), 0))

    def _not_kept(self, pp_rank: int) -> float:
        """What our layers keep for their backward pass and the other system's do not."""
        config, layout, system = self.config, self.layout, SYSTEMS[self.system]
        size, layers = sizes(config, layout), len(rank_layers(config, pp_rank))
        less = 0.0
        if config.parallelism.recompute == "selective:ops":
            kept = layer_activations(config, layout, 0).kept - size.stream
            less += (1 - system.products) * (kept - size.precise * size.tokens * size.heads)
        if system.gathers_again and size.gathers:
            less += 2 * size.whole_stream
        less *= layers
        if system.splits_outputs and pp_rank < layout.pp - 1:
            count = microbatch_count(config, layout)
            less += min(layout.pp - pp_rank, count) * size.stream * (1 - 1 / layout.tp)  # as 1F1B has under way
        return less


def peaks(base: Config) -> list[Peak]:
    """Every row of peaks.csv, as a change of `base`."""
    with FILE.open() as file:
        return [_peak(base, row) for row in csv.DictReader(file)]


def _peak(base: Config, row: dict[str, Any]) -> Peak:
    number = {key: int(value) for key, value in row.items() if value.isdigit()}
    system, tp, pp, cp = SYSTEMS[row["system"]], number["tp"], number["pp"], number["cp"]
    model: ModelConfig = replace(
        base.model,
        name=row["model"],
        vocab_size=number["vocab"],
        hidden_size=number["hidden"],
        intermediate_size=number["inner"],
        num_hidden_layers=number["layers"],
        num_attention_heads=number["heads"],
        num_key_value_heads=number["kv_heads"],
        head_dim=number["hidden"] // number["heads"],
        tie_word_embeddings=bool(number["tied"]),
        max_position_embeddings=number["seq_len"],
    )
    parallelism = replace(
        base.parallelism,
        tp=tp,
        sequence_parallel=tp > 1 and row["system"] in ("torchtitan", "nanotron"),
        loss_parallel=tp > 1,
        pp=pp,
        cp=cp,
        zero=1 if system.keeps_in_pipeline and pp > 1 else number["zero"],
        recompute=row["recompute"],
    )
    data = replace(
        base.data,
        seq_len=number["seq_len"],
        global_batch=number["global_batch"],
        micro_batch=number["micro_batch"],
    )
    config = replace(base, model=model, parallelism=parallelism, data=data)
    peak = float(row["peak_gb"]) * 1e9 if row["peak_gb"] else None
    layout = resolve(parallelism, number["gpus"])
    return Peak(row["source"], row["system"], GPUS[row["gpu"]], config, layout, peak)


@dataclass(frozen=True)
class Accuracy:
    """Errors of the predictions for one system; relative to what was published."""

    runs: int
    median: float
    """Signed: negative where too little was predicted."""
    median_size: float
    ninth_tenth: float
    """The size of error that 90 % of the runs do not exceed."""
    seen: int
    """Runs out of memory that were predicted to be."""
    failed: int


def accuracy(found: list[Peak]) -> Accuracy:
    """Over some runs, of which at least one did not run out of memory."""
    errors = [run.predicted() / run.peak_bytes - 1 for run in found if run.peak_bytes is not None]
    size = sorted(map(abs, errors))
    failed = [run for run in found if run.peak_bytes is None]
    return Accuracy(
        len(errors),
        statistics.median(errors),
        statistics.median(size),
        size[math.ceil(0.9 * len(size)) - 1],
        sum(run.predicted() > run.gpu_bytes for run in failed),
        len(failed),
    )
