"""Small training runs for comparing layouts: the configs, what a rank does, and how two runs are compared.

Everything goes through parallel/step.py, the path that the strategy takes too.
"""

import hashlib
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from models.config import BalanceScope, ModelConfig
from parallel.checkpoint import load, save
from parallel.cluster import ClusterConfig
from parallel.config import (
    AdamWConfig,
    CheckpointConfig,
    Config,
    DebugConfig,
    DecayShape,
    FloatType,
    MaskPattern,
    OptimizerConfig,
    ParallelismConfig,
    PrecisionConfig,
    RecipeConfig,
    RunConfig,
    SchedulerConfig,
    SGDConfig,
    SyntheticData,
    TrainerConfig,
)
from parallel.layout import resolve
from parallel.pipeline import build_decoder
from parallel.sharded import local, offset, whole
from parallel.step import ParallelModel, clip, evaluate, forward_backward, make_mesh, parallelize
from recipes.data.windows import StepOrder, SyntheticWindows, TrainBatches, ValidationBatches
from recipes.optimizers import make_optimizer
from recipes.validation import batch_sums, means

PRECISIONS = {
    "fp64": PrecisionConfig("fp64", FloatType.float64, FloatType.float64, FloatType.float64),
    "fp32": PrecisionConfig("fp32", FloatType.float32, FloatType.float32, FloatType.float32),
    "bf16": PrecisionConfig("bf16", FloatType.float32, FloatType.bfloat16, FloatType.float32),
}
OPTIMIZERS: dict[str, OptimizerConfig] = {
    "sgd": SGDConfig(name="sgd", lr=0.5, weight_decay=0.0),
    "adamw": AdamWConfig(name="adamw", lr=1e-3, weight_decay=0.1),
}


def make_config(
    model: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    precision: str = "fp64",
    optimizer: str = "sgd",
    clip_at: float | None = 1.0,
    **parallelism: Any,
) -> Config:
    """A two-layer decoder on random documents whose masks are uneven, the first half of each step's batch empty."""
    shape = {
        "name": "test",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "max_position_embeddings": 64,
    }
    text = {
        "name": "synthetic",
        "seq_len": 16,
        "global_batch": 8,
        "micro_batch": 2,
        "cache_dir": "",
        "vocab_size": 60,
        "sequences": 40,
        "validation_sequences": 7,
        "document_len": 6,
        "document_mask": True,
        "mask": MaskPattern.empty_first,
    }
    return Config(
        recipe=RecipeConfig("test"),
        model=ModelConfig(**shape | (model or {})),
        parallelism=ParallelismConfig(**parallelism),
        precision=PRECISIONS[precision],
        cluster=ClusterConfig("test", "cpu"),
        data=SyntheticData(**text | (data or {})),
        optimizer=OPTIMIZERS[optimizer],
        scheduler=SchedulerConfig(DecayShape.constant),
        checkpoint=CheckpointConfig(),
        trainer=TrainerConfig(3, clip_at, None, None, 1),
        run=RunConfig("", "test", ""),
        debug=DebugConfig(),
        callbacks={},
        logger={},
        seed=0,
        deterministic=False,
        ckpt="none",
    )


def one_process(config: Config) -> Config:
    """The same run without any splitting or compiling, in one microbatch unless microbatches are what is balanced."""
    config = replace(config, parallelism=ParallelismConfig(), trainer=replace(config.trainer, compile=False))
    if config.model.moe.balance_loss and config.model.moe.balance_scope == BalanceScope.microbatch:
        return config
    return replace(config, data=replace(config.data, micro_batch=config.data.global_batch))


@dataclass
class Trace:
    """What a run did, the same on every rank but for `replicas`."""

    initial: dict[str, str]
    """Hash of every parameter's initial value, whole."""
    losses: list[float]
    tokens: list[int]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    """Per step, every parameter's gradient before clipping."""
    weights: dict[str, Tensor]
    """After the last step, biases of routers included."""
    validation: dict[str, float]
    samples: list[list[int]]
    """Per step, the numbers of the sequences that this rank has read."""
    replicas: list[dict[str, str]]
    """Per step, the hash of each parameter's block on this rank, under "name@offset", and of each bias."""
    routing: list[Tensor] = field(default_factory=list)
    """Per step, what routers did: the load of each layer's experts, losses, entropy, dropped assignments."""


