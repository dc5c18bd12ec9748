"""The commands as a person runs them: in a process of their own, from the root of the checkout."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from recipes.trained import load_trained

ROOT = Path(__file__).resolve().parents[2]
MODEL = [
    *("model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=2", "model.head_dim=16"),
    *("data.seq_len=32", "data.global_batch=4", "data.micro_batch=2", "cluster.device=cpu", "cluster.threads=1"),
    *("trainer.max_steps=3", "trainer.val_interval=null"),
]
MICRO = ["data=synthetic", "data.validation_sequences=4", *MODEL]
"""A run of seconds on one thread."""
_TIMES = ("step_time_s", "tokens_per_s", "tflops", "mfu", "bubble")


def start(name: str, *arguments: str) -> "subprocess.Popen[str]":
    """Start `python -m recipes.NAME ARGUMENTS`."""
    return subprocess.Popen(
        [sys.executable, "-m", f"recipes.{name}", *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: "subprocess.Popen[str]") -> "subprocess.CompletedProcess[str]":
    """Wait for it."""
    out, err = process.communicate(timeout=200)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run(name: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run `python -m recipes.NAME ARGUMENTS` to its end."""
    return finish(start(name, *arguments))


def succeed(*processes: "subprocess.Popen[str]") -> None:
    """Wait for processes that must end well."""
    for process in processes:
        done = finish(process)
        assert done.returncode == 0, done.stderr


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what depends on the clock."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(_TIMES)} for row in rows]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The trained parameters by name."""
    return load_trained(str(folder)).decoder.state_dict()


def assert_same_weights(one: Path, two: Path) -> None:
    """Every parameter equal to the bit."""
    a, b = weights(one), weights(two)
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
