"""Random configs over all groups, legal and not, for asking `validate` about."""

import random
from dataclasses import replace
from typing import Any

from parallel.config import Config, ContextMethod, FloatType, PipelineSchedule
from parallel.plan.repair import changed
from tests.small import config

GROUPS = {
    "data": ["synthetic", "stdlib"],
    "optimizer": ["adamw", "sgd", "muon"],
    "scheduler": ["cosine", "wsd", "constant"],
    "precision": ["fp32", "bf16", "fp64"],
    "model": ["tiny", "tiny_gqa", "llama2_7b", "llama3_70b", "gpt3_175b", "mistral_7b", "tiny_moe", "mixtral_8x7b"],
    "cluster": ["local", "h100_ib", "a100_ib"],
}
VALUES: dict[str, list[Any]] = {
    "parallelism.tp": [1, 1, 2, 2, 3, 4, 8, 12, 0],
    "parallelism.sequence_parallel": [True, False],
    "parallelism.loss_parallel": [True, False],
    "parallelism.pp": [1, 1, 2, 3, 4, 8, 16, -1],
    "parallelism.pp_schedule": [schedule for schedule in PipelineSchedule if schedule != "csv"],
    "parallelism.virtual_stages": [1, 1, 2, 2, 3, 0],
    "parallelism.pp_split": ["balanced", "even", "fair", [1, 3], [2, 2]],
    "parallelism.cp": [1, 1, 1, 2, 3, 4],
    "parallelism.cp_method": list(ContextMethod),
    "parallelism.cp_ulysses": [None, None, 2, 3],
    "parallelism.cp_padding": [True, False],
    "parallelism.ep": [1, 1, 1, 2, 3, 4],
    "parallelism.etp": [1, 1, 2, 3],
    "parallelism.ep_nodes": [1, 1, 2],
    "parallelism.async_tp": [False, False, True],
    "parallelism.dp_replicate": [1, 1, 2, 3, 0],
    "parallelism.dp_shard": [-1, -1, 1, 2, 5, 0],
    "parallelism.zero": [0, 1, 2, 3, 3, 4, -1],
    "parallelism.recompute": ["none", "none", "full", "full:2", "selective:ops", "selective:mlp", "half", "full:0"],
    "parallelism.prefetch": [0, 0, 0, 1, -1],
    "parallelism.offload": [False, False, False, True],
    "data.seq_len": [256, 255, 1024, 4096, 16, 7, 0, 200000],
    "data.global_batch": [1, 8, 12, 32, 64, 100, 1536, 0, -4],
    "data.micro_batch": [1, 1, 2, 3, 4, 0],
    "data.workers": [0, 2, -1],
    "data.validation_fraction": [0.02, 0.0, 1.0, float("nan")],
    "model.num_hidden_layers": [4, 3, 30, 80, 0],
    "model.num_attention_heads": [4, 8, 6, 0],
    "model.num_key_value_heads": [1, 2, 4, 3, 0],
    "model.head_dim": [64, 63, 80],
    "model.vocab_size": [260, 257, 100, 50257, 128256],
    "model.dropout": [0.0, 0.1, 1.0, -0.1],
    "model.tie_word_embeddings": [True, False],
    "model.qk_norm": [True, False],
    "model.sliding_window": [None, 128, 0],
    "model.moe.num_experts_per_tok": [2, 1, 9, 0],
    "model.moe.capacity_factor": [None, 1.25, 0.01, -1.0],
    "model.moe.num_groups": [1, 2, 3],
    "model.moe.balance_loss": [0.0, 0.01, -1.0],
    "optimizer.lr": [1e-3, -1.0, float("nan"), float("inf")],
    "optimizer.weight_decay": [0.1, -0.1],
    "scheduler.warmup": [20, -1, 100000],
    "scheduler.decay": [0, 100, -5, 100000],
    "scheduler.total": [None, 0, 50],
    "scheduler.minimum_ratio": [0.1, 1.5],
    "trainer.compile": [False, True],
    "trainer.max_steps": [100, 5, 0, -1],
    "trainer.gradient_clip": [1.0, None, 0.0, float("nan")],
    "trainer.val_interval": [None, 10, 0],
    "trainer.log_interval": [10, 0],
    "checkpoint.keep": [2, 0],
    "checkpoint.every_n_steps": [None, 10, 0],
    "cluster.nodes": [1, 1, 2, 3, 8, 0],
    "cluster.threads": [None, 2, 0],
    "run.id": ["x", "a b", "../up", ""],
    "precision.master": [FloatType.float32, FloatType.bfloat16],
    "precision.reduce": [FloatType.float32, FloatType.float64],
}
WORLDS = [1, 2, 3, 4, 6, 8]


def draw(seed: int) -> tuple[Config, int]:
    """A config and how many ranks there are; about as often legal as not."""
    random_ = random.Random(seed)
    made = config()
    for group in sorted(GROUPS):
        if random_.random() < 0.3:
            option = random_.choice(GROUPS[group])
            made = replace(made, **{group: getattr(config(f"{group}={option}"), group)})
    for key in random_.sample(sorted(VALUES), random_.randint(0, 9)):
        made = changed(made, {key: random_.choice(VALUES[key])})
    if made.cluster.devices_per_node is not None:
        return made, max(made.cluster.nodes, 1) * made.cluster.devices_per_node
    return made, random_.choice(WORLDS) * max(made.cluster.nodes, 1)
