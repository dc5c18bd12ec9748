"""Prepared tokens: whole or not at all, prepared once per fingerprint, from every kind of file."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from models.errors import ConfigError
from parallel.config import FilesData, TokenizerConfig, TokenizerKind
from recipes.data.documents import open_source
from recipes.data.store import SPLITS, fingerprint, held_out, open_split, open_tokenizer, prepare

DOCUMENTS = [f"document {number}: " + "text é " * (number % 5) for number in range(40)]


def _data(cache: Path, *paths: Path | str, **settings: object) -> FilesData:
    base = FilesData(
        name="files",
        seq_len=16,
        global_batch=1,
        micro_batch=1,
        cache_dir=str(cache / "cache"),
        validation_fraction=0.3,
        paths=[str(path) for path in paths],
    )
    return replace(base, **settings)


def _write_jsonl(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text, "other": 1}) + "\n" for text in documents))
    return path


def _write_parquet(path: Path, documents: list[str]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table({"text": documents}), path)
    return path


def _write_arrow(path: Path, documents: list[str]) -> Path:
    table = pyarrow.table({"text": documents})
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return path


def _texts(folder: Path) -> dict[str, list[str]]:
    """The documents of each split as they come back from the prepared tokens."""
    tokenizer, texts = open_tokenizer(folder), {}
    for split in SPLITS:
        store = open_split(folder, split)
        ends = [*store.document_starts[1:], store.tokens]
        documents = [store.read(int(a), int(b)) for a, b in zip(store.document_starts, ends, strict=True)]
        assert all(document[0] == tokenizer.document_mark for document in documents)
        texts[split] = [tokenizer.decode(document[1:]) for document in documents]
    return texts


def _folders(data: FilesData) -> list[str]:
    return sorted(path.name for path in Path(data.cache_dir).iterdir() if path.is_dir())


@pytest.mark.parametrize("write", [_write_jsonl, _write_parquet, _write_arrow], ids=["x.jsonl", "x.parquet", "x.arrow"])
def test_given_a_table_when_prepared_then_both_splits_together_hold_every_document(
    tmp_path: Path, write: Callable[[Path, list[str]], Path], request: pytest.FixtureRequest
) -> None:
    path = write(tmp_path / request.node.callspec.id, [*DOCUMENTS, ""])
    texts = _texts(prepare(_data(tmp_path, path)))
    assert sorted(texts["train"] + texts["validation"]) == sorted(DOCUMENTS)  # the empty one has no token
    assert len(texts["validation"]) > 3
    assert [text for index, text in enumerate(DOCUMENTS) if held_out(f"{path}:{index}", 0.3)] == texts["validation"]


def test_given_text_files_and_a_glob_when_prepared_then_each_file_is_a_document(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for number, text in enumerate(DOCUMENTS):
        (tmp_path / "deep" / f"{number}.txt").write_text(text)
    texts = _texts(prepare(_data(tmp_path, tmp_path / "**" / "*.txt")))
    assert sorted(texts["train"] + texts["validation"]) == sorted(DOCUMENTS)


def test_given_a_learned_tokenizer_when_prepared_then_it_learns_from_the_training_split_and_text_comes_back(
    tmp_path: Path,
) -> None:
    documents = [*DOCUMENTS, *("zq" * 50 for _ in range(1))]
    path = _write_jsonl(tmp_path / "x.jsonl", documents)
    assert held_out(f"{path}:40", 0.99)
    data = _data(tmp_path, path, tokenizer=TokenizerConfig(TokenizerKind.bpe, 300))
    folder = prepare(data)
    texts = _texts(folder)
    assert sorted(texts["train"] + texts["validation"]) == sorted(documents)
    learned = "".join(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    assert ("zqzq" in learned) == ("zq" * 50 in texts["train"])


def test_given_prepared_data_when_asked_again_then_nothing_is_written(tmp_path: Path) -> None:
    data = _data(tmp_path, _write_jsonl(tmp_path / "x.jsonl", DOCUMENTS))
    folder = prepare(data)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert prepare(replace(data, seq_len=4, global_batch=7)) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert _folders(data) == [folder.name]


def test_given_a_change_that_matters_when_fingerprinted_then_it_differs(tmp_path: Path) -> None:
    path = _write_jsonl(tmp_path / "x.jsonl", DOCUMENTS)
    data = _data(tmp_path, path)

    def of(changed: FilesData) -> str:
        return fingerprint(changed, open_source(changed))

    first = of(data)
    assert of(data) == first
    changes = [
        of(replace(data, validation_fraction=0.2)),
        of(replace(data, text_field="other")),
        of(replace(data, tokenizer=TokenizerConfig(TokenizerKind.bpe, 300))),
        of(replace(data, tokenizer=TokenizerConfig(TokenizerKind.bpe, 301))),
        of(replace(data, paths=[str(_write_jsonl(tmp_path / "y.jsonl", DOCUMENTS))])),
    ]
    stat = path.stat()
    path.write_bytes(path.read_bytes().replace(b"document 0", b"document X"))  # same size, another time
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    changes.append(of(data))
    assert len({first, *changes}) == 7


def test_given_more_documents_when_split_then_those_that_were_there_stay_where_they_were(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    few = _texts(prepare(_data(tmp_path, _write_jsonl(path, DOCUMENTS[:20]))))
    many = _texts(prepare(_data(tmp_path, _write_jsonl(path, DOCUMENTS))))
    for split in SPLITS:
        assert many[split][: len(few[split])] == few[split]


def test_given_a_fraction_when_names_are_hashed_then_that_share_is_held_out_and_a_larger_one_only_adds() -> None:
    names = [f"name {number}" for number in range(5000)]
    small, large = ({name for name in names if held_out(name, fraction)} for fraction in (0.1, 0.2))
    assert small < large
    assert len(small) / 5000 == pytest.approx(0.1, abs=0.02)
    assert not any(held_out(name, 0.0) for name in names)


def _break(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet", "x.arrow"])
def test_given_a_damaged_file_when_prepared_then_it_is_refused_by_name_and_nothing_is_left(
    tmp_path: Path, name: str
) -> None:
    write = {".jsonl": _write_jsonl, ".parquet": _write_parquet, ".arrow": _write_arrow}[Path(name).suffix]
    path = write(tmp_path / name, DOCUMENTS)
    _break(path)
    data = _data(tmp_path, path)
    with pytest.raises(ConfigError, match=f"data.paths: .*{name} cannot be read"):
        prepare(data)
    assert _folders(data) == []


def test_given_files_that_cannot_be_used_when_opened_then_each_message_names_the_key(tmp_path: Path) -> None:
    table = _write_jsonl(tmp_path / "x.jsonl", DOCUMENTS)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    one = tmp_path / "one.txt"
    one.write_text("text")
    cases = [
        (_data(tmp_path), "data.paths is empty"),
        (_data(tmp_path, tmp_path / "no*.txt"), r"data.paths: .*no\*.txt matches no file"),
        (_data(tmp_path, tmp_path), "matches no file"),
        (_data(tmp_path, tmp_path / "empty.txt"), r"data.paths: .*empty.txt is empty \(0 bytes\)"),
        (_data(tmp_path, tmp_path / "binary.txt"), "data.paths: .*binary.txt is not UTF-8 text"),
        (_data(tmp_path, table, text_field="body"), "data.text_field=body: row 0 of .* its fields are text, other"),
        (_data(tmp_path, table, text_field="other"), "data.text_field=other: row 0"),
        (_data(tmp_path, one), "data=files has no document for the (train|validation) split"),
    ]
    for data, words in cases:
        with pytest.raises(ConfigError, match=words):
            prepare(data)
    assert not [name for data, _ in cases if Path(data.cache_dir).exists() for name in _folders(data)]


_PREPARE = """
import sys, time
from dataclasses import replace
from pathlib import Path
from recipes.data import documents, store
from tests.unit.test_store import _data

