"""The default data end to end, and what generate and evaluate make of a run directory, right or wrong."""

import json
import math
import os
import pickle
import shutil
from pathlib import Path

import pytest

from tests.recipes.commands import MODEL, run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 3 steps on the default data, the standard library."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    validation = ["trainer.val_interval=3", "trainer.val_sequences=6"]
    done = run("train", *MODEL, *validation, f"run.dir={folder}", "logger=none")
    assert done.returncode == 0, done.stderr
    assert "a sample, continued from 'def '" in done.stderr
    return folder


def test_given_a_run_when_evaluated_then_the_numbers_are_those_of_training_and_fit_each_other(trained: Path) -> None:
    done = run("evaluate", f"run={trained}", "sequences=6")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    final = json.loads((trained / "DONE").read_text())
    assert result["tokens"] == 6 * 32
    assert result["loss"] == pytest.approx(final["val/loss"], rel=1e-6)
    assert result["loss_per_byte"] == pytest.approx(final["val/loss_per_byte"], rel=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert 4.5 < result["loss"] < 6.0  # about ln 260, hardly trained


def test_given_a_run_when_it_generates_then_the_prompt_goes_on_and_a_seed_repeats_it(trained: Path) -> None:
    settings = [f"run={trained}", "prompt='class é'", "max_new_tokens=40", "seed=3"]
    first, second = run("generate", *settings), run("generate", *settings)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("class é")
    assert len(first.stdout) > len("class é\n")
    assert first.stdout == second.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate"], "run is empty"),
        (["evaluate", "run=/nowhere"], "run=/nowhere is neither a complete checkpoint"),
        (["generate", "run=/nowhere", "temprature=1"], "Did you mean temperature?"),
        (["generate", "run={run}", "max_new_tokens=2000"], "write max_new_tokens=1019"),
        (["generate", "run={run}", "max_new_tokens=-1"], "max_new_tokens=-1"),
        (["generate", "run={run}", "temperature=-1"], "temperature=-1.0 must be 0"),
        (["generate", "run={run}", "top_p=0"], "top_p=0.0 must lie in"),
        (["evaluate", "run={run}", "sequences=0"], "sequences=0"),
        (["evaluate", "run={run}", "sequences=-1"], "sequences=-1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_given_wrong_arguments_when_run_then_they_are_refused_with_2(
    trained: Path, arguments: list[str], words: str
) -> None:
    done = run(*(part.replace("{run}", str(trained)) for part in arguments))
    assert done.returncode == 2, done.stdout + done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "evil"), [("generate", "os.system"), ("evaluate", "recipes.run_directory.subprocess.run")]
)
def test_given_a_config_that_someone_tampered_with_when_used_then_it_is_refused_before_anything_is_built(
    trained: Path, tmp_path: Path, name: str, evil: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("recipes.callbacks.Progress", evil))
    done = run(name, f"run={folder}")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "would run code from outside" in done.stderr


def test_given_a_checkpoint_that_someone_tampered_with_when_used_then_no_code_in_it_runs(
    trained: Path, tmp_path: Path
) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    (metadata,) = folder.glob("checkpoints/*/.metadata")
    metadata.write_bytes(pickle.dumps(Evil()))
    done = run("evaluate", f"run={folder}")
    assert done.returncode != 0
    assert not (tmp_path / "ran").exists()


def test_given_a_run_without_a_tokenizer_when_it_generates_then_the_missing_file_is_named(
    trained: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("tokenizer.json"))
    done = run("generate", f"run={tmp_path}/run")
    assert done.returncode == 2, done.stderr
    assert "tokenizer.json: no such file" in done.stderr
