"""What a checkpoint consists of, and whether it is still what was written: size and SHA-256 of every file.

manifest.json lists the files; COMPLETE, written last of all, holds the manifest's own SHA-256, twice, so that a damaged
mark is told from a damaged manifest.
"""

import hashlib
import json
from pathlib import Path
from typing import TypedDict

from parallel.files import write_whole

MANIFEST, COMPLETE = "manifest.json", "COMPLETE"
FORMAT = 1
"""Raised when a checkpoint written from then on cannot be read as before."""


class Digest(TypedDict):
    """One file as it was written."""

    bytes: int
    sha256: str


def digest(path: Path) -> Digest:
    """Size and checksum of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_manifest(folder: Path, files: dict[str, Digest]) -> None:
    """List the files of a checkpoint."""
    ordered = dict(sorted(files.items()))
    write_whole(folder / MANIFEST, json.dumps({"format": FORMAT, "files": ordered}, indent=1) + "\n")


def mark_complete(folder: Path) -> None:
    """Say that everything the manifest lists is there."""
    checksum = digest(folder / MANIFEST)["sha256"]
    write_whole(folder / COMPLETE, f"{checksum}\n{checksum}\n")


def damage(folder: Path, rank: int = 0, ranks: int = 1) -> list[str]:
    """What is wrong with a checkpoint, a line per file; empty where it is as it was written.

    Every rank looks at mark and manifest; the content of files is shared out, so that the checkpoint is read once.
    """
    try:
        marks = (folder / COMPLETE).read_bytes().split(b"\n")
    except FileNotFoundError:
        return [f"{COMPLETE} is missing: it was not finished, or has lost its mark"]
    if len(marks) != 3 or marks[0] != marks[1] or len(marks[0]) != 64:
        return [f"{COMPLETE} is damaged"]
    try:
        text = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        return [f"{MANIFEST} is missing"]
    if hashlib.sha256(text).hexdigest().encode() != marks[0]:
        return [f"{MANIFEST} is not what {COMPLETE} was written for"]
    content = json.loads(text)
    if content["format"] != FORMAT:
        return [f"{MANIFEST} is of format {content['format']}; this version reads {FORMAT}"]
    names = sorted(content["files"])[rank::ranks]
    found = (_damage_of(folder / name, content["files"][name]) for name in names)
    return [f"{name} {what}" for name, what in zip(names, found, strict=True) if what]


def _damage_of(path: Path, written: Digest) -> str:
    try:
        if (size := path.stat().st_size) != written["bytes"]:
            return f"has {size} bytes instead of {written['bytes']}"
        return "" if digest(path) == written else "is not what was written: its SHA-256 differs"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
