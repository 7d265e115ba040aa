"""Kernels that come compiled: taken where they fit the source and the processor, and nowhere else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from polygon.commands import cli
from polygon.commands.kernels import main
from polygon.jit import shipped
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
USER = """
from polygon.jit.compilation import inner, kernel
FACTOR = 3
@inner
def tripled(x):
    return FACTOR * x
@kernel
def used(x):
    return tripled(x) + 1
print(used(4), used._cache_hits[used.signatures[0]])
"""


@pytest.fixture
def package(tmp_path):
    """polygon with nothing but its compilation, as a wheel would bring it, and a module of kernels."""
    shutil.copytree(ROOT / "polygon" / "jit", tmp_path / "polygon" / "jit", ignore=shutil.ignore_patterns("shipped"))
    (tmp_path / "polygon" / "__init__.py").touch()
    (tmp_path / "user.py").write_text(USER)
    return tmp_path


def printed(package, cache, **more):
    """Value of the kernel, and whether it came compiled or was kept."""
    environment = {**os.environ, "PYTHONPATH": str(package), "NUMBA_CACHE_DIR": str(cache), **more}
    done = subprocess.run(
        [sys.executable, "-c", "import user"], cwd=package, env=environment, capture_output=True, text=True,
        timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    value, kept = done.stdout.split()
    return int(value), bool(int(kept))


@pytest.mark.skipif(not shipped.run_here(), reason=f"this processor is no {shipped.CPU}")
def test_a_shipped_kernel_is_taken_while_source_and_processor_are_its_own(package, tmp_path):
    """Compiled for a common processor, moved beside the package; a changed constant, a lesser processor: made anew."""
    built = tmp_path / "built"
    assert printed(package, **{"cache": built, **shipped.environment(built)}) == (13, False)
    folder = package / "polygon" / "jit" / "shipped"
    assert shipped.collect(built, folder) == 2 and not list(built.rglob("*.nb?"))
    assert printed(package, tmp_path / "empty") == (13, True)
    assert not list((tmp_path / "empty").rglob("*.nbc"))
    module = package / "polygon" / "jit" / "shipped.py"
    text = module.read_text()
    module.write_text(text.replace('"avx2"', '"no-processor-has-this"'))
    assert module.read_text() != text and printed(package, tmp_path / "lesser") == (13, False)
    module.write_text(text)
    (package / "user.py").write_text(USER.replace("FACTOR = 3", "FACTOR = 5"))
    assert printed(package, tmp_path / "changed") == (21, False)


def test_two_kernels_that_are_called_alike_are_not_shipped(tmp_path):
    """numba tells them apart by their folders alone."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.nbi").touch()
    with pytest.raises(FileExistsError):
        shipped.collect(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("name", ["full", "full/file"])
def test_kernels_go_into_a_folder_of_their_own(name, tmp_path, capsys):
    """Neither a folder with something in it nor a file, and nothing is compiled before that is said."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert cli.run(main, ["--ship", str(tmp_path / name)]) == 2
    assert "expected a new or an empty folder" in capsys.readouterr().err
