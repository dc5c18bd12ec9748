"""What one rank holds when it holds most, by formula: weights, gradients, optimizer state, activations, buffers.

A step has few moments at which memory can peak: while dropout draws a mask, while the loss makes logits or scales its
gradients, while the first layers that go backward do so with all others still waiting (in the block, in its experts, in
the norm before it), or the last one with most gradients there, and at the end of each half of a backward pass that is
split. Each is added up from plan/weights.py and plan/activations.py, from what FSDP2 gathers and when
(parallel/zero.py), and from what the schedule has in flight (plan/timeline.py). Tests hold every number against a dry
run. Bytes everywhere.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from models.counts import for_each_layer, layer_shapes
from parallel.config import BYTES, Config, ParallelismConfig, recompute_interval
from parallel.layout import AXES, Layout, microbatch_count
from parallel.order import order
from parallel.plan.activations import (
    LayerActivations,
    between_halves,
    dropout_temporary,
    exchange_buffers,
    layer_activations,
    loss_activations,
    norm_backward,
    shared_kept,
    sizes,
)
from parallel.plan.weights import (
    Shapes,
    end_groups,
    held_parameters,
    only_experts,
    optimizer_elements,
    padded_block,
    sharded,
    shards,
)
from parallel.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Action
from parallel.stages import split_layers, splits_backward, stages_of

RESERVED_BYTES = 1536 << 20
"""Assumed: CUDA context, kernels, cuBLAS workspaces and NCCL's own buffers, which no tensor accounts for."""
SLACK = 0.05
"""Assumed: what the caching allocator holds beyond what is in use at the peak."""
KINDS = ("parameters", "gradients", "optimizer", "gathered", "communication", "activations", "loss")


