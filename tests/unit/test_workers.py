"""Data workers, and the time that collectives are given: what a run sets for processes and groups it makes later."""

import os
import signal
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from parallel.ranks import Ranks, start_process_group, stop_process_group
from recipes.data.module import _stand_apart


class _Where(Dataset):
    """Says in which process group it is read, and whether USR1 is ignored there."""

    def __getitem__(self, index: int) -> tuple[int, bool]:
        return os.getpgid(0), signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN

    def __len__(self) -> int:
        return 1


def test_given_a_data_worker_when_it_begins_then_signals_to_the_ranks_group_do_not_reach_it() -> None:
    loader: Any = DataLoader(_Where(), batch_size=None, num_workers=1, worker_init_fn=_stand_apart)
    [(group, ignored)] = list(loader)
    assert group != os.getpgid(0)
    assert ignored


def test_given_a_time_limit_when_groups_are_made_later_then_it_is_theirs_too() -> None:
    c10d: Any = dist.distributed_c10d
    before = c10d.default_pg_timeout, c10d.default_pg_nccl_timeout
    with patch.object(c10d, "default_pg_timeout", before[0]), patch.object(c10d, "default_pg_nccl_timeout", before[1]):
        start_process_group(Ranks(), torch.device("cpu"), timeout_s=77.0)
        try:
            group = dist.new_group(backend="gloo")
            assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
            mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
            backend = mesh.get_group("a")._get_backend(torch.device("cpu"))
            assert backend.options._timeout == timedelta(seconds=77)
        finally:
            stop_process_group()
