"""Text to token ids and back: bytes, byte-level BPE (Sennrich et al., 2016) learned from the training split, or a
published model's own.

Each is one `tokenizers` tokenizer, so that all are saved, loaded and exported the same way. Ours are over the 256
bytes, the byte tokenizer without merges; their token 256 is the document mark that begins every document. Of another's,
tokenizer_config.json beside it says which tokens begin and end a text.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from models.errors import ConfigError
from parallel.config import TokenizerConfig, TokenizerKind

DOCUMENT_MARK = "<|document|>"
DESCRIPTION = "tokenizer_config.json"


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE: itself where it prints, else 256 + n."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


class Tokenizer:
    """Encodes documents, decodes tokens, and knows how many bytes each token stands for."""

    def __init__(self, backend: Backend, mark: str = DOCUMENT_MARK, end: str | None = None) -> None:
        """A document is `mark`, its text, and `end` where there is one."""
        self.backend, self.mark, self.end = backend, mark, end
        backend.encode_special_tokens = True  # text that spells the document mark is text
        vocabulary = backend.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1
        self.document_mark = vocabulary[mark]
        self.stops = {self.document_mark} | ({vocabulary[end]} if end else set())
        """Tokens after which a text does not go on."""
        self._bytes_alone = mark == DOCUMENT_MARK and self.vocab_size == 257

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Each document as uint32 tokens, the document mark first."""
        last = np.array([] if self.end is None else [self.backend.token_to_id(self.end)], np.uint32)
        return [np.concatenate((opened, last)) for opened in self.open(texts)]

    def open(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Each text as the beginning of a document, which is to go on."""
        if self._bytes_alone:
            bodies: Iterable[np.ndarray] = (np.frombuffer(text.encode(errors="replace"), np.uint8) for text in texts)
        else:
            # Without what a model's own would put around a text: that is here and in `encode`.
            encoded = self.backend.encode_batch_fast(_whole_characters(texts), add_special_tokens=False)
            bodies = (np.asarray(item.ids, np.uint32) for item in encoded)
        mark = np.array([self.document_mark], np.uint32)
        return [np.concatenate((mark, body.astype(np.uint32))) for body in bodies]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens; bytes that are no valid UTF-8 become the replacement character."""
        return self.backend.decode([int(token) for token in tokens if token < self.vocab_size])

    def bytes_per_token(self) -> np.ndarray:
        """How many bytes of text each token stands for, int64 (vocab_size,); special tokens stand for none."""
        lengths = np.zeros(self.vocab_size, np.int64)
        added = self.backend.get_added_tokens_decoder()
        byte_level = "ByteLevel" in repr(self.backend.decoder)
        for token, index in self.backend.get_vocab().items():
            if index in added:
                lengths[index] = 0 if added[index].special else len(token.encode())
            elif byte_level:
                lengths[index] = len(token)
            else:  # as SentencePiece has them: a sign for the space, and names of bytes
                lengths[index] = 1 if _BYTE.fullmatch(token) else len(token.replace("\u2581", " ").encode())
        return lengths

    def save(self, path: Path) -> None:
        """Write the tokenizer as Hugging Face's tokenizer.json, and beside it which token begins a document."""
        path.write_text(self.backend.to_str(), encoding="utf-8")
        if self.mark != DOCUMENT_MARK:
            described = {"bos_token": self.mark, "eos_token": self.end}
            path.with_name(DESCRIPTION).write_text(json.dumps(described, indent=2) + "\n")

    def means_the_same(self, other: "Tokenizer") -> bool:
        """Whether each token id stands for the same text in both."""
        return self.backend.get_vocab() == other.backend.get_vocab()


_BYTE = re.compile("<0x[0-9A-F]{2}>")


def _whole_characters(texts: Sequence[str]) -> list[str]:
    """Texts without lone surrogates, which are no character and have no bytes."""
    return [text.encode(errors="replace").decode() for text in texts]


def load_tokenizer(path: Path, mark: str | None = None) -> Tokenizer:
    """The tokenizer of a tokenizer.json, whose documents begin with `mark`, or with what is said there or beside it.

    They end with what is said there to be the end of a text, if that is another token.

    Raises ConfigError where there is none, or no such token.
    """
    try:
        backend = Backend.from_str(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; without a tokenizer text cannot become tokens.") from error
    except Exception as error:  # the library has no type of its own for a damaged file
        raise ConfigError(f"{path} is no tokenizer.json: {error}") from error
    vocabulary = backend.get_vocab()
    if DOCUMENT_MARK in vocabulary and mark is None:
        return Tokenizer(backend)
    begin, end = _described(path.with_name(DESCRIPTION))
    mark = mark or begin or end
    if mark not in vocabulary:
        raise ConfigError(
            f"{path} has no token {mark or 'that begins or ends a text, as far as ' + DESCRIPTION + ' says'}. Write "
            f"data.tokenizer.document_mark=<token>, the one that begins every document."
        )
    return Tokenizer(backend, mark, end if end in vocabulary and end != mark else None)


def _described(path: Path) -> tuple[str | None, str | None]:
    """The tokens for the beginning of a text and for its end, of a tokenizer_config.json."""
    if not path.is_file():
        return None, None
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
    found = (described.get("bos_token"), described.get("eos_token"))
    begin, end = (token.get("content") if isinstance(token, dict) else token for token in found)
    return begin, end


def tokenizer_file(config: TokenizerConfig) -> Path:
    """`kind=file`: where tokenizer.json is."""
    assert config.path is not None
    path = Path(config.path)
    return path / "tokenizer.json" if path.is_dir() else path


def identity(config: TokenizerConfig) -> list[object]:
    """What the tokens of a text depend on, besides the text that a tokenizer is learned from."""
    parts: list[object] = [config.kind, config.vocab_size]
    if config.kind == TokenizerKind.file:
        tokenizer = load_tokenizer(tokenizer_file(config), config.document_mark)
        parts += [hashlib.sha256(tokenizer.backend.to_str().encode()).hexdigest(), tokenizer.mark, tokenizer.end]
    return parts


def make_tokenizer(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """The byte tokenizer, a BPE of config.vocab_size tokens learned from `texts` (read for it alone), or a file's."""
    if config.kind == TokenizerKind.file:
        return load_tokenizer(tokenizer_file(config), config.document_mark)
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