@dataclass(frozen=True)
class Memory:
    """What a rank holds at one moment of a step."""

    moment: str
    parameters: int = 0
    """Its shards of the master weights."""
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    """Whole weights in the type of computing, from FSDP2's all-gathers."""
    communication: int = 0
    """Buffers of gathers and reductions."""
    activations: int = 0
    """What waits for the backward pass, and temporaries."""
    loss: int = 0
    """Logits of a chunk, and the gradients that the loss works out at once."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, kind) for kind in KINDS)

    @property
    def needed(self) -> int:
        """Bytes of a device that it asks for, with what no tensor accounts for."""
        return int(self.total * (1 + SLACK)) + RESERVED_BYTES


def moments(config: Config, layout: Layout, place: dict[str, int]) -> Iterator[Memory]:
    """The moments at which the rank at `place` may hold most, in the order of its schedule."""
    rank = _Rank(config, layout, place)
    most: dict[tuple[str, int, Summed], int] = {}
    for moment, stage, held, made in rank.walk():
        most[moment, stage, made] = max(most.get((moment, stage, made), 0), held)
    needed = {FORWARD: rank.forward, BACKWARD: rank.backward, INPUT: rank.inputs, WEIGHT: rank.weights}
    for (moment, stage, made), held in most.items():
        yield from needed[moment](stage, held, made)
    yield rank.clipping()


@cache
def _ordered(key: str, count: int) -> list[list[Action]]:
    return order(_ASKED[key], count)


_ASKED: dict[str, ParallelismConfig] = {}


def order_of(parallelism: ParallelismConfig, count: int) -> list[list[Action]]:
    """`order`, remembered: a search asks for the same schedules over and over."""
    key = f"{parallelism.pp_schedule} {parallelism.pp} {parallelism.virtual_stages} {parallelism.pp_schedule_file}"
    _ASKED[key] = parallelism
    return _ordered(key, count)


Summed = frozenset[int]
"""The stages of which gradients stand, from microbatches before."""


class _Rank:
    """One rank's sizes, and what it holds at each moment."""

    def __init__(self, config: Config, layout: Layout, place: dict[str, int]) -> None:
        self.config, self.layout, parallelism = config, layout, config.parallelism
        self.master, self.compute, self.reduce = (
            BYTES[getattr(config.precision, kind)] for kind in ("master", "compute", "reduce")
        )
        held = held_parameters(config, layout, place)
        self.largest, self.elements = max(held.values()), sum(held.values())
        self.base = Memory("", self.elements * self.master, optimizer=optimizer_elements(config, held) * self.master)
        if parallelism.offload:  # shards, their gradients and the optimizer's state are the host's
            self.base = Memory("")
        self.size, self.shards = sizes(config, layout), shards(config, layout)
        self.split, self.stages = split_layers(config.model, parallelism), stages_of(place["pp"], parallelism)
        self.last_stage = len(self.split) - 1
        self.microbatches = microbatch_count(config, layout)
        self.pipeline, self.fsdp = layout.pp > 1, sharded(config, layout)
        self.splits_backward = self.pipeline and splits_backward(parallelism)
        self.once = parallelism.zero < 3 or self.splits_backward
        """Weights are gathered once a step and kept (parallel/zero.py), or else for each pass through a layer."""
        self.shares_each = parallelism.zero >= 2 and not self.splits_backward
        """Gradients are shared out after each microbatch, or else stand whole until the step's last."""
        layers = {layer for stage in self.stages for layer in self.split[stage]}
        padded = for_each_layer(config.model, lambda layer: self._padded(layer_shapes(config.model, layer)))
        self.layers = {layer: padded[layer] for layer in layers}
        self.layer = max(self.layers.values())
        self.experts = {layer: self._padded(only_experts(layer_shapes(config.model, layer))) for layer in layers}
        """Of each layer's elements those of its experts, which are a group of their own."""
        self.expert_shards = layout.expert_dp if parallelism.zero else 1
        self._alike: dict[tuple[bool, bool], LayerActivations] = {}
        self.whole = {stage: self._stage_elements(stage) for stage in self.stages}
        self.kept = {stage: self._stage_kept(stage) for stage in self.stages}
        self.pending = {stage: self._stage_pending(stage) if self.splits_backward else 0 for stage in self.stages}
        self.actions = self._order()[place["pp"]] if self.pipeline else self._plain()
        messages = int(self.stages[-1] > 0)  # a gradient that is on its way to the stage before
        if self.splits_backward:  # as seen in dry runs, not derived
            messages = 4 if self.last_stage in self.stages else 2
        self.buffers = messages * self.size.stream + exchange_buffers(config, layout)
        """What a pipeline has under way, what experts' exchange has, and a layer's shards that come from the host."""
        if parallelism.offload:
            self.buffers += self.layer // self.shards * self.master

    def _order(self) -> list[list[Action]]:
        """The schedule, of as many microbatches as show its peak: but for gpipe, a steady state holds no more."""
        parallelism, count = self.config.parallelism, self.microbatches
        if parallelism.pp_schedule not in ("gpipe", "csv") and count % parallelism.pp == 0:
            count = min(count, 4 * parallelism.pp)
        return order_of(parallelism, count)

    def _plain(self) -> list[Action]:
        return [Action(kind, 0, number) for number in range(min(self.microbatches, 2)) for kind in (FORWARD, BACKWARD)]

    def _padded(self, shapes: Shapes) -> int:
        """Elements of this tp rank's part of a group of parameters, as FSDP2 fills it up to equal shards."""
        return sum(padded_block(name, shape, self.config, self.layout, self.shards) for name, shape in shapes.items())

    def _ends(self, stage: int) -> list[int]:
        ends = end_groups(self.config.model, stage == 0, stage == self.last_stage)
        return [self._padded(shapes) for shapes in ends]

    def _stage_elements(self, stage: int) -> int:
        return sum(self.layers[layer] for layer in self.split[stage]) + sum(self._ends(stage))

    def _layer(self, layer: int) -> LayerActivations:
        """What a layer keeps; layers of one kind that are worked out again are alike, and so are the others."""
        interval = recompute_interval(self.config.parallelism.recompute)
        kind = interval is not None and layer % interval == 0, self.config.model.has_experts(layer)
        if kind not in self._alike:
            self._alike[kind] = layer_activations(self.config, self.layout, layer)
        return self._alike[kind]

    def _stage_kept(self, stage: int) -> int:
        layers = sum(self._layer(layer).kept for layer in self.split[stage])
        loss = loss_activations(self.config, self.layout).kept if stage == self.last_stage else 0
        # A stage's input is kept, if not by its first layer then beside it, and its output.
        mode, first = self.config.parallelism.recompute, self.split[stage][0]
        interval = recompute_interval(mode)
        by_layer = mode == "selective:ops" or (interval is not None and first % interval == 0)
        by_layer |= self.size.compute == self.size.precise
        received = self.size.stream * (stage > 0 and not by_layer)
        sent = self.size.stream * (stage != self.last_stage)
        dropped = self.size.stream * (stage == 0 and self.config.model.dropout > 0)  # the mask after the embedding
        return layers + loss + received + sent + dropped + shared_kept(self.size)

    def _stage_pending(self, stage: int) -> int:
        """Between the halves of a split backward pass; what is sent to the stage before is under way meanwhile."""
        layers = (between_halves(self.config, self.layout, layer) for layer in self.split[stage])
        return sum(layers) + self.size.stream

    def walk(self) -> Iterator[tuple[str, int, int, Summed]]:
        """What is held, beside what a moment itself needs, when a stage makes its loss and when it goes backward.

        torch leaves all of the first stage's backward pass, whose inputs ask for no gradient, to the half of the
        weights.
        """
        held: int = self.buffers
        gradients: Summed = frozenset()
        for action in self.actions:
            stage = action.stage
            kind = BACKWARD if stage == 0 and action.kind == WEIGHT else action.kind
            if kind == FORWARD:
                held += self.kept[stage]
                yield FORWARD, stage, held, gradients
            elif kind == BACKWARD:
                yield BACKWARD, stage, held, gradients
                held -= self.kept[stage]
                gradients |= {stage}
            elif kind == INPUT and stage > 0:
                yield INPUT, stage, held, gradients
                held += self.pending[stage]
            elif kind == WEIGHT:
                yield WEIGHT, stage, held, gradients
                held -= self.kept[stage] + self.pending[stage]
                gradients |= {stage}

    def _standing(self, held: int, made: Summed) -> Memory:
        """What is held whatever the moment: weights, state, gathered weights, and gradients of earlier microbatches."""
        if self.fsdp and not self.shares_each:
            gradients = sum(self.whole[stage] for stage in made) * self.reduce
        else:
            gradients = self.elements * self.master * bool(made) * (not self.config.parallelism.offload)
        gathered = sum(self.whole.values()) * self.compute if self.fsdp and self.once else 0
        return replace(self.base, activations=held, gradients=gradients, gathered=gathered)

    def inputs(self, stage: int, held: int, made: Summed) -> Iterator[Memory]:
        """At the end of the half of a backward pass that is for inputs: nothing of the forward pass is let go yet."""
        if stage == self.last_stage:
            held -= loss_activations(self.config, self.layout).kept
        now = self._standing(held + self.pending[stage] + norm_backward(self.size), made)
        yield replace(now, moment="inputs, backward")

    def weights(self, stage: int, held: int, made: Summed) -> Iterator[Memory]:
        """At the end of the half that is for weights: their gradients in place of all that they are made of."""
        now = self._standing(held - self.kept[stage] - self.pending[stage], made)
        adds = self.compute == self.reduce and stage in made  # to those that stand, one by one
        new = 0 if adds else self.whole[stage] * self.compute
        yield replace(now, moment="weights, backward", gradients=now.gradients + new)

    def forward(self, stage: int, held: int, made: Summed) -> Iterator[Memory]:
        """While dropout draws a mask, while logits exist, and while the gradients that were made of them are scaled."""
        if self.config.model.dropout:
            dropping = held + dropout_temporary(self.size) + 2 * self.size.stream
            yield replace(self._standing(dropping, made), moment="dropout, forward")
        if stage != self.last_stage:
            return
        loss, head = loss_activations(self.config, self.layout), self._ends(stage)[-1] * self.compute
        now = self._standing(held - loss.kept, made)
        first = replace(now, moment="loss, forward", loss=loss.kept + loss.forward)
        if self.fsdp and not self.once:
            first = replace(first, gathered=head)
        if self.fsdp and self.shards > 1 and not (self.once and (made or self.pipeline)):
            first = replace(first, communication=head)
        yield first
        second = replace(first, moment="loss, backward", loss=loss.kept + loss.backward)
        yield replace(second, communication=0 if self.once else self.layer * self.compute * self.fsdp)

    def backward(self, stage: int, held: int, made: Summed) -> Iterator[Memory]:
        """While a stage's last layer goes backward, then the one before it, and at the end the first."""
        mine, last = self.split[stage], stage == self.last_stage
        layers = [self._layer(layer) for layer in mine]
        now = self._standing(held, made)
        reduces = self.fsdp and (self.shares_each or self.microbatches == 1) and not self.splits_backward
        if last:
            held -= loss_activations(self.config, self.layout).kept
        for position in sorted({len(mine) - 1, len(mine) - 2, 0} - {-1}, reverse=True):
            after = mine[position + 1 :]
            waiting = held - sum(layer.kept for layer in layers[position + 1 :]) + layers[position].again
            here = replace(now, moment="last layer, backward", activations=waiting)
            if self.fsdp and not self.once:
                gathered, ahead = self.layers[mine[position]], self._ahead(stage, position)
                here = replace(here, gathered=gathered * self.compute, communication=ahead * self.compute)
            sent = self._ends(stage)[-1] if last else 0
            if after:
                received = self.size.stream * (self.pipeline and not last)  # the schedule holds on to it
                name = "next layer, backward" if position else "first layer, backward"
                here = replace(here, moment=name, activations=waiting + received)
                sent = self.layers[after[0]] - self.experts[after[0]]
            if not reduces and after and not made:
                of = self.reduce if self.microbatches > 1 else self.compute
                here = replace(here, gradients=here.gradients + sum(self.layers[layer] for layer in after) * of)
            yield from self._inside_layer(mine[position], layers[position], here, reduces, sent * self.reduce * reduces)

    def _inside_layer(
        self, layer: int, needs: LayerActivations, now: Memory, reduces: bool, sent: int
    ) -> Iterator[Memory]:
        """While the block goes backward, while its experts are gathered and reduced, and in the norm before the block.

        `sent` is the buffer of the reduction before, which is let go when the next one begins.
        """
        # The gradient of the down projection stands when those of the block's activations do.
        shapes, dense = layer_shapes(self.config.model, layer), not self.experts[layer]
        down = "mlp.down_proj.weight" if dense else "mlp.experts.down_proj.weight"
        block = padded_block(down, shapes[down], self.config, self.layout, 1) * self.compute * self.fsdp
        before = replace(now, communication=now.communication + sent)
        yield replace(before, gradients=now.gradients + block, activations=now.activations + needs.temporary)
        moment = now.moment.replace("layer", "layer's norm")
        norm = replace(before, moment=moment, activations=now.activations + needs.at_norm)
        if dense:
            yield replace(norm, gradients=now.gradients + 3 * block)
            return
        experts, split = self.experts[layer], self.expert_shards > 1
        # They are not split along the first dimension, so that FSDP2 needs as much again to lay them out.
        laid_out, name = experts * self.compute * split, now.moment.replace("layer", "layer's experts")
        if reduces:
            norm = replace(norm, communication=now.communication + experts * self.reduce)
            left = needs.at_norm - norm_backward(self.size) + self.size.stream + laid_out
            yield replace(norm, moment=name, gradients=now.gradients + block, activations=now.activations + left)
        yield norm
        if split and self.fsdp and not self.once:
            yield replace(
                before,
                moment=name,
                activations=now.activations + needs.at_experts + laid_out,
                communication=before.communication + experts * self.compute,
            )

    def _ahead(self, stage: int, position: int) -> int:
        """What FSDP2 gathers while a layer of a stage goes backward: what comes before it, in the order of use."""
        if self.config.parallelism.prefetch:
            return sum(
                self.layers[layer] for layer in self.split[stage][:position][-self.config.parallelism.prefetch :]
            )
        if position == 0:
            return self._ends(stage)[0] if stage == 0 else 0
        before = self.split[stage][position - 1]
        if self.experts[before] and self.pipeline:
            return self.experts[before] if self.expert_shards > 1 else 0
        return self.layers[before] - self.experts[before]

    def clipping(self) -> Memory:
        """All gradients are there, and the square of the largest."""
        if self.config.parallelism.offload:
            return replace(self.base, moment="clipping")  # on the host
        square = self.largest * max(self.master, 4)
        return replace(self.base, moment="clipping", gradients=self.elements * self.master, activations=square)


def peak(config: Config, layout: Layout, place: dict[str, int]) -> Memory:
    """The moment at which the rank at `place` (an index per axis, as Layout.coordinates gives) holds most."""
    return max(moments(config, layout, place), key=lambda memory: memory.total)


def rank_memory(config: Config, layout: Layout, pp_rank: int) -> Memory:
    """The peak of a pipeline rank; ranks at 0 along the other axes hold the largest shards."""
    return peak(config, layout, dict.fromkeys(AXES, 0) | {"pp": pp_rank})
