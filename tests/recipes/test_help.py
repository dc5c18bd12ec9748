"""Help, the composed config, the defaults tree and shell completion, without training anything."""

import os
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from tests.recipes.commands import ROOT, run


def test_given_help_when_asked_then_groups_keys_and_switches_are_shown() -> None:
    done = run("train", "--help")
    assert done.returncode == 0, done.stderr
    for words in ("recipes.train", "model: ", "llama2_7b", "max_steps", "--multirun", "--shell-completion"):
        assert words in done.stdout


def test_given_cfg_when_asked_then_the_resolved_config_is_printed_as_yaml() -> None:
    done = run("train", "--cfg", "job", "--resolve", "trainer.max_steps=7", "run.id=me")
    assert done.returncode == 0, done.stderr
    tree = OmegaConf.create(done.stdout)
    assert tree.trainer.max_steps == 7
    assert tree.run.dir == "runs/tiny/me"


def test_given_info_when_asked_then_the_defaults_tree_is_printed() -> None:
    done = run("train", "--info", "defaults-tree", "model=llama3_8b")
    assert done.returncode == 0, done.stderr
    assert "llama3_8b" in done.stdout


_COMPLETE = """
eval "$(python -m recipes.train --shell-completion install=bash)"
COMP_LINE="python -m recipes.train $1" COMP_POINT=${#COMP_LINE} COMP_WORDS=(python -m recipes.train "$1") COMP_CWORD=3
$(complete -p python | sed 's/.* -F \\([^ ]*\\) .*/\\1/')
echo "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("word", "expected"),
    [("model=tiny", "model=tiny_gqa"), ("trainer.max", "trainer.max_steps="), ("optimizer=", "optimizer=muon")],
)
def test_given_bash_when_a_word_is_completed_then_options_and_keys_come(word: str, expected: str) -> None:
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    command = ["bash", "-c", _COMPLETE, "bash", word]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert expected in done.stdout.split(), done.stdout + done.stderr
