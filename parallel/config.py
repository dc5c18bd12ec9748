"""What a training run is, as plain immutable data: one dataclass per config group, and `Config` for the whole.

Nothing here imports torch, so that a config is checked in milliseconds. Types and meanings stand here; the numbers
stand in conf/, except for what is simply off by default.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from models.config import ModelConfig
from models.errors import ConfigError
from parallel.cluster import ClusterConfig


@dataclass(frozen=True)
class RecipeConfig:
    """Where a run comes from."""

    name: str
    hardware: str = ""
    """What the recipe is meant for, in words."""
    status: str = ""
    """What was run where, in words."""
    devices: int | None = None
    """How many devices it is meant for; None: any number."""


PipelineSchedule = StrEnum(
    "PipelineSchedule",
    ["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipe_v", "csv"],
)
"""Made by name, since a config spells a member by its name and `1f1b` is no identifier."""


class ContextMethod(StrEnum):
    ring = "ring"
    all_gather = "all_gather"
    ulysses = "ulysses"
    ulysses_ring = "ulysses_ring"


RECOMPUTE_MODES = ("none", "full", "selective:attention", "selective:mlp", "selective:ops")


def recompute_interval(mode: str) -> int | None:
    """n of `full` (1) and `full:n`, None for the other modes. Raises ConfigError for a mode that does not exist."""
    if mode in RECOMPUTE_MODES:
        return 1 if mode == "full" else None
    name, _, count = mode.partition(":")
    if name == "full" and count.isdigit() and int(count) >= 1:
        return int(count)
    raise ConfigError(
        f"parallelism.recompute={mode} is none of {', '.join(RECOMPUTE_MODES)} or full:n with n at least 1."
    )


@dataclass(frozen=True)
class ParallelismConfig:
    """How the work is split. pp * dp_replicate * dp_shard * cp * tp is the number of ranks; tp varies fastest."""

    tp: int = 1
    sequence_parallel: bool = False
    async_tp: bool = False
    """Products of matrices overlap with the transfers that sequence parallelism needs: GPUs of one node."""
    pp: int = 1
    pp_schedule: PipelineSchedule = PipelineSchedule["1f1b"]
    pp_schedule_file: str = ""
    """`pp_schedule=csv`: the schedule, in the form of parallel/schedule.py."""
    virtual_stages: int = 1
    pp_split: Any = "balanced"
    """`balanced`, `even`, or a list of layers per stage."""
    cp: int = 1
    cp_method: ContextMethod = ContextMethod.ring
    """How attention crosses the cut: `ring` (keys and values go round), `all_gather` (all of them at once), `ulysses`
    (heads are dealt out instead), `ulysses_ring` (heads among `cp_ulysses` ranks, a ring of those groups)."""
    cp_ulysses: int | None = None
    """`ulysses_ring`: among how many ranks heads are dealt out; the ring has cp / cp_ulysses."""
    cp_padding: bool = True
    """Sequences that cp does not divide are filled up with tokens that do not count; false refuses them."""
    ep: int = 1
    etp: int = 1
    ep_nodes: int = 1
    """Nodes that the ranks of one ep group span: tokens then go to their rank's place inside the node first and between
    nodes afterwards, in fewer and larger messages; 1 is one exchange for all."""
    dp_replicate: int = 1
    dp_shard: int = -1
    """-1 is what is left of the world."""
    zero: int = 0
    """0 replicates, 1 shards optimizer state, 2 also gradients, 3 also parameters."""
    recompute: str = "none"
    """`none`, `full`, `full:n`, `selective:attention`, `selective:mlp` or `selective:ops`."""
    loss_parallel: bool = False
    """Each tp rank works out its part of the vocabulary's loss; otherwise logits are gathered."""
    prefetch: int = 0
    """ZeRO: how many layers ahead parameters are gathered while one computes; 0 leaves it to FSDP2."""
    offload: bool = False
    """ZeRO on a GPU: master weights and optimizer state in the host's memory."""


class FloatType(StrEnum):
    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"


