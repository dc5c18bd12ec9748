"""Config groups: every option composes, wrong ones are refused in the user's words, and a written config reads back."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from models.errors import ConfigError
from parallel.config import Config, FilesData, PipelineSchedule, StdlibData, SyntheticData
from parallel.plan.problems import Severity
from parallel.plan.validate import validate
from recipes.command import CONF, explain
from recipes.plain import plain
from recipes.schema import read_config, to_config
from tests.small import composed, config, options

GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "hydra")
OPTIONS = [f"{group}={option}" for group in GROUPS for option in options(group)]
LEGAL = {
    "scheduler=wsd": ["trainer.max_steps=200"],
    "data=hub": ["data.dataset=owner/name"],
    "data=files": ["data.paths=[x.txt]"],
    **{f"cluster=slurm_{name}": ["cluster.nodes=1"] for name in ("a100", "h100", "dev")},
}


def test_given_the_tree_when_listed_then_the_groups_of_the_design_are_there() -> None:
    wanted = "recipe model parallelism precision cluster data optimizer scheduler checkpoint callbacks logger trainer"
    assert {*wanted.split(), "experiment", "debug"} <= set(GROUPS)


@pytest.mark.parametrize("option", OPTIONS)
def test_given_any_option_when_composed_under_the_tiny_recipe_then_it_is_a_config(option: str) -> None:
    made = config("recipe=tiny", option, *LEGAL.get(option, []))
    assert isinstance(made, Config)
    group, _, name = option.partition("=")
    if group in ("model", "precision", "cluster", "data", "optimizer", "recipe"):
        assert getattr(made, group).name == name
    if group not in ("model", "recipe", "hydra", "parallelism"):  # these have other lengths, sizes and worlds
        errors = [problem.message for problem in validate(made, 1) if problem.severity == Severity.error]
        assert errors == []


@pytest.mark.parametrize(
    ("overrides", "kind", "differs"),
    [
        ("data=synthetic data.mask=uneven data.vocab_size=77", SyntheticData, "data"),
        ("data=files data.paths=[a,b/*.txt]", FilesData, "data"),
        ("data=stdlib data.tokenizer.kind=bpe data.tokenizer.vocab_size=500", StdlibData, "data"),
        ("optimizer=muon optimizer.betas=[0.8,0.99]", StdlibData, "optimizer"),
        ("parallelism.pp_schedule=1f1b parallelism.pp_split=[1,3]", StdlibData, "parallelism"),
        ("model.rope.scaling=yarn model.rope.factor=2 model.sliding_window=100", StdlibData, "model"),
        ("scheduler=wsd scheduler.unit=tokens scheduler.total=1000000", StdlibData, "scheduler"),
        ("logger=none callbacks.progress=null seed=3", StdlibData, "callbacks"),
    ],
)
def test_given_a_config_when_written_and_read_then_it_is_the_same(
    tmp_path: Path, overrides: str, kind: type, differs: str
) -> None:
    made = config(*overrides.split())
    path = tmp_path / "config.yaml"
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(plain(made))))
    assert read_config(path) == made
    assert type(read_config(path).data) is kind
    assert getattr(made, differs) != getattr(config(), differs)


def test_given_enumerations_when_composed_then_they_are_members_and_not_words() -> None:
    assert config("parallelism.pp_schedule=zbv_zero_bubble").parallelism.pp_schedule is PipelineSchedule.zbv_zero_bubble


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("model.hiden_size=3", ["model.hiden_size: there is no such key", "Did you mean model.hidden_size?"]),
        ("model.rope.thta=1", ["Did you mean model.rope.theta?", "Keys of model.rope: theta, scaling"]),
        ("modle=tiny", ["modle: there is no such key", "Did you mean model?"]),
        ("seq_len=3", ["seq_len: there is no such key", "Did you mean data.seq_len?"]),
        ("data=files data.text_feild=x", ["Did you mean data.text_field?"]),
        ("logger.wandb.offlin=true", ["Did you mean logger.wandb.offline?"]),
        ("callbacks.progres.x=1", ["Did you mean callbacks.progress?"]),
        ("model=tinny", ["model=tinny: there is no such option", "Did you mean tiny?", "llama2_7b"]),
        ("precision=fp16", ["precision=fp16: there is no such option", "bf16, fp32, fp64"]),
        ("recipe=nope", ["recipe=nope: there is no such option"]),
        ("trainer.max_steps=abc", ["trainer.max_steps", "'abc'", "Integer"]),
        ("data.seq_len=1.5", ["data.seq_len", "'1.5'"]),
        ("data.document_mask=maybe", ["data.document_mask", "'maybe'", "bool"]),
        ("seed=null", ["seed"]),
        ("parallelism.pp_schedule=2f2b", ["parallelism.pp_schedule", "2f2b", "1f1b"]),
        ("optimizer.betas=0.9", ["optimizer.betas"]),
        ("data.seq_len=${nope}", ["data.seq_len", "nope"]),
        ("data.seq_len=${oc.env:NOPE}", ["data.seq_len", "NOPE"]),
        ("data.seq_len=???", ["data.seq_len", "missing"]),
        ("+foo=3", ["foo: there is no such key", "Keys: recipe, model"]),
        ("+data.sequence_len=3", ["data.sequence_len: there is no such key"]),
        ("+data.seqlen=3", ["Did you mean data.seq_len?"]),
        ("+model.rope.foo=3", ["model.rope.foo: there is no such key"]),
        ("+callbacks.progress.foo=3", ["callbacks.progress.foo: there is no such key"]),
    ],
)
def test_given_a_wrong_override_when_composed_then_the_message_is_in_the_users_words(
    overrides: str, words: list[str]
) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which of Hydra's kinds it is does not matter
        to_config(composed(*overrides.split()))
    message = str(caught.value) if isinstance(caught.value, ConfigError) else explain(caught.value)
    assert all(word in message for word in words), message
    assert not any(word in message for word in ("full_key", "object_type", "Traceback", "object at 0x")), message


def test_given_a_key_of_another_option_when_refused_then_the_advice_is_not_the_key_itself() -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - as above
        composed("optimizer=adamw", "optimizer.momentum=0.9")
    assert "optimizer.momentum: there is no such key" in explain(caught.value)
    assert "Did you mean optimizer.momentum" not in explain(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "no such file"),
        ("", "is not the config of a run"),
        ("{", "is not the config of a run"),
        ("- 1\n- 2\n", "is not the config of a run"),
        ("just a word\n", "is not the config of a run"),
        ("model: {}\n", "is not the config of a run"),
        ("data: {name: stdlib}\noptimizer: {name: adamw}\n", "is not the config of a run"),
        ("data: {name: nope}\noptimizer: {name: adamw}\n", "is not the config of a run"),
        ("data: stdlib\noptimizer: adamw\n", "is not the config of a run"),
    ],
)
def test_given_a_file_that_is_no_config_when_read_then_the_error_names_it(
    tmp_path: Path, text: str | None, words: str
) -> None:
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        read_config(path)
    assert str(path) in str(caught.value)


def test_given_an_older_config_with_a_key_that_is_gone_when_read_then_the_error_names_the_key(tmp_path: Path) -> None:
    tree = plain(config())
    tree["trainer"]["gone"] = 3
    path = tmp_path / "config.yaml"
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(tree)))
    with pytest.raises(ConfigError, match="gone"):
        read_config(path)
