"""`recipes.plan` as a person runs it, and the recipes: each is legal, fits its device, and is what its lock says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parallel.devices import DEVICES
from parallel.layout import resolve, world_size
from parallel.plan.plan import make_plan
from parallel.plan.problems import Severity
from parallel.plan.repair import changed, world_after
from parallel.plan.validate import errors, validate
from recipes.locks import all_differences, compose_recipe, recipes, under_lock
from recipes.plan_dry_run import corners, expected_traffic, run
from tests.recipes.commands import ROOT
from tests.recipes.commands import run as command
from tests.small import config

SHIPPED = recipes()
LARGE = [name for name in SHIPPED if not name.startswith("tiny")]


def test_given_the_blog_posts_175b_when_planned_then_it_is_refused_with_what_is_legal() -> None:
    made = config(
        *("model=gpt3_175b", "data=synthetic", "precision=bf16", "cluster=a100_ib", "cluster.nodes=128"),
        *("parallelism.tp=12", "parallelism.pp=4", "parallelism.zero=1", "parallelism.recompute=full"),
        *("parallelism.sequence_parallel=true", "parallelism.loss_parallel=true", "model.vocab_size=50304"),
        *("data.seq_len=2048", "data.global_batch=1536", "data.micro_batch=1"),
    )
    (problem,) = [problem for problem in validate(made, 1024) if problem.severity == Severity.error]
    assert "pp=4 * dp_replicate=1 * dp_shard=21 * cp=1 * tp=12 make 1008 ranks, but there are 1024" in problem.message
    assert "leave 21.33 for dp_shard" in problem.message
    assert {"parallelism.tp": 8} in problem.repairs
    for repair in problem.repairs:
        other = changed(made, repair)
        assert errors(other, world_after(made, other, 1024)) == []


@pytest.mark.parametrize("name", SHIPPED)
def test_given_a_recipe_when_planned_then_it_is_legal_and_fits(name: str) -> None:
    made = config(f"recipe={name}")
    plan = make_plan(made, world_size(made.cluster, made.parallelism, 0))
    assert plan.fits in (True, None)
    assert plan.layout.world == (made.recipe.devices or 1)
    assert plan.bubble < 0.2


@pytest.mark.parametrize("name", LARGE)
def test_given_a_large_recipe_when_a_corner_is_dry_run_at_its_world_size_then_it_fits_as_the_formulas_say(
    name: str,
) -> None:
    made = config(f"recipe={name}")
    layout = resolve(made.parallelism, world_size(made.cluster, made.parallelism, 0))
    rounds = 2 * layout.pp if layout.pp > 1 else 2
    short = config(f"recipe={name}", f"data.global_batch={rounds * layout.dp * made.data.micro_batch}")
    plan = make_plan(short, layout.world)
    rank = corners(layout)[-1]
    done = run(short, layout, rank)
    held = plan.pipeline_ranks[done.coordinates["pp"]]
    assert held.memory.total == pytest.approx(done.total, rel=0.03)
    assert sorted(done.traffic, key=str) == sorted(expected_traffic(done, short, layout), key=str)
    assert held.memory.needed < DEVICES[made.cluster.device].memory_bytes


def test_given_the_recipes_when_compared_with_their_locks_then_nothing_differs() -> None:
    assert all_differences() == []


def test_given_a_recipe_that_changed_when_compared_with_its_lock_then_the_key_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from recipes import locks

    lock = json.loads((locks.FOLDER / "tiny.lock").read_text())
    lock["config"]["optimizer.lr"] = 1.0
    (tmp_path / "tiny.lock").write_text(json.dumps(lock))
    monkeypatch.setattr(locks, "FOLDER", tmp_path)
    assert locks.differences("tiny") == ["tiny: config.optimizer.lr is 0.003, locked 1.0"]


def test_given_a_run_of_a_recipe_when_asked_for_its_lock_then_what_was_overridden_is_named() -> None:
    locked = under_lock(compose_recipe("tiny"))
    assert locked is not None
    assert locked["changed"] == []
    other = under_lock(compose_recipe("tiny", "optimizer.lr=0.1", "cluster.watch.step_limit_s=5", "optimizer=sgd"))
    assert other is not None
    assert other["config_sha256"] == locked["config_sha256"]
    assert {"optimizer.lr", "optimizer.name"} < set(other["changed"])
    assert not any(key.startswith("cluster.") for key in other["changed"])
    assert under_lock(compose_recipe("tiny", "recipe.name=own")) is None


def test_given_a_cluster_when_planned_then_the_answer_needs_no_torch_and_leaves_a_page(tmp_path: Path) -> None:
    arguments = ["recipe=dense_70b", "cluster=h100_ib", "cluster.nodes=8", f"plan.out={tmp_path}"]
    probe = "import atexit, sys, runpy; sys.argv = ['plan', *sys.argv[1:]]; "
    probe += (
        "atexit.register(lambda: print('torch' in sys.modules)); runpy.run_module('recipes.plan', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe, *arguments], cwd=ROOT, capture_output=True, text=True, env=os.environ, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False", done.stdout
    assert "recipe=dense_70b is meant for 32 devices, and the cluster has 64" in done.stdout
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["world"] == 64
    assert [rank["layers"][0] for rank in plan["pipeline_ranks"]] == [0, 20, 40, 60]
    page = (tmp_path / "plan.html").read_text()
    assert page.count("<svg") == 4
    assert "http" not in page.replace("http-equiv", "")


def test_given_a_dry_run_when_asked_for_then_it_is_printed_beside_the_formula() -> None:
    done = command(
        "plan", "recipe=tiny", "data=synthetic", "parallelism.dp_shard=4", "plan.dry_run=true", "plan.rank=3"
    )
    assert done.returncode == 0, done.stderr
    assert "dry run of rank 3 (dp_shard 3)" in done.stdout
    assert "as the formula says" in done.stdout
    assert "BUT" not in done.stdout


def test_given_a_rank_that_does_not_exist_when_dry_run_then_it_is_refused() -> None:
    done = command("plan", "recipe=tiny", "plan.dry_run=true", "plan.rank=7")
    assert done.returncode == 2
    assert "plan.rank=7 is neither corners nor a rank from 0 to 0" in done.stderr


def test_given_a_recompute_mode_that_experts_refuse_when_planned_then_no_memory_is_promised_for_it() -> None:
    for recipe, modes in (("dense_7b", 5), ("mixtral_8x7b", 4)):
        made = config(f"recipe={recipe}")
        rank = make_plan(made, world_size(made.cluster, made.parallelism, 0)).pipeline_ranks[0]
        assert len(rank.by_recompute) == modes
        assert ("selective:ops" in rank.by_recompute) == (recipe == "dense_7b")
