"""The watch and the timer in C that ends a process: armed only while somebody looks."""

import faulthandler
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock, patch

import pytest

from parallel.cluster import WatchConfig
from parallel.ranks import Ranks
from parallel.watch import Watch
from recipes.launch import error_reported


@pytest.fixture
def timer() -> Iterator[Mock]:
    with patch.object(faulthandler, "dump_traceback_later") as armed:
        yield armed


def beat_later(watch: Watch) -> None:
    """A sign of life, more than a second after the last that set the timer."""
    watch._armed -= 2.0
    watch.beat("step", 1, 60.0)


def test_given_a_watch_that_looks_when_the_run_gives_signs_of_life_then_the_timer_is_set_again(
    tmp_path: Path, timer: Mock
) -> None:
    watch = Watch(WatchConfig(), Ranks(), tmp_path / "stalls", lambda _: None)
    watch.start()
    beat_later(watch)
    watch.stop()
    assert timer.call_count == 2  # at the start, and once more


def test_given_a_watch_not_started_when_the_run_gives_signs_of_life_then_nothing_can_end_the_process(
    tmp_path: Path, timer: Mock
) -> None:
    beat_later(Watch(WatchConfig(), Ranks(), tmp_path / "stalls", lambda _: None))
    timer.assert_not_called()


def test_given_a_watch_that_has_stopped_when_the_run_gives_signs_of_life_then_nothing_can_end_the_process(
    tmp_path: Path, timer: Mock
) -> None:
    # A run that ends still writes: a beat then set a timer that ended the process ten minutes later, whatever it did.
    watch = Watch(WatchConfig(), Ranks(), tmp_path / "stalls", lambda _: None)
    watch.start()
    watch.stop()
    timer.reset_mock()
    beat_later(watch)
    timer.assert_not_called()


def test_given_one_process_when_its_run_fails_then_nothing_watches_it_any_more(tmp_path: Path) -> None:
    # The next point of a sweep runs in the same process, and must not be ended for the silence of this one.
    watch = Watch(WatchConfig(), Ranks(), tmp_path / "stalls", lambda _: None)
    with pytest.raises(ValueError, match="planted"), error_reported(Ranks(), tmp_path) as watched:  # noqa: PT012
        watched.append(watch)
        watch.start()
        raise ValueError("planted")
    watch._thread.join(5)
    assert not watch._thread.is_alive()
