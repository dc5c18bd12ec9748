"""Who holds up a run that stands still: a pure function of what every rank says of itself."""

from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

from parallel.flight import Collective

SAME_SHAPES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
"""Operations whose ranks bring tensors of one shape."""
FRAMES = 8


@dataclass
class Status:
    """One rank, at the moment when it was taken for dead or failed."""

    rank: int
    node: str
    phase: str
    step: int
    silent_s: float
    """Since its last sign of life."""
    stack: list[str]
    """Of the main thread, innermost last: `file:line function: source`."""
    waiting: bool
    """Whether the main thread is inside a collective."""
    collectives: list[Collective] = field(default_factory=list)
    groups: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    """Axis and ranks of each process group by name."""
    error: str | None = None
    """What it died of, if it did not stand still."""

    @staticmethod
    def read(tree: dict[str, Any]) -> "Status":
        """From plain containers, as `plain` makes them."""
        collectives = [Collective(**part) for part in tree["collectives"]]
        groups = {name: (axis, list(ranks)) for name, (axis, ranks) in tree["groups"].items()}
        return Status(**tree | {"collectives": collectives, "groups": groups})

    def plain(self) -> dict[str, Any]:
        """As numbers, strings, lists and dicts."""
        return asdict(self)

    def last(self, group: str, transfer: bool = False) -> int:
        """The number of the last collective that it entered in a group."""
        return max((c.number for c in self.collectives if c.group == group and c.transfer == transfer), default=0)

    @property
    def pending(self) -> Collective | None:
        """What it waits in; None if it does not wait."""
        entered = [collective for collective in self.collectives if collective.pending]
        return entered[-1] if entered and self.waiting else None


def verdict(statuses: list[Status], world: int) -> str:
    """One paragraph: which rank, on which node, did not do what, in which step; and its stack."""
    if order := differing_order(statuses):
        return order
    lines = []
    present = {status.rank for status in statuses}
    if absent := sorted(set(range(world)) - present):
        lines.append(
            f"rank {_ranks(absent)} gave no sign at all: its process has ended, is stopped, or its node is lost."
        )
    for status in statuses:
        if status.pending is None:
            lines.append(_culprit(status, statuses))
    if not lines:
        lines.append("every rank waits in a collective that the others have not entered:")
        lines += [_waits(status) for status in statuses[:FRAMES]]
    return "\n".join(lines)


def differing_order(statuses: list[Status]) -> str | None:
    """The first place where ranks of a group entered different collectives, or wait for each other in two groups."""
    entered: dict[tuple[str, int], list[tuple[Status, Collective]]] = defaultdict(list)
    for status in statuses:
        for collective in status.collectives:
            if not collective.transfer:
                entered[collective.group, collective.number].append((status, collective))
    for (group, number), ranks in sorted(entered.items(), key=lambda item: item[0][1]):
        kinds = {_kind(collective) for _, collective in ranks}
        if len(kinds) > 1:
            each = [
                f"rank {status.rank} on {status.node} (now in step {status.step}) entered {collective.operation} of "
                f"{collective.shapes}"
                for status, collective in _one_of_each(ranks)
            ]
            name = _axis(ranks[0][0], group)
            return (
                f"ranks differ in the order of their collectives: as number {number} of {name}, {', but '.join(each)}. "
                f"All must enter the same ones in the same order.\n{_stacks(ranks)}"
            )
    return _crossed(statuses)


def _crossed(statuses: list[Status]) -> str | None:
    """Two ranks that wait in two groups that both are in, each in one that the other has not entered."""
    for a in statuses:
        for b in statuses:
            if a.rank >= b.rank or a.pending is None or b.pending is None or a.pending.group == b.pending.group:
                continue
            in_both = all(group in one.groups for group in (a.pending.group, b.pending.group) for one in (a, b))
            if in_both and b.last(a.pending.group) < a.pending.number and a.last(b.pending.group) < b.pending.number:
                both = f"{_waits(a)} {_waits(b)}"
                return (
                    f"ranks differ in the order of their groups: in step {a.step} {both} Each waits for the other: "
                    f"both must enter the two in the same order.\n{_stacks([(a, a.pending), (b, b.pending)])}"
                )
    return None


def _culprit(status: Status, statuses: list[Status]) -> str:
    """A rank that does not wait: what the others wait for it in, and what it does instead."""
    missed = [
        (other, other.pending)
        for other in statuses
        if other.pending is not None
        and status.rank in other.groups.get(other.pending.group, ("", []))[1]
        and status.last(other.pending.group, other.pending.transfer) < other.pending.number
    ]
    who = f"rank {status.rank} on {status.node}"
    if status.error is not None:
        did = f"failed in step {status.step} ({status.phase}): {status.error}"
    elif missed:
        other, collective = missed[0]
        waiting = [other.rank for other, waits in missed if waits.group == collective.group]
        did = (
            f"did not enter {collective.operation} of {_axis(other, collective.group)} in step {status.step} "
            f"(phase: {status.phase}), where rank {_ranks(waiting)} waits for it"
        )
    else:
        did = f"stands still in step {status.step} (phase: {status.phase}), outside any collective"
    return f"{who} {did}; silent for {status.silent_s:.0f} s. Its stack:\n{_stack(status)}"


def _waits(status: Status) -> str:
    collective = status.pending
    assert collective is not None
    where = _axis(status, collective.group)
    return (
        f"rank {status.rank} on {status.node} waits in {collective.operation} of {where} (number {collective.number})."
    )


def _axis(status: Status, group: str) -> str:
    axis, ranks = status.groups.get(group, ("", []))
    return f"axis {axis} (ranks {_ranks(ranks)})" if axis else f"group {group}"


def _kind(collective: Collective) -> tuple[str, str]:
    same = any(collective.operation.endswith(name) for name in SAME_SHAPES)
    return collective.operation, collective.shapes if same else ""


def _one_of_each(ranks: list[tuple[Status, Collective]]) -> list[tuple[Status, Collective]]:
    return list({_kind(collective): (status, collective) for status, collective in reversed(ranks)}.values())[::-1]


def _stacks(ranks: list[tuple[Status, Collective]]) -> str:
    return "\n".join(f"rank {status.rank}'s stack:\n{_stack(status)}" for status, _ in _one_of_each(ranks))


def _stack(status: Status) -> str:
    """The innermost frames, and before them the innermost of our own: libraries can be deep."""
    inner, outer = status.stack[-3:], status.stack[:-3]
    own = [frame for frame in outer if "site-packages" not in frame and "/lib/python" not in frame and "<" not in frame]
    return "\n".join(f"  {frame}" for frame in [*own[-FRAMES + 3 :], *inner])


def _ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:FRAMES])) + (f" and {len(ranks) - FRAMES} more" if len(ranks) > FRAMES else "")
