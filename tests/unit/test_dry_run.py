"""A dry run and the formulas say the same: weights, gradients, state and traffic exactly, the peak of memory nearly."""

import math
import random

import pytest

from parallel.config import BYTES, RECOMPUTE_MODES
from parallel.layout import resolve
from parallel.plan.memory import KINDS, peak
from parallel.plan.validate import errors
from parallel.plan.weights import held_parameters
from recipes.plan_dry_run import expected_traffic, run
from tests.small import config

MODEL = (
    *("model.hidden_size=512", "model.intermediate_size=1408", "model.head_dim=64", "model.num_attention_heads=8"),
    *("model.num_key_value_heads=4", "data.seq_len=1024", "data.global_batch=16", "data.micro_batch=1"),
    *("precision=bf16", "data=synthetic", "model.vocab_size=4096"),
)
SPLIT = "tp=2 sequence_parallel=true loss_parallel=true"
CASES = [
    (1, "", "precision=fp32"),
    (8, "zero=3", ""),
    (8, "zero=3 recompute=full", ""),
    (8, "zero=3 recompute=full prefetch=3", "model.num_hidden_layers=8"),
    (4, "zero=3 recompute=full prefetch=2 pp=2", "model.num_hidden_layers=8"),
    (4, "zero=3 recompute=full prefetch=2 ep=2", "model=tiny_moe model.num_hidden_layers=8"),
    (8, "zero=2 recompute=selective:ops", "data.micro_batch=2"),
    (4, "zero=1 recompute=selective:attention", ""),
    (4, "zero=0 recompute=selective:mlp", "precision=fp64 optimizer=sgd optimizer.momentum=0.9"),
    (8, f"zero=3 {SPLIT}", "model.tie_word_embeddings=true"),
    (8, f"zero=1 {SPLIT} dp_replicate=2", "model.qk_norm=true model.dropout=0.1"),
    (8, f"zero=1 {SPLIT} recompute=full:2", "model.dropout=0.1"),
    (8, "zero=1 tp=2 ep=2 recompute=full", "model=tiny_moe model.dropout=0.1"),
    (16, f"zero=1 pp=4 {SPLIT}", ""),
    (16, f"zero=3 pp=4 {SPLIT} recompute=full", ""),
    (8, f"zero=1 pp=4 {SPLIT} pp_schedule=gpipe", ""),
    (1, "", "model.sliding_window=256"),
    (2, "zero=3", "data.document_mask=true"),
    (8, f"zero=1 {SPLIT} cp=2", ""),
    (8, f"zero=1 pp=2 {SPLIT} pp_schedule=interleaved_1f1b virtual_stages=2", ""),
    (8, f"zero=1 pp=2 {SPLIT} pp_schedule=interleaved_zero_bubble virtual_stages=2", ""),
    (8, f"zero=1 pp=2 {SPLIT} pp_schedule=zbv_zero_bubble virtual_stages=2", "model.tie_word_embeddings=true"),
    (4, "zero=1 pp=4 pp_schedule=zbv_zero_bubble virtual_stages=2", "model.num_hidden_layers=16"),
    (4, "zero=1 pp=2 pp_schedule=interleaved_zero_bubble virtual_stages=2", "precision=fp32"),
    (4, "zero=0 pp=4 pp_schedule=dualpipe_v virtual_stages=2", "model.num_hidden_layers=8"),
    (4, "zero=1 pp=4 pp_schedule=interleaved_1f1b virtual_stages=2 recompute=full", "model.num_hidden_layers=8"),
    *[
        (4, f"zero={zero} pp=2 pp_schedule=interleaved_1f1b virtual_stages=4", "model.num_hidden_layers=8")
        for zero in (1, 3)
    ],
    (8, "zero=3 pp=2 ep=2 tp=2", "model=tiny_moe"),
    (8, "zero=1 pp=4 ep=2", "model=tiny_moe model.num_hidden_layers=8"),
    (8, "zero=3 pp=2 ep=4 recompute=full", "model=tiny_moe"),
    (8, "zero=3 pp=2 ep=2 recompute=full", "model=tiny_moe model.num_hidden_layers=8"),
    (4, f"zero=2 {SPLIT} ep=2 etp=2", "model=tiny_moe"),
    (4, "zero=1 ep=2 recompute=selective:attention", "model=tiny_moe model.moe.shared_intermediate_size=256"),
    (8, "zero=1 pp=2 ep=2 pp_schedule=zbv_zero_bubble virtual_stages=2", "model=tiny_moe model.num_hidden_layers=8"),
]


