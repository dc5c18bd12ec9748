"""One development cluster for all tests of a session; it ends with them, and every job of it."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.jobs import DEVCLUSTER


@pytest.fixture(scope="session")
def cluster() -> Iterator[Path]:
    """The cluster's folder; sbatch, srun and the like of this process and its children speak to it."""
    if not (shutil.which("sbatch") and shutil.which("munged", path=f"{os.environ['PATH']}:/usr/sbin")):
        pytest.skip("slurm-wlm and munge are not installed")
    # Not pytest's own folder: the path stands in the names of sockets, which have to be short.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, pytest.MonkeyPatch.context() as patch:
        place = Path(folder, "cluster")
        subprocess.run([DEVCLUSTER, f"--dir={place}", "up"], check=True, stdout=subprocess.DEVNULL)
        for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_"))]:
            patch.delenv(name)
        patch.setenv("SLURM_CONF", str(place / "slurm.conf"))
        try:
            yield place
        finally:
            subprocess.run([DEVCLUSTER, f"--dir={place}", "down"], check=True)
