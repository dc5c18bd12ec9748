"""Asynchronous tensor parallelism is the same run.

Its two operations exist on GPUs only. Here torch's own statements of what they compute (the functions that it uses
where shapes alone are asked for) stand in for them on a CPU: what is tested is our use of them, not their kernels.
"""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from parallel.config import Config
from tests.distributed.cases import Trace, disagreeing_replicas, make_config, merged, reference, train, worst_error
from tests.distributed.pool import Pool

CASES: list[tuple[int, dict[str, Any]]] = [
    (2, {"tp": 2}),
    (4, {"tp": 4, "model": {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}}),
    (4, {"tp": 2, "zero": 3, "recompute": "full", "loss_parallel": True}),
]


def train_asynchronously(config: Config) -> Trace:
    """`train` with stand-ins for what only GPUs have."""
    import torch.distributed._symmetric_memory as symmetric

    library = torch.library.Library("symm_mem", "IMPL", "CPU")
    library.impl("fused_all_gather_matmul", symmetric._fused_all_gather_matmul_fallback)
    library.impl("fused_matmul_reduce_scatter", symmetric._fused_matmul_reduce_scatter_fallback)
    try:
        with patch("parallel.tensor.open_symmetric_memory", lambda mesh: None):
            return train(config)
    finally:
        library._destroy()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_asynchronous_tensor_parallelism_equals_one_process(pool: Pool, case: tuple[int, dict[str, Any]]) -> None:
    world, chosen = case
    config = make_config(**chosen, sequence_parallel=True, async_tp=True)
    traces = pool.run(world, "tests.distributed.test_async_tensor:train_asynchronously", config)
    error, where = worst_error(reference(pool, config), merged(traces))
    print(f"{error:.1e} ({where})")
    assert error < 1e-9, where
    assert disagreeing_replicas(traces) == []