BYTES = {FloatType.float64: 8, FloatType.float32: 4, FloatType.bfloat16: 2}


@dataclass(frozen=True)
class PrecisionConfig:
    """The floating-point types of a run."""

    name: str
    master: FloatType
    """Weights as the optimizer holds them, and its state."""
    compute: FloatType
    """Weights and activations in forward and backward."""
    reduce: FloatType
    """Gradients while they are summed over microbatches and ranks."""


class TokenizerKind(StrEnum):
    byte = "byte"
    bpe = "bpe"
    file = "file"


@dataclass(frozen=True)
class TokenizerConfig:
    """How text becomes tokens."""

    kind: TokenizerKind = TokenizerKind.byte
    vocab_size: int | None = None
    """`bpe`: how many tokens to learn from the training split."""
    path: str | None = None
    """`file`: a tokenizer.json, or the folder of a published model, which has one."""
    document_mark: str | None = None
    """`file`: the token that begins every document; null takes what tokenizer_config.json has for the beginning of a
    text, or else for its end."""


@dataclass(frozen=True)
class DataConfig:
    """What every data source has. A sequence is a window of `seq_len` tokens of the packed documents."""

    name: str
    """Which source this is: the option of the group, such as `stdlib`."""
    seq_len: int
    global_batch: int
    """Sequences per optimizer step."""
    micro_batch: int
    """Sequences per microbatch per data rank."""
    cache_dir: str
    """Prepared data lies here, a folder per fingerprint."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    document_mask: bool = False
    """Attention stays within a document."""
    validation_fraction: float = 0.02
    """Share of the documents, by a hash of their name, that is held out."""
    workers: int = 0
    """Loader processes per rank; the order does not depend on it."""


@dataclass(frozen=True)
class StdlibData(DataConfig):
    """The Python standard library and documentation topics of the running interpreter."""


@dataclass(frozen=True)
class FilesData(DataConfig):
    """Local files: one document per row, line or file."""

    paths: list[str] = field(default_factory=list)
    """Files or globs: .parquet, .jsonl, .json and .arrow have a column of text; anything else is text, one document."""
    text_field: str = "text"


@dataclass(frozen=True)
class HubData(DataConfig):
    """A dataset of the Hugging Face hub."""

    dataset: str = ""
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    """A commit of the dataset, so that the run can be repeated."""
    streaming: bool = False
    """Read over the network while preparing instead of downloading everything first."""
    max_documents: int | None = None
    text_field: str = "text"


class MaskPattern(StrEnum):
    none = "none"
    uneven = "uneven"
    empty_first = "empty_first"


@dataclass(frozen=True)
class SyntheticData(DataConfig):
    """Random tokens, a function of (seed, sequence), for benchmarks and tests."""

    vocab_size: int = 256
    sequences: int = 1_000_000
    """Distinct training sequences."""
    validation_sequences: int = 64
    document_len: int = 0
    """Mean tokens per document inside a sequence; 0 is one document."""
    mask: MaskPattern = MaskPattern.none
    """Positions without loss: `uneven` masks a share that differs per sequence; `empty_first` masks the first half of
    the sequences of every step wholly and the rest unevenly."""


@dataclass(frozen=True)
class OptimizerConfig:
    """What every optimizer has."""

    name: str
    """Which optimizer this is: the option of the group, such as `adamw`."""
    lr: float
    weight_decay: float
    decay_embeddings: bool = False
    """Weight decay on embedding and output layer too. Norms and biases never decay."""


@dataclass(frozen=True)
class AdamWConfig(OptimizerConfig):
    """AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101)."""

    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    fused: bool = True
    """One kernel for all parameters."""


@dataclass(frozen=True)
class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent."""

    momentum: float = 0.0
    nesterov: bool = False


@dataclass(frozen=True)
class MuonConfig(OptimizerConfig):
    """Muon (Jordan et al., 2024) for the layers' matrices, AdamW for everything else."""

    momentum: float = 0.95
    nesterov: bool = True
    adamw_lr: float = 3e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8


