"""Expert parallelism: experts dealt out over ep, each expert's width over etp; tokens travel to them and back.

GShard (Lepikhin et al., 2020, arXiv:2006.16668), with the ranks of tp, cp and dp folded into ep and etp as in MoE
Parallel Folding (Liu et al., 2025, arXiv:2504.14960): every rank brings tokens of its own, whichever axis gave them to
it. Rows go by all-to-all over ep to the ranks that hold their experts, are gathered over etp, where each rank has a
slice of every expert's width, and come back by reduce-scatter and all-to-all. The way back is the transpose of the way
there, so that each is the other's backward pass.

Rows for a rank's own experts never enter a collective over ep. Buffers are allocated once and grow to the largest
routing seen; nothing that autograd keeps lies in them.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from models.decoder import Decoder
from models.dispatch import Dispatch, Plan, place_rows
from models.moe import ExpertLinear, MixtureOfExperts
from models.router import on_host
from parallel.collectives import all_gather, all_gather_into, all_reduce, reduce_scatter_into, size_of
from parallel.layout import piece
from parallel.route import Nodes, Route, make_route
from parallel.sharded import block_parameter, local


@dataclass(frozen=True)
class ExpertGroups:
    """The groups that a mixture of experts talks to; None or a group of one sends nothing."""

    ep: ProcessGroup | None
    etp: ProcessGroup | None
    tokens: ProcessGroup | None
    """tp ranks, where all of them hold the same tokens: each then routes a piece of them."""
    sequence: tuple[ProcessGroup, ...]
    """The axes along which pieces of one sequence lie, slowest first, `tokens` included."""
    step: tuple[ProcessGroup, ...]
    """All axes along which tokens of a step lie."""
    nodes: Nodes | None = None
    """For an exchange over ep that goes inside a node first and then between nodes."""


def mixtures(decoder: Decoder) -> list[MixtureOfExperts]:
    """The mixtures of experts among a decoder's layers, in order."""
    blocks = [layer.mlp for layer in decoder.model.layers.values()]
    return [block for block in blocks if isinstance(block, MixtureOfExperts)]


def split_experts(decoder: Decoder, mesh: DeviceMesh) -> None:
    """Deal out the experts of a decoder on the meta device over the two-dimensional `mesh` (ep, etp)."""
    for mixture in mixtures(decoder):
        for linear, width in (
            (mixture.experts.gate_proj, 1),
            (mixture.experts.up_proj, 1),
            (mixture.experts.down_proj, 2),
        ):
            linear.weight = block_parameter(linear.weight, mesh, [Shard(0), Shard(width)])
            linear.__class__ = _ExpertBlock


class _ExpertBlock(ExpertLinear):
    def forward(self, rows: Tensor, counts: Tensor | None) -> Tensor:
        return self.apply_weight(rows, local(self.weight), counts)


@dataclass
class Workspace:
    """Buffers for rows on the way, one of each name, allocated when first needed and when more is needed than ever."""

    buffers: dict[str, Tensor] = field(default_factory=dict)

    def take(self, name: str, rows: int, like: Tensor) -> Tensor:
        """A buffer (rows, width of `like`) of its type; what was in it is gone."""
        size, held = rows * like.shape[-1], self.buffers.get(name)
        if held is None or held.numel() < size or held.dtype != like.dtype or held.device != like.device:
            self.buffers[name] = held = like.new_empty(size)
        return held[:size].view(rows, like.shape[-1])


@dataclass
class ExchangePlan:
    """Where rows go, where they come from, and how those that came are ordered by expert."""

    rows: Plan
    """Rows to the other ranks of ep in their order, each rank's sorted by expert; this rank's own last."""
    route: Route
    own: int
    """Rows that stay on this rank."""
    width: int
    """Rows of the fullest etp rank: what each brings to the gathering over etp."""
    arrange: Tensor
    """int64 (R,): for rows in the order of experts, their place among those that came."""
    counts: Tensor | None
    """int64 (experts here,): rows of each; None where each has as many."""
    tokens: int


