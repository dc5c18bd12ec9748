"""A run's `checkpoints` folder: which checkpoints there are, which is to be gone on from, and which to keep.

index.json names every checkpoint that was completed and is meant to be there, with the metrics known when it was
written: so that one which has been lost is missed, and the best ones are known.
"""

import json
import logging
import shutil
from pathlib import Path

from models.errors import ConfigError, RunError
from parallel.config import CheckpointConfig, MetricMode
from parallel.files import write_whole
from parallel.manifest import COMPLETE, MANIFEST, damage
from parallel.ranks import from_all_ranks, from_first_rank, rank_and_world

INDEX = "index.json"
log = logging.getLogger("quintet")


def checkpoint_name(step: int) -> str:
    """The folder's name; names sort as steps do."""
    return f"step-{step:08d}"


def complete_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a `checkpoints` folder that bear the mark, oldest first."""
    return sorted(path.parent for path in folder.glob(f"step-*/{COMPLETE}"))


def read_index(folder: Path) -> dict[str, dict[str, float]]:
    """Metrics of every completed checkpoint by its name; empty where there is no readable index."""
    try:
        return json.loads((folder / INDEX).read_text())
    except (FileNotFoundError, ValueError):
        return {}


def record(folder: Path, name: str, metrics: dict[str, float]) -> None:
    """Note that a checkpoint is complete."""
    write_whole(folder / INDEX, json.dumps(read_index(folder) | {name: metrics}, indent=1) + "\n")


def best(index: dict[str, dict[str, float]], config: CheckpointConfig) -> list[str]:
    """Names of the `config.best` checkpoints with the best `config.metric`, the best first; of equals the older."""
    sign = 1.0 if config.mode == MetricMode.min else -1.0
    known = {name: sign * metrics[config.metric] for name, metrics in index.items() if config.metric in metrics}
    return sorted(known, key=lambda name: (known[name], name))[: config.best]


def is_among_best(metrics: dict[str, float], index: dict[str, dict[str, float]], config: CheckpointConfig) -> bool:
    """Whether a checkpoint with these metrics would be one of the best."""
    new = "~"  # sorts behind all names, since of equals the older counts
    return new in best(index | {new: metrics}, config)


def retain(folder: Path, config: CheckpointConfig) -> None:
    """Remove all complete checkpoints but the newest `config.keep` and the best `config.best`.

    The newest always stays. One goes out of the index first, then under another name, then for good: whenever this
    is interrupted, what is left is a whole checkpoint or no checkpoint.
    """
    names = [path.name for path in complete_checkpoints(folder)]
    index = read_index(folder)
    kept = {*names[-config.keep :], *best({name: index[name] for name in names if name in index}, config)}
    if index.keys() - kept:
        write_whole(folder / INDEX, json.dumps({name: index[name] for name in index if name in kept}, indent=1) + "\n")
    for name in names:
        if name not in kept:
            remove(folder / name)


def remove(path: Path) -> None:
    """Remove a checkpoint such that no half of it is ever found under its name."""
    gone = path.with_name(f".{path.name}.removed")
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone)


def sweep(folder: Path) -> None:
    """Remove what an interrupted save or removal has left."""
    for pattern in (".*.partial", ".*.removed"):
        for path in folder.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def newest_sound(folder: Path, own: bool) -> Path | None:
    """The newest checkpoint of a `checkpoints` folder whose every file is as it was written; all ranks call it.

    Others are skipped with a warning that names their damage and, where the folder is the run's `own`, renamed, so
    that they count for nothing from then on. None where none was ever completed. Raises RunError where there were
    complete ones, but none that can be used: starting again from nothing must be the user's decision.
    """
    rank, _ = rank_and_world()
    lost: list[str] = []
    index = from_first_rank(read_index(folder))
    names = from_first_rank(sorted((path.name for path in folder.glob("step-*") if path.is_dir()), reverse=True))
    lost += [f"{name} is gone" for name in sorted(index.keys() - set(names), reverse=True)]
    torn: list[str] = []
    for name in names:
        found = damage_on_all(folder / name)
        if not found:
            _warn([*lost, *torn], f"going on from {folder / name}")
            return folder / name
        said = f"{folder / name} cannot be used: {'; '.join(found)}"
        was_complete = name in index or not found[0].startswith(COMPLETE)
        (lost if was_complete else torn).append(said)
        if own and rank == 0:
            _set_aside(folder / name)
    if lost:
        raise RunError(
            f"none of the checkpoints in {folder} can be used.\n" + "\n".join([*lost, *torn]) + "\nRestore one, or "
            "choose another run.dir to start from the beginning."
        )
    _warn(torn, "no save was ever finished here: starting from the beginning")
    return None


def find(path: Path, key: str) -> Path:
    """The checkpoint that a path means, the value of `key`: itself, or the newest sound one of a run directory.

    All ranks call it. Raises ConfigError where there is none, so that a path that cannot be used never means "from
    scratch".
    """
    if (path / COMPLETE).is_file() or (path / MANIFEST).is_file():
        if found := damage_on_all(path):
            raise ConfigError(f"{key}={path} cannot be used: {'; '.join(found)}. Name another checkpoint.")
        return path
    found_in_run = newest_sound(path / "checkpoints", own=False)
    if found_in_run is not None:
        return found_in_run
    raise ConfigError(
        f"{key}={path} is neither a complete checkpoint (a folder with the file {COMPLETE}) nor a run directory with "
        f"one in checkpoints/. Write the path of one of them."
    )


def damage_on_all(path: Path) -> list[str]:
    """`damage`, the reading shared out over all ranks, which all get the whole list."""
    found = [line for lines in from_all_ranks(damage(path, *rank_and_world())) for line in lines]
    return list(dict.fromkeys(found))  # every rank reports a missing mark


def _set_aside(path: Path) -> None:
    aside = path.with_name(f"damaged-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def _warn(skipped: list[str], then: str) -> None:
    if skipped and rank_and_world()[0] == 0:
        log.warning("CHECKPOINT SKIPPED\n%s\n%s", "\n".join(skipped), then)
