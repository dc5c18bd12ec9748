"""The ways of rows between the ranks of an ep group: one all-to-all, or inside a node first and then between nodes.

Splits leave out the rank itself: `send` and `receive` are rows to and from the *other* ranks of the group, in their
order; rows that a rank keeps are no business of a route.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from models.router import on_host
from parallel.collectives import size_of
from parallel.layout import Layout


@dataclass(frozen=True)
class Nodes:
    """An ep group over several nodes, rank = node * ranks inside a node + place inside it."""

    inside: ProcessGroup
    """The ranks of this node."""
    across: ProcessGroup
    """The ranks with this rank's place, one of each node."""


def node_groups(layout: Layout, ep_nodes: int) -> Nodes | None:
    """The groups of an exchange in two hops; None where there is one hop. A collective over all ranks."""
    if ep_nodes == 1:
        return None
    grid = layout.expert_grid()
    inside = layout.ep // ep_nodes
    grid = grid.reshape(*grid.shape[:3], ep_nodes, inside, layout.etp)
    groups = []
    for axis, size in ((4, inside), (3, ep_nodes)):
        ranks = [row.tolist() for row in grid.swapaxes(axis, -1).reshape(-1, size)]
        groups.append(dist.new_subgroups_by_enumeration(ranks)[0])
    return Nodes(*groups)


@dataclass(frozen=True)
class _Pending:
    work: Any = None
    finish: Callable[[], object] | None = None

    def wait(self) -> None:
        """Until the rows are there."""
        if self.work is not None:
            self.work.wait()
        if self.finish is not None:
            self.finish()


@dataclass
class Route:
    """One all-to-all with uneven splits."""

    group: ProcessGroup | None
    send: list[int]
    receive: list[int]

    def go(self, x: Tensor, out: Tensor) -> _Pending:
        """Start sending rows x (sum of send, n) into `out` (sum of receive, n); wait on what is returned."""
        return _Pending(_all_to_all(x, out, self.send, self.receive, self.group))

    def go_back(self, x: Tensor, out: Tensor) -> _Pending:
        """The same the other way."""
        return _Pending(_all_to_all(x, out, self.receive, self.send, self.group))