class ExpertDispatch(Dispatch):
    """Tokens to experts and back over ranks."""

    def __init__(self, experts: int, groups: ExpertGroups, workspace: Workspace) -> None:
        super().__init__(experts)
        self.groups, self.workspace = groups, workspace
        self.ranks = size_of(groups.ep)
        self.here = experts // self.ranks
        self.first = self.here * (0 if groups.ep is None else groups.ep.rank())

    def own(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        return flat if self.groups.tokens is None else _Take.apply(flat, self.groups.tokens)

    def join(self, y: Tensor, shape: torch.Size) -> Tensor:
        if self.groups.tokens is not None:
            y = _Join.apply(y, self.groups.tokens, shape[0] * shape[1])
        return y.view(shape)

    def whole_length(self, length: int) -> int:
        ranks = [size_of(group) for group in self.groups.sequence if group is not self.groups.tokens]
        for count in ranks:
            length *= count
        return length

    def most_tokens(self, shape: torch.Size) -> int:
        return -(-shape[0] * shape[1] // size_of(self.groups.tokens))

    def total_over_sequence(self, x: Tensor) -> Tensor:
        return _total(x, self.groups.sequence)

    def total_over_step(self, x: Tensor) -> Tensor:
        return _total(x, self.groups.step)

    def gather_over_sequence(self, x: Tensor, most: int) -> tuple[Tensor, slice]:
        everyone, first = _filled(x, most, -1.0), 0
        for group in reversed(self.groups.sequence):
            first += group.rank() * len(everyone)
            everyone = all_gather(everyone, 0, group)
        return everyone, slice(first, first + len(x))

    def rows_sent(self, load: Tensor, slots: int | None) -> Tensor:
        if slots is not None:
            return load.new_full((), (self.ranks - 1) * self.here * slots)
        return load.sum() - load[self.first : self.first + self.here].sum()

    def plan(self, experts: Tensor, kept: Tensor | None, slots: int | None) -> ExchangePlan:
        tokens, last = len(experts), self.experts - self.here
        # Own experts last: what stays here is then the end of the rows.
        after = experts - self.first
        experts = torch.where(after < 0, experts, torch.where(after < self.here, after + last, experts - self.here))
        rows = place_rows(experts, kept, slots, self.experts)
        etp = size_of(self.groups.etp)
        if slots is None:
            assert rows.counts is not None
            sent = rows.counts.view(self.ranks, self.here)
            received = self._exchange_counts(sent)
            everyone = all_gather(received.unsqueeze(0), 0, self.groups.etp)  # (etp, ep, experts here)
            all_rows = experts.numel()
            even = [all_rows // self.ranks] * (self.ranks - 1)
            even.append(all_rows - sum(even))
            if self.ranks * etp == 1:
                numbers = [all_rows] * 3
            else:
                # The only time that the host must know: uneven exchanges take their sizes from it.
                told = torch.cat((sent.sum(1), received.sum(1), everyone.sum((1, 2))))
                numbers = on_host(told, [*even, *even, *[all_rows] * etp])
            to, come, each = numbers[: self.ranks], numbers[self.ranks : 2 * self.ranks], numbers[2 * self.ranks :]
        else:
            each = [self.experts * slots] * etp
            to = come = [self.here * slots] * self.ranks
            everyone = experts.new_full((etp, self.ranks, self.here), slots)
        width = max(each)
        arrange = _by_expert(everyone, width, sum(each))
        counts = everyone.sum((0, 1)) if slots is None else None
        route = make_route(
            self.groups.ep, self.groups.nodes, to[:-1], come[:-1], None if slots is None else to[0], experts.device
        )
        return ExchangePlan(rows, route, to[-1], width, arrange, counts, tokens)

    def start(self, x: Tensor, plan: ExchangePlan) -> Any:
        flight = _Flight(self, plan)
        return flight, _Start.apply(x, flight)

    def finish(self, flight: Any, plan: ExchangePlan) -> tuple[Tensor, Tensor | None]:
        rows = _Finish.apply(flight[1], flight[0])
        return (rows, plan.counts) if plan.counts is not None else (rows.unflatten(0, (self.here, -1)), None)

    def back(self, rows: Tensor, plan: ExchangePlan) -> Tensor:
        rows = rows if plan.counts is not None else rows.flatten(0, 1)
        return _Back.apply(rows, _Flight(self, plan))

    def _exchange_counts(self, sent: Tensor) -> Tensor:
        """Counts (ep, experts here) for the other ranks and then this one, to those from them in the same order."""
        received = torch.empty_like(sent)
        received[-1] = sent[-1]
        others = [1] * (self.ranks - 1)
        Route(self.groups.ep, others, others).go(sent[:-1], received[:-1]).wait()
        return received


class _Flight:
    """One exchange under way. The raw ways there and back, outside autograd."""

    def __init__(self, dispatch: ExpertDispatch, plan: ExchangePlan) -> None:
        self.dispatch, self.plan = dispatch, plan
        self.work: Any = None
        self.rows: Tensor | None = None

    def _buffers(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Rows that leave, rows that come, and what stays, as it lies among the one and among the other."""
        plan, take = self.plan, self.dispatch.workspace.take
        leaving, coming = sum(plan.route.send), sum(plan.route.receive)
        sent = take("sent", leaving + plan.own, like)
        came = take("came", max(coming + plan.own, plan.width), like)
        return sent, came, sent[:leaving], came[:coming], came[coming : coming + plan.own]

    def leave(self, x: Tensor, per_token: bool) -> None:
        """Start sending tokens or assignments to the ranks of their experts."""
        sent, _, leaving, coming, stays = self._buffers(x)
        self.plan.rows.rows_of(x, per_token, out=sent)
        stays.copy_(sent[len(leaving) :])
        self.work = self.plan.route.go(leaving, coming)

    def arrive(self, like: Tensor) -> Tensor:
        """Wait; the rows in the order of experts, over all etp ranks."""
        self.work.wait()
        came, plan, etp = self._buffers(like)[1], self.plan, self.dispatch.groups.etp
        if size_of(etp) > 1:
            gathered = self.dispatch.workspace.take("gathered", size_of(etp) * plan.width, like)
            all_gather_into(gathered, came[: plan.width], etp)
            came = gathered
        return came.index_select(0, plan.arrange)

    def leave_back(self, rows: Tensor) -> None:
        """Start sending rows in the order of experts back, summed over etp ranks."""
        sent, came, leaving, coming, stays = self._buffers(rows)
        plan, etp = self.plan, self.dispatch.groups.etp
        if size_of(etp) > 1:
            gathered = self.dispatch.workspace.take("gathered", size_of(etp) * plan.width, rows)
            gathered.zero_().index_copy_(0, plan.arrange, rows)
            reduce_scatter_into(came[: plan.width], gathered, etp)
        else:
            came.index_copy_(0, plan.arrange, rows)
        sent[len(leaving) :].copy_(stays)
        self.work = plan.route.go_back(coming, leaving)

    def arrive_back(self, like: Tensor) -> Tensor:
        """Wait; the rows in the order of assignments (tokens * k, hidden)."""
        self.work.wait()
        return self.plan.rows.assignments_of(self._buffers(like)[0])


# Autograd sees three steps. Between the first two other work can be done while rows travel, in the backward pass too:
# there the second one starts the exchange and the first one waits for it.


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        flight.leave(x, per_token=True)
        return x.new_empty((0, x.shape[1]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        plan = ctx.flight.plan
        found = ctx.flight.arrive_back(grads[0])
        return found.view(plan.tokens, plan.rows.chosen, found.shape[-1]).sum(1), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        return flight.arrive(ticket)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.flight.leave_back(grads[0])
        return grads[0].new_empty((0, grads[0].shape[1])), None


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        flight.leave_back(rows)
        return flight.arrive_back(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.flight.leave(grads[0], per_token=False)
        return ctx.flight.arrive(grads[0]), None


class _Take(torch.autograd.Function):
    """The piece of tokens (N, n), the same on all ranks, that this rank routes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group, ctx.total = group, len(x)
        return _piece(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _pieces(grads[0], ctx.group, ctx.total), None


class _Join(torch.autograd.Function):
    """The ranks' pieces, on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, total: int) -> Tensor:
        ctx.group = group
        return _pieces(x, group, total)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _piece(grads[0].contiguous(), ctx.group), None, None


def _piece(x: Tensor, group: ProcessGroup) -> Tensor:
    part = piece(len(x), size_of(group), group.rank())
    return x[part.start : part.stop].clone()


def _pieces(x: Tensor, group: ProcessGroup, total: int) -> Tensor:
    return all_gather(_filled(x, -(-total // size_of(group)), 0.0), 0, group)[:total]


def _filled(x: Tensor, rows: int, value: float) -> Tensor:
    return x if len(x) == rows else torch.cat((x, x.new_full((rows - len(x), *x.shape[1:]), value)))


def _total(x: Tensor, groups: tuple[ProcessGroup, ...]) -> Tensor:
    for group in groups:
        x = all_reduce(x, group)
    return x


def _by_expert(counts: Tensor, width: int, total: int) -> Tensor:
    """The order that sorts rows by expert, int64 (total,), for counts (etp, ep, experts here) of each block of rows.

    Rows lie by etp rank, each rank's filled up to `width`, then by ep rank, then by expert.
    """
    etp = len(counts)
    flat = counts.view(etp, -1)
    starts = flat.cumsum(1) - flat + width * torch.arange(etp, device=counts.device).unsqueeze(1)
    starts, lengths = (x.view(-1, counts.shape[-1]).T.flatten() for x in (starts, flat))
    shift = starts - (lengths.cumsum(0) - lengths)
    place = torch.arange(total, device=counts.device)
    return place + torch.repeat_interleave(shift, lengths, output_size=total)


def connect_experts(decoder: Decoder, groups: ExpertGroups) -> None:
    """Let a decoder's mixtures of experts send their tokens over ranks, through buffers that they share."""
    workspace = Workspace()
    for mixture in mixtures(decoder):
        mixture.dispatch = ExpertDispatch(mixture.config.num_experts, groups, workspace)
