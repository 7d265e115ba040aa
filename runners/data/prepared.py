"""Data that is prepared once and read by all ranks of a machine: a cache of folders that appear whole."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from polygon.domain.errors import InputError, located
from polygon.formats.files import make_folder

CACHE = "~/.cache/polygon"


def cache_folder(name: str, folder: str | Path | None) -> Path:
    """Where prepared data is kept, made where it is missing; raises `InputError` where it cannot be written.

    Parameters
    ----------
    name : str
        Of the option or field that says so.
    folder : path or None
        None: `CACHE`.
    """
    return writable_folder(name, Path(folder or CACHE).expanduser())


def writable_folder(what: str, folder: Path) -> Path:
    """A folder, made where it is missing; raises `InputError` where it cannot be written."""
    with located(f"{what}: "):
        make_folder(folder)
        if not os.access(folder, os.W_OK):
            raise InputError(f"{folder}: found a folder that may not be written to")
    return folder


def state_of(source: Path) -> str:
    """A digest that changes with every file of a folder (or with the file itself) that does."""
    digest = hashlib.sha256()
    files = sorted(path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]
    for path in files:
        found = path.stat()
        digest.update(f"{os.path.relpath(path, source)} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Let one process of this machine after the other do what is inside."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def write_whole(place: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder that appears at its place when it is complete."""
    temporary = Path(tempfile.mkdtemp(dir=place.parent))
    try:
        write(temporary)
        temporary.rename(place)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
