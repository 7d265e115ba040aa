"""What planning may import, and living beside Jupyter."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE_S
from tests.real_ranks import run_ranks

ROOT = Path(__file__).parent.parent


def python(code, cwd, **environment):
    """Run code in a new interpreter; the repository is on its path."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "comm")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_planning_never_imports_torch_or_plots(tmp_path):
    """All planning modules load in an interpreter in which torch, matplotlib and joblib cannot be imported."""
    code = """
import sys, pkgutil, importlib
for name in ("torch", "deepspeed", "matplotlib"):
    sys.modules[name] = None
for name in ("polygon.init", "polygon.search", "polygon.commands.evaluate", "polygon.commands.generate",
             "polygon.commands.validate", "polygon.planning.search_engine", "polygon.planning.checker",
             "polygon.export.predicted", "solvers.genetic"):
    importlib.import_module(name)
print("fine")
"""
    assert python(code, tmp_path).strip() == "fine"


def test_jupyters_comm_is_found_from_the_repository_root():
    """In the repository root (as a notebook kernel starts) `import comm` is Jupyter's, and polygon_comm is ours."""
    code = """
import sys; sys.path.insert(0, "")
import comm, polygon_comm
print(hasattr(comm, "create_comm"), polygon_comm.__file__)
"""
    jupyters, ours = python(code, ROOT).split()
    assert jupyters == "True"
    assert Path(ours) == ROOT / "comm" / "polygon_comm" / "__init__.py"


def test_a_notebook_kernel_at_the_root_plans(tmp_path):
    """A real ipykernel started in the repository root finds a plan."""
    code = f"""
import os
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel(cwd={str(ROOT)!r})
out = []
client.execute_interactive('''
from polygon import init
assert init.main(["instances/two-campus.yaml", "--model", "opt-350m", "--global-batch", "16", "--stages", "2",
                  "-o", {str(tmp_path / "groups.json")!r}, "--quiet"]) == 0
import comm
assert hasattr(comm, "create_comm")
''', timeout={PATIENCE_S}, output_hook=lambda m: out.append(m["content"]))
client.stop_channels(); manager.shutdown_kernel(now=True)
errors = [m for m in out if "ename" in m]
assert not errors, errors
print("planned")
"""
    assert python(code, ROOT).strip().endswith("planned")
    assert json.loads((tmp_path / "groups.json").read_text())["format"] == "polygon-groups"


def test_kernels_are_kept_where_neither_package_nor_home_can_be_written(tmp_path):
    """A private folder among the temporary files serves instead, also to the next command."""
    code = """
import os, stat, sys
from pathlib import Path
from polygon.jit.cache import ensure_kernel_cache
import numba
(Path.cwd() / "file").write_text("no folder")
ensure_kernel_cache([Path.cwd() / "file" / "a", Path.cwd() / "file" / "b"])
from polygon.cost.network import intra_kernel
folder = Path(os.environ["NUMBA_CACHE_DIR"])
cached = Path(intra_kernel._cache.cache_path)
print(folder.parent == Path.cwd(), stat.S_IMODE(folder.stat().st_mode) == 0o700, cached.is_relative_to(folder))
"""
    assert python(code, tmp_path, TMPDIR=str(tmp_path), NUMBA_CACHE_DIR="").split() == ["True"] * 3


def test_numbas_own_folder_is_kept_where_it_can_be_written(tmp_path):
    """Nothing changes for whom numba finds a folder, or who names one."""
    code = """
import os
from pathlib import Path
from polygon.jit.cache import ensure_kernel_cache
os.environ.pop("NUMBA_CACHE_DIR", None)
ensure_kernel_cache([Path.cwd() / "file" / "a", Path.cwd()])
print("NUMBA_CACHE_DIR" in os.environ)
"""
    assert python(code, tmp_path).strip() == "False"


def has_loaded(rank, port):
    """Whether this rank came with what takes seconds to import."""
    return {"torch._dynamo", "runners.engine.run"} <= sys.modules.keys()


def test_ranks_come_with_what_they_need():
    """They are forked from a server that has it, though other tests import what has the server load something else."""
    assert run_ranks(has_loaded, 2) == [True, True]
