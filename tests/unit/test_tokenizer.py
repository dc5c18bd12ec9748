"""Text to tokens and back, and how many bytes each token stands for."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from models.errors import ConfigError
from parallel.config import TokenizerConfig, TokenizerKind
from recipes.data.tokenizer import DOCUMENT_MARK, Tokenizer, load_tokenizer, make_tokenizer

TEXTS = [
    "def main(arguments):\n\treturn [argument.strip() for argument in arguments]  # comment\r\n",
    "naïve café — 日本語のテキスト, עברית, 🙂👩‍👩‍👧, e\u0301 and \u00e9\n",
    " leading, trailing  and   inner blanks \x00\x01\x7f\ufeff\u2028",
    "",
]
CORPUS = [*TEXTS, *(Path(__file__).read_text() for _ in range(2))]


@pytest.fixture(scope="module", params=["byte", "bpe"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return make_tokenizer(TokenizerConfig(TokenizerKind(request.param), 400), CORPUS)


@pytest.mark.parametrize("text", [*TEXTS, "".join(map(chr, range(0x250)))], ids=range(5))
def test_given_any_text_when_encoded_then_decoding_gives_it_back_and_bytes_add_up(
    tokenizer: Tokenizer, text: str
) -> None:
    (tokens,) = tokenizer.encode([text])
    assert tokens.dtype == np.uint32
    assert tokens[0] == tokenizer.document_mark == 256
    assert tokenizer.decode(tokens[1:]) == text
    assert tokenizer.bytes_per_token()[tokens].sum() == len(text.encode())


def test_given_text_that_spells_the_document_mark_when_encoded_then_it_stays_text(tokenizer: Tokenizer) -> None:
    text = f"a {DOCUMENT_MARK} b"
    (tokens,) = tokenizer.encode([text])
    assert tokenizer.document_mark not in tokens[1:]
    assert tokenizer.decode(tokens[1:]) == text
    assert tokenizer.bytes_per_token()[tokens].sum() == len(text.encode())


def test_given_bytes_when_the_kind_is_byte_then_token_b_is_byte_b() -> None:
    (tokens,) = make_tokenizer(TokenizerConfig(), []).encode(["aé\n"])
    assert tokens.tolist() == [256, *"aé\n".encode()]


def test_given_half_a_character_when_decoded_then_it_is_the_replacement_character(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(list("é".encode()[:1])) == "\N{REPLACEMENT CHARACTER}"


def test_given_a_corpus_when_bpe_learns_then_it_has_the_size_asked_for_and_shortens_text() -> None:
    learned = make_tokenizer(TokenizerConfig(TokenizerKind.bpe, 400), CORPUS)
    assert learned.vocab_size == 400
    assert sorted(learned.backend.get_vocab().values()) == list(range(400))
    assert len(learned.encode([CORPUS[-1]])[0]) < 0.7 * len(CORPUS[-1].encode())


def test_given_the_same_corpus_when_bpe_learns_again_then_the_tokenizer_is_equal_to_the_byte() -> None:
    draw = random.Random(0)
    words = ["".join(draw.choices("abcd", k=5)) for _ in range(300)]
    corpus = [" ".join(draw.choices(words, k=200)) for _ in range(50)]  # many pairs of equal count: ties to break
    settings = TokenizerConfig(TokenizerKind.bpe, 700)
    learned = {make_tokenizer(settings, corpus).backend.to_str() for _ in range(3)}
    assert len(learned) == 1


def test_given_a_saved_tokenizer_when_loaded_then_it_encodes_alike(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    for one, two in zip(tokenizer.encode(CORPUS), loaded.encode(CORPUS), strict=True):
        assert np.array_equal(one, two)
    assert np.array_equal(tokenizer.bytes_per_token(), loaded.bytes_per_token())


def test_given_our_tokenizer_file_when_tokenizers_reads_it_then_it_encodes_as_we_do(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer as Backend

    tokenizer.save(tmp_path / "tokenizer.json")
    backend = Backend.from_str(json.dumps(json.loads((tmp_path / "tokenizer.json").read_text())))
    for text in TEXTS:
        assert backend.encode(text).ids == tokenizer.encode([text])[0][1:].tolist()


def test_given_no_file_when_loaded_then_the_error_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: no such file"):
        load_tokenizer(tmp_path / "tokenizer.json")
