"""Every fault of a config at once, with numbers and what to write instead; and what is suggested is accepted."""

import random
import re
from dataclasses import replace

import pytest

from models.errors import ConfigError
from parallel.layout import Layout
from parallel.plan.validate import Problem, Severity, batch_arithmetic, refuse, validate
from tests.small import config


def _errors(*overrides: str, world: int = 1) -> list[str]:
    return [problem.message for problem in validate(config("data=synthetic", *overrides), world)]


def _arithmetic(batch: int, micro: int, layout: Layout) -> list[str]:
    default = config("data=synthetic")
    data = replace(default.data, global_batch=batch, micro_batch=micro)
    return list(batch_arithmetic(replace(default, data=data), layout))


def test_given_any_batch_sizes_when_refused_then_the_message_has_the_numbers_and_each_suggestion_is_accepted() -> None:
    draw = random.Random(0)
    refused = with_micro = 0
    for _ in range(2000):
        batch, micro = draw.randint(1, 200), draw.randint(1, 40)
        layout = Layout(dp_replicate=draw.choice([1, 2, 3]), dp_shard=draw.randint(1, 6))
        messages = _arithmetic(batch, micro, layout)
        assert bool(messages) == bool(batch % (micro * layout.dp))
        if not messages:
            continue
        refused += 1
        (message,) = messages
        assert f"data.global_batch={batch} " in message
        assert f"data.micro_batch={micro} * {layout.dp} data ranks" in message
        advice = message.split("Write ")[1]
        batches = re.search(r"data\.global_batch=(\d+(?: or \d+)*)", advice)
        assert batches, message
        for suggestion in map(int, batches[1].split(" or ")):
            assert _arithmetic(suggestion, micro, layout) == [], message
            assert abs(suggestion - batch) < micro * layout.dp
        micros = re.search(r"data\.micro_batch=(\d+(?: or \d+)*)", advice)
        with_micro += bool(micros)
        for suggestion in map(int, micros[1].split(" or ") if micros else []):
            assert _arithmetic(batch, suggestion, layout) == [], message
        assert bool(micros) == (batch % layout.dp == 0)
    assert refused > 1000
    assert with_micro > 100


@pytest.mark.timeout(20)
def test_given_a_very_large_batch_when_refused_then_the_answer_comes_at_once() -> None:
    assert "data.global_batch=1000000007 " in _arithmetic(1_000_000_007, 16, Layout(dp_shard=1))[0]


