"""Every fault of a config at once, with numbers and what to write instead; and what is suggested is accepted."""

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from models.errors import ConfigError
from parallel.layout import Layout, resolve, world_size
from parallel.plan.memory import rank_memory
from parallel.plan.problems import Problem, Severity, refuse
from parallel.plan.rules.fit import worst
from parallel.plan.rules.idle import IDLE
from parallel.plan.validate import validate
from tests.small import config, options


def _errors(*overrides: str, world: int = 1) -> list[str]:
    return [problem.message for problem in validate(config("data=synthetic", *overrides), world)]


def _arithmetic(batch: int, micro: int, layout: Layout) -> list[Problem]:
    default = config("data=synthetic")
    data = replace(default.data, global_batch=batch, micro_batch=micro)
    split = replace(default.parallelism, dp_replicate=layout.dp_replicate, dp_shard=layout.dp_shard)
    problems = validate(replace(default, data=data, parallelism=split), layout.world)
    return [problem for problem in problems if problem.severity == Severity.error]


def test_given_any_batch_sizes_when_refused_then_the_message_has_the_numbers_and_each_suggestion_is_accepted() -> None:
    draw = random.Random(0)
    refused = with_micro = 0
    for _ in range(1000):
        batch, micro = draw.randint(1, 200), draw.randint(1, 40)
        layout = Layout(dp_replicate=draw.choice([1, 2, 3]), dp_shard=draw.randint(1, 6))
        problems = _arithmetic(batch, micro, layout)
        assert bool(problems) == bool(batch % (micro * layout.dp))
        if not problems:
            continue
        refused += 1
        (problem,) = problems
        assert f"data.global_batch={batch} " in problem.message
        assert f"data.micro_batch={micro} * {layout.dp} data ranks" in problem.message
        batches = [repair["data.global_batch"] for repair in problem.repairs if "data.global_batch" in repair]
        micros = [repair["data.micro_batch"] for repair in problem.repairs if "data.micro_batch" in repair]
        assert batches
        for suggestion in batches:
            assert f"{suggestion}" in problem.message.split("Write ")[1]
            assert _arithmetic(suggestion, micro, layout) == [], problem.message
            assert abs(suggestion - batch) < micro * layout.dp
        for suggestion in micros:
            assert _arithmetic(batch, suggestion, layout) == [], problem.message
        with_micro += bool(micros)
        assert bool(micros) == (batch % layout.dp == 0)
    assert refused > 500
    assert with_micro > 50


@pytest.mark.timeout(20)
def test_given_a_very_large_batch_when_refused_then_the_answer_comes_at_once() -> None:
    assert "data.global_batch=1000000007 " in _arithmetic(1_000_000_007, 16, Layout(dp_shard=1))[0].message


REFUSED = [
    (
        "model.num_key_value_heads=3",
        "model.num_key_value_heads=3 must divide .*=4.*Write model.num_key_value_heads=4 or 2",
    ),
    ("model.head_dim=63", "model.head_dim=63 must be even.*Write model.head_dim=64"),
    ("model.hidden_size=0", "model.hidden_size=0 must be at least 1"),
    ("model.dropout=1.0", "model.dropout=1.0 must lie in [0, 1)"),
    ("model.dropout=nan", "model.dropout=nan"),
    ("model.rms_norm_eps=nan", "model.rms_norm_eps=nan must be above 0.*Write model.rms_norm_eps=1e-05"),
    ("model.rope.theta=inf", "model.rope.theta=inf must be above 0"),
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
    ("data=stdlib data.tokenizer.kind=file", "kind=file reads data.tokenizer.path, which is not set"),
    ("data=stdlib data.tokenizer.path=x", "data.tokenizer.path=x is for data.tokenizer.kind=file; the kind is byte"),
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
    ("checkpoint.every_n_minutes=0", "checkpoint.every_n_minutes=0.0 must be above 0"),
    ("checkpoint.best=-1", "checkpoint.best=-1 must be 0 or more"),
    ("checkpoint.best=1 trainer.val_interval=null", "checkpoint.best=1 goes by checkpoint.metric=val/loss"),
    ("checkpoint.metric=loss", "checkpoint.metric=loss is none of val/loss"),
    ("checkpoint.mirror=bucket/run", "checkpoint.mirror=bucket/run is no address such as s3://bucket/run"),
    ("model.lora.rank=8", "model.lora.rank=8 trains adapters of weights that stand still"),
    ("model.lora.rank=-1", "model.lora.rank=-1 must be 0"),
    ("weights=x model.lora.rank=8 model.lora.targets=[head]", "model.lora.targets=['head'] must be some of q_proj"),
    ("cluster.threads=0", "cluster.threads=0 must be at least 1"),
    ("parallelism.tp=0", "parallelism.tp=0 must be at least 1"),
]


