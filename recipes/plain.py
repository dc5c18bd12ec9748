"""Configs as plain data."""

from dataclasses import asdict
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
