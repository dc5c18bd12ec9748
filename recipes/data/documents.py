"""Where text comes from: each source as a stream of (name, text), and a description that changes when the text does."""

import glob
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.errors import ConfigError
from parallel.config import DataConfig, FilesData, HubData, StdlibData

Document = tuple[str, str]


@dataclass(frozen=True)
class Source:
    """A stream of documents that can be read again, and what its content depends on."""

    description: Any
    """Plain values: equal descriptions mean equal documents."""
    read: Callable[[], Iterable[Document]]


def open_source(config: DataConfig) -> Source:
    """The source a config names. Raises ConfigError for paths that do not exist or hold nothing."""
    match config:
        case StdlibData():
            return _stdlib()
        case FilesData():
            return _files(config)
        case HubData():
            return _hub(config)
    raise AssertionError(f"no source for {type(config).__name__}")


def _stdlib() -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    outside = {"site-packages", "dist-packages", "__pycache__"}
    paths = sorted(path for path in root.rglob("*.py") if not outside & set(path.relative_to(root).parts))
    sizes = [(path.relative_to(root).as_posix(), path.stat().st_size) for path in paths]

    def read() -> Iterator[Document]:
        from pydoc_data.topics import topics

        for path in paths:
            text = path.read_text(encoding="utf-8", errors="replace")
            if text:
                yield path.relative_to(root).as_posix(), text
        for name, text in sorted(topics.items()):
            yield f"pydoc_data/topics/{name}", text

    return Source({"stdlib": sys.version, "files": sizes}, read)


def _files(config: FilesData) -> Source:
    if not config.paths:
        raise ConfigError("data.paths is empty. Write data=files 'data.paths=[my/*.jsonl]'.")
    found: list[Path] = []
    for pattern in config.paths:
        matches = sorted(Path(match) for match in glob.glob(pattern, recursive=True) if Path(match).is_file())
        if not matches:
            raise ConfigError(f"data.paths: {pattern} matches no file (looked from {Path.cwd()}).")
        empty = [str(path) for path in matches if path.stat().st_size == 0]
        if empty:
            raise ConfigError(f"data.paths: {', '.join(empty)} is empty (0 bytes). Leave it out.")
        found += [match.resolve() for match in matches if match.resolve() not in found]
    description = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in found]

    def read() -> Iterator[Document]:
        for path in found:
            yield from _read_file(path, config.text_field)

    return Source({"files": description, "text_field": config.text_field}, read)


_TABLES = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".arrow": "arrow"}


def _read_file(path: Path, text_field: str) -> Iterator[Document]:
    builder = _TABLES.get(path.suffix)
    if builder is None:
        try:
            yield str(path), path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"data.paths: {path} is not UTF-8 text: {error}.") from error
        return
    from datasets import load_dataset

    try:
        rows = load_dataset(builder, data_files=str(path), split="train", streaming=True)
        for index, row in enumerate(rows):
            if not isinstance(row.get(text_field), str):
                raise ConfigError(
                    f"data.text_field={text_field}: row {index} of {path} has no text there; its fields are "
                    f"{', '.join(row)}."
                )
            yield f"{path}:{index}", row[text_field]
    except ConfigError:
        raise
    except Exception as error:  # pyarrow, json and datasets each raise their own kinds for a damaged file
        raise ConfigError(f"data.paths: {path} cannot be read as {builder}: {error}") from error


def _hub(config: HubData) -> Source:
    if not config.dataset:
        raise ConfigError("data.dataset is empty. Write data=hub data.dataset=OWNER/NAME.")

    def read() -> Iterator[Document]:
        from datasets import load_dataset

        rows = load_dataset(
            config.dataset, config.subset, split=config.split, revision=config.revision, streaming=config.streaming
        )
        for index, row in enumerate(rows):
            if index == config.max_documents:
                return
            if config.text_field not in row:
                raise ConfigError(
                    f"data.text_field={config.text_field}: {config.dataset} has no such field; its fields are "
                    f"{', '.join(row)}."
                )
            yield f"{config.dataset}:{index}", row[config.text_field]

    keys = ("dataset", "subset", "split", "revision", "max_documents", "text_field")
    return Source({key: getattr(config, key) for key in keys}, read)
