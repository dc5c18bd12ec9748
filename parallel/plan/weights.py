"""What one rank holds of the weights: its layers, its block of every parameter, and what the optimizer keeps.

Elements everywhere; plan/memory.py makes bytes of them. Tests hold every number against a dry run.
"""

import math

from models.config import ModelConfig
from models.counts import end_shapes, for_each_layer, is_expert, layer_shapes
from parallel.config import AdamWConfig, Config, MuonConfig, SGDConfig
from parallel.layout import Layout, mesh_layout, piece
from parallel.plan.traffic import split_dim
from parallel.stages import split_layers, stages_of

Shapes = dict[str, tuple[int, ...]]


def only_experts(shapes: Shapes) -> Shapes:
    """Of some parameters those that are stacks of experts."""
    return {name: shape for name, shape in shapes.items() if is_expert(name)}


def sharded(config: Config, layout: Layout) -> bool:
    """Whether FSDP2 manages the weights (parallel/step.py): with data ranks, or computing in another type."""
    return layout.dp * layout.cp > 1 or config.precision.compute != config.precision.master


def shards(config: Config, layout: Layout) -> int:
    """Over how many ranks a weight is dealt out."""
    return mesh_layout(layout, config.parallelism.zero).dp_shard


def rank_layers(config: Config, pp_rank: int) -> list[int]:
    """The layers of a pipeline rank, those of all its stages."""
    split = split_layers(config.model, config.parallelism)
    return [layer for stage in stages_of(pp_rank, config.parallelism) for layer in split[stage]]


def groups(config: Config, pp_rank: int) -> list[Shapes]:
    """The weights of a pipeline rank as FSDP2 gathers them: a group per layer, then the ends."""
    mine, last = stages_of(pp_rank, config.parallelism), config.parallelism.pp * config.parallelism.virtual_stages - 1
    shapes = for_each_layer(config.model, lambda layer: layer_shapes(config.model, layer))
    result = [shapes[layer] for layer in rank_layers(config, pp_rank)]
    return result + end_groups(config.model, 0 in mine, last in mine)


def end_groups(model: ModelConfig, first: bool, last: bool) -> list[Shapes]:
    """Embedding, and final norm with output layer, as far as they are here; a tied weight makes them one group."""
    ends = end_shapes(model)
    embedding = {name: shape for name, shape in ends.items() if "embed_tokens" in name}
    output = {name: shape for name, shape in ends.items() if name not in embedding}
    if model.tie_word_embeddings:
        together = (embedding if first or last else {}) | (output if last else {})
        return [together] if together else []
    return [embedding] * first + [output] * last


def block_shape(name: str, shape: tuple[int, ...], config: Config, layout: Layout, place: dict[str, int]) -> list[int]:
    """The block of a parameter that the rank at `place` holds: its part along tp, and of that its shard."""
    if is_expert(name):
        return [size // parts for size, parts in zip(shape, _expert_parts(name, config, layout), strict=True)]
    block = list(shape)
    dim = split_dim(name, config.model, layout.tp)
    if dim is not None:
        block[dim] = len(piece(shape[dim], layout.tp, place["tp"]))
    shard = place["dp_shard"] * layout.cp + place["cp"] if config.parallelism.zero else 0
    block[0] = len(piece(block[0], shards(config, layout), shard))
    return block


def _expert_parts(name: str, config: Config, layout: Layout) -> list[int]:
    """In how many parts each dimension of a stack of experts is dealt out: by expert, by width, by hidden size."""
    shards = layout.expert_dp if config.parallelism.zero else 1
    return [layout.ep, shards, layout.etp] if "down_proj" in name else [layout.ep, layout.etp, shards]


def held_parameters(config: Config, layout: Layout, place: dict[str, int]) -> dict[str, int]:
    """Elements of every parameter that the rank at `place` holds, layers under the name of each layer."""
    found: dict[str, int] = {}
    known: dict[tuple[str, tuple[int, ...]], int] = {}  # most layers are alike
    layers, shapes_of = rank_layers(config, place["pp"]), groups(config, place["pp"])
    prefixes = [f"model.layers.{layer}." for layer in layers] + [""] * (len(shapes_of) - len(layers))
    for prefix, shapes in zip(prefixes, shapes_of, strict=True):
        for key in shapes.items():
            if key not in known:
                known[key] = math.prod(block_shape(*key, config, layout, place))
            found[prefix + key[0]] = known[key]
    return found


def optimizer_elements(config: Config, held: dict[str, int]) -> int:
    """Numbers that the optimizer keeps for those parameters, in the type of the master weights."""
    match config.optimizer:
        case AdamWConfig():
            return 2 * sum(held.values())
        case SGDConfig(momentum=momentum):
            return sum(held.values()) if momentum else 0
        case MuonConfig():
            matrices = {name for name in held if ".layers." in name and "norm" not in name and "bias" not in name}
            return sum(count * (1 if name in matrices else 2) for name, count in held.items())
    raise AssertionError(f"no rule for {type(config.optimizer).__name__}")


def padded_block(name: str, shape: tuple[int, ...], config: Config, layout: Layout, ranks: int) -> int:
    """Elements of the tp block of a parameter, its first dimension filled up to a multiple of the shards."""
    if is_expert(name):
        return math.prod(shape) // (layout.ep * layout.etp)
    block = list(shape)
    dim = split_dim(name, config.model, layout.tp)
    if dim is not None:
        block[dim] = -(-block[dim] // layout.tp)
    block[0] = -(-block[0] // ranks) * ranks
    return math.prod(block)
