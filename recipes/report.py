"""A run as a picture: `python -m recipes.report RUN [--out FILE]`.

Draws loss, gradient norm and speed over the steps and, for a pipeline, when each rank computed what in the last step
beside the simulation of the same schedule. Writes report.png into the run directory unless told otherwise.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from models.errors import ConfigError, RunError
from parallel.config import Config
from parallel.layout import resolve
from parallel.plan.timeline import Span, bubble, expected_of
from parallel.schedule import parse
from recipes.command import report as report_error

COLOURS = {"F": "#4c78a8", "B": "#f58518", "I": "#e8a33d", "W": "#54a24b"}
NAMES = {"F": "forward", "B": "backward", "I": "backward (inputs)", "W": "backward (weights)"}
IDLE = "#e8e8e8"


def report(run: Path, out: Path) -> None:
    """Draw the run into a file. Raises ConfigError where it is no run directory or has no metrics yet."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from recipes.schema import read_config

    config = read_config(run / "config.yaml")
    rows = read_metrics(run)
    timelines = pipeline_timelines(run, config)
    ranks = config.parallelism.pp
    heights = [3.0, 1.6, 1.6] + [0.5 + 0.42 * ranks] * len(timelines)
    figure, axes = plt.subplots(len(heights), 1, figsize=(11, sum(heights) + 0.9 * len(heights)), height_ratios=heights)
    steps = [row["step"] for row in rows]
    for axis, key, label in zip(
        axes, ("loss", "grad_norm", "tokens_per_s"), ("loss", "gradient norm", "tokens/s"), strict=False
    ):
        axis.plot(
            steps, [float("nan") if row[key] is None else row[key] for row in rows], color="#4c78a8", linewidth=1.2
        )
        axis.set(ylabel=label, xlabel="step")
        axis.grid(alpha=0.3)
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[2].set_ylim(bottom=0)
    axes[0].set_title(f"{run.name}: {config.model.name}, {config.precision.name}, {len(rows)} steps", loc="left")
    length = max((span.end for _, spans in timelines for span in spans), default=0.0)  # one scale for both
    for axis, (title, spans) in zip(axes[3:], timelines, strict=True):
        draw_timeline(axis, spans, ranks, length)
        axis.set_title(f"{title}: {bubble(spans, ranks):.1%} of the ranks' time idle", loc="left", fontsize=10)
    if timelines:
        axes[-1].set_xlabel("seconds")
        kinds = sorted({span.action.kind for _, spans in timelines for span in spans})
        patches = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[kind]) for kind in kinds]
        patches.append(plt.Rectangle((0, 0), 1, 1, color=IDLE))
        figure.legend(patches, [*(NAMES[kind] for kind in kinds), "idle"], loc="lower right", ncols=4, frameon=False)
    figure.tight_layout(rect=(0, 0.03 if timelines else 0, 1, 1))
    known = figure.canvas.get_supported_filetypes()
    if out.suffix[1:] not in known:
        raise ConfigError(f"--out={out}: the ending must be one of {', '.join(sorted(known))}; write {out.stem}.png.")
    try:
        figure.savefig(out, dpi=110)
    except OSError as error:
        raise RunError(f"{out}: {error.strerror}; write --out=FILE for another place.") from error


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if not rows:
        raise ConfigError(f"{path}: there are no steps to draw yet.")
    return rows


def pipeline_timelines(run: Path, config: Config) -> list[tuple[str, list[Span]]]:
    """The measured timeline and, in its units, the simulated one; none without a pipeline."""
    path = run / "timeline.json"
    if not path.exists():
        return []
    recorded = json.loads(path.read_text())
    measured = [
        Span(rank, action, start, end)
        for rank, spans in enumerate(recorded["ranks"])
        for text, start, end in spans
        if (action := parse(text)) is not None
    ]
    first = min(span.start for span in measured)
    measured = [Span(span.rank, span.action, span.start - first, span.end - first) for span in measured]
    simulated = expected_of(config, resolve(config.parallelism, recorded["world"]))
    unit = _busy(measured) / _busy(simulated)
    simulated = [Span(span.rank, span.action, span.start * unit, span.end * unit) for span in simulated]
    schedule = config.parallelism.pp_schedule
    return [(f"{schedule}, step {recorded['step']} as measured", measured), (f"{schedule} as simulated", simulated)]


def _busy(spans: list[Span]) -> float:
    return sum(span.end - span.start for span in spans)


def draw_timeline(axis: Any, spans: list[Span], ranks: int, length: float) -> None:
    """A row per pipeline rank; a bar per action, with its microbatch's number where there is room.

    A rank's later stages are paler.
    """
    end = max(span.end for span in spans)
    held: dict[int, list[int]] = {
        rank: sorted({s.action.stage for s in spans if s.rank == rank}) for rank in range(ranks)
    }
    for rank in range(ranks):
        axis.broken_barh([(0, end)], (rank - 0.4, 0.8), facecolors=IDLE)
    for span in spans:
        width = span.end - span.start
        axis.broken_barh(
            [(span.start, width)],
            (span.rank - 0.4, 0.8),
            facecolors=COLOURS[span.action.kind],
            alpha=1.0 - 0.45 * held[span.rank].index(span.action.stage) / len(held[span.rank]),
            edgecolor="white",
            linewidth=0.4,
        )
        if width > length / 90:
            axis.text(
                span.start + width / 2,
                span.rank,
                str(span.action.microbatch),
                ha="center",
                va="center",
                fontsize=6,
                color="white",
            )
    axis.set(xlim=(0, length), ylim=(ranks - 0.5, -0.5), yticks=range(ranks))
    axis.set_yticklabels([f"rank {rank}" for rank in range(ranks)])
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.report", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("--out", type=Path, help="the picture; its ending says the format (png, svg, pdf)")
    arguments = parser.parse_args()
    out = arguments.out or arguments.run / "report.png"
    try:
        report(arguments.run, out)
    except Exception as error:
        sys.exit(report_error(error))
    print(out)


if __name__ == "__main__":
    main()
