"""The commands as a person runs them: in a process of their own, from the root of the checkout.

The processes are forked from a server that has imported torch and Lightning, which take longer than what is tested.
"""

import atexit
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
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


_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        *("lightning.pytorch", "torch._dynamo", "parallel.strategy", "recipes.module", "recipes.data.module"),
        *("recipes.metrics", "recipes.checkpoints", "recipes.loggers", "tests.recipes.commands"),
    ]
)


def _become(name: str, arguments: tuple[str, ...], environment: dict[str, str], folder: str) -> None:
    """In a forked process: be `python -m recipes.NAME ARGUMENTS`, and end as that does."""
    multiprocessing.set_start_method(None, force=True)  # Python's own again, for the loader's workers
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, file in ((1, "out"), (2, "err")):
        opened = os.open(Path(folder, file), os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.argv = [f"recipes.{name}", *arguments]
    try:
        runpy.run_module(f"recipes.{name}", run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out


class Command:
    """`python -m recipes.NAME ARGUMENTS` that runs."""

    def __init__(self, name: str, *arguments: str) -> None:
        self.args = [name, *arguments]
        self._folder = tempfile.TemporaryDirectory()
        task = (name, arguments, dict(os.environ), self._folder.name)
        self._process = _FORKS.Process(target=_become, args=task)
        self._process.start()

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def finish(self, timeout_s: float = 200) -> "subprocess.CompletedProcess[str]":
        """Wait for it. Raises TimeoutExpired if it takes longer than that."""
        self._process.join(timeout_s)
        code = self.poll()
        if code is None:
            self.kill()
            raise subprocess.TimeoutExpired(self.args, timeout_s)
        out, err = (Path(self._folder.name, file).read_text() for file in ("out", "err"))
        return subprocess.CompletedProcess(self.args, code, out, err)


def start(name: str, *arguments: str) -> Command:
    """Start `python -m recipes.NAME ARGUMENTS`."""
    return Command(name, *arguments)


def run(name: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run `python -m recipes.NAME ARGUMENTS` to its end."""
    return start(name, *arguments).finish()


def succeed(*commands: Command) -> None:
    """Wait for commands that must end well."""
    for command in commands:
        done = command.finish()
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