def _check(world: int, split: str, other: str, rank: int) -> None:
    made = config(*MODEL, *(f"parallelism.{part}" for part in split.split()), *other.split())
    layout = resolve(made.parallelism, world)
    done = run(made, layout, rank)
    master = BYTES[made.precision.master]
    held = sum(held_parameters(made, layout, done.coordinates).values()) * master
    formula = peak(made, layout, done.coordinates)
    assert done.parameters == done.gradients == held
    assert done.optimizer == formula.optimizer
    assert sorted(done.traffic, key=str) == sorted(expected_traffic(done, made, layout), key=str)
    assert formula.total == pytest.approx(done.total, rel=0.03)
    activations = done.peak.get("activations", 0) + done.peak.get("loss", 0)
    assert formula.activations + formula.loss == pytest.approx(activations, rel=0.03)
    assert set(done.peak) <= set(KINDS)


@pytest.mark.parametrize(("world", "split", "other"), CASES, ids=[f"{w} {s} {o}" for w, s, o in CASES])
def test_given_a_layout_when_dry_run_then_the_formulas_agree(world: int, split: str, other: str) -> None:
    ranks = {0, world - 1} if "pp=" in split else {0}
    for rank in ranks:
        _check(world, split, other, rank)


def test_given_a_rank_with_smaller_shards_when_dry_run_then_what_it_holds_is_exact() -> None:
    made = config(*MODEL, "parallelism.zero=3", "parallelism.tp=2", "data.global_batch=20")
    layout = resolve(made.parallelism, 10)
    done = run(made, layout, 9)
    assert done.parameters == 4 * sum(held_parameters(made, layout, done.coordinates).values())
    assert done.parameters < run(made, layout, 0).parameters


EXPERTS = ("", "model.moe.shared_intermediate_size=256", "model.moe.capacity_factor=1.25")
MIXTURES = [
    f"model=tiny_moe ep={ep} etp={etp} {other}" for ep, etp in ((1, 1), (2, 1), (4, 1), (2, 2)) for other in EXPERTS
]
DRAWN = [
    ["model=tiny", "model.dropout=0.1", "model.tie_word_embeddings=true", "model.qk_norm=true", *MIXTURES],
    [
        *("pp=1", "pp=1", "pp=2 pp_schedule=1f1b", "pp=4 pp_schedule=1f1b", "pp=2 pp_schedule=gpipe"),
        *(f"pp=2 pp_schedule=interleaved_1f1b virtual_stages={stages}" for stages in (2, 4)),
        *(f"pp={pp} pp_schedule=zbv_zero_bubble virtual_stages=2" for pp in (2, 4)),
        "pp=4 pp_schedule=interleaved_zero_bubble virtual_stages=2",
    ],
    ["tp=1", "tp=1", "tp=2", SPLIT, SPLIT.replace("tp=2", "tp=4")],
    ["cp=1", "cp=1", "cp=2"],
    ["zero=0", "zero=1", "zero=2", "zero=3"],
    [f"recompute={mode}" for mode in RECOMPUTE_MODES],
    [f"model.num_hidden_layers={layers}" for layers in (4, 8, 16)],
    ["data.micro_batch=1", "data.micro_batch=2", "precision=fp32"],
]
"""One of each together with all others; what is not legal is drawn again."""


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
def test_given_layouts_drawn_over_all_axes_when_dry_run_then_traffic_is_exact_and_memory_near(seed: int) -> None:
    draw, found = random.Random(seed), {}
    while len(found) < 30:
        words = " ".join(draw.choice(choices) for choices in DRAWN).split()
        words = [word if "." in word or word.startswith(("model", "prec")) else f"parallelism.{word}" for word in words]
        sizes = [int(dict(word.split("=") for word in words)[f"parallelism.{axis}"]) for axis in ("tp", "pp", "cp")]
        made, world = config(*MODEL, *words), math.prod(sizes) * draw.choice([1, 2, 4])
        if errors(made, world):
            continue
        layout = resolve(made.parallelism, world)
        rank = draw.choice([0, world - 1])
        done = run(made, layout, rank)
        assert sorted(done.traffic, key=str) == sorted(expected_traffic(done, made, layout), key=str), words
        found[" ".join(words)] = peak(made, layout, done.coordinates).total / done.total - 1.0
    far = {words: error for words, error in found.items() if abs(error) > 0.03}
    assert len(far) <= 3, far
    assert max(map(abs, found.values())) < 0.08, far
