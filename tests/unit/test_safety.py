"""No code from outside and no secret, in a composed config and in one read from a run directory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from models.errors import ConfigError
from recipes import safety
from recipes.callbacks import SampleText
from recipes.plain import plain
from recipes.schema import read_config, to_config
from tests.small import composed, config

EVIL = [
    "os.system",
    "builtins.eval",
    "subprocess.run",
    "shutil.rmtree",
    "recipes",
    "recipes.",
    "recipes..callbacks.Progress",
    "recipes.../../tmp/evil",
    "recipes/../../evil",
    ".recipes.callbacks.Progress",
    "recipesx.callbacks.Progress",
    "recipes.command._nearest",
    "recipes.callbacks.Progress.__init__",
    "recipes.command.__builtins__",
    "recipes.command.os.system",
    "recipes.run_directory.subprocess.run",
    "recipes.run_directory.subprocess",
    "recipes.data.store.partial",
    "parallel.checkpoint.shutil.rmtree",
    "models.random.hashlib.new",
    "lightning.pytorch.callbacks.LambdaCallback",
    "lightning.pytorch.Trainer",
    "Recipes.callbacks.Progress",
    "",
    " recipes.callbacks.Progress",
    "recipes.callbacks.Progress\nos.system",
]


def _from_command_line(tree: dict[str, Any], _: Path) -> None:
    composed_config = composed()
    OmegaConf.set_struct(composed_config, False)
    composed_config.callbacks.x = tree
    to_config(composed_config)


def _from_run_directory(tree: dict[str, Any], folder: Path) -> None:
    whole = plain(config())
    whole["callbacks"]["x"] = tree
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(whole)))
    read_config(folder / "config.yaml")


HIDDEN: list[dict[str, Any]] = [
    {"a": {"b": [1, [{"_target_": "os.system"}]]}},
    {"_target_": ["os.system"]},
    {"_target_": {"a": 1}},
    {"_target_": 3},
    {"_target_": None},
]
WAYS = pytest.mark.parametrize("way", [_from_command_line, _from_run_directory], ids=["composed", "read"])


@WAYS
@pytest.mark.parametrize("target", EVIL, ids=repr)
def test_given_a_target_that_is_not_ours_when_checked_then_it_is_refused(
    tmp_path: Path, way: Callable[..., None], target: str
) -> None:
    with pytest.raises(ConfigError, match=r"callbacks\.x\._target_="):
        way({"_target_": target}, tmp_path)


@WAYS
@pytest.mark.parametrize("hidden", HIDDEN, ids=str)
def test_given_a_target_hidden_deeper_or_of_another_type_when_checked_then_it_is_refused(
    tmp_path: Path, way: Callable[..., None], hidden: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError):
        way({"_target_": "recipes.callbacks.Progress", **hidden}, tmp_path)


@WAYS
def test_given_targets_that_are_allowed_when_checked_then_they_pass(tmp_path: Path, way: Callable[..., None]) -> None:
    for target in ("recipes.callbacks.Progress", "recipes.loggers.csv_logger", *safety.ALLOWED_TARGETS):
        way({"_target_": target}, tmp_path)


def test_given_a_target_in_an_interpolation_when_checked_then_what_it_resolves_to_counts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"callbacks\.x\._target_=os.system"):
        _from_run_directory({"a": "os.system", "_target_": "${.a}"}, tmp_path)


SECRETS = {
    "key": ({"api_key": "abc"}, "abc"),
    "key with prefix": ({"my_password": "hunter22"}, "hunter22"),
    "key, upper case": ({"HF_TOKEN": "something"}, "something"),
    "number under a key": ({"password": 12345678}, "12345678"),
    "list under a key": ({"token": ["abcdefgh"]}, "abcdefgh"),
    "hugging face": ({"note": "x hf_abcdefghijklmnopqrstuvwxyz y"}, "hf_abc"),
    "github": ({"note": "ghp_abcdefghijklmnopqrstuvwxyz0123"}, "ghp_abc"),
    "aws": ({"note": "AKIAABCDEFGHIJKLMNOP"}, "AKIA"),
    "address with a password": ({"uri": "https://me:hunter22@host/x"}, "hunter22"),
}


@WAYS
@pytest.mark.parametrize(("node", "secret"), SECRETS.values(), ids=SECRETS)
def test_given_a_secret_when_checked_then_it_is_refused_and_not_shown(
    tmp_path: Path, way: Callable[..., None], node: dict[str, Any], secret: str
) -> None:
    with pytest.raises(ConfigError, match="looks like a secret") as caught:
        way({"_target_": "recipes.callbacks.Progress", **node}, tmp_path)
    assert secret not in str(caught.value)


def test_given_a_secret_of_the_environment_when_interpolated_then_it_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    with pytest.raises(ConfigError, match=r"run.root holds what looks like a secret") as caught:
        config("run.root='${oc.env:WANDB_API_KEY}'")
    assert "0123456789abcdef" not in str(caught.value)


def test_given_ordinary_words_when_checked_then_nothing_is_taken_for_a_secret() -> None:
    safety.check({"tokens": "many", "tokenizer": {"kind": "byte"}, "uri": "https://host/x@y", "token_budget": "abc"})


def test_given_a_checked_node_when_built_then_it_gets_what_it_takes_and_its_own_keys_win() -> None:
    node = {"_target_": "recipes.callbacks.SampleText", "prompt": "p", "max_new_tokens": 1, "temperature": 0.5}
    made = safety.build(node, prompt="other", tokenizer=None, unknown=3)
    assert isinstance(made, SampleText)
    assert (made.prompt, made.max_new_tokens, made.tokenizer) == ("p", 1, None)


@pytest.mark.parametrize(
    "node",
    [
        {"_target_": "recipes.nope.Nope"},
        {"_target_": "recipes.callbacks.Nope"},
        {"_target_": "recipes.loggers.csv_logger", "unknown": 3},
        {"_target_": "recipes.callbacks.Checkpoints"},
        {"prompt": "a node without a target"},
    ],
    ids=str,
)
def test_given_a_node_that_cannot_be_built_when_built_then_it_is_a_refused_config(node: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        safety.build(node)
