"""The tables in READMEs that are worked out from the code: `python -m recipes.docs` writes them anew.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. A test fails where one is out of date.
"""

import re
from collections.abc import Callable
from pathlib import Path

from parallel.config import ParallelismConfig, PipelineSchedule
from parallel.order import order
from parallel.plan.timeline import bubble, expected, peak_activations

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


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


TABLES = {"bubbles": bubbles, "live_activations": live_activations}


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
