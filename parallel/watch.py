"""A watch over the run: no rank stands still in silence.

The training loop gives signs of life (`beat`); a thread looks at the time of the last one. When a limit is exceeded, or
another rank has given up, it writes down where this rank is; rank 0 reads what all have written, says who holds the run
up, and every process ends. Ranks meet in a folder of the run directory, since the network may be what is broken.
"""

import ctypes
import faulthandler
import json
import linecache
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from parallel import flight
from parallel.cluster import WatchConfig
from parallel.ranks import Ranks, node_name
from parallel.verdict import Status, differing_order, verdict

TICK_S = 0.05
COLLECT_S = 5.0
"""How long rank 0 waits for the others to write where they are."""
_C_MARGIN_S = 15.0  # when even this thread cannot run (the interpreter's lock is held in C), C code ends the process


def from_collective(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, was raised by NCCL or gloo (which has no type of its own)."""
    if error is None:
        return False
    own = isinstance(error, dist.DistBackendError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
    return own or from_collective(error.__cause__)


class Watch:
    """This rank's signs of life, and the thread that looks at them."""

    def __init__(self, config: WatchConfig, ranks: Ranks, folder: Path, give_up: Callable[[str], None]) -> None:
        """`folder` is the same for all ranks of this start and of no other; `give_up` gets the verdict on one rank."""
        self.config, self.ranks, self.folder, self.give_up = config, ranks, folder, give_up
        self._final = folder / "verdict.txt"
        self.groups: dict[str, tuple[str, list[int]]] = {}
        """Axis and ranks of each process group, once there is a mesh."""
        self._phase, self._step, self._limit_s = "start", 0, config.start_limit_s
        self._last = self._armed = time.monotonic()
        self._main = threading.main_thread().ident
        self._samples = self._waiting = 0
        self._stop = threading.Event()
        self._reporting = threading.Lock()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._arm()
        self._thread.start()
        if self.ranks.world > 1:
            _on_abort(self._last_words)

    def stop(self) -> None:
        """Look no more: the run has ended, well or not."""
        self._stop.set()
        faulthandler.cancel_dump_traceback_later()

    def beat(self, phase: str, step: int, limit_s: float) -> None:
        """A sign of life: what comes now, in which optimizer step (from 1), and how long it may take; 0 is for ever."""
        self._phase, self._step, self._limit_s = phase, step, limit_s
        self._last = time.monotonic()
        looking = self._thread.is_alive() and not self._stop.is_set()  # else nobody would disarm what ends the process
        if looking and self._last - self._armed > 1.0:
            self._arm()

    def take_looks(self) -> tuple[int, int]:
        """How often the thread has looked at the main thread since the last call, and saw it inside collectives."""
        looks, self._samples, self._waiting = (self._samples, self._waiting), 0, 0
        return looks

    def failed(self, error: BaseException) -> str | None:
        """After an error that may come from the ranks' differing: what all of them say, if they do differ."""
        self.stop()
        with self._reporting:
            self._write(str(error).splitlines()[0] if str(error) else type(error).__name__)
            deadline = time.monotonic() + COLLECT_S
            while time.monotonic() < deadline:
                statuses = self._read()
                if order := differing_order(statuses):
                    self._final.write_text(order + "\n")
                    return order
                if len(statuses) == self.ranks.world:
                    break
                time.sleep(0.1)
        return None

    def _last_words(self) -> None:
        """What is left to say where a library aborts: gloo does, in a thread of its own, when sizes do not match."""
        if self._stop.is_set():  # the run is over, or its failure has been looked into
            os._exit(1)
        order = self.failed(RuntimeError("aborted by a library"))
        if order is not None:
            self.give_up(order)
        os._exit(1)

    def _arm(self) -> None:
        self._armed = self._last
        if self._limit_s:
            faulthandler.dump_traceback_later(self._limit_s + COLLECT_S + _C_MARGIN_S, exit=True)
        else:
            faulthandler.cancel_dump_traceback_later()

    def _look(self) -> None:
        # Many ranks that look into one folder are a load on its file system: the more, the later.
        patience_s = max(1.0, self.ranks.world / 64)
        looked = 0.0
        while not self._stop.wait(TICK_S):
            self._samples += 1
            self._waiting += waits(self._frame())
            silent_s = time.monotonic() - self._last
            if self._limit_s and silent_s > self._limit_s:
                break
            if silent_s > patience_s and silent_s - looked > patience_s:
                looked = silent_s
                if self.folder.exists():
                    break
            looked = min(looked, silent_s)
        if not self._stop.is_set():
            with self._reporting:
                self._end()

    def _end(self) -> None:
        """Write where this rank is, see to it that there is a verdict, and end the process."""
        self._write(None)
        if self.ranks.rank == 0:
            self._until(lambda: len(self._read()) == self.ranks.world, COLLECT_S)
        else:
            self._until(self._final.exists, COLLECT_S + 2.0)
        statuses = self._read()
        # Rank 0 speaks; where it cannot, the first that could write.
        if not self._final.exists() and statuses and statuses[0].rank == self.ranks.rank:
            text = verdict(statuses, self.ranks.world)
            self._final.write_text(text + "\n")
            self.give_up(text)
        for worker in multiprocessing.active_children():
            worker.kill()  # one that is stuck would outlive this process
        os._exit(1)

    def _write(self, error: str | None) -> None:
        frame = self._frame()
        frames = [] if frame is None else traceback.extract_stack(frame)
        status = Status(
            rank=self.ranks.rank,
            node=node_name(),
            phase=self._phase,
            step=self._step,
            silent_s=time.monotonic() - self._last,
            stack=[f"{frame.filename}:{frame.lineno} {frame.name}: {frame.line}" for frame in frames],
            waiting=error is None and waits(frame),
            collectives=flight.recorded(),
            groups=self.groups,
            error=error,
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"rank-{self.ranks.rank:06d}"
        with (self.folder / f"{name}.stacks").open("w") as file:
            faulthandler.dump_traceback(file)
        partial = self.folder / f".{name}.partial"
        partial.write_text(json.dumps(status.plain()))
        partial.replace(self.folder / f"{name}.json")

    def _read(self) -> list[Status]:
        return [Status.read(json.loads(path.read_text())) for path in sorted(self.folder.glob("rank-*.json"))]

    def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.1)

    def _frame(self) -> FrameType | None:
        """Where the main thread is."""
        return sys._current_frames().get(self._main or 0)


def _on_abort(last_words: Callable[[], None]) -> None:
    """Call `last_words` on SIGABRT, in the thread that aborts.

    Python's own handlers run in the main thread, later; abort() does not wait for them. An alarm ends the process where
    not even this can run.
    """
    libc = ctypes.CDLL(None)
    handler_type = ctypes.CFUNCTYPE(None, ctypes.c_int)

    def handler(number: int) -> None:
        libc.alarm(int(3 * COLLECT_S))
        libc.signal(number, 0)  # once: a second abort is one
        last_words()

    global _handler
    _handler = handler_type(handler)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(int(signal.SIGABRT), ctypes.cast(_handler, ctypes.c_void_p))


_handler: Any = None  # C code has its address: it must not be collected


def waits(frame: FrameType | None) -> bool:
    """Whether a thread is inside a collective: its innermost frames are torch's, or its line waits for one."""
    if frame is None:
        return False
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0)  # None between two lines
    for _ in range(3):
        if frame is not None:
            if "/torch/distributed/" in frame.f_code.co_filename:
                return True
            frame = frame.f_back
    return ".wait(" in line
