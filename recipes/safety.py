"""What a config may never contain: code from outside our packages, and secrets."""

import importlib
import inspect
import os
import re
from collections.abc import Iterator
from typing import Any

from models.config import ConfigError

PACKAGES = ("recipes.", "parallel.", "models.")
"""Everything in our own packages may be named by a `_target_`."""
ALLOWED_TARGETS = frozenset(
    {
        "lightning.pytorch.callbacks.EarlyStopping",
        "lightning.pytorch.callbacks.ModelCheckpoint",
        "lightning.pytorch.loggers.CSVLogger",
        "lightning.pytorch.loggers.TensorBoardLogger",
        "lightning.pytorch.loggers.MLFlowLogger",
    }
)
_SECRET_KEY = re.compile(r"(api_?key|token|secret|passw(or)?d|credentials?)$", re.IGNORECASE)
_SECRET_VALUE = re.compile(
    r"hf_[A-Za-z0-9]{20,}|wandb_v\d_\w{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16}|://[^/\s:@]+:[^/\s@]+@"
)


def check(tree: Any) -> None:
    """Raise ConfigError for a `_target_` that is not ours and not allowed, or for a secret, anywhere in a plain tree.

    Called on every composed config and on every config read from a run directory, before anything is built from it.
    """
    for path, value in _leaves(tree, ""):
        key = path.rpartition(".")[2]
        if key == "_target_":
            _check_target(path, value)
        elif isinstance(value, str) and value:
            _check_secret(path, key, value)


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _leaves(value, f"{path}[{index}]")
    else:
        yield path, tree


def _check_target(path: str, target: Any) -> None:
    plain = isinstance(target, str) and all(part.isidentifier() and part[0] != "_" for part in target.split("."))
    if plain and (target.startswith(PACKAGES) or target in ALLOWED_TARGETS):
        return
    raise ConfigError(
        f"{path}={target} would run code from outside this project. Allowed are names in {', '.join(PACKAGES)} and "
        f"{', '.join(sorted(ALLOWED_TARGETS))}; put your own class into recipes/ and name it there."
    )


def _check_secret(path: str, key: str, value: str) -> None:
    from_environment = {
        name for name, secret in os.environ.items() if _SECRET_KEY.search(name) and len(secret) >= 8 and secret in value
    }
    if not (_SECRET_KEY.search(key) or _SECRET_VALUE.search(value) or from_environment):
        return
    raise ConfigError(
        f"{path} holds what looks like a secret (not shown). A config is written to the run directory and the logger; "
        f"give secrets in the environment (WANDB_API_KEY, HF_TOKEN) or in ~/.netrc instead."
    )


def build(node: dict[str, Any], **available: Any) -> Any:
    """Make what a checked node's `_target_` names, from the node's keys and those of `available` that it takes."""
    module, _, name = node["_target_"].rpartition(".")
    target = getattr(importlib.import_module(module), name)
    accepted = inspect.signature(target).parameters
    given = {key: value for key, value in node.items() if key != "_target_"}
    return target(**{key: value for key, value in available.items() if key in accepted} | given)
