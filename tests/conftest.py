"""What every test needs: one thread, nothing of the user's touched, and its turn among pytest-xdist's workers."""

import fcntl
import os
import subprocess
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO

import pytest

ROOT = Path(__file__).resolve().parents[1]
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: the machine has few cores and subprocesses share them


@pytest.fixture(scope="session", autouse=True)
def _own_home() -> Iterator[None]:
    """A home and a cache of the session's own; subprocesses inherit them."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name, part in (("HOME", "home"), ("QUINTET_CACHE", "cache"), ("HF_HOME", "home/hf")):
            Path(folder, part).mkdir(parents=True)
            patch.setenv(name, str(Path(folder, part)))
        for name in ("WANDB_API_KEY", "HF_TOKEN", "QUINTET_RUN_ID"):
            patch.delenv(name, raising=False)
        patch.setenv("WANDB_MODE", "offline")
        yield


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of 64 KiB, or of the size given by an indirect parameter such as "1m"."""
    size = getattr(request, "param", "64k")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker has the pool of ranks, and one SLURM and what runs alone; the others are dealt out by file.

    Interruptions spend their minutes waiting for SLURM and leave them to others; what else runs on SLURM has limits.
    """
    for item in items:
        folder = item.path.parent.name
        if folder == "slurm" and item.path.stem != "test_interruptions":
            item.add_marker(pytest.mark.alone)
        pooled = folder == "distributed" and "pool" in getattr(item, "fixturenames", ())
        waits = folder == "slurm" or (is_alone(item) and not pooled)
        group = "alone" if waits else folder if folder == "distributed" else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


def is_alone(item: pytest.Item | None) -> bool:
    """Whether a test may run only while no other does."""
    return item is not None and item.get_closest_marker("alone") is not None


class Turn:
    """This worker's turn among pytest-xdist's: shared with the others, or its own for tests that run alone.

    Locks on two files of the checkout: one for the turn, and one to queue for it, so that none is overtaken for ever.
    """

    def __init__(self) -> None:
        self._held: IO[bytes] | None = None

    def take(self, alone: bool) -> None:
        """Wait for it, unless it is held already."""
        if self._held is None:
            with Path(__file__).open("rb") as queue:
                fcntl.flock(queue, fcntl.LOCK_EX)
                self._held = (ROOT / "pyproject.toml").open("rb")
                fcntl.flock(self._held, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)

    def give_back(self) -> None:
        """Let others go on."""
        if self._held is not None:
            self._held.close()
            self._held = None


turn = Turn()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before the test's time limit begins
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Run a test in its turn; tests in a row that run alone share what they set up, and so one turn."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    turn.take(is_alone(item))
    try:
        return (yield)
    finally:
        if not (is_alone(item) and is_alone(nextitem)):
            turn.give_back()
