"""Training a mixture of experts as a person runs it: telemetry, resuming with biases, and experts that stay busy."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.commands import MICRO, assert_same_weights, metrics, run, start, succeed

EXPERTS = [
    *MICRO,
    *("model=tiny_moe", "callbacks=experts", "model.moe.intermediate_size=16", "model.moe.bias_update_rate=0.01"),
    # In fp64, since in less a token near the border between two experts may go to either.
    "precision=fp64",
    *("model.moe.z_loss=0.001", "callbacks.expert_load.every_n_steps=2", "logger=none"),
]


@pytest.mark.long  # minutes, which the default suite does not have
def test_given_experts_over_ranks_when_trained_then_telemetry_says_what_routers_did(tmp_path: Path) -> None:
    done = run("train", *EXPERTS, f"run.dir={tmp_path}/two", "parallelism.ep=2", "parallelism.dp_shard=2")
    assert done.returncode == 0, done.stderr
    assert "note: parallelism.ep=2: a rank keeps" in done.stderr + done.stdout
    succeed(start("train", *EXPERTS, f"run.dir={tmp_path}/one"))
    for one, two in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert one["exchange_bytes"] == 0 < two["exchange_bytes"]
        assert two["expert_load_max"] == max(two["expert_load_max_by_layer"]) >= 1 >= two["expert_load_min"]
        assert len(two["expert_load_cv_by_layer"]) == 2
        assert 0 < two["router_entropy"] < 2.08  # the logarithm of 8
        assert two["dropped_fraction"] == 0
        assert two["expert_bias_range"] <= 0.02 * two["step"]
        for key in ("balance_loss", "z_loss", "expert_load_max", "router_entropy", "expert_bias_range", "loss"):
            assert one[key] == pytest.approx(two[key], rel=1e-9)
    (line,) = (tmp_path / "two" / "expert_load.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert found["step"] == 2
    assert [sum(layer) for layer in found["load"]] == [4 * 32 * 2] * 2


def test_given_biases_when_resumed_then_the_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    long = [part for part in EXPERTS if not part.startswith("trainer.max_steps")]
    long.append("scheduler=constant")
    whole = start("train", *long, "trainer.max_steps=4", f"run.dir={tmp_path}/whole", "logger=wandb")
    succeed(start("train", *long, "trainer.max_steps=2", f"run.dir={tmp_path}/half"))
    rest = start("train", *long, "trainer.max_steps=4", f"run.dir={tmp_path}/rest", f"ckpt={tmp_path}/half")
    succeed(whole, rest)
    assert metrics(tmp_path / "whole")[2:] == metrics(tmp_path / "rest")
    assert metrics(tmp_path / "rest")[-1]["expert_bias_range"] > 0
    (logged,) = (tmp_path / "whole").glob("wandb/offline-run-*/*.wandb")
    assert logged.read_bytes().count(b'"histogram"') >= 2  # of the load of all experts, in steps 2 and 4
    assert_same_weights(tmp_path / "whole", tmp_path / "rest")


def load_at_the_end(folder: Path) -> float:
    """The load of the busiest expert of any layer over its layer's mean, on average over the last 20 steps."""
    rows: list[dict[str, Any]] = metrics(folder)[-20:]
    return sum(row["expert_load_max"] for row in rows) / len(rows)


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("name", "settings", "even"),
    [
        ("loss", [], True),
        ("none", ["model.moe.balance_loss=0"], False),
        ("sigmoid", ["model.moe.balance_loss=0", "model.moe.score=sigmoid"], False),
        # Weights of a sigmoid, as those have who made the method (Wang et al., 2024, arXiv:2408.15664): of a softmax,
        # which ever fewer experts share, biases follow only after more steps than these.
        (
            "bias",
            ["model.moe.balance_loss=0", "model.moe.score=sigmoid", "model.moe.bias_update_rate=0.003"],
            True,
        ),
    ],
)
def test_given_300_steps_on_text_when_balanced_then_no_expert_has_half_more_than_its_share(
    tmp_path: Path, name: str, settings: list[str], even: bool
) -> None:
    overrides = ["recipe=tiny_moe", "trainer.max_steps=300", "trainer.val_interval=null", "logger=none"]
    process = start("train", *overrides, "cluster.device=cpu", f"run.dir={tmp_path}/{name}", *settings)
    done = process.finish(2400)
    assert done.returncode == 0, done.stdout + done.stderr
    found = load_at_the_end(tmp_path / name)
    print(f"{name}: the busiest expert has {found:.2f} of its share")
    assert (found < 1.5) == even