real, delay = documents.open_source, float(sys.argv[3])
def slow(config):
    source = real(config)
    def read():
        for document in source.read():
            time.sleep(delay)
            yield document
    return replace(source, read=read)
store.open_source = slow
print(store.prepare(_data(Path(sys.argv[1]), sys.argv[2])))
"""


def _start(folder: Path, path: Path, delay: float) -> "subprocess.Popen[str]":
    arguments = [sys.executable, "-c", _PREPARE, str(folder), str(path), str(delay)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_given_a_preparation_that_was_killed_when_prepared_again_then_it_starts_anew_and_removes_the_torn_one(
    tmp_path: Path,
) -> None:
    path = _write_jsonl(tmp_path / "x.jsonl", DOCUMENTS * 5)
    data = _data(tmp_path, path)
    process = _start(tmp_path, path, delay=0.005)
    while not (torn := list(Path(data.cache_dir).glob("*.partial-*/train"))):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.communicate()
    assert _folders(data) == [torn[0].parent.name]  # nothing under the name that would be believed
    folder = prepare(data)
    assert _folders(data) == [folder.name]
    assert sorted(text for split in _texts(folder).values() for text in split) == sorted(DOCUMENTS * 5)


def test_given_two_processes_when_they_prepare_the_same_at_once_then_both_get_the_one_folder(tmp_path: Path) -> None:
    path = _write_jsonl(tmp_path / "x.jsonl", DOCUMENTS)
    processes = [_start(tmp_path, path, delay=0.01) for _ in range(2)]
    outputs = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert len({out for out, _ in outputs}) == 1
    assert _folders(_data(tmp_path, path)) == [Path(outputs[0][0].strip()).name]


def test_given_tokens_in_chunks_when_any_range_is_read_then_it_is_that_of_the_whole(tmp_path: Path) -> None:
    store = open_split(prepare(_data(tmp_path, _write_jsonl(tmp_path / "x.jsonl", DOCUMENTS))), "train")
    whole = store.read(0, store.tokens)
    assert len(whole) == store.tokens
    assert np.array_equal(np.flatnonzero(whole == 256), store.document_starts)
    for start in range(0, store.tokens - 7, 5):
        assert np.array_equal(store.read(start, start + 7), whole[start : start + 7])
