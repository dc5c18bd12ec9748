"""Where planted faults are listed, by name."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

FAULTS: dict[str, Callable[[], AbstractContextManager[object]]] = {}


def fault(function: Callable[[], Iterator[None]]) -> Callable[[], AbstractContextManager[object]]:
    """Register a fault under its function's name."""
    FAULTS[function.__name__] = contextmanager(function)
    return FAULTS[function.__name__]
