"""Windows of the packed documents, and which of them make up a step."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from models.errors import ConfigError
from models.loss import IGNORE
from parallel.config import MaskPattern, SyntheticData
from recipes.data.module import Data
from recipes.data.store import TokenStore
from recipes.data.windows import (
    PackedWindows,
    Sample,
    StepOrder,
    SyntheticWindows,
    TrainBatches,
    ValidationBatches,
    Windows,
)
from tests.small import config

SYNTHETIC = SyntheticData(
    name="synthetic", seq_len=32, global_batch=8, micro_batch=2, cache_dir="", vocab_size=50, document_len=6
)


def _store(lengths: list[int], chunks: int = 3) -> TokenStore:
    """Documents of the given lengths; token i of the whole is the number i, stored in several chunks."""
    stream = np.arange(sum(lengths), dtype=np.uint16)
    return TokenStore(np.array_split(stream, chunks), np.cumsum([0, *lengths[:-1]]))


def _windows(store: TokenStore, seq_len: int, document_mask: bool = False) -> PackedWindows:
    return PackedWindows(store, seq_len, document_mask, "train")


@pytest.mark.parametrize("seq_len", [1, 4, 7, 22])
@pytest.mark.parametrize("chunks", [1, 5])
def test_given_documents_when_packed_then_windows_reassemble_the_stream_but_for_its_tail(
    seq_len: int, chunks: int
) -> None:
    windows = _windows(_store([5, 1, 9, 8], chunks), seq_len)
    samples = [windows.sample(index, 0.0) for index in range(len(windows))]
    tokens = np.concatenate([sample["tokens"] for sample in samples])
    labels = np.concatenate([sample["labels"] for sample in samples])
    assert np.array_equal(tokens, np.arange(len(windows) * seq_len))
    assert np.array_equal(labels, tokens + 1)  # the next token, over a window's end too
    assert 23 - 1 - len(tokens) < seq_len
    assert all(part.dtype == np.int64 and part.shape == (seq_len,) for sample in samples for part in sample.values())


def test_given_windows_when_cut_inside_documents_then_ids_and_positions_begin_anew_in_each() -> None:
    # Documents hold tokens 0-4, 5, 6-14, 15-22; windows hold tokens 0-6, 7-13, 14-20.
    masked = _windows(_store([5, 1, 9, 8]), 7, document_mask=True)
    plain = _windows(_store([5, 1, 9, 8]), 7, document_mask=False)
    ids = [[0, 0, 0, 0, 0, 1, 2], [0] * 7, [0, 1, 1, 1, 1, 1, 1]]
    positions = [[0, 1, 2, 3, 4, 0, 0], [0, 1, 2, 3, 4, 5, 6], [0, 0, 1, 2, 3, 4, 5]]
    for index in range(3):
        assert masked.sample(index, 0.0)["document_ids"].tolist() == ids[index]
        assert masked.sample(index, 0.0)["positions"].tolist() == positions[index]
        assert plain.sample(index, 0.0)["positions"].tolist() == list(range(7))


def test_given_documents_shorter_than_a_window_when_packed_then_they_share_one() -> None:
    sample = _windows(_store([2, 2, 2, 2, 2]), 8, document_mask=True).sample(0, 0.0)
    assert sample["document_ids"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert sample["positions"].tolist() == [0, 1] * 4


@pytest.mark.parametrize("tokens", [0, 1, 7, 8])
def test_given_less_text_than_a_window_when_opened_then_it_is_refused_with_the_longest_that_fits(tokens: int) -> None:
    store = TokenStore([np.arange(tokens)] if tokens else [], np.zeros(1, np.int64))
    with pytest.raises(ConfigError, match=f"data.seq_len=8: the train split has {tokens} tokens .* needs 9"):
        _windows(store, 8)
    assert len(_windows(_store([9]), 8)) == 1


@pytest.mark.parametrize(("samples", "batch"), [(12, 4), (13, 4), (3, 8), (1, 2)])
def test_given_a_seed_when_steps_are_drawn_then_every_epoch_is_a_permutation_across_step_ends(
    samples: int, batch: int
) -> None:
    order = StepOrder(samples, batch, seed=5)
    drawn = np.concatenate([order[step] for step in range(-(-4 * samples // batch))])[: 4 * samples]
    epochs = drawn.reshape(4, samples)
    assert all(sorted(epoch) == list(range(samples)) for epoch in epochs)
    if samples > 3:
        assert len({tuple(epoch) for epoch in epochs}) == 4


def test_given_any_step_when_asked_alone_then_it_is_what_it_is_in_order() -> None:
    in_order = StepOrder(13, 4, seed=5)
    steps = [in_order[step].tolist() for step in range(10)]
    assert [StepOrder(13, 4, seed=5)[step].tolist() for step in reversed(range(10))] == steps[::-1]
    assert [StepOrder(13, 4, seed=6)[step].tolist() for step in range(10)] != steps


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_given_data_ranks_when_they_read_a_step_then_together_they_have_the_whole_batch_in_order(ranks: int) -> None:
    windows, order = SyntheticWindows(SYNTHETIC, 0, "train"), StepOrder(100, 8, seed=0)
    whole = TrainBatches(windows, order, 0, 1, None)[3]
    parts = [TrainBatches(windows, order, rank, ranks, None)[3] for rank in range(ranks)]
    for key, value in whole.items():
        assert torch.equal(torch.cat([part[key] for part in parts]), value), key
    assert whole["sample"].tolist() == list(range(8))
    assert whole["ids"].tolist() == order[3].tolist()


def test_given_overfitting_when_steps_pass_then_the_first_ones_come_again() -> None:
    batches = TrainBatches(SyntheticWindows(SYNTHETIC, 0, "train"), StepOrder(100, 8, seed=0), 0, 1, repeat=2)
    assert torch.equal(batches[5]["tokens"], batches[1]["tokens"])
    assert not torch.equal(batches[0]["tokens"], batches[1]["tokens"])


class _Numbers:
    """Windows whose sample i holds the number i."""

    def __len__(self) -> int:
        return 1000

    def sample(self, index: int, place: float) -> Sample:
        return {"tokens": np.full(3, index), "labels": np.full(3, index)}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 7, 12, 13])
@pytest.mark.parametrize("micro_batch", [1, 3])
def test_given_ranks_and_an_uneven_count_when_validated_then_each_sample_counts_once_and_no_rank_waits(
    ranks: int, count: int, micro_batch: int
) -> None:
    windows: Windows = _Numbers()
    parts = [ValidationBatches(windows, count, micro_batch, rank, ranks) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    counted = [
        int(row[0])
        for part in parts
        for index in range(len(part))
        for row in part[index]["labels"]
        if (row != IGNORE).any()
    ]
    assert sorted(counted) == list(range(count))
    with pytest.raises(IndexError):
        parts[0][len(parts[0])]


def test_given_workers_when_loaded_then_batches_and_their_order_are_those_without() -> None:
    base = (
        "data=synthetic",
        "data.sequences=20",
        "data.validation_sequences=5",
        "data.seq_len=16",
        "data.micro_batch=2",
    )
    loaded = []
    for workers in (0, 2):
        data = Data(config(*base, "trainer.max_steps=7", f"data.workers={workers}"))
        data.load()
        data.first_step = data.trained_steps = 2
        loaded.append([*data.train_dataloader(), *data.val_dataloader()])
    assert len(loaded[0]) == 5 + 3
    for one, two in zip(*loaded, strict=True):
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one)


def test_given_synthetic_data_when_sampled_then_it_depends_on_seed_split_and_number_alone() -> None:
    def sample(seed: int = 0, split: str = "train", index: int = 3) -> np.ndarray:
        return SyntheticWindows(SYNTHETIC, seed, split).sample(index, 0.0)["tokens"]

    base = sample()
    assert np.array_equal(base, SyntheticWindows(SYNTHETIC, 0, "train").sample(3, 0.9)["tokens"])
    others = [sample(seed=1), sample(split="validation"), sample(index=4)]
    assert all(np.mean(base == other) < 0.3 for other in others)
    assert base.min() >= 0
    assert base.max() < 50


def test_given_synthetic_documents_when_sampled_then_labels_follow_and_positions_restart_where_masked() -> None:
    sample = SyntheticWindows(replace(SYNTHETIC, document_mask=True), 0, "train").sample(0, 0.0)
    assert np.array_equal(sample["labels"][:-1], sample["tokens"][1:])
    starts = np.flatnonzero(np.diff(sample["document_ids"], prepend=-1))
    assert len(starts) > 2
    assert np.all(sample["positions"][starts] == 0)
    assert np.all(np.diff(sample["positions"])[np.setdiff1d(np.arange(31), starts - 1)] == 1)


def test_given_mask_patterns_when_sampled_then_uneven_shares_differ_and_empty_first_has_no_labels_in_front() -> None:
    def shares(mask: MaskPattern, place: float) -> list[float]:
        windows = SyntheticWindows(replace(SYNTHETIC, mask=mask, seq_len=400), 0, "train")
        return [float(np.mean(windows.sample(index, place)["labels"] == IGNORE)) for index in range(12)]

    assert shares(MaskPattern.none, 0.0) == [0.0] * 12
    uneven = shares(MaskPattern.uneven, 0.0)
    assert len(set(uneven)) > 8
    assert max(uneven) - min(uneven) > 0.5
    assert shares(MaskPattern.empty_first, 0.49) == [1.0] * 12
    assert shares(MaskPattern.empty_first, 0.5) == uneven


def test_given_another_global_batch_when_resumed_then_data_goes_on_after_the_samples_consumed() -> None:
    # S-31: ten steps of 8 are twenty of 4; nothing is read twice and nothing is left out.
    data = Data(config("data=synthetic", "data.global_batch=4", "data.micro_batch=2", "trainer.max_steps=24"))
    data.load()
    data.load_state_dict({"consumed_samples": 80, "trained_steps": 10})
    assert list(data.train_dataloader().sampler) == list(range(20, 34))
    with pytest.raises(ConfigError, match="global_batch=4"):
        data.load_state_dict({"consumed_samples": 78, "trained_steps": 10})
