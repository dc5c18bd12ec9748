"""Settings that do nothing beside the others. They are legal, since a value left over from another layout harms nobody;
they are said, so that nobody waits for what they would do."""

from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from typing import Any

from models.config import RopeScaling
from parallel.config import Config, DecayShape, SyntheticData, TokenizerKind
from parallel.plan.problems import Fault

IDLE: tuple[tuple[str, Callable[[Config], bool], str], ...] = (
    ("parallelism.pp_schedule", lambda config: config.parallelism.pp > 1, "parallelism.pp above 1"),
    ("parallelism.pp_schedule_file", lambda config: config.parallelism.pp_schedule == "csv", "pp_schedule=csv"),
    ("parallelism.cp_method", lambda config: config.parallelism.cp > 1, "parallelism.cp above 1"),
    ("parallelism.cp_padding", lambda config: config.parallelism.cp > 1, "parallelism.cp above 1"),
    ("model.lora.alpha", lambda config: config.model.lora.rank > 0, "model.lora.rank above 0"),
    ("model.lora.targets", lambda config: config.model.lora.rank > 0, "model.lora.rank above 0"),
    ("model.rope.factor", lambda config: _scaling(config) != "none", "model.rope.scaling other than none"),
    (
        "model.rope.original_max_position_embeddings",
        lambda config: _scaling(config) in ("llama3", "yarn"),
        "model.rope.scaling=llama3 or yarn",
    ),
    *(
        (f"model.rope.{key}", lambda config: _scaling(config) == "llama3", "model.rope.scaling=llama3")
        for key in ("low_freq_factor", "high_freq_factor")
    ),
    *(
        (f"model.rope.{key}", lambda config: _scaling(config) == "yarn", "model.rope.scaling=yarn")
        for key in ("beta_fast", "beta_slow", "attention_factor")
    ),
    ("data.tokenizer.kind", lambda config: not isinstance(config.data, SyntheticData), "data that is text"),
    (
        "data.tokenizer.vocab_size",
        lambda config: config.data.tokenizer.kind == TokenizerKind.bpe,
        "data.tokenizer.kind=bpe; other tokenizers have a size of their own",
    ),
    ("scheduler.decay", lambda config: config.scheduler.shape == DecayShape.wsd, "scheduler=wsd"),
    (
        "scheduler.minimum_ratio",
        lambda config: config.scheduler.shape != DecayShape.constant,
        "a schedule that falls; scheduler=constant does not",
    ),
    ("checkpoint.metric", lambda config: config.checkpoint.best > 0, "checkpoint.best above 0"),
    ("checkpoint.mode", lambda config: config.checkpoint.best > 0, "checkpoint.best above 0"),
)
"""A key, whether it does something in a config, and where it would."""


def _scaling(config: Config) -> RopeScaling:
    return config.model.rope.scaling


def idle(config: Config) -> Iterator[Fault]:
    """Keys that are not at their usual value though nothing reads them."""
    for key, works, where in IDLE:
        if works(config):
            continue
        value, usual = _value_and_usual(config, key)
        if value != usual:
            yield Fault("no-effect", f"{key}={value} does nothing here: it is for {where}.")


def _value_and_usual(config: Config, key: str) -> tuple[Any, Any]:
    *groups, name = key.split(".")
    owner: Any = config
    for group in groups:
        owner = getattr(owner, group)
    [field] = [field for field in fields(owner) if field.name == name]
    usual = field.default_factory() if field.default_factory is not MISSING else field.default
    return getattr(owner, name), usual
