"""What a pipeline schedule is: for every pipeline rank, actions in their order. No torch.

Also reads one from a CSV file, the form that torch.distributed.pipelining prints: a line per rank, a cell per action,
`3F7` being the forward pass of stage 3 for microbatch 7. Empty cells are gaps for the reader's eye.
"""

import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

from models.errors import ConfigError

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
"""Forward; whole backward; and the two halves of a split one: gradients of inputs, gradients of weights."""


@dataclass(frozen=True)
class Action:
    """One piece of computing: `kind` of a microbatch on a stage."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def parse(text: str) -> Action | None:
    """The action that is written `3F7`; None for something else."""
    match = re.fullmatch(r"(\d+)([FBIW])(\d+)", text)
    return Action(match[2], int(match[1]), int(match[3])) if match else None


def read_csv(path: str) -> list[list[Action]]:
    """The orders of a schedule file. Raises ConfigError where there is no such file or it holds something else."""
    if not path:
        raise ConfigError(
            "parallelism.pp_schedule=csv needs a file: write parallelism.pp_schedule_file=PATH, a line per pipeline "
            "rank, cells such as 0F0 (stage 0, forward, microbatch 0), B (backward), or I and W (its halves)."
        )
    try:
        changed = Path(path).stat().st_mtime_ns
    except OSError as error:
        raise ConfigError(f"parallelism.pp_schedule_file={path}: {error.strerror}.") from error
    return _read(path, changed)


@cache
def _read(path: str, changed: int) -> list[list[Action]]:
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"parallelism.pp_schedule_file={path} cannot be read as text: {error}.") from error
    orders = []
    for number, line in enumerate(lines, start=1):
        cells = [cell.strip() for cell in line.split(",")]
        found = [(cell, parse(cell)) for cell in cells if cell]
        wrong = [cell for cell, action in found if action is None]
        if wrong:
            raise ConfigError(
                f"parallelism.pp_schedule_file={path} line {number}: {wrong[0]!r} is no action. Write stage, one of F "
                f"B I W, and microbatch, such as 0F0."
            )
        orders.append([action for _, action in found if action is not None])
    return orders


def check(path: str, orders: list[list[Action]], pp: int, virtual_stages: int, microbatches: int) -> list[str]:
    """What is wrong with a file's orders for a pipeline of `pp` ranks; nothing where it can run."""
    if len(orders) != pp or any(not actions for actions in orders):
        return [f"{path} has {len(orders)} lines; parallelism.pp={pp} ranks need one each, none of them empty."]
    held = [sorted({action.stage for action in actions}) for actions in orders]
    stages = pp * virtual_stages
    if any(len(mine) != virtual_stages for mine in held) or sorted(chain(*held)) != list(range(stages)):
        return [
            f"{path} puts stages {held} on the ranks; parallelism.pp={pp} * virtual_stages={virtual_stages} makes "
            f"stages 0 to {stages - 1}, {virtual_stages} to a rank."
        ]
    counts = Counter(action for actions in orders for action in actions)
    for stage in range(stages):
        for microbatch in range(microbatches):
            done = [counts[Action(kind, stage, microbatch)] for kind in (FORWARD, BACKWARD, INPUT, WEIGHT)]
            if done not in ([1, 1, 0, 0], [1, 0, 1, 1]):
                numbers = dict(zip("FBIW", done, strict=True))
                return [
                    f"{path} has, for stage {stage} and microbatch {microbatch} of {microbatches}, the actions "
                    f"{numbers}; it needs one F and either one B or one I and one W."
                ]
    beyond = [str(action) for action in counts if action.microbatch >= microbatches]
    return [f"{path} has {beyond[0]}, but there are microbatches 0 to {microbatches - 1} only."] if beyond else []
