"""Taking tokens to their experts and back, in one process. (parallel/expert.py has the way over ranks.)

An assignment is one token going to one of its experts; T tokens of k experts each make T * k of them, token by token.
They are put in rows sorted by expert. Either each expert has the rows it was chosen for, however many, or with a
capacity each has the same number of rows, `slots`, of which some stay empty: then no shape depends on the routing.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.router import count, place_within


@dataclass
class Plan:
    """Where assignments stand among the rows that a rank sends off."""

    slot: Tensor
    """int64 (T * k,): the row of each assignment."""
    dropped: Tensor | None
    """bool (T * k,): assignments that have none."""
    assignment: Tensor
    """int64 (rows,): the assignment in each row."""
    empty: Tensor | None
    """bool (rows,): rows without one."""
    chosen: int
    """Experts per token."""
    counts: Tensor | None
    """int64 (E,): rows of each expert; None where each has as many."""

    def rows_of(self, x: Tensor, per_token: bool, out: Tensor | None = None) -> Tensor:
        """Tokens (T, hidden), or assignments (T * k, hidden), as rows; empty ones zero."""
        if len(x) == 0:  # no tokens here, and with a capacity still rows, all of them empty
            return x.new_zeros((len(self.assignment), x.shape[1])) if out is None else out.zero_()
        index = self.assignment // self.chosen if per_token else self.assignment
        rows = torch.index_select(x, 0, index, out=out)
        return rows if self.empty is None else rows.masked_fill_(self.empty.unsqueeze(-1), 0.0)

    def assignments_of(self, rows: Tensor) -> Tensor:
        """Rows as assignments (T * k, hidden); dropped ones zero."""
        found = rows.index_select(0, self.slot)
        return found if self.dropped is None else found.masked_fill(self.dropped.unsqueeze(-1), 0.0)


def place_rows(experts: Tensor, kept: Tensor | None, slots: int | None, total: int) -> Plan:
    """The plan that sorts assignments by expert: experts int64 (T, k), `kept` bool (T, k), `total` experts."""
    expert, chosen = experts.flatten(), experts.shape[-1]
    if slots is None:
        place, order = place_within(expert)
        counts = count(expert, total)
        return Plan(place + (counts.cumsum(0) - counts)[expert], None, order, None, chosen, counts)
    assert kept is not None
    place, _ = place_within(expert.where(kept.flatten(), total))
    dropped = ~kept.flatten()
    # One row more takes what is dropped, and is cut off.
    slot = (expert * slots + place).where(~dropped, total * slots)
    assignment = slot.new_full((total * slots + 1,), -1)
    assignment[slot] = torch.arange(len(slot), device=slot.device)
    assignment = assignment[:-1]
    return Plan(slot.where(~dropped, 0), dropped, assignment.clamp_min(0), assignment < 0, chosen, None)


class Dispatch:
    """Tokens to experts and back where one process has them all."""

    def __init__(self, experts: int) -> None:
        self.experts = experts

    def own(self, x: Tensor) -> Tensor:
        """The tokens that this rank routes: (batch, seq, n) to (T, n)."""
        return x.flatten(0, 1)

    def join(self, y: Tensor, shape: torch.Size) -> Tensor:
        """The inverse: (T, hidden) of the tokens that this rank routes to (batch, seq, hidden)."""
        return y.view(shape)

    def whole_length(self, length: int) -> int:
        """Tokens of a whole sequence of which `length` are here."""
        return length

    def most_tokens(self, shape: torch.Size) -> int:
        """The most tokens that any rank routes of a batch of this shape."""
        return shape[0] * shape[1]

    def total_over_sequence(self, x: Tensor) -> Tensor:
        """Sum over the ranks that have pieces of the same sequences."""
        return x

    def total_over_step(self, x: Tensor) -> Tensor:
        """Sum over all ranks that have tokens of this layer."""
        return x

    def gather_over_sequence(self, x: Tensor, most: int) -> tuple[Tensor, slice]:
        """The rows (N, n) of all ranks that have pieces of the same sequences, and which of them are this rank's.

        N is at most `most`; the rows of ranks with fewer are filled up with -1.
        """
        return x, slice(None)

    def rows_sent(self, load: Tensor, slots: int | None) -> Tensor:
        """Rows that leave this rank, of `load` (E,) assignments: a scalar."""
        return load.new_zeros(())

    def plan(self, experts: Tensor, kept: Tensor | None, slots: int | None) -> Any:
        """Where the assignments of experts int64 (T, k) go."""
        return place_rows(experts, kept, slots, self.experts)

    def start(self, x: Tensor, plan: Any) -> Any:
        """Send tokens (T, hidden) off; `finish` waits for them."""
        return plan.rows_of(x, per_token=True)

    def finish(self, flight: Any, plan: Any) -> tuple[Tensor, Tensor | None]:
        """The rows of the experts that are here, and how many each has: see `models.moe.grouped_linear`."""
        return (flight, plan.counts) if plan.counts is not None else (flight.unflatten(0, (self.experts, -1)), None)

    def back(self, rows: Tensor, plan: Any) -> Tensor:
        """The experts' results in the order of assignments: (T * k, hidden)."""
        return plan.assignments_of(rows if plan.counts is not None else rows.flatten(0, 1))
