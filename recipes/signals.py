"""The signals that tell a run to end, noted from the first moment on. No torch: it is imported before it."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from models.errors import RunError

ENDING = (signal.SIGTERM, signal.SIGUSR1)


class RunInterruptedError(RunError):
    """The run was told to end and has saved its state; the same command goes on."""


class Told:
    """Which signal this process was told to end by; 0 is none."""

    def __init__(self) -> None:
        self.signal = 0
        self.at_once = True
        """Until training begins there is nothing to save: the signal ends the process by an exception."""

    def listen(self) -> "Told":
        """Note SIGTERM and SIGUSR1 from now on instead of dying of them."""
        for number in ENDING:
            signal.signal(number, self._note)
        return self

    def _note(self, number: int, _: object) -> None:
        # Noted in any case: a library that is being imported may swallow the exception, and the first step then ends.
        self.signal = self.signal or number
        if self.at_once:
            raise self._error()

    def _error(self) -> RunInterruptedError:
        return RunInterruptedError(f"told to end by {signal.Signals(self.signal).name} before the first step.")

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """What fails after the signal and before the first step fails for it: libraries make other errors of it."""
        try:
            yield
        except Exception as error:
            if self.signal and self.at_once and not isinstance(error, RunInterruptedError):
                raise self._error() from error
            raise
