"""Is it the same run? `python -m recipes.compare RUN_A RUN_B [--tolerance 1e-9]`.

Compares loss and gradient norm of every step, and, where `callbacks=gradients` was on, every parameter's gradient and
value. Exit code 0 where all agree within the tolerance, 1 where they differ, 2 where they cannot be compared.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from models.errors import ConfigError
from recipes.command import report

TOLERANCES = {"fp64": 1e-9, "fp32": 1e-5}
"""Relative, by precision: rounding of sums in another order. Other precisions have that of bfloat16."""
BF16_TOLERANCE = 2e-2
SHOWN = 10


@dataclass(frozen=True)
class Difference:
    """How far two values are apart, relative to the first one's size: |a - b| / |a|, by the largest element."""

    error: float
    what: str


def compare(run_a: Path, run_b: Path, tolerance: float | None) -> bool:
    """Print the worst differences and a verdict; whether the runs agree. Raises ConfigError where nothing compares."""
    from recipes.schema import read_config

    configs = [read_config(run / "config.yaml") for run in (run_a, run_b)]
    if tolerance is None:
        tolerance = max(TOLERANCES.get(config.precision.name, BF16_TOLERANCE) for config in configs)
    for name, run, config in zip("AB", (run_a, run_b), configs, strict=True):
        split = config.parallelism
        sizes = ("tp", "pp", "cp", "ep", "dp_replicate", "dp_shard", "zero")
        print(f"{name}: {run}  {config.precision.name}, " + " ".join(f"{key}={getattr(split, key)}" for key in sizes))
    differences = [*_metrics(run_a, run_b), *_tensors(run_a, run_b)]
    differences.sort(key=lambda difference: -difference.error)
    print(f"\n{len(differences)} values compared; the worst {min(SHOWN, len(differences))} (relative):")
    for difference in differences[:SHOWN]:
        print(f"  {difference.error:9.2e}  {difference.what}")
    same = differences[0].error <= tolerance
    print(f"\nverdict: the runs {'agree' if same else 'DIFFER'} (tolerance {tolerance:g})")
    return same


def _metrics(run_a: Path, run_b: Path) -> Iterator[Difference]:
    rows_a, rows_b = _rows(run_a), _rows(run_b)
    common = sorted(rows_a.keys() & rows_b.keys())
    if not common:
        raise ConfigError(f"{run_a} and {run_b} have no step in common in metrics.jsonl.")
    if rows_a.keys() != rows_b.keys():
        print(f"steps compared: {common[0]} to {common[-1]} (A has {len(rows_a)}, B has {len(rows_b)})")
    for step in common:
        for key in ("loss", "grad_norm", "tokens"):
            a, b = (math.nan if row[step][key] is None else row[step][key] for row in (rows_a, rows_b))
            yield Difference(_relative(abs(a - b), abs(a)), f"step {step} {key}  {a!r} against {b!r}")


def _rows(run: Path) -> dict[int, dict[str, float]]:
    path = run / "metrics.jsonl"
    if not path.exists():
        raise ConfigError(f"{path}: no such file, so {run} is not a run directory that can be compared.")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["step"]: row for row in rows}


def _tensors(run_a: Path, run_b: Path) -> Iterator[Difference]:
    files_a, files_b = _gradient_files(run_a), _gradient_files(run_b)
    common = sorted(files_a.keys() & files_b.keys())
    if not common:
        print("no gradients to compare (callbacks=gradients writes them): a right loss alone proves little")
        return
    from safetensors import safe_open

    for step in common:
        with safe_open(files_a[step], "pt") as a, safe_open(files_b[step], "pt") as b:
            names_a, names_b = set(a.keys()), set(b.keys())
            for name in sorted(names_a ^ names_b):
                yield Difference(math.inf, f"step {step} {name}: only in {'A' if name in names_a else 'B'}")
            for name in sorted(names_a & names_b):
                first, second = a.get_tensor(name).double(), b.get_tensor(name).double()
                if first.shape != second.shape:
                    yield Difference(math.inf, f"step {step} {name}: shapes {first.shape} and {second.shape}")
                    continue
                distance = float((first - second).abs().max())
                yield Difference(_relative(distance, float(first.abs().max())), f"step {step} {name}")


def _gradient_files(run: Path) -> dict[int, Path]:
    found = {path: re.fullmatch(r"gradients-step(\d+)\.safetensors", path.name) for path in run.glob("*.safetensors")}
    return {int(match[1]): path for path, match in found.items() if match}


def _relative(distance: float, size: float) -> float:
    if math.isnan(distance):
        return math.inf
    return distance / size if size else (0.0 if distance == 0.0 else math.inf)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.compare", description=__doc__.splitlines()[0])
    parser.add_argument("run_a", type=Path, help="a run directory")
    parser.add_argument("run_b", type=Path, help="another")
    parser.add_argument("--tolerance", type=float, help="largest relative difference that counts as the same")
    arguments = parser.parse_args()
    try:
        same = compare(arguments.run_a, arguments.run_b, arguments.tolerance)
    except Exception as error:
        sys.exit(report(error))
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
