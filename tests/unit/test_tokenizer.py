"""Text to tokens and back, and how many bytes each token stands for."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from models.errors import ConfigError
from parallel.config import TokenizerConfig, TokenizerKind
from recipes.data.tokenizer import DOCUMENT_MARK, Tokenizer, identity, load_tokenizer, make_tokenizer

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
    tokenizer.save(tmp_path / "tokenizer.json")
    backend = Backend.from_str(json.dumps(json.loads((tmp_path / "tokenizer.json").read_text())))
    for text in TEXTS:
        assert backend.encode(text).ids == tokenizer.encode([text])[0][1:].tolist()


def test_given_no_file_when_loaded_then_the_error_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: no such file"):
        load_tokenizer(tmp_path / "tokenizer.json")


def published(folder: Path, kind: str, **described: object) -> PreTrainedTokenizerFast:
    """A folder with a tokenizer as others publish them: byte-level as Llama 3's, or by words and bytes as Llama 2's."""
    special = ["<begin>", "<end>"]
    if kind == "byte-level":
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, special_tokens=special)
        backend.train_from_iterator(CORPUS, trainer)
    else:
        learner = Backend(models.BPE())
        learner.normalizer = normalizers.Replace(" ", "\u2581")
        learner.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=special))
        model = json.loads(learner.to_str())["model"]
        vocabulary = model["vocab"] | {f"<0x{byte:02X}>": len(model["vocab"]) + byte for byte in range(256)}
        merges = [tuple(pair) for pair in model["merges"]]
        backend = Backend(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True))
        backend.normalizer = normalizers.Replace(" ", "\u2581")
        backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
        backend.add_special_tokens(special)
    ids = [(token, backend.token_to_id(token)) for token in special]
    backend.post_processor = processors.TemplateProcessing(single="<begin> $A <end>", special_tokens=ids)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    words = {"bos_token": "<begin>", "eos_token": "<end>", "tokenizer_class": "PreTrainedTokenizerFast"} | described
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in words.items() if v is not None}))
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("kind", ["byte-level", "words and bytes"])
def test_given_a_published_tokenizer_when_used_then_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    theirs = published(tmp_path / "model", kind)
    config = TokenizerConfig(TokenizerKind.file, path=str(tmp_path / "model"))
    ours = make_tokenizer(config, [])
    for text, tokens in zip(TEXTS, ours.encode(TEXTS), strict=True):
        assert tokens.tolist() == theirs(text)["input_ids"]
        assert ours.decode(tokens) == text
        assert ours.bytes_per_token()[tokens].sum() == len(text.encode())
        assert ours.open([text])[0].tolist() == tokens.tolist()[:-1]
    assert ours.stops == {theirs.bos_token_id, theirs.eos_token_id}
    (tmp_path / "run").mkdir()
    ours.save(tmp_path / "run" / "tokenizer.json")
    again = load_tokenizer(tmp_path / "run" / "tokenizer.json")
    assert again.means_the_same(ours)
    assert not again.means_the_same(make_tokenizer(TokenizerConfig(), []))
    assert np.array_equal(again.encode(TEXTS)[0], ours.encode(TEXTS)[0])
    assert identity(config) == identity(replace(config, path=str(tmp_path / "run" / "tokenizer.json")))


def test_given_a_model_with_no_token_for_the_beginning_when_used_then_the_end_stands_between_documents(
    tmp_path: Path,
) -> None:
    published(tmp_path / "model", "byte-level", bos_token=None)
    config = TokenizerConfig(TokenizerKind.file, path=str(tmp_path / "model"))
    ours = make_tokenizer(config, [])
    (tokens,) = ours.encode(["a"])
    assert tokens[0] == ours.document_mark == ours.backend.token_to_id("<end>")
    assert len(tokens) == 2
    chosen = make_tokenizer(replace(config, document_mark="<begin>"), [])
    assert chosen.document_mark == chosen.backend.token_to_id("<begin>")
    assert identity(config) != identity(replace(config, document_mark="<begin>"))


@pytest.mark.parametrize(
    ("mark", "words"), [("<none>", "has no token <none>"), (None, "document_mark=<token>")], ids=["none", "unsaid"]
)
def test_given_no_token_to_begin_documents_with_when_used_then_the_key_is_named(
    tmp_path: Path, mark: str | None, words: str
) -> None:
    published(tmp_path / "model", "byte-level", bos_token=None, eos_token=None)
    with pytest.raises(ConfigError, match=words):
        make_tokenizer(TokenizerConfig(TokenizerKind.file, path=str(tmp_path / "model"), document_mark=mark), [])


def test_given_a_file_that_is_no_tokenizer_when_loaded_then_the_error_names_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is no tokenizer\.json"):
        load_tokenizer(tmp_path / "tokenizer.json")
