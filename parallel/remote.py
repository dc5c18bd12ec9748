"""Checkpoints at a remote address, by fsspec (s3://, gs://, hf://, ...): copied there when complete, fetched to resume.

An object store has no rename, so the mark COMPLETE is copied last and removed first.
"""

from pathlib import Path

import fsspec

from models.errors import ConfigError
from parallel.manifest import COMPLETE


def is_remote(path: str) -> bool:
    """Whether a path is an address."""
    return "://" in path


def upload(checkpoint: Path, address: str) -> None:
    """Copy a complete checkpoint into the folder at `address`, under its name."""
    files, root = _open(address)
    target = f"{root}/{checkpoint.name}"
    files.makedirs(target, exist_ok=True)
    for path in sorted(checkpoint.iterdir(), key=lambda path: path.name == COMPLETE):
        files.put_file(str(path), f"{target}/{path.name}")


def keep_only(names: set[str], address: str) -> None:
    """Remove the checkpoints at `address` that are not among these names."""
    files, root = _open(address)
    for path in files.glob(f"{root}/step-*"):
        if path.rpartition("/")[2] not in names:
            if files.exists(f"{path}/{COMPLETE}"):
                files.rm_file(f"{path}/{COMPLETE}")
            files.rm(path, recursive=True)


def check_address(key: str, address: str) -> None:
    """Raise ConfigError where there is no package that knows such addresses; nothing is sent."""
    protocol = address.partition("://")[0]
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError as error:
        raise ConfigError(f"{key}={address}: fsspec knows no {protocol}://. Write s3://, gs:// or another.") from error
    except ImportError as error:
        raise ConfigError(f"{key}={address} needs a package that is not installed: {error}") from error


def fetch(key: str, address: str, folder: Path) -> Path:
    """Copy the checkpoint at `address`, or the newest complete one in the folder there, into a local folder.

    Whether it came over whole is asked of it like of any other: `find`. Raises ConfigError where there is none.
    """
    check_address(key, address)
    files, root = _open(address)
    try:
        marks = files.glob(f"{root}/{COMPLETE}") or sorted(files.glob(f"{root}/step-*/{COMPLETE}"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}={address} cannot be read: {error}") from error
    if not marks:
        raise ConfigError(
            f"{key}={address} is neither a complete checkpoint nor a folder with one (step-*/{COMPLETE})."
        )
    source = marks[-1].rpartition("/")[0]
    target = folder / source.rpartition("/")[2]
    target.mkdir(parents=True, exist_ok=True)
    (target / COMPLETE).unlink(missing_ok=True)
    for path in sorted(files.ls(source, detail=False), key=lambda path: path.endswith(f"/{COMPLETE}")):
        files.get_file(path, str(target / path.rpartition("/")[2]))
    return target


def _open(address: str) -> tuple[fsspec.AbstractFileSystem, str]:
    files, root = fsspec.core.url_to_fs(address)
    return files, root.rstrip("/")