@pytest.mark.parametrize(("overrides", "words"), REFUSED, ids=[overrides for overrides, _ in REFUSED])
def test_given_one_fault_when_validated_then_exactly_that_is_named_with_its_value(overrides: str, words: str) -> None:
    errors = _errors(*overrides.split())
    pattern = ".*".join(re.escape(part) for part in words.split(".*"))
    assert len(errors) == 1, errors
    assert re.search(pattern, errors[0]), errors


PIPELINES = [
    (4, "pp=4", "virtual_stages=2", "virtual_stages=2: pp_schedule=1f1b has one stage per rank.*interleaved_1f1b"),
    (4, "pp=4", "pp_schedule=dualpipe_v", "virtual_stages=1: pp_schedule=dualpipe_v has two stages per rank"),
    (4, "pp=4", "pp_schedule=interleaved_1f1b", "virtual_stages=1: pp_schedule=interleaved_1f1b interleaves several"),
    (
        8,
        "pp=8",
        "pp_schedule=gpipe",
        "pp=8 * virtual_stages=1 = 8 stages, but model.num_hidden_layers=4.*Write parallelism.pp=4",
    ),
    (2, "pp=2", "pp_split=[3,2]", "pp_split=[3, 2] must name 2 stages.*4 layers in all.*names 2 of 5"),
    (2, "pp=2", "pp_split=fair", "pp_split=fair is none of balanced, even, or a list"),
    (1, "pp=1", "virtual_stages=2", "virtual_stages=2 needs parallelism.pp above 1"),
    (2, "pp=2", "pp_schedule=csv", "pp_schedule=csv needs a file"),
    (2, "pp=2", "pp_schedule=csv parallelism.pp_schedule_file=/nowhere.csv", "/nowhere.csv: No such file"),
    (
        *(2, "pp=2", "pp_schedule=zbv_zero_bubble parallelism.virtual_stages=2 parallelism.recompute=full"),
        "recompute=full with pp_schedule=zbv_zero_bubble.*pp_schedule=interleaved_1f1b",
    ),
]


ASYNC = [
    (("tp=1",), "async_tp=true needs parallelism.tp above 1"),
    (("tp=2",), "overlaps the gathers and sums of sequence parallelism"),
    (("tp=2", "sequence_parallel=true"), "works in the memory of GPUs; cluster.device=cpu"),
]


@pytest.mark.parametrize(("split", "words"), ASYNC, ids=[words for _, words in ASYNC])
def test_given_asynchronous_tp_without_what_it_needs_when_validated_then_that_is_demanded(
    split: tuple[str, ...], words: str
) -> None:
    keys = [f"parallelism.{key}" for key in (*split, "async_tp=true")]
    device = "cpu" if "sequence_parallel=true" in split else "h100"
    errors = _errors(*keys, f"cluster.device={device}", world=int(split[0][-1]))
    assert len(errors) == 1, errors
    assert words in errors[0]


@pytest.mark.parametrize(("world", "pp", "other", "words"), PIPELINES, ids=[f"{c[1]} {c[2]}" for c in PIPELINES])
def test_given_a_faulty_pipeline_when_validated_then_the_fault_is_named(
    world: int, pp: str, other: str, words: str
) -> None:
    errors = _errors(f"parallelism.{pp}", *f"parallelism.{other}".split(), "data.micro_batch=1", world=world)
    pattern = ".*".join(re.escape(part) for part in words.split(".*"))
    assert len(errors) == 1, errors
    assert re.search(pattern, errors[0]), errors


