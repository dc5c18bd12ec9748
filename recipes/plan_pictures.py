"""The pictures of a plan, as SVG: ranks on nodes, memory per pipeline rank, bytes per axis, the pipeline's timeline."""

from collections.abc import Iterator
from html import escape

from parallel.layout import AXES
from parallel.plan.memory import KINDS
from parallel.plan.plan import Plan

WIDTH = 1080
COLOURS = {
    "parameters": "#3b6fb6",
    "gradients": "#6fa3dc",
    "optimizer": "#274b7f",
    "gathered": "#2a9d8f",
    "communication": "#8ecfc4",
    "activations": "#f4a259",
    "loss": "#d1495b",
    "assumed": "#c9ced6",
}
STAGES = ("#3b6fb6", "#2a9d8f", "#e9a03b", "#d1495b", "#7a5ea8", "#5b8c3e", "#b5651d", "#4a90a4")
ACTIONS = {"F": "#3b6fb6", "B": "#f4a259", "I": "#e9c46a", "W": "#2a9d8f"}
NAMES = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
NODES_SHOWN = 64


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """One line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, title: str = "", radius: float = 2) -> str:
    """A rectangle that says what it is when pointed at."""
    inside = f"<title>{escape(title)}</title>" if title else ""
    size = f'width="{max(width, 0):.2f}" height="{height:.2f}" rx="{radius}"'
    return f'<rect x="{x:.2f}" y="{y:.2f}" {size} fill="{fill}">{inside}</rect>'


def picture(height: float, parts: Iterator[str], label: str) -> str:
    """A whole SVG."""
    inside = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">{inside}</svg>'


def legend(y: float, entries: dict[str, str]) -> Iterator[str]:
    """Coloured squares with names, in one row."""
    x = 110.0
    for name, colour in entries.items():
        yield box(x, y - 10, 12, 12, colour)
        yield text(x + 17, y, name, "small")
        x += 34 + 7.0 * len(name)


def ranks(plan: Plan) -> str:
    """Nodes as boxes of devices, coloured by their place along pp, for the first nodes of each."""
    layout, per_node = plan.layout, plan.devices_per_node
    each = layout.world // layout.pp
    nodes = max(layout.world // per_node, 1)
    if nodes <= NODES_SHOWN:
        shown = list(range(nodes))
    else:
        of_each = max(NODES_SHOWN // layout.pp, 1)
        starts = [pp_rank * each // per_node for pp_rank in range(layout.pp)]
        shown = [node for start in starts for node in range(start, start + min(of_each, max(each // per_node, 1)))]
    cell, gap, columns = 17, 14, 4 if per_node >= 4 else per_node
    rows_in_node = -(-per_node // columns)
    width, height = columns * cell + 10, rows_in_node * cell + 26
    across = max((WIDTH - 10) // (width + gap), 1)
    rows = -(-len(shown) // across)

    def parts() -> Iterator[str]:
        for number, node in enumerate(shown):
            x, y = 5 + (number % across) * (width + gap), 4 + (number // across) * (height + gap)
            yield f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" class="node"/>'
            yield text(x + 6, y + 14, f"node {node}", "small")
            for device in range(min(per_node, layout.world)):
                rank = node * per_node + device
                place = layout.coordinates(rank)
                named = " ".join(f"{axis} {place[axis]}" for axis in AXES if getattr(layout, axis) > 1)
                left = x + 5 + device % columns * cell
                top = y + 20 + device // columns * cell
                fill = STAGES[place["pp"] % len(STAGES)]
                yield box(left + 1, top + 1, cell - 2, cell - 2, fill, f"rank {rank}: {named}", 3)
        if len(shown) < nodes:
            words = f"{len(shown)} of {nodes:,} nodes: the first of every place along pp"
            yield text(5, rows * (height + gap) + 14, words, "small")

    return picture(rows * (height + gap) + 20, parts(), "ranks on nodes")


def memory(plan: Plan) -> str:
    """A bar per place along pp, its kinds stacked, against the device's memory."""
    limit = plan.device_memory or 0
    most = max(limit, *(rank.needed for rank in plan.pipeline_ranks)) * 1.03
    scale, row, left = (WIDTH - 200) / most, 30, 110
    height = len(plan.pipeline_ranks) * row + 66

    def parts() -> Iterator[str]:
        for number, rank in enumerate(plan.pipeline_ranks):
            y, x = 8 + number * row, float(left)
            yield text(left - 10, y + 15, f"pp {rank.pp_rank}", "label", "end")
            for kind in KINDS:
                size = getattr(rank.memory, kind)
                yield box(x, y, size * scale, row - 9, COLOURS[kind], f"{kind}: {size / 1e9:.2f} GB", 0)
                x += size * scale
            extra = rank.needed - rank.memory.total
            yield box(x, y, extra * scale, row - 9, COLOURS["assumed"], f"assumed: {extra / 1e9:.2f} GB", 0)
            yield text(x + extra * scale + 6, y + 15, f"{rank.needed / 1e9:.1f} GB", "small")
        bottom = 8 + len(plan.pipeline_ranks) * row
        if limit:
            x = left + limit * scale
            yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="2" y2="{bottom}" class="limit"/>'
            yield text(x, bottom + 14, f"{plan.config.cluster.device}: {limit / 1e9:.1f} GB", "small", "end")
        shown = {kind for kind in KINDS if any(getattr(rank.memory, kind) for rank in plan.pipeline_ranks)} | {
            "assumed"
        }
        yield from legend(bottom + 42, {kind: colour for kind, colour in COLOURS.items() if kind in shown})

    return picture(height, parts(), "memory per place along pp")


