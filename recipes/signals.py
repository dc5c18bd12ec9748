"""The signals that tell a run to end, noted from the first moment on. No torch: it is imported before it."""

import signal

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
            raise RunInterruptedError(f"told to end by {signal.Signals(number).name} before the first step.")
