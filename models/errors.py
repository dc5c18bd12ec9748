"""The two ways in which a run is the user's to mend; neither shows a traceback."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class ConfigError(ValueError):
    """A setting is refused: the message names the key, the value, the rule and what to write instead. Exit code 2."""


class RunError(RuntimeError):
    """A run cannot go on for a reason outside the program; the message says which and what to do. Exit code 1."""


@dataclass(frozen=True)
class Flaw:
    """One rule that numbers do not keep: keys, values and the rule, without what to write instead."""

    message: str
    tries: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Values that may be legal, by key, the nearest first."""

    def __str__(self) -> str:
        """With what to write."""
        key, values = next(iter(self.tries.items()), ("", ()))
        said = " or ".join(f"{key}={'null' if value is None else value}" for value in values[:2])
        return f"{self.message} Write {said}." if said else self.message


def refuse_flaws(flaws: Iterable[Flaw]) -> None:
    """Raise ConfigError with all of them, if there are any."""
    if found := [str(flaw) for flaw in flaws]:
        raise ConfigError("\n".join(found))


def nearest(values: Iterable[int], wanted: int) -> list[int]:
    """The values in the order of their distance, by ratio, from `wanted`."""
    return sorted({*values}, key=lambda value: max(value, wanted) / max(min(value, wanted), 1) if value > 0 else 1e9)
