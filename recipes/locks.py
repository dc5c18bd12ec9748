"""What every recipe is, written down beside it, so that none changes unnoticed: conf/recipe/NAME.lock.

`python -m recipes.locks` says what differs, key by key, and leaves with 1 if anything does; `--write` writes the
locks anew, on purpose. A lock holds the resolved config and its hash, pinned versions, seed, where the data comes from,
and the numbers that are known beforehand: parameters and tokens per step, and of recipes that run on any machine, as
the twins of the large ones do, the first losses. `--measure` trains those for three steps and compares.
"""

import argparse
import hashlib
import json
import math
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from models.counts import parameter_count
from models.errors import ConfigError, RunError
from parallel.config import Config, HubData, RunConfig
from recipes import schema
from recipes.command import CONF, report

FOLDER = CONF / "recipe"
PINNED = ("torch", "lightning", "hydra-core", "omegaconf", "numpy", "datasets", "tokenizers")
FIRST_STEPS = (
    *("data=synthetic", "precision=fp32", "cluster.device=cpu", "trainer.max_steps=3", "trainer.log_interval=1"),
    *("trainer.val_interval=null", "logger=none", "callbacks=none"),
)
"""How first losses are measured: on synthetic tokens, since the default text is that of the Python at hand."""
TOLERANCE = 1e-4
"""Relative; processors and versions of torch sum in another order, which three steps hardly enlarge."""


def recipes() -> list[str]:
    """The names of all recipes."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def compose_recipe(name: str, *overrides: str) -> Config:
    """The config of a recipe."""
    OmegaConf.register_new_resolver("run_id", lambda: "lock", replace=True)
    schema.register()
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        return schema.to_config(compose("config", overrides=[f"recipe={name}", *overrides]))


def lock_of(name: str, measured: dict[str, Any]) -> dict[str, Any]:
    """The lock that a recipe has now; `measured` is what its old one holds of measured numbers."""
    config = compose_recipe(name)
    flat = _settings(config)
    pins = tomllib.loads((CONF.parent / "pyproject.toml").read_text())["project"]["dependencies"]
    versions = dict(pin.split("==") for pin in pins)
    return {
        "config_sha256": hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest(),
        "config": flat,
        "versions": {package: versions[package] for package in PINNED},
        "data": {
            "source": config.data.name,
            "revision": config.data.revision if isinstance(config.data, HubData) else None,
            "tokenizer": str(config.data.tokenizer.kind),
        },
        "seed": config.seed,
        "expected": {
            "parameters": parameter_count(config.model),
            "tokens_per_step": config.data.global_batch * config.data.seq_len,
        },
        "measured": measured,
    }


def under_lock(config: Config) -> dict[str, Any] | None:
    """For a run's checkpoints: the hash in its recipe's lock, and the keys in which the run is not what it locks.

    None where the recipe has no lock.
    """
    if not (FOLDER / f"{config.recipe.name}.lock").exists():
        return None
    lock, now = read_lock(config.recipe.name), _settings(config)
    locked = lock["config"]
    changed = sorted(key for key in now.keys() | locked.keys() if now.get(key) != locked.get(key))
    return {"recipe": config.recipe.name, "config_sha256": lock["config_sha256"], "changed": changed}


def _settings(config: Config) -> dict[str, Any]:
    """What a run is, key by key; not how or where it is started."""
    from recipes.plain import plain

    data = replace(config.data, cache_dir="")
    tree = plain(replace(config, run=RunConfig("", "", ""), ckpt="", data=data))
    for key in ("environment", "slurm", "watch"):
        del tree["cluster"][key]
    return dict(_flat(tree, ""))


def _flat(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _flat(value, f"{path}.{key}" if path else key)
    else:
        yield path, node


def read_lock(name: str) -> dict[str, Any]:
    """A recipe's lock. Raises ConfigError where there is none or it is damaged."""
    path = FOLDER / f"{name}.lock"
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; `python -m recipes.locks --write {name}` makes it.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}") from error


def differences(name: str) -> list[str]:
    """What a recipe is now and what its lock says, key by key; nothing where they agree."""
    locked = read_lock(name)
    now = lock_of(name, locked.get("measured", {}))
    old, new = dict(_flat(locked, "")), dict(_flat(now, ""))
    found = []
    for key in sorted(old.keys() | new.keys()):
        if key != "config_sha256" and old.get(key) != new.get(key):
            found.append(f"{name}: {key} is {new.get(key, 'gone')}, locked {old.get(key, 'nowhere')}")
    return found


def all_differences(names: list[str] | None = None) -> list[str]:
    """`differences` of many recipes, and locks whose recipe is gone."""
    found = [line for name in names or recipes() for line in differences(name)]
    left = {path.stem for path in FOLDER.glob("*.lock")} - set(recipes())
    return found + [f"{name}.lock: there is no such recipe" for name in sorted(left)]


def write(name: str, measured: dict[str, Any] | None = None) -> None:
    """Write a recipe's lock anew. Measured numbers stay, unless others are given or the recipe has changed."""
    path = FOLDER / f"{name}.lock"
    lock = lock_of(name, measured or {})
    if measured is None and path.exists() and (old := read_lock(name)).get("config_sha256") == lock["config_sha256"]:
        lock["measured"] = old.get("measured", {})
    path.write_text(json.dumps(lock, indent=1) + "\n")


def is_measured(name: str) -> bool:
    """Whether a recipe's first losses can be had on any machine."""
    return name.startswith("tiny")


def first_losses(name: str) -> list[float]:
    """Train a recipe for three steps on its own axes, as FIRST_STEPS says. Raises RunError where it does not train."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "recipes.train", f"recipe={name}", *FIRST_STEPS, f"run.dir={folder}/run"]
        done = subprocess.run(words, cwd=CONF.parent, capture_output=True, text=True)
        if done.returncode:
            raise RunError(f"{' '.join(words[1:])}:\n{done.stderr}")
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def loss_differences(name: str, losses: list[float]) -> list[str]:
    """Where the first losses are not those in the recipe's lock."""
    locked = read_lock(name)["measured"].get("first_losses")
    if locked is None:
        return [f"{name}: its lock has no first losses; `python -m recipes.locks --measure --write {name}` takes them"]
    if all(math.isclose(*pair, rel_tol=TOLERANCE) for pair in zip(losses, locked, strict=True)):
        return []
    return [f"{name}: the first losses are {losses}, locked {locked}, with a tolerance of {TOLERANCE:g} of each"]


def main(words: list[str] | None = None) -> None:
    """The command line; `recipes.doctor --locks` brings its own words."""
    parser = argparse.ArgumentParser(prog="python -m recipes.locks", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="recipes; all where none is named")
    parser.add_argument("--write", action="store_true", help="write the locks anew")
    parser.add_argument("--measure", action="store_true", help="train those named tiny for three steps; minutes")
    arguments = parser.parse_args(words)
    names = arguments.names or recipes()
    try:
        losses = {name: first_losses(name) for name in names if arguments.measure and is_measured(name)}
        for name in names:
            if arguments.write:
                write(name, {"first_losses": losses[name]} if name in losses else None)
        found = all_differences(arguments.names)
        found += [line for name in losses for line in loss_differences(name, losses[name])]
    except Exception as error:
        sys.exit(report(error))
    print("\n".join(found) or "every recipe is what its lock says")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
