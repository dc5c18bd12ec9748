"""Where a run begins: at a checkpoint of its own or another's, at given weights, or at random ones."""

import json
import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from models.decoder import Decoder
from models.errors import ConfigError
from parallel.checkpoint import load_weights
from parallel.config import Config
from parallel.published import Published, fill_from_published
from parallel.ranks import from_first_rank
from parallel.remote import fetch, is_remote
from parallel.retention import find, newest_sound
from parallel.saver import RUN
from recipes.data.tokenizer import Tokenizer, load_tokenizer
from recipes.run_directory import RunDirectory

PUBLISHED = "published"
"""In a run directory: what came with the weights that the run began from (tokenizer, generation settings)."""
log = logging.getLogger("quintet")


def checkpoint_to_resume(config: Config, run: RunDirectory, tokenizer: Tokenizer | None) -> Path | None:
    """What `ckpt` means: the newest sound checkpoint of the run directory, a path, or nothing; all ranks call it.

    A path says where a new run begins; a run that has checkpoints of its own goes on from those.
    """
    own = None if config.ckpt == "none" else newest_sound(run.checkpoints, own=True)
    if config.ckpt in ("auto", "none"):
        return own
    named = find(here("ckpt", config.ckpt, run), "ckpt")
    if json.loads((named / RUN).read_text()).get("weights_only"):
        raise ConfigError(
            f"ckpt={config.ckpt} holds weights only, no optimizer and no step. Write weights={config.ckpt}."
        )
    if own is None or named == own:
        if run.writes and own is None:
            check_tokenizer(f"ckpt={config.ckpt}", named, tokenizer)
        return named
    if run.checkpoints.resolve() in named.resolve().parents:
        raise ConfigError(
            f"ckpt={config.ckpt} is not the newest checkpoint of run.dir={run.path}, which is {own.name}. Remove those "
            f"after it, or choose another run.dir to begin from it."
        )
    if run.writes:
        log.info("ckpt=%s is where this run began; it has checkpoints of its own by now", config.ckpt)
    return own


def starting_weights(path: str, run: RunDirectory, tokenizer: Tokenizer | None) -> Callable[[Decoder], None]:
    """What fills a decoder, split as it is, with the weights at `path`; all ranks call it.

    Raises ConfigError, also later, for weights that are not there or not those of this model.
    """
    folder = here("weights", path, run)
    if run.writes:
        log.info("starting from the weights of %s", folder)
        check_tokenizer(f"weights={path}", folder, tokenizer)
    if (folder / "config.json").is_file():
        published = Published(folder, "weights")
        keep_companions(folder, run)
        return partial(fill_from_published, published=published)
    checkpoint = find(folder, "weights")
    if json.loads((checkpoint / RUN).read_text())["config"]["model"].get("lora", {}).get("rank", 0):
        raise ConfigError(
            f"weights={path} has adapters beside its weights. Put them together first: python -m recipes.export "
            f"run={path} out=merged merge=true, and write weights=merged."
        )
    keep_companions(checkpoint.parent.parent / PUBLISHED, run)
    return lambda decoder: load_weights(checkpoint, decoder)


def tokenizer_of(folder: Path) -> Path:
    """tokenizer.json of a folder of published weights, of a run directory, or of a checkpoint in one."""
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    own = run / "tokenizer.json"
    return own if own.is_file() or not (run / PUBLISHED).is_dir() else run / PUBLISHED / "tokenizer.json"


def check_tokenizer(key: str, folder: Path, tokenizer: Tokenizer | None) -> None:
    """Weights know the tokens of the run that begins from them. Raises ConfigError where they know others.

    `key` is the setting that named the folder. Nothing is said of weights without a tokenizer, or data without text.
    """
    path = tokenizer_of(folder)
    if tokenizer is not None and path.is_file() and not tokenizer.means_the_same(load_tokenizer(path)):
        raise ConfigError(
            f"{key}: those weights know the tokens of {path}, and the data of this run is made of others. Write "
            f"data.tokenizer.kind=file data.tokenizer.path={path}."
        )


def here(key: str, path: str, run: RunDirectory) -> Path:
    """A path, the value of `key`; from a remote address it is fetched into the run directory. All ranks call it."""
    if not is_remote(path):
        return Path(path)
    problem: str | None = None
    fetched: Path | None = None
    if run.writes:
        try:
            fetched = fetch(key, path, run.path / "fetched")
        except ConfigError as error:
            problem = str(error)
    problem, fetched = from_first_rank((problem, fetched))
    if fetched is None:
        raise ConfigError(problem)
    return fetched


def keep_companions(folder: Path, run: RunDirectory) -> None:
    """Copy what is published beside weights into the run directory, for `recipes.export` to hand on."""
    if not run.writes or not folder.is_dir():
        return
    for name in companions(folder):
        (run.path / PUBLISHED).mkdir(exist_ok=True)
        shutil.copyfile(folder / name, run.path / PUBLISHED / name)


def companions(folder: Path) -> list[str]:
    """Files of a published model that are neither weights nor code nor the model's own config."""
    kinds = (".json", ".model", ".txt", ".jinja")
    skipped = ("config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json")
    return sorted(path.name for path in folder.iterdir() if path.suffix in kinds and path.name not in skipped)
