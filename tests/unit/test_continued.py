"""`run=DIR` is the command that made a run directory, once more."""

from pathlib import Path

import pytest

from models.errors import ConfigError
from recipes.continued import continued
from recipes.run_directory import RunDirectory
from tests.small import config


def test_given_a_run_directory_when_gone_on_with_then_its_own_arguments_come_first_and_its_place_last(
    tmp_path: Path,
) -> None:
    run = RunDirectory(tmp_path / "there")
    run.create(config("data=synthetic", "run.id=me"), ["--config-dir", "/c", "data=synthetic", "run.id=me", "seed=0"])
    assert continued(["seed=0", "x"]) == ["seed=0", "x"]
    found = continued([f"run={tmp_path}/there", "parallelism.tp=2"])
    place = [f"run.dir={tmp_path}/there", "run.id=me"]
    assert found == ["--config-dir", "/c", "data=synthetic", "seed=0", "parallelism.tp=2", *place]


def test_given_what_is_no_run_directory_when_gone_on_with_then_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"overrides\.yaml is missing, so it is not a run directory"):
        continued([f"run={tmp_path}"])
    (tmp_path / "overrides.yaml").write_text("- a=1\n")
    (tmp_path / "config.yaml").write_text("{")
    with pytest.raises(ConfigError, match="is not the directory of a run"):
        continued([f"run={tmp_path}"])