REFUSED = [
    ("model.num_key_value_heads=3", "model.num_key_value_heads=3 must divide .*=4.*Write one of [1, 2, 4]"),
    ("model.head_dim=63", "model.head_dim=63 must be even.*Write 64"),
    ("model.hidden_size=0", "model.hidden_size=0 must be at least 1"),
    ("model.dropout=1.0", "model.dropout=1.0 must lie in [0, 1)"),
    ("model.dropout=nan", "model.dropout=nan"),
    ("model.sliding_window=0", "model.sliding_window=0 must be at least 1"),
    ("model.rope.scaling=yarn", "needs model.rope.original_max_position_embeddings"),
    ("model.rope.scaling=linear model.rope.factor=0.5", "model.rope.factor=0.5 must be at least 1"),
    ("data.seq_len=1025", "data.seq_len=1025 is above model.max_position_embeddings=1024"),
    ("data.seq_len=0", "data.seq_len=0 must be at least 1"),
    ("data.micro_batch=0", "data.micro_batch=0 must be at least 1"),
    ("data.global_batch=-8", "data.global_batch=-8 must be at least 1"),
    ("data.vocab_size=261", "model.vocab_size=260 is smaller than the 261 tokens of data.vocab_size=261.*=261"),
    ("data=stdlib model.vocab_size=256", "model.vocab_size=256 is smaller than the 257 tokens of data.tokenizer.kind"),
    ("data=stdlib experiment=bpe model.vocab_size=2047", "smaller than the 2048 tokens"),
    ("data=stdlib data.tokenizer.kind=bpe", "data.tokenizer.vocab_size=None: bpe starts from 256"),
    ("data.validation_fraction=0", "data.validation_fraction=0.0 must lie between"),
    ("data.validation_fraction=nan", "data.validation_fraction=nan"),
    ("data.workers=-1", "data.workers=-1 must be 0 or more"),
    ("data.sequences=0", "data.sequences"),
    ("optimizer.lr=-1", "optimizer.lr=-1.0 must not be negative"),
    ("optimizer.lr=nan", "optimizer.lr=nan"),
    ("optimizer.weight_decay=-1", "optimizer.weight_decay=-1.0 must not be negative"),
    ("optimizer.betas=[0.9]", "optimizer.betas=[0.9] must be two numbers"),
    ("optimizer.betas=[0.9,1.0]", "optimizer.betas=[0.9, 1.0] must be two numbers"),
    ("optimizer.eps=-1", "optimizer.eps=-1.0"),
    ("optimizer=sgd optimizer.momentum=-1", "optimizer.momentum=-1.0"),
    ("optimizer=sgd optimizer.nesterov=true", "optimizer.nesterov"),
    ("optimizer=muon precision=fp64", "optimizer=muon .* precision=fp64"),
    ("scheduler.minimum_ratio=1.5", "scheduler.minimum_ratio=1.5 must lie in [0, 1]"),
    ("scheduler.warmup=-1", "scheduler.warmup=-1"),
    ("scheduler.total=0", "scheduler.total=0"),
    ("scheduler=wsd trainer.max_steps=99", "scheduler.decay=100 is longer than the schedule's 99 steps"),
    ("trainer.max_steps=0", "trainer.max_steps=0 must be at least 1"),
    ("trainer.log_interval=0", "trainer.log_interval=0 must be at least 1"),
    ("trainer.val_interval=0", "trainer.val_interval=0 must be at least 1"),
    ("trainer.gradient_clip=0", "trainer.gradient_clip=0.0 must be above 0"),
    ("trainer.gradient_clip=nan", "trainer.gradient_clip=nan"),
    ("checkpoint.keep=0", "checkpoint.keep=0 must be at least 1"),
    ("checkpoint.every_n_steps=0", "checkpoint.every_n_steps=0 must be at least 1"),
    ("cluster.threads=0", "cluster.threads=0 must be at least 1"),
    ("parallelism.tp=0", "parallelism.tp=0 must be at least 1"),
]


@pytest.mark.parametrize(("overrides", "words"), REFUSED, ids=[overrides for overrides, _ in REFUSED])
def test_given_one_fault_when_validated_then_exactly_that_is_named_with_its_value(overrides: str, words: str) -> None:
    errors = _errors(*overrides.split())
    pattern = ".*".join(re.escape(part) for part in words.split(".*"))
    assert len(errors) == 1, errors
    assert re.search(pattern, errors[0]), errors


def test_given_the_recipe_when_validated_then_there_is_nothing_to_say() -> None:
    assert _errors() == []


def test_given_many_faults_when_refused_then_all_are_listed_at_once() -> None:
    many = _errors("model.head_dim=63", "data.seq_len=2000", "optimizer.lr=-1", "trainer.max_steps=0", world=3)
    assert len(many) == 5  # and 8 sequences on 3 data ranks
    with pytest.raises(ConfigError) as caught:
        refuse([Problem(Severity.error, message) for message in many])
    assert str(caught.value).splitlines() == many


def test_given_only_warnings_when_refused_then_nothing_is_raised() -> None:
    refuse([Problem(Severity.warning, "costly"), Problem(Severity.note, "by the way")])


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_given_a_machine_with_so_many_gpus_when_the_default_recipe_starts_then_it_is_legal(world: int) -> None:
    assert validate(config(), world) == []
