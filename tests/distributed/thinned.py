"""Fewer cases by default: the suite has its minutes, and the rest runs with the long tests."""

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], keep: int = 2) -> list[Any]:
    """The cases as parameters of a test, all but every `keep`-th marked long; a tuple is one case's arguments."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=() if number % keep == 0 else pytest.mark.long
        )
        for number, case in enumerate(cases)
    ]
