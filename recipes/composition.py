"""What goes with what, asked of `validate` cell by cell: the tables of parallel/README.md.

Every cell is a config of a small decoder. tests/distributed/test_composition.py trains those that work.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from models.config import ModelConfig, MoEConfig
from parallel.config import Config, ContextMethod, PipelineSchedule
from parallel.layout import world_size
from parallel.plan.problems import Problem, Severity
from parallel.plan.repair import changed
from parallel.plan.validate import validate
from parallel.stages import SINGLE

Changes = dict[str, Any]

SEQUENCE_PARALLEL = {"parallelism.tp": 2, "parallelism.sequence_parallel": True, "parallelism.loss_parallel": True}
EXPERTS = MoEConfig(num_experts=4, num_experts_per_tok=2, intermediate_size=16)
DOCUMENTS, WINDOW = {"data.document_mask": True}, {"model.sliding_window": 5}


def schedule(name: str) -> Changes:
    """A pipeline of two ranks."""
    virtual = 1 if name in SINGLE else 2
    return {
        "parallelism.pp": 2,
        "parallelism.pp_schedule": PipelineSchedule[name],
        "parallelism.virtual_stages": virtual,
    }


def method(name: str) -> Changes:
    """Sequences cut over two ranks, or four where the method needs them."""
    changes: Changes = {"parallelism.cp": 2, "parallelism.cp_method": ContextMethod[name]}
    return changes | ({"parallelism.cp": 4, "parallelism.cp_ulysses": 2} if name == "ulysses_ring" else {})


AXES: dict[str, Changes] = {
    "tp": {"parallelism.tp": 2},
    "tp, sequence_parallel": SEQUENCE_PARALLEL,
    "pp": schedule("1f1b"),
    "cp": method("ring"),
    "ep": {"model.moe": EXPERTS, "parallelism.ep": 2},
}
ZERO: dict[str, Changes] = {
    f"zero={stage}": {"parallelism.zero": stage, "parallelism.dp_shard": 2} for stage in range(4)
}
SCHEDULES: dict[str, Changes] = {name: schedule(name) for name in PipelineSchedule if name != "csv"}
METHODS: dict[str, Changes] = {"no cp": {}} | {name: method(name) for name in ContextMethod}
MASKS: dict[str, Changes] = {"causal": {}, "window": WINDOW, "documents": DOCUMENTS, "both": DOCUMENTS | WINDOW}
RECOMPUTE: dict[str, Changes] = {
    f"recompute={mode}": {"parallelism.recompute": mode}
    for mode in ("full", "selective:attention", "selective:mlp", "selective:ops")
}
COMPILE: dict[str, Changes] = {"compile": {"trainer.compile": True}}
ENDS: dict[str, Changes] = {"tied": {"model.tie_word_embeddings": True}, "dropout": {"model.dropout": 0.1}}

GRIDS: dict[str, tuple[dict[str, Changes], dict[str, Changes]]] = {
    "axes": (AXES, AXES | ZERO),
    "schedules": (
        {"no pp": {}} | {"no pp, compile": COMPILE["compile"]} | SCHEDULES,
        RECOMPUTE | COMPILE | {name: AXES[name] for name in ("tp, sequence_parallel", "cp", "ep")} | ZERO | ENDS,
    ),
    "attention": (METHODS, MASKS | RECOMPUTE | COMPILE | {"ep": AXES["ep"]} | ENDS),
}
"""Rows and columns of each table."""


def cell(base: Config, *changes: Changes) -> tuple[Config, int, list[Problem]]:
    """The config of several changes at once, its ranks, and the problems for which it is refused.

    The decoder has four layers; sequences are synthetic and short, of several documents.
    """
    model = ModelConfig("small", 64, 32, 48, 4, 4, 4, 8, 64)
    data = replace(base.data, seq_len=16, global_batch=8, micro_batch=1)
    config = replace(base, model=model, data=data)
    for each in changes:
        config = changed(config, each)
    parallelism = config.parallelism
    needed = -(-parallelism.ep // (parallelism.cp * parallelism.tp))
    config = changed(config, {"parallelism.dp_shard": max(parallelism.dp_shard, needed)})
    world = world_size(config.cluster, config.parallelism, 0)
    return config, world, [problem for problem in validate(config, world) if problem.severity == Severity.error]


def cells(grid: str) -> Iterator[tuple[str, str, Changes, Changes]]:
    """Each pair of a grid: names and changes. Where columns are rows too, each pair comes once."""
    rows, columns = GRIDS[grid]
    for number, (row, changes) in enumerate(rows.items()):
        for column, more in columns.items():
            if column not in [*rows][: number + 1]:
                yield row, column, changes, more
