"""What context parallelism is for: memory that does not grow with the ring, and sequences of 131,072 tokens."""

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.mask import WHOLE
from parallel.balance import zig_zag
from parallel.config import Config
from parallel.ring import RingMask, attend_in_ring
from parallel.step import clip, forward_backward
from tests.distributed.cases import build, make_config
from tests.distributed.pool import Pool


class AllocationTracker(TorchDispatchMode):
    """Bytes of all storages that operations make while it is on, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._watch(tensor.untyped_storage())
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        if storage.data_ptr() in self.seen:
            return
        self.seen.add(storage.data_ptr())
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, storage.data_ptr(), storage.nbytes())

    def _forget(self, pointer: int, size: int) -> None:
        self.seen.discard(pointer)
        self.live -= size


def peak_of_ring(tokens: int, heads: int, key_value_heads: int) -> tuple[int, int]:
    """Most bytes that live at once in forward and backward of a ring with so many tokens on each rank, and the bytes
    of this rank's own queries, keys, values, results and their gradients.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    held = [[pieces] for pieces in zig_zag(tokens * ranks, ranks)]
    mask = RingMask.build([*held], rank, WHOLE, None)
    shapes = [(1, count, tokens, 32) for count in (heads, key_value_heads, key_value_heads)]
    query, key, value = (torch.randn(shape, dtype=torch.float32).requires_grad_() for shape in shapes)
    assert dist.group.WORLD is not None
    own = 2 * sum(x.numel() * 4 for x in (query, query, key, value))
    with AllocationTracker() as tracker:
        out = attend_in_ring(query, key, value, mask, dist.group.WORLD)
        out.backward(torch.ones_like(out))
    return tracker.peak, own


@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1)], ids=str)
def test_a_rings_memory_does_not_grow_with_its_ranks(pool: Pool, heads: tuple[int, int]) -> None:
    peaks = {}
    for ranks in (2, 4, 8):
        found = pool.run(ranks, "tests.distributed.test_long_context:peak_of_ring", 1024, *heads)
        peaks[ranks] = max(peak for peak, _ in found)
        print(f"{ranks} ranks: peak {peaks[ranks] / 1e6:.2f} MB a rank, own tensors {found[0][1] / 1e6:.2f} MB")
    assert max(peaks.values()) < 1.05 * min(peaks.values())


def one_long_step(config: Config, threads: int) -> tuple[float, float]:
    """Loss and gradient norm of one step."""
    torch.set_num_threads(threads)
    model, batches = build(config)
    part, _ = forward_backward(model, batches[0], 0)
    return float(model.sum_of_parts(part)), float(clip(model).norm)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_step_of_131072_tokens_on_four_ranks_has_the_loss_of_one_process() -> None:
    length = 131_072
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    model = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": length} | heads
    data = {"seq_len": length, "global_batch": 1, "micro_batch": 1, "document_mask": False, "mask": "none"}
    patient = Pool(4, timeout_s=3600)
    try:
        alone, split = (
            patient.run(
                ranks,
                "tests.distributed.test_long_context:one_long_step",
                make_config(model=model, data=data, precision="fp32", cp=ranks),
                threads,
            )[0]
            for ranks, threads in ((1, 2), (4, 1))
        )
    finally:
        patient.close()
    print(f"loss {alone[0]:.6f} and {split[0]:.6f}, gradient norm {alone[1]:.6f} and {split[1]:.6f}")
    for expected, found in zip(alone, split, strict=True):
        assert abs(found / expected - 1) < 1e-4
