"""What context parallelism asks of a config; part of parallel/plan/validate.py."""

from collections.abc import Iterator

from parallel.balance import length_multiple, padded_length, ring_and_ulysses
from parallel.config import Config, ContextMethod
from parallel.layout import Layout, divisors


def context_rules(config: Config, layout: Layout) -> Iterator[str]:
    """Every fault of the cp keys: sizes of the method, heads that are dealt out, and lengths that do not divide."""
    parallelism, model, cp = config.parallelism, config.model, layout.cp
    method, groups = parallelism.cp_method, parallelism.cp_ulysses
    if groups is not None and method != ContextMethod.ulysses_ring:
        yield (
            f"parallelism.cp_ulysses={groups} is for cp_method=ulysses_ring; cp_method={method}. Write "
            f"parallelism.cp_ulysses=null."
        )
        return
    if cp == 1:
        if groups is not None:
            yield f"parallelism.cp_ulysses={groups} needs parallelism.cp above it. Write parallelism.cp_ulysses=null."
        return
    if method == ContextMethod.ulysses_ring and (groups is None or not 1 < groups < cp or cp % groups):
        legal = [size for size in divisors(cp) if 1 < size < cp]
        advice = f"Write parallelism.cp_ulysses={' or '.join(map(str, legal))}, or" if legal else "Write"
        yield (
            f"parallelism.cp_ulysses={groups}: cp_method=ulysses_ring deals heads out among cp_ulysses ranks and makes "
            f"a ring of cp / cp_ulysses of such groups, both above 1, of parallelism.cp={cp}. {advice} cp_method=ring."
        )
        return
    ring, ulysses = ring_and_ulysses(parallelism)
    heads, key_value_heads = model.num_attention_heads, model.num_key_value_heads
    if heads % (layout.tp * ulysses) == 0:
        held = max(key_value_heads // layout.tp, 1)
        if held % ulysses and ulysses % held:
            yield (
                f"parallelism.cp_method={method} deals the {held} key/value heads of a tp rank (model."
                f"num_key_value_heads={key_value_heads}, parallelism.tp={layout.tp}) out among {ulysses} ranks: one "
                f"number must divide the other. Write parallelism.cp_method=ring."
            )
    elif heads % layout.tp == 0:  # else tensor parallelism has said it
        legal = [size for size in divisors(heads // layout.tp) if size > 1]
        key = "cp" if method == ContextMethod.ulysses else "cp_ulysses"
        advice = f"Write parallelism.{key}={' or '.join(map(str, legal))}, or" if legal else "Write"
        yield (
            f"parallelism.cp_method={method} deals the {heads // layout.tp} heads of a tp rank (model."
            f"num_attention_heads={heads}, parallelism.tp={layout.tp}) out among {ulysses} ranks, which must divide "
            f"them. {advice} parallelism.cp_method=ring."
        )
    multiple = length_multiple(parallelism)
    if not parallelism.cp_padding and config.data.seq_len % multiple:
        below, above = config.data.seq_len // multiple * multiple, padded_length(config.data.seq_len, parallelism)
        lengths = " or ".join(str(length) for length in (below, above) if length)
        pieces = f"two pieces for each of {ring} ring ranks" if ring > 1 else f"a piece for each of {cp} ranks"
        sequence = f" and equal parts for {layout.tp} tp ranks" if parallelism.sequence_parallel else ""
        yield (
            f"data.seq_len={config.data.seq_len} must be a multiple of {multiple} with parallelism.cp={cp} and "
            f"cp_method={method}: {pieces}{sequence}. Write data.seq_len={lengths}, or parallelism.cp_padding=true."
        )
