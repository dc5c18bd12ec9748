"""What every test needs: one thread, and nothing of the user's touched."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

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