def build(config: Config) -> tuple[ParallelModel, TrainBatches]:
    """This rank's part of the model and of the data."""
    layout = resolve(config.parallelism, dist.get_world_size())
    mesh = make_mesh(config, layout, "cpu")
    with torch.device("meta"):
        decoder = build_decoder(config.model, config.parallelism, layout.coordinates(dist.get_rank())["pp"])
    model = parallelize(decoder, config, layout, mesh)
    windows = SyntheticWindows(config.data, config.seed, "train")
    order = StepOrder(len(windows), config.data.global_batch, config.seed)
    return model, TrainBatches(windows, order, layout.data_rank(dist.get_rank()), layout.dp, None)


def train(config: Config, steps: int = 3, fault: str | None = None) -> Trace:
    """Train for some steps on this rank; `fault` plants one of tests/distributed/faults."""
    from tests.distributed.faults import FAULTS

    with FAULTS[fault]() if fault else nullcontext():
        return _train(config, steps)


def _train(config: Config, steps: int) -> Trace:
    model, batches = build(config)
    decoder = model.decoder
    initial = {name: _hash([whole(parameter.detach())]) for name, parameter in decoder.named_parameters()}
    trace = Trace(initial, [], [], [], [], {}, {}, [], [])
    optimizer = make_optimizer(config.optimizer, decoder)
    for step in range(steps):
        optimizer.zero_grad()
        batch = batches[step]
        trace.samples.append(batch["ids"].tolist())
        part, tokens = forward_backward(model, batch, step)
        trace.losses.append(float(model.sum_of_parts(part)))
        trace.tokens.append(int(tokens))
        gradients = {name: p.grad for name, p in decoder.named_parameters() if p.requires_grad}
        assert all(p.grad is None for p in decoder.parameters() if not p.requires_grad)
        trace.gradients.append({name: whole(gradient).clone() for name, gradient in gradients.items()})
        trace.norms.append(float(clip(model).norm))
        optimizer.step()
        blocks = {f"{name}@{offset(p)}": local(p.detach()) for name, p in decoder.named_parameters()}
        trace.replicas.append({name: _hash([block]) for name, block in (blocks | _biases(decoder)).items()})
        if model.routing is not None:
            assert model.routing.totals is not None
            trace.routing.append(model.routing.totals[:, :-1].clone())  # rows sent do depend on the layout
    before = {name: bias.clone() for name, bias in _biases(decoder).items()}
    trace.weights = {name: whole(parameter.detach()).clone() for name, parameter in decoder.named_parameters()} | before
    trace.validation = validate(model)
    assert all(torch.equal(before[name], bias) for name, bias in _biases(decoder).items())
    assert not trace.routing or torch.equal(trace.routing[-1], model.routing.totals[:, :-1])
    return trace


def _biases(decoder: torch.nn.Module) -> dict[str, Tensor]:
    return dict(decoder.named_buffers())


@torch.no_grad()
def validate(model: ParallelModel) -> dict[str, float]:
    """Validation means over a split that does not divide evenly."""
    config, layout = model.config, model.layout
    windows = SyntheticWindows(config.data, config.seed, "validation")
    data_rank = layout.data_rank(dist.get_rank())
    batches = ValidationBatches(windows, len(windows), config.data.micro_batch, data_rank, layout.dp)
    sums = torch.zeros(3, dtype=torch.float64)
    for index in range(len(batches)):
        batch = model.own_part(batches[index])
        loss = evaluate(model, batch)
        if loss is not None:
            sums += batch_sums(loss, batch["labels"], None)
    return means(model.sum_of_parts(sums))


