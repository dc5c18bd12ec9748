"""Time as a device sees it, without making the device wait: CUDA events there, the machine's clock on a CPU."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from parallel.schedule import Action


class Clock:
    """Marks moments; how far apart they are is asked later."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def mark(self) -> Any:
        """This moment: on a GPU, when it gets here with its work."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, earlier: Any, later: Any) -> float:
        """From one mark to another. On a GPU this waits until the later one has been reached."""
        if not self._cuda:
            return later - earlier
        later.synchronize()
        return earlier.elapsed_time(later) / 1e3


class Recording:
    """When each action of one pipeline rank ran in one step."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begin = self._end = clock.mark()
        self._marks: list[tuple[Action, Any, Any]] = []

    @contextmanager
    def action(self, kind: str, stage: int, microbatch: int) -> Generator[None, None, None]:
        """What runs inside is this action."""
        start = self._clock.mark()
        yield
        self._marks.append((Action(kind, stage, microbatch), start, self._clock.mark()))

    def stop(self) -> None:
        """The step's last action is done."""
        self._end = self._clock.mark()

    @property
    def begin(self) -> float:
        """The machine's clock at the beginning on a CPU, so that ranks of one machine share it; 0 on a GPU."""
        return self._begin if isinstance(self._begin, float) else 0.0

    def spans(self) -> list[tuple[Action, float, float]]:
        """Every action in its order, with its start and end in seconds since `begin`."""
        seconds = self._clock.seconds
        return [(action, seconds(self._begin, start), seconds(self._begin, end)) for action, start, end in self._marks]

    def busy_and_length(self) -> tuple[float, float]:
        """Seconds in which the rank computed, and seconds from its beginning to its end."""
        busy = sum(self._clock.seconds(start, end) for _, start, end in self._marks)
        return busy, self._clock.seconds(self._begin, self._end)
