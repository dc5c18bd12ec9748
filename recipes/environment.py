"""What is installed and on what machine, for environment.json; and which commit the code is of. torch comes late."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "lightning", "hydra-core", "omegaconf", "numpy", "datasets", "pyarrow", "tokenizers", "wandb")


def environment() -> dict[str, Any]:
    """What is installed and on what machine: packages, git commit and dirty flag, host, processors, GPUs."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "python": sys.version.split()[0],
        "packages": {name: _version(name) for name in PACKAGES},
        "git": git_state(),
        "host": platform.node(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": gpus,
        "cuda": torch.version.cuda,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_state() -> dict[str, Any]:
    """Commit of the checkout and whether tracked files differ from it; None where this is no checkout.

    A submitted job runs a snapshot, which says what it was taken of.
    """
    root = Path(__file__).resolve().parent.parent
    if (root / "snapshot.json").exists():
        return json.loads((root / "snapshot.json").read_text())

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    return {"commit": commit, "dirty": bool(git("status", "--porcelain", "-uno")) if commit else None}
