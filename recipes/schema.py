"""The typed schema of every config group in Hydra's ConfigStore, made from the dataclasses of parallel/config.py.

A YAML file of a group names its schema first in its defaults list, so that a wrong key or type is refused when the
config is composed. From there on the program sees only the frozen dataclasses: see `to_config`.
"""

import dataclasses
import difflib
import inspect
import types
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from models.config import ModelConfig
from models.errors import ConfigError
from parallel import config as groups
from recipes import safety
from recipes.nodes import CALLBACKS, LOGGERS

SCHEMAS: dict[str, dict[str, type]] = {
    "recipe": {"schema": groups.RecipeConfig},
    "model": {"schema": ModelConfig},
    "parallelism": {"schema": groups.ParallelismConfig},
    "precision": {"schema": groups.PrecisionConfig},
    "cluster": {"schema": groups.ClusterConfig},
    "data": {
        "stdlib_schema": groups.StdlibData,
        "files_schema": groups.FilesData,
        "hub_schema": groups.HubData,
        "synthetic_schema": groups.SyntheticData,
    },
    "optimizer": {
        "adamw_schema": groups.AdamWConfig,
        "sgd_schema": groups.SGDConfig,
        "muon_schema": groups.MuonConfig,
    },
    "scheduler": {"schema": groups.SchedulerConfig},
    "checkpoint": {"schema": groups.CheckpointConfig},
    "trainer": {"schema": groups.TrainerConfig},
    "debug": {"schema": groups.DebugConfig},
}


@cache
def mutable(frozen: Any) -> Any:
    """A dataclass with the same name, fields and bases that OmegaConf will let overrides write to."""
    own = inspect.get_annotations(frozen)
    fields = []
    for item in dataclasses.fields(frozen):
        if item.name not in own:
            continue
        default: dict[str, Any] = {"default": item.default}
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            default = {"default": "???"}
        elif item.default_factory is not dataclasses.MISSING:
            factory = item.default_factory
            default = {"default_factory": _mutable_type(factory)}
        fields.append((item.name, _mutable_type(item.type), dataclasses.field(**default)))
    bases = tuple(_mutable_type(base) for base in frozen.__bases__ if dataclasses.is_dataclass(base))
    twin: Any = dataclasses.make_dataclass(frozen.__name__, fields, bases=bases)
    twin.frozen = frozen
    return twin


def _mutable_type(annotation: Any) -> Any:
    if dataclasses.is_dataclass(annotation):
        kind: Any = annotation
        return mutable(kind)
    if get_origin(annotation) in (Union, types.UnionType):
        return Union[tuple(_mutable_type(part) for part in get_args(annotation))]  # noqa: UP007 - built at run time
    return annotation


def register(extra: type | None = None) -> None:
    """Put every schema into Hydra's ConfigStore, before a command composes.

    `extra` is a dataclass of what a command takes beside the config of a run: its fields stand at the top.
    """
    root = mutable(groups.Config)
    if extra is not None:
        root = dataclasses.make_dataclass(extra.__name__, [], bases=(extra, root))
    ConfigStore.instance().store(name="schema", node=root)
    _register_groups()


@cache
def _register_groups() -> None:
    store = ConfigStore.instance()
    for group, schemas in SCHEMAS.items():
        for name, schema in schemas.items():
            store.store(group=group, name=name, node=mutable(schema))
    for group, nodes in (("callbacks", CALLBACKS), ("logger", LOGGERS)):
        for name, node in nodes.items():
            store.store(group=group, name=f"{name}_schema", node=node)


def to_config(composed: DictConfig) -> groups.Config:
    """The composed config as frozen dataclasses, every interpolation resolved.

    Raises ConfigError for a key that no dataclass has (added with `+`), for code from outside and for secrets; and
    omegaconf's MissingMandatoryValue or InterpolationResolutionError, which name the key.
    """
    _refuse_strangers(composed, "")
    safety.check(OmegaConf.to_container(composed, resolve=True))
    return _freeze(OmegaConf.to_object(composed))


def read_config(path: Path) -> groups.Config:
    """The config of a run directory's config.yaml, checked like one that was just composed.

    Raises ConfigError where the file is missing, torn, or not a config of this version.
    """
    try:
        plain: Any = OmegaConf.load(path)
        chosen = {
            group: OmegaConf.structured(mutable(SCHEMAS[group][f"{plain[group].name}_schema"]))
            for group in ("data", "optimizer")
        }
        merged: Any = OmegaConf.merge(OmegaConf.structured(mutable(groups.Config)), chosen, plain)
        return to_config(merged)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file, so {path.parent} is not a run directory.") from error
    except (OmegaConfBaseException, YAMLError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path} is not the config of a run: {str(error).splitlines()[0]}") from error


def _refuse_strangers(node: Any, path: str) -> None:
    """Hydra lets `+key=value` add a key to a typed node; nothing would ever read it."""
    kind = OmegaConf.get_type(node)
    known = [item.name for item in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else None
    for key in node:
        if known is not None and key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            advice = f"Did you mean {path}{near[0]}? " if near else ""
            raise ConfigError(f"{path}{key}: there is no such key. {advice}Keys: {', '.join(known)}.")
        if OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key):
            continue
        if isinstance(node[key], DictConfig):
            _refuse_strangers(node[key], f"{path}{key}.")


def _freeze(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        values = {item.name: _freeze(getattr(value, item.name)) for item in dataclasses.fields(value)}
        frozen: Any = getattr(value, "frozen", None)
        if frozen is None:
            return values
        # What a command has beside the config of a run is not part of it.
        return frozen(**{item.name: values[item.name] for item in dataclasses.fields(frozen)})
    if isinstance(value, dict):
        return {key: _freeze(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_freeze(part) for part in value]
    return value