class TwoHops(Route):
    """Rows go to the rank of this node that has their rank's place, then between nodes among ranks of one place.

    Between nodes a rank then has messages for one rank of each other node instead of all of them: fewer and larger
    ones. In between rows lie by source: a chunk per rank of this node and node of destination.
    """

    def __init__(
        self, group: ProcessGroup, nodes: Nodes, send: list[int], receive: list[int], uniform: int | None, device: Any
    ) -> None:
        super().__init__(group, send, receive)
        self.nodes = nodes
        self.inside, self.across = nodes.inside.size(), nodes.across.size()
        self.node, self.place = nodes.across.rank(), nodes.inside.rank()
        rank = group.rank()
        self.to = [*send[:rank], 0, *send[rank:]]
        self.come = [*receive[:rank], 0, *receive[rank:]]
        self.peers = [place for place in range(self.inside) if place != self.place]
        self.others = [node for node in range(self.across) if node != self.node]
        self.middle = self._middle(uniform, device)

    def _middle(self, uniform: int | None, device: Any) -> dict[tuple[int, int], int]:
        """Rows that come by here, by (place of their source in this node, node they go to)."""
        own = {(self.place, node): self.to[node * self.inside + self.place] for node in range(self.across)}
        if uniform is not None:
            return own | {(peer, node): uniform for peer in self.peers for node in range(self.across)}
        told = [[self.to[node * self.inside + peer] for node in range(self.across)] for peer in self.peers]
        sent = torch.tensor(told, device=device).view(-1, self.across)
        heard = torch.empty_like(sent)
        one = [1] * len(self.peers)
        work = _all_to_all(sent, heard, one, one, self.nodes.inside)
        if work is not None:
            work.wait()
        counts = on_host(heard.flatten(), [max(self.to)] * heard.numel())
        rows = zip(self.peers, zip(*[iter(counts)] * self.across, strict=True), strict=True)
        return own | {(peer, node): count for peer, row in rows for node, count in enumerate(row)}

    def go(self, x: Tensor, out: Tensor) -> _Pending:
        chunk = _chunks(x, {divmod(rank, self.inside): count for rank, count in enumerate(self.to)})
        first = [(node, peer) for peer in self.peers for node in range(self.across)]
        here = self._hop_inside(_joined(x, [chunk[key] for key in first]), back=False)
        here |= {(self.place, node): chunk[node, self.place] for node in range(self.across)}
        leaving = _joined(x, [here[place, node] for node in self.others for place in range(self.inside)])
        arrived = leaving.new_empty((sum(self._from(node) for node in self.others), x.shape[1]))
        sizes = [sum(self.middle[place, node] for place in range(self.inside)) for node in self.others]
        work = _all_to_all(leaving, arrived, sizes, [self._from(node) for node in self.others], self.nodes.across)

        def finish() -> None:
            keys = [(node, place) for node in self.others for place in range(self.inside)]
            parts = _chunks(arrived, {key: self.come[key[0] * self.inside + key[1]] for key in keys})
            parts |= {(self.node, peer): here[peer, self.node] for peer in self.peers}
            _join_into(out, [parts[key] for key in sorted(parts)])

        return _Pending(work, finish)

    def go_back(self, x: Tensor, out: Tensor) -> _Pending:
        chunk = _chunks(x, {divmod(rank, self.inside): count for rank, count in enumerate(self.come)})
        leaving = _joined(x, [chunk[node, place] for node in self.others for place in range(self.inside)])
        sizes = [sum(self.middle[place, node] for place in range(self.inside)) for node in self.others]
        arrived = leaving.new_empty((sum(sizes), x.shape[1]))
        work = _all_to_all(leaving, arrived, [self._from(node) for node in self.others], sizes, self.nodes.across)

        def finish() -> None:
            keys = [(place, node) for node in self.others for place in range(self.inside)]
            here = _chunks(arrived, {key: self.middle[key] for key in keys})
            here |= {(peer, self.node): chunk[self.node, peer] for peer in self.peers}
            first = [here[peer, node] for peer in self.peers for node in range(self.across)]
            home = self._hop_inside(_joined(x, first), back=True)
            home |= {(node, self.place): here[self.place, node] for node in self.others}
            _join_into(out, [home[key] for key in sorted(home)])

        return _Pending(work, finish)

    def _from(self, node: int) -> int:
        """Rows that come from a node."""
        return sum(self.come[node * self.inside : (node + 1) * self.inside])

    def _hop_inside(self, x: Tensor, back: bool) -> dict[tuple[int, int], Tensor]:
        """Chunks by (source place, node) on the way there, by (node, place) on the way back."""
        nodes = range(self.across)
        send = {peer: [self.to[node * self.inside + peer] for node in nodes] for peer in self.peers}
        come = {peer: [self.middle[peer, node] for node in nodes] for peer in self.peers}
        send, come = (come, send) if back else (send, come)
        totals = [[sum(sizes[peer]) for peer in self.peers] for sizes in (send, come)]
        out = x.new_empty((sum(totals[1]), x.shape[1]))
        work = _all_to_all(x, out, totals[0], totals[1], self.nodes.inside)
        if work is not None:
            work.wait()
        keys = [(peer, node) for peer in self.peers for node in nodes]
        chunks = _chunks(out, {(peer, node): come[peer][node] for peer, node in keys})
        return {(node, peer): chunks[peer, node] for peer, node in keys} if back else chunks


def make_route(
    group: ProcessGroup | None,
    nodes: Nodes | None,
    send: list[int],
    receive: list[int],
    uniform: int | None,
    device: torch.device,
) -> Route:
    """The route of an ep group; `uniform` is the rows of every split where they are all alike."""
    if group is None or nodes is None:
        return Route(group, send, receive)
    return TwoHops(group, nodes, send, receive, uniform, device)


def _all_to_all(x: Tensor, out: Tensor, send: list[int], receive: list[int], group: ProcessGroup | None) -> Any:
    if group is None or size_of(group) == 1:
        return None
    rank = group.rank()
    send, receive = ([*rows[:rank], 0, *rows[rank:]] for rows in (send, receive))
    return dist.all_to_all_single(out, x, receive, send, group=group, async_op=True)


def _chunks(x: Tensor, sizes: dict[Any, int]) -> dict[Any, Tensor]:
    return dict(zip(sizes, x.split(list(sizes.values())), strict=True))


def _joined(like: Tensor, parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else like.new_empty((0, like.shape[1]))


def _join_into(out: Tensor, parts: list[Tensor]) -> None:
    if parts:
        torch.cat(parts, out=out)
