"""The bytes that a real step hands to its collectives are those of the formulas."""

from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from models.config import MoEConfig
from parallel.expert import ExpertDispatch, mixtures
from parallel.layout import Layout, resolve
from parallel.plan.dry_run import Ledger, group_axes
from parallel.plan.expert_traffic import RoutedRows, exchange_bytes
from parallel.plan.traffic import by_group, is_partial, split_dim, traffic
from parallel.sharded import split_axes
from parallel.step import forward_backward
from tests.distributed.cases import build, make_config
from tests.distributed.pool import Pool
from tests.distributed.test_pipeline import settings
from tests.distributed.thinned import thinned


class StrictLedger(Ledger):
    """The ledger of dry runs, which here must know every group; and no rank sends rows to itself."""

    def _count(self, operation: str, args: Any) -> None:
        group = next(arg for arg in args if "ProcessGroup" in str(type(arg)) or "ProcessGroup" in str(arg))
        ranks = dist.ProcessGroup.unbox(group)
        if ranks.size() > 1:
            assert ranks.group_name in self.axes, f"a group that nobody knows: {ranks.group_name}"
            if operation == "all_to_all" and len(args[4]):  # of rows; others have parts of equal size
                assert args[4][ranks.rank()] == 0, "rows for the rank itself"
        super()._count(operation, args)


def count(config: Any) -> dict[tuple[str, str], tuple[int, int]]:
    """Calls and bytes of one step on this rank: the second, since in the first a pipeline opens its connections."""
    return count_routed(config)[0]


