"""Text to token ids and back: bytes, or byte-level BPE (Sennrich et al., 2016) learned from the training split.

Both are one `tokenizers` tokenizer over the 256 bytes, so that both are saved, loaded and exported the same way; the
byte tokenizer is the one without merges. Token 256 is the document mark that begins every document.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from models.errors import ConfigError
from parallel.config import TokenizerConfig, TokenizerKind

DOCUMENT_MARK = "<|document|>"


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE: itself where it prints, else 256 + n."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


class Tokenizer:
    """Encodes documents, decodes tokens, and knows how many bytes each token stands for."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        backend.encode_special_tokens = True  # text that spells the document mark is text
        self.vocab_size = backend.get_vocab_size()
        self.document_mark = backend.get_vocab()[DOCUMENT_MARK]
        self.merges = self.vocab_size - 257

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Each document as uint32 tokens, the document mark first."""
        if self.merges == 0:
            bodies: Iterable[np.ndarray] = (np.frombuffer(text.encode(errors="replace"), np.uint8) for text in texts)
        else:
            bodies = (
                np.asarray(item.ids, np.uint32) for item in self.backend.encode_batch_fast(_whole_characters(texts))
            )
        mark = np.array([self.document_mark], np.uint32)
        return [np.concatenate((mark, body.astype(np.uint32))) for body in bodies]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens; bytes that are no valid UTF-8 become the replacement character."""
        return self.backend.decode([int(token) for token in tokens if token < self.vocab_size])

    def bytes_per_token(self) -> np.ndarray:
        """How many bytes of text each token stands for, int64 (vocab_size,); the document mark stands for none."""
        lengths = np.zeros(self.vocab_size, np.int64)
        for token, index in self.backend.get_vocab().items():
            lengths[index] = 0 if index == self.document_mark else len(token)
        return lengths

    def save(self, path: Path) -> None:
        """Write the tokenizer as Hugging Face's tokenizer.json."""
        path.write_text(self.backend.to_str(), encoding="utf-8")


def _whole_characters(texts: Sequence[str]) -> list[str]:
    """Texts without lone surrogates, which are no character and have no bytes."""
    return [text.encode(errors="replace").decode() for text in texts]


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json. Raises ConfigError where there is none."""
    try:
        return Tokenizer(Backend.from_str(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; the run directory has no tokenizer.") from error


def make_tokenizer(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """The byte tokenizer, or a BPE of config.vocab_size tokens learned from `texts` (read once, only for BPE)."""
    alphabet = _byte_alphabet()
    vocabulary = {character: byte for byte, character in enumerate(alphabet)}
    if config.kind == TokenizerKind.bpe:
        # A trainer numbers tokens in its own order; learned merges are put behind ours, so that byte b is token b.
        learner = Backend(models.BPE())
        learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        assert config.vocab_size is not None
        trainer = trainers.BpeTrainer(vocab_size=config.vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
        learner.train_from_iterator(texts, trainer)
        merges = [tuple(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]
    else:
        merges = []
    vocabulary[DOCUMENT_MARK] = 256
    for first, second in merges:
        vocabulary.setdefault(first + second, len(vocabulary))
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([DOCUMENT_MARK])
    return Tokenizer(backend)
