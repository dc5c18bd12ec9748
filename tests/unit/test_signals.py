"""A run that is told to end does, whatever it is doing by then."""

import signal
from collections.abc import Iterator

import pytest

from recipes.signals import ENDING, RunInterruptedError, Told


@pytest.fixture
def told() -> Iterator[Told]:
    before = {number: signal.getsignal(number) for number in ENDING}
    yield Told().listen()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_given_a_library_that_swallows_exceptions_when_told_before_the_first_step_then_the_signal_is_not_lost(
    told: Told,
) -> None:
    # As huggingface_hub does while it imports one of its modules.
    with pytest.raises(RunInterruptedError, match="SIGUSR1 before the first step"):
        signal.raise_signal(signal.SIGUSR1)
    assert told.signal == signal.SIGUSR1


def test_given_training_when_told_then_the_first_signal_is_noted_and_nothing_raised(told: Told) -> None:
    told.at_once = False
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGUSR1)
    assert told.signal == signal.SIGTERM


def test_given_a_library_that_makes_another_error_of_it_when_told_before_the_first_step_then_the_run_was_told(
    told: Told,
) -> None:
    def imported() -> None:  # as matplotlib is
        try:
            signal.raise_signal(signal.SIGUSR1)
        except RunInterruptedError:
            raise KeyError("Rectangle:kwdoc") from None

    with pytest.raises(RunInterruptedError, match="SIGUSR1 before the first step"), told.heeded():
        imported()


def test_given_no_signal_or_training_when_something_else_fails_then_that_is_the_error(told: Told) -> None:
    for number in (None, signal.SIGUSR1):
        if number is not None:
            told.at_once = False
            signal.raise_signal(number)
        with pytest.raises(KeyError), told.heeded():
            raise KeyError("x")