class DecayShape(StrEnum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    wsd = "wsd"


class ScheduleUnit(StrEnum):
    steps = "steps"
    tokens = "tokens"


@dataclass(frozen=True)
class SchedulerConfig:
    """The learning rate over the run: a linear warm-up, then `shape` down to `minimum_ratio` of the peak."""

    shape: DecayShape
    unit: ScheduleUnit = ScheduleUnit.steps
    warmup: int = 0
    """Steps, or tokens, of the warm-up."""
    total: int | None = None
    """Steps, or tokens, at which the decay ends; None is trainer.max_steps."""
    decay: int = 0
    """`wsd`: the last so many steps, or tokens, fall linearly; before them the rate stands."""
    minimum_ratio: float = 0.1


class MetricMode(StrEnum):
    min = "min"
    max = "max"


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run's state is written, and what is kept of it."""

    at_end: bool = True
    every_n_steps: int | None = None
    every_n_minutes: float | None = None
    """By rank 0's clock, at the end of a step."""
    asynchronous: bool = True
    """Training waits only until the state is copied to the host's memory; files are written while it goes on."""
    keep: int = 2
    """How many of the newest complete checkpoints stay."""
    best: int = 0
    """How many more stay, by `metric`; one that is among the best is written right after its validation."""
    metric: str = "val/loss"
    mode: MetricMode = MetricMode.min
    mirror: str | None = None
    """An address that fsspec knows, such as s3://bucket/run: what is kept in the run directory is copied there too."""


@dataclass(frozen=True)
class TrainerConfig:
    """The loop."""

    max_steps: int
    gradient_clip: float | None
    """Largest gradient norm of the whole model; None never scales a gradient."""
    val_interval: int | None
    """Steps between validations; None validates once, at the end."""
    val_sequences: int | None
    """Validation sequences to use, from the front; None is all of them."""
    log_interval: int
    """Steps between fetching metrics from the device, writing and showing them."""
    compile: bool = False
    """Layers by torch.compile (parallel/compiled.py), in the first step of each shape."""


@dataclass(frozen=True)
class RunConfig:
    """Where the run leaves what it makes."""

    root: str
    id: str
    dir: str


@dataclass(frozen=True)
class DebugConfig:
    """Aids for finding a fault; all off by default."""

    detect_anomaly: bool = False
    """Stop at the first backward that makes a NaN and name the forward operation."""
    overfit_steps: int | None = None
    """Train on the batches of the first so many steps over and over: the loss must fall to nothing."""
    profile: bool = False
    """Write a torch profiler trace of steps 5 to 7 into the run directory."""


@dataclass(frozen=True)
class Config:
    """A whole training run."""

    recipe: RecipeConfig
    model: ModelConfig
    parallelism: ParallelismConfig
    precision: PrecisionConfig
    cluster: ClusterConfig
    data: DataConfig
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig
    checkpoint: CheckpointConfig
    trainer: TrainerConfig
    run: RunConfig
    debug: DebugConfig
    callbacks: dict[str, Any]
    """Named nodes with a `_target_`, so that they merge and can be switched off one by one."""
    logger: dict[str, Any]
    """Named nodes with a `_target_`. metrics.jsonl is written whatever stands here."""
    seed: int
    deterministic: bool
    """Only operations that give the same bits every time; an operation without such a kernel stops the run."""
    ckpt: str
    """`auto`: go on from the newest sound checkpoint of the run directory, if there is one; `none`: start afresh; or
    the path of a checkpoint or run directory that a new run begins from, optimizer, step and data included."""
    weights: str | None = None
    """What a new run's weights are instead of random: a folder of safetensors as Hugging Face has them, or a checkpoint
    or run directory, of which the optimizer is then left out. A run that goes on does not look at it."""


def schedule_total(config: Config) -> int:
    """Steps, or tokens, at which the learning rate's decay ends."""
    if config.scheduler.total is not None:
        return config.scheduler.total
    if config.scheduler.unit == "tokens":
        return config.trainer.max_steps * config.data.global_batch * config.data.seq_len
    return config.trainer.max_steps
