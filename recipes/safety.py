"""What a config may never contain: code from outside our packages, and secrets."""

import ast
import importlib
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models.errors import ConfigError

_ROOT = Path(__file__).resolve().parent.parent
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
        key = path.rpartition(".")[2].partition("[")[0]
        if key == "_target_":
            _check_target(path, value)
        elif value is not None and value != "":
            _check_secret(path, key, str(value))


def check_overrides(overrides: list[str]) -> None:
    """The same for overrides, which are written to files as they are, also what a later one replaced."""
    check([dict([override.lstrip("+~").split("=", 1)]) for override in overrides if "=" in override])


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            place = f"{path}.{key}" if path else str(key)
            if key == "_target_":  # a word or nothing: what else stands there is refused as it is
                yield place, value
            else:
                yield from _leaves(value, place)
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _leaves(value, f"{path}[{index}]")
    else:
        yield path, tree


def _check_target(path: str, target: Any) -> None:
    plain = isinstance(target, str) and all(part.isidentifier() and part[0] != "_" for part in target.split("."))
    if plain and (target in ALLOWED_TARGETS or (target.startswith(PACKAGES) and _is_our_own(target))):
        return
    raise ConfigError(
        f"{path}={target} would run code from outside this project. Allowed are names in {', '.join(PACKAGES)} and "
        f"{', '.join(sorted(ALLOWED_TARGETS))}; put your own class into recipes/ and name it there."
    )


def _is_our_own(target: str) -> bool:
    """Whether a module of ours has the name at its top and defines it itself; found by reading, not by importing."""
    module, _, name = target.rpartition(".")
    file = _ROOT.joinpath(*module.split(".")).with_suffix(".py")
    if not file.is_file():
        return False
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name for node in tree.body)


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
    if not isinstance(node, dict) or "_target_" not in node:
        raise ConfigError(f"{node}: a node of callbacks or logger needs a _target_, the class that it stands for.")
    module, _, name = node["_target_"].rpartition(".")
    try:
        target = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"_target_={node['_target_']}: there is no such name ({error}).") from error
    signature = inspect.signature(target)
    own = {key: value for key, value in node.items() if key != "_target_"}
    given = {key: value for key, value in available.items() if key in signature.parameters} | own
    try:
        signature.bind(**given)
    except TypeError as error:
        raise ConfigError(
            f"_target_={node['_target_']} cannot be made from {', '.join(own) or 'nothing'}: {error}."
        ) from error
    return target(**given)
