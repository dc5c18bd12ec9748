"""A pool of gloo workers, started once per session: importing torch in eight processes takes longer than a case."""

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import tempfile
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

TIMEOUT_S = 180
RECYCLE_AFTER = 400
"""Cases after which the workers are replaced, whatever they have gathered by then."""


class CaseError(AssertionError):
    """A rank of a case raised; the message is its traceback."""


class Pool:
    """Runs `function(*arguments)` on the first `world` workers, each in a fresh process group of them."""

    def __init__(self, size: int, timeout_s: int = TIMEOUT_S) -> None:
        self.size, self.timeout_s = size, timeout_s
        self._cases = 0
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, world: int, function: str, *arguments: Any) -> list[Any]:
        """The results of all ranks. `function` is "module:name". A rank that raises or hangs ends all workers."""
        assert world <= self.size
        if self._cases == RECYCLE_AFTER:
            self.close()
        if not self._workers:
            self._start()
        self._cases += 1
        with tempfile.TemporaryDirectory() as folder:
            ranks = self._workers[:world]
            for rank, (_, pipe) in enumerate(ranks):
                pipe.send((rank, world, str(Path(folder, "store")), function, arguments))
            results: dict[int, Any] = {}
            pipes = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}
            while len(results) < world:
                ready = wait([pipe for pipe in pipes if pipes[pipe] not in results], timeout=self.timeout_s)
                if not ready:
                    self.close()
                    raise CaseError(
                        f"ranks {sorted(set(range(world)) - set(results))} did not end in {self.timeout_s} s"
                    )
                for pipe in ready:
                    try:
                        failed, value = pickle.loads(pipe.recv_bytes())
                    except EOFError:
                        failed, value = True, "the process died; its last words are on standard error"
                    if failed:
                        self.close()
                        raise CaseError(f"rank {pipes[pipe]}:\n{value}")
                    results[pipes[pipe]] = value
        return [results[rank] for rank in range(world)]

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for _ in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(there, self.timeout_s), daemon=True)
            process.start()
            self._workers.append((process, here))

    def close(self) -> None:
        """End the workers; the next run starts others."""
        for process, _ in self._workers:
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers = []
        self._cases = 0


def forget_meshes() -> None:
    """Empty what DTensor remembers by mesh. It would name process groups of an earlier case, and keep them: threads
    that poll sockets which the other ranks have closed, as fast as they can.
    """
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    _gen_transform_infos.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()
    gc.collect()


def _work(pipe: Connection, timeout_s: int) -> None:
    faulthandler.enable()
    import tests.distributed.cases  # noqa: F401  what nearly all cases need

    gc.freeze()  # modules stay, so that no collection need look at them
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # its own pool of processes a daemon may not start
    while True:
        rank, world, store, function, arguments = pipe.recv()
        try:
            module, _, name = function.partition(":")
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world),
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=timeout_s),
            )
            result = getattr(importlib.import_module(module), name)(*arguments)
            dist.destroy_process_group()
            forget_meshes()
        except BaseException:
            answer = (True, traceback.format_exc())
        else:
            answer = (False, result)
        # Plain pickle: torch's own would pass a file descriptor for each of many tensors.
        pipe.send_bytes(pickle.dumps(answer))
