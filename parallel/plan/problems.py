"""What a rule finds in a config."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from models.errors import ConfigError

Changes = dict[str, Any]
"""Config keys and the values to write instead."""


class Severity(StrEnum):
    error = "error"
    warning = "warning"
    note = "note"


@dataclass(frozen=True)
class Fault:
    """A rule that a config breaks, as the rule finds it."""

    rule: str
    """The rule's short name."""
    message: str
    """Keys, values, and the rule with its numbers put in."""
    tries: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Values that may be legal, by key, the nearest first; which of them really are is searched for (repair.py)."""


@dataclass(frozen=True)
class Problem:
    """One rule that a config breaks: refused (`error`), or legal but costly (`warning`), or worth knowing (`note`)."""

    severity: Severity
    message: str
    """Keys, values, the rule with its numbers, and what to write instead."""
    rule: str = ""
    repairs: tuple[Changes, ...] = ()
    """Each removes this problem and makes no other; where it is the only one, the config is then accepted."""


def refuse(problems: list[Problem]) -> None:
    """Raise one ConfigError that lists every error, if there is any."""
    errors = [problem.message for problem in problems if problem.severity == Severity.error]
    if errors:
        raise ConfigError("\n".join(errors))
