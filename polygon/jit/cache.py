"""Where numba keeps compiled kernels when neither the package's folder nor the user's cache can be written to."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path


def numbas_choices() -> tuple[Path, Path]:
    """The folders that numba tries: beside the source, then the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(__file__).parent.parent, Path(cache) / "numba"


def ensure_kernel_cache(choices: Iterable[Path] | None = None) -> None:
    """Name a folder for numba where it would find none, and fail: read-only installation and home.

    The folder lies among the temporary files, is the user's alone, and serves later commands and child processes too.
    """
    if os.environ.get("NUMBA_CACHE_DIR") or any(map(_writable, choices or numbas_choices())):
        return
    os.environ["NUMBA_CACHE_DIR"] = str(_private_folder())
    if "numba" in sys.modules:  # it has read its settings
        from numba.core import config

        config.reload_config()


def _writable(folder: Path) -> bool:
    """Whether a folder can be written to (made if missing), as numba tries it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def _private_folder() -> Path:
    """A folder that only this user can write to: kernels are code."""
    folder = Path(tempfile.gettempdir()) / f"polygon-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    return folder if private else Path(tempfile.mkdtemp(prefix="polygon-kernels-"))