def count_routed(config: Any) -> tuple[dict[tuple[str, str], tuple[int, int]], RoutedRows]:
    """The same, and the rows that the step has routed."""
    model, batches = build(config)
    forward_backward(model, batches[0], 0)
    widths, received, plan = [], [], ExpertDispatch.plan

    def noted(self: Any, *arguments: Any) -> Any:
        made = plan(self, *arguments)
        widths.append(made.width)
        received.append(sum(made.route.receive))
        return made

    with StrictLedger(group_axes(model)) as ledger, patch.object(ExpertDispatch, "plan", noted):
        forward_backward(model, batches[1], 1)
    counted = {key: (ledger.calls[key], ledger.sent[key]) for key in ledger.calls}
    if model.routing is None:
        return counted, RoutedRows(0, 0, 0)
    notes = model.routing._notes
    passes = len(notes) * len(mixtures(model.decoder))
    # Passes that are repeated route as the first.
    gathered, came = (sum(rows) * passes // max(len(rows), 1) for rows in (widths, received))
    return counted, RoutedRows(int(notes[..., -1].sum()), came, gathered * model.layout.etp)


def placements(config: Any) -> dict[str, Any]:
    """How each parameter is split over tp, and which gradients are partial."""
    model, _ = build(config)
    dims = {
        name: parameter.placements[0].dim if "tp" in split_axes(parameter) else None
        for name, parameter in model.decoder.named_parameters()
    }
    return {"dims": dims, "partial": sorted(model.partial)}


CASES = [
    (2, {"tp": 2}),
    (2, {"tp": 2, "sequence_parallel": True}),
    (2, {"tp": 2, "loss_parallel": True, "model": {"qk_norm": True, "num_key_value_heads": 1}}),
    (2, {"tp": 2, "sequence_parallel": True, "loss_parallel": True, "precision": "bf16"}),
    *[(2, {"tp": 2, "recompute": mode}) for mode in ("full", "full:2", "selective:attention", "selective:mlp")],
    *[(2, {"tp": 2, "sequence_parallel": True, "recompute": mode}) for mode in ("full", "selective:ops")],
    *[(2, {"zero": zero}) for zero in (0, 1, 2, 3)],
    (2, {"zero": 3, "model": {"tie_word_embeddings": True}}),
    (3, {"zero": 2, "data": {"global_batch": 12}, "precision": "bf16"}),
    (4, {"zero": 3, "dp_replicate": 2}),
    (4, {"zero": 0, "tp": 2}),
    (4, {"zero": 3, "tp": 2, "sequence_parallel": True, "loss_parallel": True}),
    (2, settings("gpipe", 2, 1, 4)),
    (4, settings("interleaved_1f1b", 4, 2, 4, model={"num_hidden_layers": 9})),
    (2, settings("zbv_zero_bubble", 2, 2, 4)),
    (2, settings("1f1b", 2, 1, 4, model={"tie_word_embeddings": True}, precision="bf16")),
    *[(4, settings("1f1b", 2, 1, 3, dp=2, zero=zero)) for zero in (0, 1, 2, 3)],
    *[(4, settings(name, 2, 2, 4, dp=2, zero=3)) for name in ("interleaved_1f1b", "zbv_zero_bubble", "dualpipe_v")],
    (4, settings("interleaved_1f1b", 2, 2, 4, dp=2, zero=2, model={"tie_word_embeddings": True})),
    *[(4, settings("interleaved_1f1b", 2, 4, 8, dp=2, zero=zero)) for zero in (1, 3)],  # torch keeps three stages
    (8, settings("1f1b", 2, 1, 4, dp=2, zero=3, tp=2, sequence_parallel=True, loss_parallel=True, recompute="full:2")),
]


@pytest.mark.parametrize(("world", "case"), CASES, ids=str)
def test_bytes_on_the_wire_equal_the_formula(pool: Pool, world: int, case: dict[str, Any]) -> None:
    config = make_config(**case)
    layout = resolve(config.parallelism, world)
    for rank, counted in enumerate(pool.run(world, "tests.distributed.test_traffic:count", config)):
        rows = traffic(config, layout, layout.coordinates(rank)["pp"])
        assert counted == {(row.axis, row.operation): (row.calls, row.bytes_sent) for row in rows}, rank


PLAIN: dict[str, Any] = {"data": {"document_mask": False, "global_batch": 4}}
CONTEXT: list[tuple[int, dict[str, Any]]] = [
    (2, {"cp": 2} | PLAIN),
    (3, {"cp": 3, "zero": 3, "model": {"num_key_value_heads": 1}} | PLAIN),
    (4, {"cp": 4, "data": {"document_mask": False, "global_batch": 4, "seq_len": 21}}),
    (4, {"cp": 4, "model": {"sliding_window": 4, "num_key_value_heads": 2}, "precision": "bf16"} | PLAIN),
    (4, {"cp": 2, "tp": 2, "sequence_parallel": True, "zero": 2} | PLAIN),
    (4, {"cp": 4, "cp_method": "all_gather", "model": {"num_key_value_heads": 2}} | PLAIN),
    (2, {"cp": 2, "cp_method": "ulysses", "zero": 1} | PLAIN),
    (4, {"cp": 4, "cp_method": "ulysses", "model": {"num_key_value_heads": 2}} | PLAIN),
    (4, {"cp": 4, "cp_method": "ulysses_ring", "cp_ulysses": 2, "model": {"num_key_value_heads": 1}} | PLAIN),
    (4, {"cp": 2, "pp": 2, "model": {"num_hidden_layers": 3}} | PLAIN),
    *[(2, {"cp": 2, "recompute": mode} | PLAIN) for mode in ("full", "full:2", "selective:attention", "selective:mlp")],
    *[
        (2, {"cp": 2, "cp_method": method, "recompute": "selective:ops"} | PLAIN)
        for method in ("ring", "all_gather", "ulysses")
    ],
]


@pytest.mark.parametrize(("world", "settings"), thinned(CONTEXT, 3), ids=str)
def test_every_context_rank_sends_what_the_formula_says(pool: Pool, world: int, settings: dict[str, Any]) -> None:
    config = make_config(**settings)
    layout = resolve(config.parallelism, world)
    for rank, counted in enumerate(pool.run(world, "tests.distributed.test_traffic:count", config)):
        place = layout.coordinates(rank)
        rows = traffic(config, layout, place["pp"], place["cp"])
        assert counted == {(row.axis, row.operation): (row.calls, row.bytes_sent) for row in rows}


def test_packed_documents_make_a_ring_send_less_than_the_formula(pool: Pool) -> None:
    config = make_config(cp=4, data={"global_batch": 4, "seq_len": 64, "document_len": 5})
    layout = resolve(config.parallelism, 4)
    counts = pool.run(4, "tests.distributed.test_traffic:count", config)
    sent = sum(count.get(("cp", "send"), (0, 0))[1] for count in counts)
    rows = [row for rank in range(4) for row in traffic(config, layout, 0, rank)]
    most = sum(row.bytes_sent for row in rows if row.operation == "send")
    assert 0 < sent < most / 3


def expected(
    config: Any, layout: Layout, pp_rank: int, cp_rank: int, routed: RoutedRows | None = None
) -> dict[tuple[str, str], tuple[int, int]]:
    """The formula's calls and bytes by group and operation."""
    rows = by_group(traffic(config, layout, pp_rank, cp_rank, routed), config, layout)
    return {(row.axis, row.operation): (row.calls, row.bytes_sent) for row in rows}


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 20}
BALANCED = {"balance_loss": 0.1, "z_loss": 0.1}
SP = {"sequence_parallel": True, "loss_parallel": True}
MIXTURES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, {}, {"ep": 2, "zero": 0}),
    (2, BALANCED, {"ep": 2, "zero": 3, "data": {"micro_batch": 4}}),
    (2, BALANCED, {"ep": 2, "zero": 2, "data": {"micro_batch": 1}, "precision": "bf16"}),
    (2, BALANCED, {"ep": 2, "zero": 3}),
    (2, {"shared_intermediate_size": 12, "dense_layers": [0]}, {"tp": 2, "ep": 2, "recompute": "full"}),
    (2, BALANCED | {"shared_intermediate_size": 12}, {"tp": 2, "etp": 2, "recompute": "selective:mlp"} | SP),
    (4, BALANCED | {"balance_scope": "sequence"}, {"tp": 2, "ep": 2, "etp": 2, "zero": 3}),
    (4, BALANCED | {"balance_scope": "microbatch", "capacity_factor": 1.0}, {"tp": 2, "ep": 4, "zero": 1} | SP),
    (4, {"capacity_factor": 1.0}, {"tp": 2, "ep": 2, "etp": 2}),
    (4, {}, {"ep": 2, "zero": 3, "dp_replicate": 2, "recompute": "full"}),
    (2, BALANCED, {"tp": 2, "ep": 2, "recompute": "full"} | SP),
    (4, {}, {"tp": 2, "zero": 3}),
    (2, BALANCED, {"cp": 2, "ep": 2} | PLAIN),
    (
        4,
        {"capacity_factor": 1.0, "balance_loss": 0.1, "balance_scope": "sequence"},
        {"cp": 2, "tp": 2, "ep": 4} | PLAIN,
    ),
    (4, BALANCED, {"pp": 2, "ep": 2, "data": {"micro_batch": 1}}),
]