FILES = [
    ("0F0,0B0\n1F0,1X0\n", "line 2: '1X0' is no action"),
    ("0F0,0B0\n", "has 1 lines; parallelism.pp=2 ranks"),
    ("0F0,0B0\n0F0,0B0\n", "puts stages [[0], [0]] on the ranks"),
    ("0F0,0B0\n1F0\n", "for stage 1 and microbatch 0 of 1, the actions {'F': 1, 'B': 0"),
    ("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n", "has 0F1, but there are microbatches 0 to 0"),
    ("0B0,0F0\n1F0,1B0\n", "cannot go on"),
]


@pytest.mark.parametrize(("text", "words"), FILES, ids=[words for _, words in FILES])
def test_given_a_faulty_schedule_file_when_validated_then_the_fault_is_named(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text(text)
    pipeline = ("parallelism.pp=2", "parallelism.pp_schedule=csv", f"parallelism.pp_schedule_file={path}")
    errors = _errors(*pipeline, "data.global_batch=1", "data.micro_batch=1", world=2)
    assert len(errors) == 1, errors
    assert words in errors[0]


MIXTURES = [
    ("parallelism.ep=2", 2, "parallelism.ep=2: model=tiny has no experts.*Write parallelism.ep=1"),
    ("model.moe.z_loss=0.1", 1, "model.moe.num_experts=0 is a dense model"),
    (
        "model=tiny_moe parallelism.ep=16",
        16,
        "ep=16 must divide .*=8.*more ranks than experts.*[1, 2, 4, 8]",
    ),
    ("model=tiny_moe parallelism.ep=3", 3, "parallelism.ep=3 must divide model.moe.num_experts=8.*one of [1]"),
    ("model=tiny_moe parallelism.ep=4", 2, "parallelism.ep=4 * etp=1 must divide .* = 2,.*among [1, 2]"),
    ("model=tiny_moe parallelism.etp=3", 3, "parallelism.etp=3 must divide model.moe.intermediate_size=352.*[1]"),
    ("model=tiny_moe parallelism.zero=1", 3, "zero=1 splits experts along model.hidden_size=256 .* 3 ranks"),
    (
        "model=tiny_moe model.moe.capacity_factor=0.01",
        1,
        "capacity_factor=0.01 gives .*less than.*Write .*0.015625",
    ),
    ("model=tiny_moe model.moe.capacity_factor=0", 1, "capacity_factor=0.0 must be above 0"),
    ("model=tiny_moe model.moe.drop_order=position", 1, "drop_order=position needs a capacity"),
    ("model=tiny_moe model.moe.num_groups=3", 1, "num_groups=3 must divide .*=8.*Write model.moe.num_groups=4 or 2"),
    (
        "model=tiny_moe model.moe.num_groups=4 model.moe.top_groups=5",
        1,
        "top_groups=5 must be 1 to .*=4",
    ),
    ("model=tiny_moe model.moe.num_groups=8", 1, "num_experts_per_tok=2 must be 1 to 1, .*num_groups=8 * top_groups=1"),
    ("model=tiny_moe model.moe.num_experts_per_tok=9", 1, "num_experts_per_tok=9 must be 1 to 8"),
    ("model=tiny_moe model.moe.dense_layers=[4]", 1, "dense_layers=[4] must name layers from 0 to 3"),
    ("model=tiny_moe model.moe.dense_layers=[0,1,2,3]", 1, "each once and not all"),
    ("model=tiny_moe model.moe.jitter=1", 1, "model.moe.jitter=1.0 must lie in [0, 1)"),
    ("model=tiny_moe model.moe.balance_loss=-1", 1, "model.moe.balance_loss=-1.0"),
    ("model=tiny_moe model.mlp_bias=true", 1, "model.mlp_bias=true: experts have no biases"),
    (
        "model=tiny_moe parallelism.recompute=selective:ops",
        1,
        "selective:ops asks.*Write .*selective:attention",
    ),
    ("model=tiny_moe optimizer=muon", 1, "optimizer=muon has no rule for stacks of experts"),
    ("model=tiny_moe parallelism.ep=4 parallelism.ep_nodes=3", 4, "ep_nodes=3 must divide parallelism.ep=4.*[1, 2, 4]"),
]


@pytest.mark.parametrize(("overrides", "world", "words"), MIXTURES, ids=[overrides for overrides, _, _ in MIXTURES])
def test_given_a_mixture_that_does_not_fit_when_validated_then_exactly_that_is_named(
    overrides: str, world: int, words: str
) -> None:
    problems = validate(config("data=synthetic", f"data.global_batch={world}", *overrides.split()), world)
    errors = [problem.message for problem in problems if problem.severity == Severity.error]
    pattern = ".*".join(re.escape(part) for part in words.split(".*"))
    assert len(errors) == 1, errors
    assert re.search(pattern, errors[0]), errors


def test_given_experts_over_ranks_when_validated_then_the_bytes_against_experts_on_every_rank_are_said() -> None:
    overrides = ["model=tiny_moe", "parallelism.ep=4", "data=synthetic", "data.global_batch=8"]
    overrides += ["data.micro_batch=1", "model.moe.balance_scope=global_batch"]
    said = {problem.severity: problem.message for problem in validate(config(*overrides), 4)}
    assert re.search(r"ep=4: a rank keeps \S+ GB .* sends \S+ GB .* with ep=1 \S+ GB", said[Severity.note])
    assert "2 microbatches a step takes one forward pass more" in said[Severity.warning]
    whole = validate(config(*overrides, "data.micro_batch=2"), 4)
    assert [problem.severity for problem in whole] == [Severity.note]


def test_given_the_recipe_when_validated_then_there_is_nothing_to_say() -> None:
    assert _errors() == []


def test_given_many_faults_when_refused_then_all_are_listed_at_once() -> None:
    shape = ["model.head_dim=63", "model.dropout=2", "model.num_key_value_heads=3"]
    many = _errors(*shape, "data.seq_len=2000", "optimizer.lr=-1", "trainer.max_steps=0", world=3)
    assert len(many) == 7  # and 8 sequences on 3 data ranks
    with pytest.raises(ConfigError) as caught:
        refuse([Problem(Severity.error, message) for message in many])
    assert str(caught.value).splitlines() == many


@pytest.mark.parametrize(("normalised", "said"), [("true", ["experts-one-weight"]), ("false", [])])
def test_given_one_expert_a_token_with_the_weight_1_when_validated_then_the_idle_router_is_named(
    normalised: str, said: list[str]
) -> None:
    overrides = ["num_experts_per_tok=1", "balance_loss=0", f"norm_topk_prob={normalised}"]
    problems = validate(config("data=synthetic", "model=tiny_moe", *(f"model.moe.{part}" for part in overrides)), 1)
    assert [problem.rule for problem in problems if problem.rule == "experts-one-weight"] == said
    assert all(problem.severity == Severity.warning for problem in problems if problem.rule == "experts-one-weight")


def test_given_only_warnings_when_refused_then_nothing_is_raised() -> None:
    refuse([Problem(Severity.warning, "costly"), Problem(Severity.note, "by the way")])


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_given_a_machine_with_so_many_gpus_when_the_default_recipe_starts_then_it_is_legal(world: int) -> None:
    assert validate(config(), world) == []


def _warnings(*overrides: str) -> list[str]:
    problems = validate(config("data=synthetic", *overrides), 1)
    assert all(problem.severity != Severity.error for problem in problems), problems
    return [problem.message for problem in problems if problem.rule == "no-effect"]


IDLE_VALUES = {
    "parallelism.pp_schedule": "gpipe",
    "parallelism.pp_schedule_file": "/x.csv",
    "parallelism.cp_method": "ulysses",
    "parallelism.cp_padding": "false",
    "model.lora.targets": "[q_proj]",
    "model.rope.original_max_position_embeddings": "100",
    "model.rope.low_freq_factor": "0.5",
    "data.tokenizer.kind": "bpe",
    "data.tokenizer.vocab_size": "300",
    "scheduler.decay": "10",
    "checkpoint.metric": "val/perplexity",
    "checkpoint.mode": "max",
}


@pytest.mark.parametrize("key", [key for key, _, _ in IDLE])
def test_given_a_key_that_nothing_reads_when_set_then_it_is_said_where_it_is_for(key: str) -> None:
    constant = ["scheduler=constant"] if key == "scheduler.minimum_ratio" else []
    assert _warnings(*constant) == []
    [message] = _warnings(*constant, f"{key}={IDLE_VALUES.get(key, '7.0' if 'ratio' not in key else '0.5')}")
    assert re.match(rf"{re.escape(key)}=\S+ does nothing here: it is for ", message), message


@pytest.mark.parametrize("name", options("recipe"))
def test_given_a_recipe_when_validated_then_every_key_of_it_does_something(name: str) -> None:
    made = config(f"recipe={name}")
    problems = validate(made, world_size(made.cluster, made.parallelism, 0))
    assert [problem.message for problem in problems if problem.rule == "no-effect"] == []


@pytest.mark.parametrize(
    ("overrides", "lost"),
    [
        ("", True),
        ("checkpoint.every_n_steps=50", False),
        ("checkpoint.every_n_steps=500 trainer.max_steps=400", True),
        ("checkpoint.every_n_minutes=10", False),
        ("checkpoint.best=1", False),
        ("checkpoint.best=1 trainer.val_interval=500 trainer.max_steps=400", True),
    ],
)
def test_given_no_checkpoint_at_the_end_when_nothing_else_writes_one_then_the_loss_is_said(
    overrides: str, lost: bool
) -> None:
    problems = validate(config("data=synthetic", "checkpoint.at_end=false", *overrides.split()), 1)
    assert any(problem.rule == "no-checkpoint" for problem in problems) == lost


def test_given_a_pipeline_whose_middle_is_heavy_when_validated_then_it_is_refused_for_the_rank_that_does_not_fit() -> (
    None
):
    split = "parallelism.pp=4 parallelism.tp=8 parallelism.sequence_parallel=true parallelism.pp_split=[5,5,65,5]"
    problems = validate(config("recipe=dense_70b", *split.split()), 32)
    [fault] = [problem for problem in problems if problem.rule == "memory"]
    assert fault.severity == Severity.error
    assert fault.message.startswith("a rank at 2 along pp needs ")


@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"]
)
@pytest.mark.parametrize("model", ["tiny", "tiny_moe model.moe.dense_layers=[0,1,9]"])
def test_given_any_pipeline_when_the_fullest_rank_is_looked_for_then_no_other_is_fuller(
    schedule: str, model: str
) -> None:
    virtual = 1 if schedule in ("gpipe", "1f1b") else 2
    overrides = f"model={model} model.num_hidden_layers=16 data.global_batch=16 data.micro_batch=1 precision=bf16"
    split = f"parallelism.pp=4 parallelism.pp_schedule={schedule} parallelism.virtual_stages={virtual}"
    made = config("data=synthetic", *overrides.split(), *split.split())
    layout = resolve(made.parallelism, 8)
    sizes = [rank_memory(made, layout, rank).total for rank in range(4)]
    assert worst(made, layout)[1].total == max(sizes)


def test_given_offload_when_planned_then_weights_and_state_are_not_the_gpus() -> None:
    layout, words = Layout(dp_shard=8), ["recipe=dense_7b", "parallelism.tp=1", "parallelism.zero=3"]
    words += ["parallelism.sequence_parallel=false", "parallelism.loss_parallel=false"]
    kept, away = (rank_memory(config(*words, f"parallelism.offload={on}"), layout, 0) for on in ("false", "true"))
    assert (away.parameters, away.optimizer) == (0, 0)
    assert away.gathered == kept.gathered > 0
    assert away.total < kept.total - kept.parameters - kept.optimizer
    words += ["parallelism.offload=true", "data.global_batch=8", "data.micro_batch=1"]
    [note] = [problem for problem in validate(config(*words), 8) if problem.rule == "offload-host"]
    assert "about 107.8 GB a node" in note.message  # 6.74e9 parameters: weight, gradient and two moments in float32
