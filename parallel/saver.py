"""Writing a checkpoint while training goes on: copied at once, then written, checked and marked in a thread."""

import io
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.optim import Optimizer

from models.errors import RunError
from parallel import rng
from parallel.files import sync, write_whole
from parallel.manifest import Digest, digest, mark_complete, write_manifest
from parallel.plain_reader import PlainReader, one_process_is_fine
from parallel.ranks import from_all_ranks, rank_and_world
from parallel.retention import remove

STATE, RUN = "state.pt", "run.json"
# Flattened: named by parameter, so that the state of different stages and layouts has different names.
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
T = TypeVar("T")
log = logging.getLogger("quintet")


class SaveError(RunError):
    """A checkpoint could not be written; the message says why, and is the same on every rank."""


class Saver:
    """Writes checkpoints, one at a time, in a thread with collectives of its own: training goes on meanwhile."""

    def __init__(self) -> None:
        """All ranks make theirs together."""
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        on_gpu = torch.cuda.is_available()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_gpu,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=on_gpu,
            )
        )
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(
        self,
        folder: Path,
        model: nn.Module,
        optimizers: list[Optimizer],
        state: dict[str, Any],
        about: dict[str, Any],
        then: Callable[[], None] | None = None,
    ) -> None:
        """Begin to write a checkpoint of the model, its optimizers, plain `state`, and `about` as run.json.

        Returns when all of it has been copied: it may change from then on. Every rank writes its shards; rank 0 does
        the rest, and calls `then` once the checkpoint is complete. Raises SaveError if the save before this one, which
        is waited for, has failed, and RunError for state that is not plain.
        """
        self.wait()
        began = time.perf_counter()
        rank, _ = rank_and_world()
        tensors = split_state(model, optimizers) | {"rng": {str(rank): rng.capture()}}
        staged = cast(dict[str, Any], self._stager.stage(tensors))
        files = {STATE: plain_bytes(state), RUN: (json.dumps(about, indent=1) + "\n").encode()}
        waited = time.perf_counter() - began
        gpu = torch.cuda.current_device() if torch.cuda.is_available() else None

        def in_background() -> None:
            if gpu is not None:  # a new thread begins on the first of the node
                torch.cuda.set_device(gpu)
            try:
                self.write(folder, staged, files)
                if then is not None and rank == 0:
                    then()
                if rank == 0:
                    took = time.perf_counter() - began
                    log.info("checkpoint %s: written in %.2f s, training waited %.3f s", folder.name, took, waited)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=in_background, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the save under way, if there is one, has ended. Raises SaveError if it has failed."""
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error

    def write(
        self, folder: Path, staged: dict[str, Any], files: dict[str, bytes], planner: dcp.SavePlanner | None = None
    ) -> None:
        """Write tensors and the content of files as a checkpoint, here and now; all ranks call it. Raises SaveError."""
        rank, world = rank_and_world()
        partial = folder.with_name(f".{folder.name}.partial")

        def clear() -> None:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

        def finish(digests: dict[str, Digest]) -> None:
            for name, content in files.items():
                write_whole(partial / name, content)
            names = (*files, ".metadata")
            _require_shards(partial, digests)
            write_manifest(partial, digests | {name: digest(partial / name) for name in names})
            sync(partial)
            if folder.exists():
                remove(folder)
            partial.rename(folder)
            sync(folder.parent)
            mark_complete(folder)
            sync(folder)

        try:
            self._together(clear if rank == 0 else None)
            with one_process_is_fine():
                # torch keeps a file's tensors until it is closed: one that is made when written has its own file.
                # Everything is on the host: torch's look-ahead would open a context on a GPU for nothing.
                writer = _Writer(partial, single_file_per_rank=planner is None, per_thread_copy_ahead=0)
                alone = world == 1
                dcp.save(staged, storage_writer=writer, planner=planner, no_dist=alone, process_group=self._group)
            digests = self._together(lambda: {path.name: digest(path) for path in partial.glob(f"__{rank}_*")})
            merged = {name: value for part in digests for name, value in (part or {}).items()}
            self._together((lambda: finish(merged)) if rank == 0 else None)
        except (SaveError, CheckpointException) as error:
            if rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise SaveError(f"{folder} could not be written: {_reason(error)}") from error

    def _together(self, work: Callable[[], T] | None) -> list[T | None]:
        """Every rank's result of its work; SaveError on all of them if one has failed."""
        result: T | None = None
        problem = None
        try:
            result = work() if work is not None else None
        except OSError as error:
            problem = error.strerror or str(error)
        except SaveError as error:
            problem = str(error)
        found = from_all_ranks((problem, result), self._group)
        problems = [f"rank {rank}: {said}" for rank, (said, _) in enumerate(found) if said]
        if problems:
            raise SaveError("; ".join(problems))
        return [value for _, value in found]


def split_state(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
    """This rank's blocks of weights and optimizer state, by names that do not depend on the layout."""
    tensors: dict[str, Any] = {"model": get_model_state_dict(model, options=OPTIONS)}
    for index, optimizer in enumerate(optimizers):
        tensors[f"optimizer_{index}"] = get_optimizer_state_dict(model, optimizer, options=OPTIONS)
    return tensors


def plain_bytes(state: dict[str, Any]) -> bytes:
    """`state` as a file's content; RunError where it holds more than the reader of it will take."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        reason = str(error).partition("WeightsUnpickler error: ")[2].partition("\n")[0] or str(error)
        raise RunError(
            f"the state of a callback or the loop holds what no checkpoint may: {reason} Keep numbers, strings, lists, "
            f"dicts and tensors."
        ) from error
    return buffer.getvalue()


def _require_shards(folder: Path, digests: dict[str, Digest]) -> None:
    """Raise SaveError unless every file that the metadata speaks of is there: a rank may have written elsewhere."""
    storage = PlainReader(folder).read_metadata().storage_data
    named = {info.relative_path for info in storage.values()}
    missing = sorted(name for name in named if name not in digests or not (folder / name).exists())
    if missing:
        raise SaveError(f"{', '.join(missing)} is missing; do all ranks see this folder?")


class _Writer(dcp.FileSystemWriter):
    """torch's writer, but for a full disk, which torch.save hides behind an error of its zip file."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise cause or error from None


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        causes = (f"rank {rank}: {_of_system(wrapped[0])}" for rank, wrapped in error.failures.items())
        return "; ".join(causes)
    return str(error)


def _of_system(error: BaseException) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
