"""How a command ends: by its own exit code, whatever would go wrong while the interpreter is taken down."""

import subprocess
import sys

from tests.recipes.commands import ROOT

ENDS_BADLY = """
import atexit, os, runpy, sys

class Bomb:
    def __del__(self, abort=os.abort):
        abort()

sys.kept = Bomb()
atexit.register(print, "done at exit")
sys.argv = ["plan", *sys.argv[1:]]
runpy.run_module("recipes.plan", run_name="__main__")
"""


def _plan(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", ENDS_BADLY, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)


def test_given_what_would_abort_a_process_that_is_taken_down_when_a_command_ends_then_it_ends_well() -> None:
    done = _plan("recipe=tiny")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "done at exit"


def test_given_the_same_when_a_config_is_refused_then_the_exit_code_says_so() -> None:
    done = _plan("recipe=tiny", "parallelism.tp=3")
    assert done.returncode == 2, done.stderr
    assert "config refused" in done.stderr


def test_given_nobody_who_reads_when_a_command_has_written_then_its_exit_code_says_so() -> None:
    plan = f"{sys.executable} -m recipes.plan recipe=tiny | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", plan], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
