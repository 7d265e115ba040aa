"""Kept kernels are those of the source as it is now, in whatever file what they are made of stands."""

import os
import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
CALLED = """
from typing import NamedTuple
from polygon.jit.compilation import inner
FACTOR = 3
class Pair(NamedTuple):
    first: int
    second: int
@inner
def called(x):
    return 10 * x
"""
CALLER = """
from called import FACTOR, Pair, called
from polygon.jit.compilation import kernel
@kernel
def caller(pair):
    return called(pair.first) + FACTOR * pair.second
print(caller(Pair(1, 2)), sum(caller.stats.cache_hits.values()))
"""


def printed(folder):
    """Value of the kernel, and whether it was kept from before."""
    # Python's own cache tells files apart by second and size: it would keep what changes within a second.
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, folder / "caller.py"], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    value, kept = done.stdout.split()
    return int(value), bool(int(kept))


def test_a_kernel_is_made_anew_when_what_it_holds_changes(tmp_path):
    """Another file's kernel, constant or named tuple; kept otherwise."""
    (tmp_path / "caller.py").write_text(CALLER)
    (tmp_path / "called.py").write_text(CALLED)
    assert [printed(tmp_path) for _ in range(2)] == [(16, False), (16, True)]
    for old, new, value in (
        ("10 * x", "20 * x", 26),
        ("FACTOR = 3", "FACTOR = 4", 18),
        ("first: int\n    second", "second: int\n    first", 23),
    ):
        (tmp_path / "called.py").write_text(CALLED.replace(old, new))
        assert CALLED.replace(old, new) != CALLED and printed(tmp_path) == (value, False)


def test_what_an_earlier_version_kept_is_made_anew(tmp_path):
    """A kept index that cannot be read (a module has moved, a write was cut short) is no fault."""
    (tmp_path / "caller.py").write_text(CALLER)
    (tmp_path / "called.py").write_text(CALLED)
    assert printed(tmp_path) == (16, False)
    (tmp_path / "called.py").write_text(CALLED.replace("class Pair", "class Couple") + "\nPair = Couple\n")
    assert printed(tmp_path) == (16, False)
    for index in (tmp_path / "__pycache__").glob("*.nbi"):
        index.write_bytes(index.read_bytes()[:40])
    assert printed(tmp_path) == (16, False)
