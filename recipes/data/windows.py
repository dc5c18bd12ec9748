"""Windows of `seq_len` tokens, and which of them make up a step: a pure function of (seed, step)."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from models.errors import ConfigError
from models.loss import IGNORE
from models.random import key_of, philox, uniform
from parallel.config import MaskPattern, SyntheticData
from recipes.data.store import TokenStore

Sample = dict[str, np.ndarray]
"""tokens, labels, positions, document_ids: each int64 (seq_len,). labels[i] is what follows tokens[i], or IGNORE."""


class Windows(Protocol):
    """A finite set of samples that can be had by number."""

    def __len__(self) -> int: ...

    def sample(self, index: int, place: float) -> Sample:
        """Sample `index`; `place` in [0, 1) says where in its step's batch it stands."""
        ...


class PackedWindows:
    """Documents end to end, cut every `seq_len` tokens: no token is left out but the tail of the whole.

    With `document_mask`, positions count from the first token that the window has of each document, since nothing
    before it can be attended to; without, they count through the window.
    """

    def __init__(self, store: TokenStore, seq_len: int, document_mask: bool, split: str) -> None:
        self.store, self.seq_len, self.document_mask = store, seq_len, document_mask
        self.count = max(store.tokens - 1, 0) // seq_len
        if self.count == 0:
            raise ConfigError(
                f"data.seq_len={seq_len}: the {split} split has {store.tokens} tokens in all, and a window needs "
                f"{seq_len + 1}. Write data.seq_len={max(store.tokens - 1, 1)} or less, or give more text."
            )

    def __len__(self) -> int:
        return self.count

    def sample(self, index: int, place: float) -> Sample:
        start = index * self.seq_len
        tokens = self.store.read(start, start + self.seq_len + 1)
        places = np.arange(start, start + self.seq_len)
        document_ids = np.searchsorted(self.store.document_starts, places, side="right") - 1
        first = start if not self.document_mask else np.maximum(self.store.document_starts[document_ids], start)
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "positions": places - first,
            "document_ids": document_ids - document_ids[0],
        }


class SyntheticWindows:
    """Random tokens, documents and masks: sample i is a function of (seed, split, i)."""

    def __init__(self, config: SyntheticData, seed: int, split: str) -> None:
        self.config, self.key = config, key_of(seed, "synthetic", split)
        self.count = config.sequences if split == "train" else config.validation_sequences

    def __len__(self) -> int:
        return self.count

    def sample(self, index: int, place: float) -> Sample:
        length = self.config.seq_len
        position = torch.arange(length + 1)
        number, zero = torch.full_like(position, index), torch.zeros_like(position)
        words = philox((position, number, zero, zero), self.key)
        tokens = (words[0] % self.config.vocab_size).numpy()
        labels = tokens[1:].copy()
        share = float(uniform(philox((zero[:1], number[:1], zero[:1] + 1, zero[:1]), self.key)[0]))
        if self.config.mask != MaskPattern.none:
            labels[uniform(words[1])[1:].numpy() < share] = IGNORE
        if self.config.mask == MaskPattern.empty_first and place < 0.5:
            labels[:] = IGNORE
        begins = np.zeros(length, bool)
        if self.config.document_len:
            begins = uniform(words[2])[:length].numpy() < 1.0 / self.config.document_len
        begins[0] = True
        document_ids = np.cumsum(begins) - 1
        positions = np.arange(length)
        if self.config.document_mask:
            positions = positions - np.flatnonzero(begins)[document_ids]
        return {"tokens": tokens[:-1], "labels": labels, "positions": positions, "document_ids": document_ids}


class StepOrder:
    """Which samples make up step k (counted from 0): a seeded permutation per epoch, read `global_batch` at a time."""

    def __init__(self, samples: int, global_batch: int, seed: int) -> None:
        self.samples, self.global_batch, self.seed = samples, global_batch, seed
        self._epoch, self._permutation = -1, np.zeros(0, np.int64)

    def permutation(self, epoch: int) -> np.ndarray:
        """The order of all samples in an epoch, int64 (samples,): sorted by random 64-bit keys."""
        if epoch != self._epoch:
            index = torch.arange(self.samples)
            zero = torch.zeros_like(index)
            words = philox((index, zero, zero, zero), key_of(self.seed, "order", epoch))
            self._permutation = ((words[0] << 31) ^ words[1]).argsort(stable=True).numpy()
            self._epoch = epoch
        return self._permutation

    def __getitem__(self, step: int) -> np.ndarray:
        """The samples of a step in their order, int64 (global_batch,)."""
        consumed = np.arange(step * self.global_batch, (step + 1) * self.global_batch)
        epochs, places = np.divmod(consumed, self.samples)
        return np.concatenate([self.permutation(int(e))[places[epochs == e]] for e in np.unique(epochs)])


class TrainBatches(torch.utils.data.Dataset):
    """Step k's batch for one data rank: item k is a dict of int64 tensors (global_batch / data ranks, seq_len).

    `sample` is each sequence's place in the whole step's batch, so that dropout knows it; `ids` is its number in the
    data, so that a run can show what it was trained on.
    """

    def __init__(self, windows: Windows, order: StepOrder, data_rank: int, data_ranks: int, repeat: int | None) -> None:
        self.windows, self.order, self.repeat = windows, order, repeat
        size = order.global_batch // data_ranks
        self.places = range(data_rank * size, (data_rank + 1) * size)

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        step = step if self.repeat is None else step % self.repeat
        ids = self.order[step]
        samples = [self.windows.sample(int(ids[place]), place / len(ids)) for place in self.places]
        batch = stack(samples)
        batch["sample"] = torch.tensor(self.places)
        batch["ids"] = torch.from_numpy(ids[self.places.start : self.places.stop].copy())
        return batch


class ValidationBatches(torch.utils.data.Dataset):
    """The validation split in order, `micro_batch` sequences a batch and data rank.

    Every rank has the same number of batches: what is missing at the end is filled with sequences without labels, so
    that no sample is lost or counted twice and no rank waits for another.
    """

    def __init__(self, windows: Windows, count: int, micro_batch: int, data_rank: int, data_ranks: int) -> None:
        self.windows, self.count, self.micro_batch = windows, count, micro_batch
        self.data_rank, self.data_ranks = data_rank, data_ranks

    def __len__(self) -> int:
        return -(-self.count // (self.micro_batch * self.data_ranks))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= len(self):
            raise IndexError(index)
        first = (index * self.data_ranks + self.data_rank) * self.micro_batch
        samples = []
        for number in range(first, first + self.micro_batch):
            sample = self.windows.sample(min(number, self.count - 1), 1.0)
            if number >= self.count:
                sample["labels"] = np.full_like(sample["labels"], IGNORE)
            samples.append(sample)
        return stack(samples)


def stack(samples: list[Sample]) -> dict[str, Tensor]:
    """Samples as a batch of int64 tensors (samples, seq_len)."""
    return {key: torch.from_numpy(np.stack([sample[key] for sample in samples])) for key in samples[0]}
