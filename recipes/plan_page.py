"""A plan as one HTML file that opens anywhere, without a network: numbers, problems, pictures."""

from collections.abc import Iterator
from html import escape

from parallel.plan.memory import RESERVED_BYTES, SLACK
from parallel.plan.plan import Plan
from recipes import plan_pictures
from recipes.plan_text import ranges

STYLE = """
:root { --ink: #1c2430; --soft: #5d6876; --line: #dfe4ea; --card: #ffffff; --ground: #f5f7f9; --idle: #e6eaef; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ecf1; --soft: #98a4b3; --line: #313b47; --card: #1b222b;
  --ground: #12171d; --idle: #2a333e; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 34px 20px 60px; }
h1 { font-size: 27px; margin: 0 0 2px; } h2 { font-size: 17px; margin: 0 0 3px; }
p { margin: 0 0 14px; color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 20px 22px;
  margin-top: 18px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px; margin-top: 18px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 13px 16px; }
.card b { display: block; font-size: 21px; font-variant-numeric: tabular-nums; } .card span { color: var(--soft); }
.bad b { color: #d1495b; } .good b { color: #2a9d8f; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--ink); font: 13px system-ui, sans-serif; }
svg .small { fill: var(--soft); font-size: 12px; } svg .tiny { font-size: 9px; fill: #ffffff; }
svg .node { fill: none; stroke: var(--line); } svg .limit { stroke: #d1495b; stroke-width: 2; stroke-dasharray: 5 3; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 14px 5px 0; border-top: 1px solid var(--line); } th { color: var(--soft);
  font-weight: 500; border-top: 0; } td.n, th.n { text-align: right; }
.warning, .note { border-left: 4px solid #e9a03b; padding: 4px 0 4px 12px; margin: 8px 0; overflow-wrap: anywhere; }
.note { border-color: #3b6fb6; }
"""


def page(plan: Plan) -> str:
    """The whole file."""
    title = f"{plan.config.recipe.name} on {plan.layout.world:,} {plan.config.cluster.device}"
    body = "".join(_body(plan))
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    head += f"<style>{STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body><main>{body}</main></body></html>\n'


def _body(plan: Plan) -> Iterator[str]:
    config, layout = plan.config, plan.layout
    split = " · ".join(f"{axis} {size}" for axis, size in layout.split.items()) or "one rank"
    yield f"<h1>{escape(config.recipe.name)}</h1>"
    yield (
        f"<p>{escape(config.model.name)}, {plan.parameters / 1e9:,.1f} billion parameters, {config.precision.name}, on "
        f"{layout.world:,} {escape(config.cluster.device)} in {config.cluster.nodes:,} nodes: {escape(split)}, ZeRO "
        f"{config.parallelism.zero}, recompute {escape(config.parallelism.recompute)}</p>"
    )
    yield f'<div class="cards">{"".join(_cards(plan))}</div>'
    if plan.problems:
        lines = "".join(f'<div class="{p.severity}">{escape(p.message)}</div>' for p in plan.problems)
        yield f"<section><h2>Worth knowing before it starts</h2>{lines}</section>"
    yield _section(
        "Memory of a rank at its peak",
        f"By formula, per place along pp. Assumed on top: {SLACK:.0%} that the allocator holds unused and "
        f"{RESERVED_BYTES / 1e9:.1f} GB of context and NCCL.",
        plan_pictures.memory(plan) + _recompute(plan),
    )
    if layout.pp > 1:
        yield _section(
            f"Pipeline: {config.parallelism.pp_schedule}",
            f"{plan.bubble:.1%} of the ranks' time is idle. Simulated with the cost of every stage's layers; messages "
            f"are free.",
            plan_pictures.timeline(plan),
        )
    if any(rank.traffic for rank in plan.pipeline_ranks):
        yield _section(
            "What a rank sends in a step",
            "The busiest place along pp. Blue runs inside a node, red between nodes; the pale part can hide under "
            "computing. Seconds are bytes over the speed of the wires, by data sheet.",
            plan_pictures.traffic(plan),
        )
    yield _section(
        "Ranks on nodes",
        "A square is a device, its colour the place along pp; point at one for its place on every axis.",
        plan_pictures.ranks(plan) + _layers(plan),
    )


def _section(title: str, words: str, inside: str) -> str:
    return f"<section><h2>{escape(title)}</h2><p>{escape(words)}</p>{inside}</section>"


def _cards(plan: Plan) -> Iterator[str]:
    config = plan.config
    total = plan.tokens_per_step * config.trainer.max_steps
    worst = max(rank.needed for rank in plan.pipeline_ranks)
    if plan.device_memory is None:
        yield _card(f"{worst / 1e9:.1f} GB", "a rank needs at most")
    else:
        kind = "good" if plan.fits else "bad"
        yield _card(f"{worst / plan.device_memory:.0%}", f"of {plan.device_memory / 1e9:.1f} GB needed at most", kind)
    yield _card(_short(plan.tokens_per_step), f"tokens a step, {plan.microbatches} microbatches a data rank")
    yield _card(_short(total), f"tokens in {config.trainer.max_steps:,} steps")
    causal, full = (f * plan.tokens_per_step / 1e15 for f in (plan.flops_per_token_causal, plan.flops_per_token_full))
    yield _card(f"{causal:,.1f}", f"PFLOP a step, causal attention ({full:,.1f} full)")
    if plan.layout.pp > 1:
        yield _card(f"{plan.bubble:.1%}", "pipeline bubble", "bad" if plan.bubble > 0.2 else "")
    if plan.device_hours is not None:
        yield _card(_short(plan.device_hours), f"device hours at {plan.mfu:.0%} of the peak (assumed)")


def _card(number: str, words: str, kind: str = "") -> str:
    return f'<div class="card {kind}"><b>{escape(number)}</b><span>{escape(words)}</span></div>'


def _recompute(plan: Plan) -> str:
    modes = plan.pipeline_ranks[0].by_recompute
    cells = "".join(
        f'<td class="n">{max(s.by_recompute[m] for s in plan.pipeline_ranks) / 1e9:.1f} GB</td>' for m in modes
    )
    heads = "".join(f'<th class="n">{escape(mode)}</th>' for mode in modes)
    return f"<table><tr><th>recompute</th>{heads}</tr><tr><td>needed at most</td>{cells}</tr></table>"


def _layers(plan: Plan) -> str:
    each = plan.layout.world // plan.layout.pp
    rows = "".join(
        f"<tr><td>{rank.pp_rank}</td><td>{rank.pp_rank * each:,} to {rank.pp_rank * each + each - 1:,}</td>"
        f"<td>{escape(ranges(rank.layers))}</td><td class='n'>{len(rank.layers)}</td></tr>"
        for rank in plan.pipeline_ranks
    )
    return f"<table><tr><th>pp</th><th>ranks</th><th>layers</th><th class='n'>count</th></tr>{rows}</table>"


def _short(value: float) -> str:
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:,.1f}{unit}"
    return f"{value:,.0f}"
