"""The tables in READMEs that are worked out from the code: `python -m recipes.docs` writes them anew.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. A test fails where one is out of date.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from parallel.config import Config, ParallelismConfig, PipelineSchedule
from parallel.layout import resolve
from parallel.order import order
from parallel.plan.timeline import bubble, expected, peak_activations
from parallel.plan.traffic import traffic
from recipes import schema
from recipes.command import CONF
from recipes.composition import GRIDS, cell, cells
from recipes.peaks import SYSTEMS, accuracy, peaks

ROOT = Path(__file__).parent.parent
SIZES = [(2, 4), (4, 8), (4, 16), (8, 16), (8, 32), (8, 64)]
SCHEDULES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 4),
    ("interleaved_zero_bubble", 2),
    ("zbv_zero_bubble", 2),
    ("dualpipe_v", 2),
]
CONTEXT_RANKS = (4, 8, 16, 32)
LONG = [
    "model=llama3_8b_128k",
    "precision=bf16",
    "data=synthetic",
    "data.seq_len=131072",
    "data.global_batch=1",
    "data.micro_batch=1",
]
"""A step of one sequence."""
COMPOSITION = ["data=synthetic", "data.document_len=6", "data.vocab_size=60", "precision=fp64", "optimizer=sgd"]
"""Of what goes with what."""


def bubbles() -> str:
    """Schedules by sizes: the simulated bubble."""
    return _schedules(lambda config, microbatches: f"{bubble(expected(config, microbatches), config.pp):.1%}")


def live_activations() -> str:
    """Schedules by sizes: live activations of the fullest rank."""
    return _schedules(lambda config, m: str(max(peak_activations(actions) for actions in order(config, m))))


def _schedules(cell: Callable[[ParallelismConfig, int], str]) -> str:
    rows = []
    for schedule, virtual in SCHEDULES:
        configs = [
            (ParallelismConfig(pp=pp, pp_schedule=PipelineSchedule[schedule], virtual_stages=virtual), microbatches)
            for pp, microbatches in SIZES
        ]
        rows.append([f"`{schedule}`, {virtual} a rank", *(cell(config, m) for config, m in configs)])
    return table(["ranks, microbatches", *(f"{pp}, {m}" for pp, m in SIZES)], rows)


def context_bytes() -> str:
    """Methods by ranks: what the busiest rank sends for attention in a step."""
    methods = {
        "`ring`": ["parallelism.cp_method=ring"],
        "`all_gather`": ["parallelism.cp_method=all_gather"],
        "`ulysses`": ["parallelism.cp_method=ulysses"],
        "`ulysses_ring`, `cp_ulysses=2`": ["parallelism.cp_method=ulysses_ring", "parallelism.cp_ulysses=2"],
        "`ring`, window of 4,096": ["parallelism.cp_method=ring", "model.sliding_window=4096"],
    }
    rows = []
    for name, overrides in methods.items():
        cells = []
        for cp in CONTEXT_RANKS:
            config = composed(*LONG, f"parallelism.cp={cp}", *overrides)
            sent = sum(row.bytes_sent for row in traffic(config, resolve(config.parallelism, cp)) if row.axis == "cp")
            cells.append(f"{sent / 1e9:.1f}")
        rows.append([name, *cells])
    return table(["GB a step, cp", *map(str, CONTEXT_RANKS)], rows)


def composition(grid: str) -> str:
    """What goes with what: "yes", or the rule that refuses it; then what each rule says."""
    base = composed(*COMPOSITION)
    said: dict[str, str] = {}
    rows: dict[str, dict[str, str]] = {}
    for row, column, *changes in cells(grid):
        _, _, problems = cell(base, *changes)
        said |= {problem.rule: problem.message for problem in problems if problem.rule not in said}
        rows.setdefault(row, {})[column] = ", ".join(problem.rule for problem in problems) or "yes"
    columns = [name for name in GRIDS[grid][1] if any(name in row for row in rows.values())]
    lines = [[f"`{row}`", *(found.get(column, "") for column in columns)] for row, found in rows.items()]
    messages = [f"* {rule}: {message.partition(' Write ')[0]}" for rule, message in said.items()]
    return "\n".join([table(["", *columns], lines), *([""] if messages else []), *messages])


def published_peaks() -> str:
    """Systems by errors: what the memory formulas say of runs that others have published."""
    runs = peaks(composed("precision=bf16", "data=synthetic"))
    rows = []
    for name in SYSTEMS:
        chosen = [run for run in runs if run.system == name]
        found, sources = accuracy(chosen), dict.fromkeys(run.source for run in chosen)
        errors = (f"{found.median:+.1%}", f"{found.median_size:.1%}", f"{found.ninth_tenth:.1%}")
        failed = f"{found.seen} of {found.failed}" if found.failed else ""
        rows.append([f"`{name}`", "; ".join(sources), str(found.runs), *errors, failed])
    header = [
        "system",
        "source",
        "runs",
        "median error",
        "median size of it",
        "90 % are below",
        "out of memory, foreseen",
    ]
    return table(header, rows)


def composed(*overrides: str) -> Config:
    """The config of a command line."""
    OmegaConf.register_new_resolver("run_id", lambda: "docs", replace=True)
    schema.register()
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        return schema.to_config(compose("config", overrides=list(overrides)))


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


TABLES: dict[str, Callable[[], str]] = {
    "bubbles": bubbles,
    "live_activations": live_activations,
    "context_bytes": context_bytes,
    "published_peaks": published_peaks,
    **{f"composition_{grid}": partial(composition, grid) for grid in GRIDS},
}


def renewed(text: str) -> str:
    """A document with its tables worked out anew."""
    return re.sub(
        r"<!-- table: (\w+) -->\n.*?<!-- end -->",
        lambda found: f"<!-- table: {found[1]} -->\n{TABLES[found[1]]()}\n<!-- end -->",
        text,
        flags=re.DOTALL,
    )


def documents() -> list[Path]:
    """Every README of the tree."""
    return [ROOT / "README.md", *sorted(ROOT.glob("[a-z]*/**/README.md"))]


if __name__ == "__main__":
    for path in documents():
        before = path.read_text()
        after = renewed(before)
        if after != before:
            path.write_text(after)
            print(path.relative_to(ROOT))
