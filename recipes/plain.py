"""Configs as plain data, and files that are whole or not there."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parallel.config import Config


def plain(config: Config) -> dict[str, Any]:
    """The config as numbers, strings, lists and dicts, enumerations by their value."""

    def simple(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: simple(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [simple(part) for part in value]
        return str(value) if isinstance(value, str) else value

    return simple(asdict(config))


def write_whole(path: Path, text: str) -> None:
    """Write a file under another name, sync it, rename it: it is there whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
