"""A suite that cannot fail proves nothing: each planted fault must break the parity that the ladder asks for."""

from typing import Any

import pytest

from models.config import MoEConfig
from parallel.config import MaskPattern
from tests.distributed.cases import disagreeing_replicas, make_config, merged, reference, worst_error
from tests.distributed.faults import FAULTS
from tests.distributed.pool import Pool
from tests.distributed.thinned import thinned

TP: dict[str, Any] = {"world": 2, "tp": 2}
SP: dict[str, Any] = TP | {"sequence_parallel": True, "loss_parallel": True}
DP: dict[str, Any] = {"world": 2, "zero": 2}
CP: dict[str, Any] = {"world": 2, "cp": 2, "data": {"global_batch": 4, "mask": MaskPattern.uneven}}
PLAIN: dict[str, Any] = {"data": {"global_batch": 4, "document_mask": False, "mask": MaskPattern.uneven}}
BIASES = {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True}

MOE = {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 20}
BALANCED = MoEConfig(**MOE, balance_loss=0.5, bias_update_rate=0.02)
EXPERTS: dict[str, Any] = {"model": {"moe": BALANCED}}
DROPPING: dict[str, Any] = {"model": {"moe": MoEConfig(**MOE, capacity_factor=0.75)}}

WHERE: dict[str, dict[str, Any]] = {
    "row_results_are_not_summed": TP,
    "input_gradients_are_not_summed": TP,
    "input_gradients_are_averaged": SP,
    "output_gradients_are_summed_again": TP,
    "partial_gradients_are_not_summed": SP,
    "norm_gradients_are_taken_for_whole": TP | {"model": {"qk_norm": True}},
    "whole_gradients_are_summed_as_if_partial": TP,
    "every_rank_adds_the_row_bias": TP | {"model": BIASES},
    "all_ranks_use_the_first_key_value_head": {"world": 4, "tp": 4, "model": {"num_key_value_heads": 2}},
    "vocabulary_normaliser_is_local": SP,
    "vocabulary_maximum_is_local": SP,
    "labels_are_looked_up_a_row_too_far": SP,
    "loss_is_a_mean_per_rank": DP | {"data": {"mask": MaskPattern.uneven}},
    "loss_is_a_mean_per_microbatch": DP,
    "gradients_are_averaged_over_data_ranks": DP,
    "replicas_are_left_out_of_the_sum": {"world": 2, "zero": 0},
    "only_the_last_microbatch_counts": DP,
    "seed_depends_on_the_rank": DP,
    "blocks_are_initialised_as_if_whole": TP,
    "all_data_ranks_read_the_same": DP,
    "tensor_ranks_read_different_data": {"world": 4, "tp": 2},
    "norm_is_local": DP,
    "norm_counts_replicated_parameters_again": TP,
    "dropout_masks_restart_in_every_piece": SP | {"model": {"dropout": 0.2}},
    "dropout_sees_samples_by_their_local_number": DP | {"model": {"dropout": 0.2}},
    "recomputation_sees_other_keys": TP | {"recompute": "selective:attention"},
    "partial_attention_is_added_without_weights": CP,
    "log_sum_exp_is_not_merged": CP | PLAIN,
    "the_ring_stops_a_hop_early": CP | {"world": 3, "cp": 3},
    "key_gradients_stay_where_they_were_made": CP,
    "gradients_of_keys_and_values_are_swapped_on_their_way": CP,
    "key_gradients_go_to_the_next_rank": CP | {"cp_method": "all_gather"},
    "heads_come_back_in_another_order": CP | {"cp_method": "ulysses"},
    "copies_of_key_heads_are_dealt_out_in_turn": CP
    | {"world": 4, "cp": 4, "cp_method": "ulysses", "model": {"num_key_value_heads": 2}},
    "context_gradients_are_not_summed": CP,
    "context_ranks_divide_by_their_own_tokens": CP | {"world": 4, "zero": 1},
    "labels_are_shifted_after_the_cut": CP | PLAIN,
    "positions_are_counted_in_the_part": CP,
    "dropout_goes_by_the_place_in_the_part": CP | {"model": {"dropout": 0.2}},
    "tokens_that_fill_up_count": CP | {"data": {"global_batch": 4, "seq_len": 15}},
    "documents_end_where_the_part_does_not_know": CP,
    "the_window_ends_with_the_part": CP | PLAIN | {"model": {"sliding_window": 7}},
    "tensor_ranks_all_route_the_same_tokens": TP | EXPERTS,
    "router_gradients_are_taken_for_whole": TP | EXPERTS | {"ep": 2},
    "input_gradients_of_routed_pieces_stay_where_they_are": TP | EXPERTS,
    "norm_leaves_out_experts_of_other_ranks": DP | EXPERTS | {"ep": 2},
    "expert_gradients_grow_with_the_ranks": DP | EXPERTS | {"ep": 2},
    "slices_of_an_expert_are_not_summed": SP | EXPERTS | {"etp": 2},
    "rows_are_taken_for_sorted_by_expert": DP | EXPERTS | {"ep": 2},
    "load_share_is_local": DP | EXPERTS | {"data": {"micro_batch": 4}},
    "load_share_is_that_of_the_microbatch": DP | EXPERTS,
    "biases_follow_the_tokens_of_their_rank": DP | EXPERTS,
    "biases_move_with_every_microbatch": DP | EXPERTS,
    "a_rank_drops_by_its_own_tokens": SP | DROPPING | {"ep": 2},
}


def test_every_fault_has_a_place() -> None:
    assert WHERE.keys() == FAULTS.keys()


@pytest.mark.parametrize("name", WHERE)
def test_fault_is_caught(pool: Pool, name: str) -> None:
    layout = dict(WHERE[name])
    world = layout.pop("world")
    config = make_config(**layout)
    traces = pool.run(world, "tests.distributed.cases:train", config, 3, name)
    error, where = worst_error(reference(pool, config), merged(traces))
    torn = disagreeing_replicas(traces)
    print(f"{name}: error {error:.1e} ({where}){', replicas differ' if torn else ''}")
    assert error > 1e-6 or torn


@pytest.mark.parametrize("name", thinned(WHERE))
def test_the_same_run_without_the_fault_passes(pool: Pool, name: str) -> None:
    layout = dict(WHERE[name])
    world = layout.pop("world")
    config = make_config(**layout)
    traces = pool.run(world, "tests.distributed.cases:train", config)
    assert worst_error(reference(pool, config), merged(traces))[0] < 1e-9
    assert disagreeing_replicas(traces) == []
