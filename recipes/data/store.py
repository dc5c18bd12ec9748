"""Tokens on disk: prepared once per fingerprint, whole or not at all, and memory-mapped Arrow from then on."""

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from models.errors import ConfigError
from parallel.config import DataConfig
from recipes.data.documents import Document, Source, open_source
from recipes.data.tokenizer import Tokenizer, identity, load_tokenizer, make_tokenizer

SPLITS = ("train", "validation")
_FORMAT = 1  # raise when the meaning of what is stored changes
_BATCH = 64
log = logging.getLogger("quintet.data")


class TokenStore:
    """The tokens of one split, all documents in a row, without reading them into memory."""

    def __init__(self, chunks: list[np.ndarray], document_starts: np.ndarray) -> None:
        self.chunks = chunks
        self.document_starts = document_starts
        """Position of each document's first token, int64 and rising."""
        self._ends = np.cumsum([len(chunk) for chunk in chunks])
        self.tokens = int(self._ends[-1]) if chunks else 0

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start to stop - 1, int64."""
        pieces = []
        for index in range(int(np.searchsorted(self._ends, start, side="right")), len(self.chunks)):
            first = int(self._ends[index]) - len(self.chunks[index])
            if first >= stop:
                break
            pieces.append(self.chunks[index][max(start - first, 0) : stop - first])
        return np.concatenate(pieces).astype(np.int64)


def fingerprint(config: DataConfig, source: Source) -> str:
    """What prepared data depends on: the documents, the tokenizer and the split. Not on seq_len or batch sizes."""
    parts = [_FORMAT, source.description, identity(config.tokenizer), config.validation_fraction]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def prepare(config: DataConfig) -> Path:
    """The folder of a config's prepared tokens, made now if it is not there.

    It is written under another name and renamed when it is complete, so that a folder of the right name is always
    whole; processes that need the same one wait for the first. Raises ConfigError for data that cannot be used.
    """
    source = open_source(config)
    root = Path(config.cache_dir)
    folder = root / f"{config.name}-{fingerprint(config, source)}"
    if folder.exists():
        return folder
    from filelock import FileLock

    root.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            for torn in root.glob(f"{folder.name}.partial-*"):
                shutil.rmtree(torn)
            partial = root / f"{folder.name}.partial-{os.getpid()}"
            try:
                _write(config, source, partial)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            partial.rename(folder)
    return folder


def open_split(folder: Path, split: str) -> TokenStore:
    """One split of prepared data, memory-mapped."""
    from datasets import load_from_disk

    column = load_from_disk(str(folder / split)).data.column("tokens")
    chunks, starts, first = [], [], 0
    for chunk in column.chunks:
        offsets = chunk.offsets.to_numpy()
        chunks.append(chunk.flatten().to_numpy(zero_copy_only=True))
        starts.append(first + offsets[:-1].astype(np.int64) - int(offsets[0]))
        first += len(chunks[-1])
    return TokenStore(chunks, np.concatenate(starts) if starts else np.zeros(0, np.int64))


def open_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that made the prepared data."""
    return load_tokenizer(folder / "tokenizer.json")


def held_out(name: str, fraction: float) -> bool:
    """Whether a document belongs to the validation split: by a hash of its name, so that adding others moves none."""
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return number / 2**64 < fraction


def _write(config: DataConfig, source: Source, folder: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    folder.mkdir()
    started = time.monotonic()
    log.info("preparing data=%s (once; kept in %s)", config.name, config.cache_dir)
    train_texts = (text for name, text in source.read() if not held_out(name, config.validation_fraction))
    tokenizer = make_tokenizer(config.tokenizer, train_texts)
    tokenizer.save(folder / "tokenizer.json")
    width = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    features = datasets.Features({"name": datasets.Value("string"), "tokens": datasets.List(datasets.Value(width))})
    progress = _Progress()
    for split in SPLITS:
        rows = _rows(config, source, tokenizer, split, progress)
        first = next(rows, None)
        if first is None:
            raise ConfigError(
                f"data={config.name} has no document for the {split} split: documents go to a split by a hash of their "
                f"name, data.validation_fraction={config.validation_fraction} of them to validation. Give more "
                f"documents (rows or files), or another fraction."
            )
        datasets.Dataset.from_generator(
            partial(chain, [first], rows), features=features, cache_dir=str(folder / "building"), fingerprint=split
        ).save_to_disk(str(folder / split))
    shutil.rmtree(folder / "building")
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
    log.info("prepared %s in %.1f s", progress, time.monotonic() - started)


def _rows(
    config: DataConfig, source: Source, tokenizer: Tokenizer, split: str, progress: "_Progress"
) -> Iterator[dict[str, Any]]:
    batch: list[Document] = []

    def encoded() -> Iterator[dict[str, Any]]:
        tokens = tokenizer.encode([text for _, text in batch])
        for (name, text), ids in zip(batch, tokens, strict=True):
            progress.add(text, len(ids))
            yield {"name": name, "tokens": ids}
        batch.clear()

    for name, text in source.read():
        if text and held_out(name, config.validation_fraction) == (split == "validation"):
            batch.append((name, text))
        if len(batch) == _BATCH:
            yield from encoded()
    yield from encoded()


class _Progress:
    """Counts what was prepared and says so every few seconds."""

    def __init__(self) -> None:
        self.documents = self.characters = self.tokens = 0
        self._said = time.monotonic()

    def add(self, text: str, tokens: int) -> None:
        self.documents += 1
        self.characters += len(text)
        self.tokens += tokens
        if time.monotonic() - self._said > 3:
            self._said = time.monotonic()
            log.info("preparing: %s", self)

    def __str__(self) -> str:
        millions = f"{self.characters / 1e6:,.1f} M characters, {self.tokens / 1e6:,.1f} M tokens"
        return f"{self.documents:,} documents, {millions}"