def traffic(plan: Plan) -> str:
    """Bytes that a rank sends in a step, by axis and operation; what can hide under computing is pale."""
    busiest = max(plan.pipeline_ranks, key=lambda rank: sum(row["bytes_sent"] for row in rank.traffic))
    rows = sorted(busiest.traffic, key=lambda row: -(row["seconds"] or row["bytes_sent"]))[:10]
    timed = all(row["seconds"] is not None for row in rows)
    most = max((row["seconds"] if timed else row["bytes_sent"]) for row in rows) or 1
    left, line = 210, 30
    scale = (WIDTH - left - 250) / most

    def parts() -> Iterator[str]:
        for number, row in enumerate(rows):
            y = 8 + number * line
            size = (row["seconds"] if timed else row["bytes_sent"]) * scale
            colour = "#d1495b" if row["nodes_spanned"] > 1 else "#3b6fb6"
            yield text(left - 10, y + 15, f"{row['axis']}  {row['operation'].replace('_', '-')}", "label", "end")
            yield f'<g opacity="0.4">{box(left, y, size, line - 10, colour, "can hide under computing")}</g>'
            yield box(left, y, size * (1 - row["can_hide"]), line - 10, colour, "cannot hide")
            wires = "in a node" if row["nodes_spanned"] == 1 else f"over {row['nodes_spanned']} nodes"
            seconds = "" if row["seconds"] is None else f", {_seconds(row['seconds'])}"
            yield text(left + size + 8, y + 15, f"{_bytes(row['bytes_sent'])}{seconds}, {wires}", "small")

    return picture(len(rows) * line + 14, parts(), "what a rank sends in a step")


def _bytes(size: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.1 else f"{value * 1e3:.1f} ms" if value >= 1e-4 else f"{value * 1e6:.0f} us"


def timeline(plan: Plan) -> str:
    """When each pipeline rank computes what."""
    pp, spans = plan.layout.pp, plan.spans
    length = max(span.end for span in spans)
    row, left = max(min(30, 420 // pp), 14), 70
    scale = (WIDTH - left - 10) / length

    def parts() -> Iterator[str]:
        for rank in range(pp):
            y = 6 + rank * row
            yield text(left - 10, y + row / 2 + 3, f"pp {rank}", "label", "end")
            yield box(left, y, WIDTH - left - 10, row - 3, "var(--idle)")
        for span in spans:
            x, width = left + span.start * scale, (span.end - span.start) * scale
            y = 6 + span.rank * row
            action = span.action
            title = f"{NAMES[action.kind]} of microbatch {action.microbatch} on stage {action.stage}"
            yield box(x, y, width - min(0.6, width / 4), row - 3, ACTIONS[action.kind], title, 1)
            if width > 13 and row >= 16:
                yield text(x + width / 2, y + row / 2 + 2.5, str(action.microbatch), "tiny", "middle")
        kinds = {kind: None for kind in ACTIONS if any(span.action.kind == kind for span in spans)}
        entries = {NAMES[kind]: ACTIONS[kind] for kind in kinds} | {"idle": "var(--idle)"}
        yield from legend(pp * row + 28, entries)
        if plan.microbatches_drawn < plan.microbatches:
            words = f"drawn with {plan.microbatches_drawn} of {plan.microbatches} microbatches; the middle repeats"
            yield text(WIDTH - 10, pp * row + 28, words, "small", "end")

    return picture(pp * row + 42, parts(), "pipeline timeline")