def _hash(tensors: list[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def relative(a: Tensor, b: Tensor) -> float:
    """Largest difference over the largest value."""
    scale = float(a.abs().max())
    return float((a - b).abs().max()) / scale if scale else float(b.abs().max())


def _relative(expected: float, found: float) -> float:
    return abs(expected - found) / (abs(expected) or 1.0)


def worst_error(reference: Trace, trace: Trace) -> tuple[float, str]:
    """The largest relative error of loss, norm, any gradient at any step, weights, routing, validation; and where."""
    errors = []
    for step, (expected, found) in enumerate(zip(reference.gradients, trace.gradients, strict=True)):
        assert expected.keys() == found.keys()
        errors += [(relative(expected[name], found[name]), f"step {step} gradient {name}") for name in expected]
    for what in ("losses", "norms"):
        for step, (expected, found) in enumerate(zip(getattr(reference, what), getattr(trace, what), strict=True)):
            errors.append((_relative(expected, found), f"step {step} {what}"))
    errors += [(relative(reference.weights[n], trace.weights[n]), f"weights {n}") for n in reference.weights]
    for step, (expected, found) in enumerate(zip(reference.routing, trace.routing, strict=True)):
        columns = zip(expected.unbind(1), found.unbind(1), strict=True)
        errors += [(relative(a, b), f"step {step} routing, column {column}") for column, (a, b) in enumerate(columns)]
    errors += [
        (_relative(reference.validation[k], trace.validation[k]), f"validation {k}") for k in reference.validation
    ]
    return max(errors)


def samples_read(config: Config, traces: list[Trace]) -> list[list[int]]:
    """Per step, the sequences of all data ranks in their order. Asserts that ranks of a data rank read the same."""
    layout = resolve(config.parallelism, len(traces))
    by_data_rank: dict[int, list[list[int]]] = {}
    for rank, trace in enumerate(traces):
        assert by_data_rank.setdefault(layout.data_rank(rank), trace.samples) == trace.samples
    parts = [by_data_rank[data_rank] for data_rank in sorted(by_data_rank)]
    return [[number for part in parts for number in part[step]] for step in range(len(traces[0].samples))]


@dataclass
class Continued:
    """Some steps of a run, on one rank."""

    losses: list[float]
    weights: dict[str, Tensor]
    """Parameters and routers' biases after the last step, whole."""


def resumed(config: Config, folder: Path, first: int, last: int, save_last: bool = True) -> Continued:
    """Steps `first` to `last` - 1, from the checkpoint `first` in `folder` if it is not 0; saves there as `last`."""
    model, batches = build(config)
    optimizer = make_optimizer(config.optimizer, model.decoder)
    if first:
        load(folder / str(first), model.decoder, [optimizer])
    losses = []
    for step in range(first, last):
        optimizer.zero_grad()
        part, _ = forward_backward(model, batches[step], step)
        losses.append(float(model.sum_of_parts(part)))
        clip(model)
        optimizer.step()
    if save_last:
        save(folder / str(last), model.decoder, [optimizer], {}, {})
    weights = {name: whole(parameter.detach()).clone() for name, parameter in model.decoder.named_parameters()}
    return Continued(losses, weights | _biases(model.decoder))


def merged(traces: list[Trace]) -> Trace:
    """Rank 0's trace with the parameters of all pipeline stages."""
    first = traces[0]
    gradients = [
        {name: g for trace in traces for name, g in trace.gradients[step].items()}
        for step in range(len(first.gradients))
    ]
    weights = {name: weight for trace in traces for name, weight in trace.weights.items()}
    initial = {name: digest for trace in traces for name, digest in trace.initial.items()}
    return replace(first, gradients=gradients, weights=weights, initial=initial)


def disagreeing_replicas(traces: list[Trace]) -> list[str]:
    """Blocks that several ranks hold and that are not bit-equal on all of them after some step."""
    wrong = set()
    for step in range(len(traces[0].replicas)):
        seen: dict[str, str] = {}
        for trace in traces:
            for key, digest in trace.replicas[step].items():
                if seen.setdefault(key, digest) != digest:
                    wrong.add(f"step {step} {key}")
    return sorted(wrong)


@cache
def _references() -> dict[str, Trace]:
    return {}


def reference(pool: Any, config: Config, steps: int = 3) -> Trace:
    """The one-process run of a config, worked out once."""
    alone = one_process(config)
    key = f"{alone} {steps}"
    if key not in _references():
        _references()[key] = pool.run(1, "tests.distributed.cases:train", alone, steps)[0]
    return _references()[key]