@pytest.mark.parametrize(("world", "moe", "settings"), thinned(MIXTURES, 3), ids=str)
def test_bytes_of_a_mixture_equal_the_formula_for_what_was_routed(
    pool: Pool, world: int, moe: dict[str, Any], settings: dict[str, Any]
) -> None:
    config = make_config(model={"moe": MoEConfig(**EXPERTS | moe)}, **settings)
    layout = resolve(config.parallelism, world)
    results = pool.run(world, "tests.distributed.test_traffic:count_routed", config)
    # What telemetry says of all ranks together: their rows both ways, without the exchange of counts.
    ways = exchange_bytes(config, layout) * sum(routed.sent for _, routed in results)
    both = exchange_bytes(config, layout) / 2 * sum(routed.sent + routed.received for _, routed in results)
    assert ways == both
    for rank, (counted, routed) in enumerate(results):
        place = layout.coordinates(rank)
        assert counted == expected(config, layout, place["pp"], place["cp"], routed)
        if config.model.moe.capacity_factor is not None:  # shapes do not depend on the routing
            assert counted == expected(config, layout, place["pp"], place["cp"])


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_the_rule_of_which_dimension_is_split_is_what_is_split(pool: Pool, heads: int, sequence_parallel: bool) -> None:
    biases = {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True, "qk_norm": True}
    config = make_config(
        model=biases | {"num_key_value_heads": heads}, tp=4, sequence_parallel=sequence_parallel, loss_parallel=True
    )
    found = pool.run(4, "tests.distributed.test_traffic:placements", config)[0]
    for name, dim in found["dims"].items():
        assert split_dim(name, config.model, 4) == dim, name
    partial = [name for name in found["dims"] if is_partial(name, config.model, 4, sequence_parallel)]
    assert sorted(partial) == found["partial"]
