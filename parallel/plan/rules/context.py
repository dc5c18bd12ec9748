"""Context parallelism: sizes of the method, heads that are dealt out, and lengths that do not divide."""

from collections.abc import Iterator

from models.errors import nearest
from parallel.balance import length_multiple, padded_length, ring_and_ulysses
from parallel.config import Config, ContextMethod
from parallel.layout import Layout, divisors
from parallel.plan.problems import Fault


def method(config: Config, layout: Layout) -> Iterator[Fault]:
    """The keys of cp, and what they ask of heads and lengths."""
    parallelism, cp = config.parallelism, layout.cp
    groups = parallelism.cp_ulysses
    if groups is not None and parallelism.cp_method != ContextMethod.ulysses_ring:
        yield Fault(
            "cp-ulysses",
            f"parallelism.cp_ulysses={groups} is for cp_method=ulysses_ring; cp_method={parallelism.cp_method}.",
            {"parallelism.cp_ulysses": [None]},
        )
        return
    if cp == 1:
        if groups is not None:
            yield Fault(
                "cp-ulysses",
                f"parallelism.cp_ulysses={groups} needs parallelism.cp above it.",
                {"parallelism.cp_ulysses": [None]},
            )
        return
    if parallelism.cp_method == ContextMethod.ulysses_ring and (groups is None or not 1 < groups < cp or cp % groups):
        yield Fault(
            "cp-ulysses",
            f"parallelism.cp_ulysses={groups}: cp_method=ulysses_ring deals heads out among cp_ulysses ranks and makes "
            f"a ring of cp / cp_ulysses of such groups, both above 1, of parallelism.cp={cp}.",
            {
                "parallelism.cp_ulysses": nearest([size for size in divisors(cp) if 1 < size < cp], groups or 2),
                "parallelism.cp_method": [ContextMethod.ring],
            },
        )
        return
    yield from _heads(config, layout)
    yield from _length(config, layout)


def _heads(config: Config, layout: Layout) -> Iterator[Fault]:
    parallelism, model = config.parallelism, config.model
    _, ulysses = ring_and_ulysses(parallelism)
    heads, key_value_heads = model.num_attention_heads, model.num_key_value_heads
    if heads % (layout.tp * ulysses) == 0:
        held = max(key_value_heads // layout.tp, 1)
        if held % ulysses and ulysses % held:
            yield Fault(
                "cp-key-value-heads",
                f"parallelism.cp_method={parallelism.cp_method} deals the {held} key/value heads of a tp rank (model."
                f"num_key_value_heads={key_value_heads}, parallelism.tp={layout.tp}) out among {ulysses} ranks: one "
                f"number must divide the other.",
                {"parallelism.cp_method": [ContextMethod.ring]},
            )
    elif heads % layout.tp == 0:  # else tensor parallelism has said it
        legal = nearest([size for size in divisors(heads // layout.tp) if size > 1], ulysses)
        key = "cp" if parallelism.cp_method == ContextMethod.ulysses else "cp_ulysses"
        yield Fault(
            "cp-heads",
            f"parallelism.cp_method={parallelism.cp_method} deals the {heads // layout.tp} heads of a tp rank (model."
            f"num_attention_heads={heads}, parallelism.tp={layout.tp}) out among {ulysses} ranks, which must divide "
            f"them.",
            {f"parallelism.{key}": legal, "parallelism.cp_method": [ContextMethod.ring]},
        )


def _length(config: Config, layout: Layout) -> Iterator[Fault]:
    parallelism, length = config.parallelism, config.data.seq_len
    multiple, (ring, _) = length_multiple(parallelism), ring_and_ulysses(parallelism)
    if length % multiple == 0:
        return
    if config.model.moe.num_experts and parallelism.cp_padding:
        filled = padded_length(length, parallelism)
        yield Fault(
            "experts-filled",
            f"data.seq_len={length} would be filled up to {filled} for parallelism.cp={layout.cp}, and experts would "
            f"be chosen by tokens that are not there.",
            {"data.seq_len": [filled, 2 * length - filled], "parallelism.cp": [1]},
        )
    if parallelism.cp_padding:
        return
    pieces = f"two pieces for each of {ring} ring ranks" if ring > 1 else f"a piece for each of {layout.cp} ranks"
    sequence = f" and equal parts for {layout.tp} tp ranks" if parallelism.sequence_parallel else ""
    lengths = [size for size in (length // multiple * multiple, padded_length(length, parallelism)) if size]
    yield Fault(
        "cp-length",
        f"data.seq_len={length} must be a multiple of {multiple} with parallelism.cp={layout.cp} and cp_method="
        f"{parallelism.cp_method}: {pieces}{sequence}.",
        {"data.seq_len": nearest(lengths, length), "parallelism.cp_padding": [True]},
    )


def costs(config: Config, layout: Layout) -> Iterator[Fault]:
    """Tokens that fill sequences up."""
    data, padded = config.data, padded_length(config.data.seq_len, config.parallelism)
    if padded != data.seq_len:
        yield Fault(
            "cp-padding",
            f"data.seq_len={data.seq_len} is filled up to {padded} with tokens that do not count: "
            f"{data.global_batch * (padded - data.seq_len)} of {data.global_batch * padded} a step "
            f"({1 - data.seq_len / padded:.1%}). data.seq_len={padded} needs none.",
        )


def notes(_: Config, layout: Layout) -> Iterator[Fault]:
    """Where the axis does nothing."""
    if layout.cp > 1:
        yield Fault(
            "cp-decoding",
            f"parallelism.cp={layout.cp} is for training and validation. Generation does not use it: it decodes one "
            "token a step, and every rank would have to be asked for its keys and values each time.",
        )
