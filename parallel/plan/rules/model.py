"""The decoder's shape, its numbers, and the length of what it reads."""

from collections.abc import Iterator

from models.errors import ConfigError
from parallel.config import BYTES, Config, FloatType, SyntheticData, TokenizerKind, recompute_interval
from parallel.devices import DEVICES
from parallel.plan.problems import Fault


def shape(config: Config) -> Iterator[Fault]:
    """The rules that models/config.py keeps."""
    for flaw in config.model.flaws():
        yield Fault("model", flaw.message, flaw.tries)


def precision(config: Config) -> Iterator[Fault]:
    """Types fit each other."""
    kinds = config.precision
    sizes = {key: BYTES[getattr(kinds, key)] for key in ("master", "compute", "reduce")}
    if sizes["compute"] > sizes["master"] or sizes["reduce"] > sizes["master"] or sizes["reduce"] < sizes["compute"]:
        yield Fault(
            "precision-order",
            f"precision: compute={kinds.compute} must not be finer than master={kinds.master}, nor reduce="
            f"{kinds.reduce} coarser than compute or finer than master.",
            {"precision.reduce": [kinds.master, kinds.compute], "precision.compute": [kinds.master]},
        )
    if kinds.master == FloatType.bfloat16:
        yield Fault(
            "precision-master",
            "precision.master=bfloat16 loses small updates.",
            {"precision.master": [FloatType.float32]},
        )


def precision_costs(config: Config) -> Iterator[Fault]:
    """Types and the device they run on."""
    device = DEVICES.get(config.cluster.device)
    if device is not None and config.precision.compute != FloatType.bfloat16:
        yield Fault(
            "precision-slow",
            f"precision={config.precision.name} computes in {config.precision.compute}: on {device.name} at most "
            f"{device.fp32_flops / 1e12:.1f} TFLOP/s instead of {device.bf16_flops / 1e12:.0f} in bfloat16, "
            f"{device.bf16_flops / device.fp32_flops:.0f} times slower. precision=bf16 keeps float32 weights.",
        )


def aligned(config: Config) -> Iterator[Fault]:
    """Tensor cores want multiples of 8 in bfloat16; BigScience saw 27 % lost to a head dimension that was none."""
    model = config.model
    if config.cluster.device not in DEVICES or config.precision.compute != FloatType.bfloat16:
        return
    for key in ("head_dim", "hidden_size", "intermediate_size"):
        if getattr(model, key) % 8:
            yield Fault(
                "alignment",
                f"model.{key}={getattr(model, key)} is no multiple of 8, which tensor cores work in with bfloat16: "
                f"products over it are padded or slow (BigScience measured 27 % of the speed lost to such heads).",
            )
    width, etp = model.moe.intermediate_size, max(config.parallelism.etp, 1)
    if model.moe.num_experts and width % etp == 0 and width // etp % 8:
        yield Fault(
            "alignment",
            f"model.moe.intermediate_size={width} / parallelism.etp={etp} = {width // etp} is no multiple of 8: the "
            f"kernel that works on all experts at once cannot take it, and they go one after another.",
        )


def sequence(config: Config) -> Iterator[Fault]:
    """The rotary embedding's limit."""
    longest, length = config.model.max_position_embeddings, config.data.seq_len
    if length > longest:
        yield Fault(
            "rotary-limit",
            f"data.seq_len={length} is above model.max_position_embeddings={longest}, the longest that the rotary "
            f"embedding of model={config.model.name} is meant for; a higher limit needs model.rope.scaling.",
            {"data.seq_len": [longest]},
        )


def vocabulary(config: Config) -> Iterator[Fault]:
    """Every token has a row."""
    needed, source = tokens_needed(config)
    if config.model.vocab_size < needed:
        yield Fault(
            "vocabulary",
            f"model.vocab_size={config.model.vocab_size} is smaller than the {needed} tokens of {source}.",
            {"model.vocab_size": [needed, -(-needed // 64) * 64, -(-needed // 128) * 128]},
        )


def vocabulary_notes(config: Config) -> Iterator[Fault]:
    """Rows that no token uses."""
    needed, source = tokens_needed(config)
    size = config.model.vocab_size
    if not isinstance(config.data, SyntheticData) and size > 2 * needed:
        wasted = (size - needed) * config.model.hidden_size * (1 if config.model.tie_word_embeddings else 2)
        yield Fault(
            "vocabulary-unused",
            f"model.vocab_size={size} has {size - needed:,} rows that the {needed} tokens of {source} never use: "
            f"{wasted:,} parameters that only cost.",
        )


def tokens_needed(config: Config) -> tuple[int, str]:
    """How many token ids the data may hold, and where they come from."""
    if isinstance(config.data, SyntheticData):
        return config.data.vocab_size, f"data.vocab_size={config.data.vocab_size}"
    if config.data.tokenizer.kind == TokenizerKind.byte:
        return 257, "data.tokenizer.kind=byte (256 bytes and the document mark)"
    if config.data.tokenizer.kind == TokenizerKind.file:  # the run looks into it
        return config.model.vocab_size, f"data.tokenizer.path={config.data.tokenizer.path}"
    size = config.data.tokenizer.vocab_size or 0
    return size, f"data.tokenizer.vocab_size={size}"


def recompute(config: Config) -> Iterator[Fault]:
    """The mode exists."""
    try:
        recompute_interval(config.parallelism.recompute)
    except ConfigError as error:
        yield Fault("recompute-mode", str(error), {"parallelism.recompute": ["none", "full"]})
