"""The wheel: what it holds, that it works from an empty folder, and that the checkout's names stay the checkout's."""

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import polygon
from polygon.formats import files
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """A wheel built from a copy of the sources, without a network, unpacked as pip would put it."""
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path_factory.mktemp("source")
    kept_out = shutil.ignore_patterns("__pycache__", "*.nb[ic]", "*.egg-info")
    for name in ("polygon", "runners", "solvers", "comm", "instances"):
        shutil.copytree(ROOT / name, source / name, ignore=kept_out)
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("dist")
    program = f"from setuptools.build_meta import build_wheel; build_wheel({str(out)!r})"
    built = subprocess.run(
        [sys.executable, "-c", program], cwd=source, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert built.returncode == 0, built.stderr[-2000:]
    (wheel,) = out.glob("polygon*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(out / "site")
    return out / "site"


def in_empty_folder(unpacked, folder, *arguments):
    """Standard output of a Python that sees the unpacked wheel and nothing of the checkout."""
    environment = {**os.environ, "PYTHONPATH": str(unpacked), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def modules(folder):
    return {path.relative_to(folder) for path in folder.rglob("*.py")}


def test_it_holds_everything_under_names_of_its_own(unpacked):
    """At the top only polygon's names; every module, catalogue, page and instance of the checkout below them."""
    info = f"polygon_train-{polygon.__version__}.dist-info"
    assert {path.name for path in unpacked.iterdir()} == {"polygon", "polygon_comm", info}
    assert (unpacked / info / "top_level.txt").read_text().split() == ["polygon", "polygon_comm"]
    package = unpacked / "polygon"
    rivals = {path for path in modules(ROOT / "runners") if path.parts[0] in ("sweep.py", "sweeps")}
    assert len(rivals) > 2
    assert modules(package / "runners") == modules(ROOT / "runners") - rivals
    assert modules(package / "solvers") == modules(ROOT / "solvers")
    assert modules(ROOT / "comm" / "polygon_comm") == modules(unpacked / "polygon_comm")
    kept = {path.relative_to(package) for path in package.rglob("*") if path.is_file()}
    shipped = {path.relative_to(ROOT) for path in (ROOT / "instances").rglob("*") if path.is_file()}
    page = {path.relative_to(ROOT / "polygon") for path in (ROOT / "polygon/web/static").rglob("*") if path.is_file()}
    assert shipped | page <= kept and len(page) > 3
    data = "domain/words.json", "domain/catalogue/devices.yaml", "web/controls.json", "web/strings.json"
    for name in ("py.typed", *data):
        assert Path(name) in kept
    assert {path.name for path in package.glob("export/templates/*")} == {
        path.name for path in (ROOT / "polygon/export/templates").iterdir()
    }


def test_no_module_of_it_asks_for_the_checkouts_names(unpacked):
    """Neither an import nor a word that is run as a module: they would find another's `runners`, or nothing."""
    for path in unpacked.rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.append(node.value)
                assert not re.search(r"-m (runners|solvers)\b", node.value), (path, node.value)
            assert not any(re.fullmatch(r"(runners|solvers|benchmarks)(\.\w+)*", name) for name in names), (path, names)


def test_every_module_of_it_is_found_where_it_says(unpacked, tmp_path):
    """All of planner, solvers and runtime load, from the wheel alone; `solvers` and `runners` are not to be had."""
    code = f"""
import importlib, pkgutil, sys
from importlib.util import find_spec
import polygon, polygon.runners, polygon.solvers
for package in (polygon.runners, polygon.solvers):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if "backends." not in module.name:  # other programs' libraries
            importlib.import_module(module.name)
for module in [*sys.modules.values()]:
    if module.__name__.split(".")[0] in ("polygon", "polygon_comm"):
        assert module.__file__.startswith({str(unpacked)!r}), module
assert not [name for name in sys.modules if name.split(".")[0] in ("runners", "solvers")]
print(polygon.Cluster.from_yaml("instances/ptafm-7dc.yaml").devices)
"""
    assert in_empty_folder(unpacked, tmp_path, "-c", code).split() == ["96"]


def test_programs_of_the_runtime_run_from_it(unpacked, tmp_path):
    """As `polygon NAME`, as a module, and by their path, which is deeper there than in a checkout."""
    by_path = str(unpacked / "polygon" / "runners" / "dist_runner.py")
    module = "polygon.runners.dist_runner"
    starts = {
        "polygon dist-runner": ["-m", "polygon", "dist-runner"],
        f"python -m {module}": ["-m", module],
        "dist_runner.py": [by_path],
    }
    for name, start in starts.items():
        assert in_empty_folder(unpacked, tmp_path, *start, "--help").startswith(f"usage: {name} [")
    listing = in_empty_folder(unpacked, tmp_path, "-m", "polygon", "--help")
    assert all(f"\n  {name} " in listing for name in ("init", "search", "launch", "probe", "train"))


def test_instances_are_read_from_the_package_only_where_the_folder_has_none(tmp_path, monkeypatch):
    """A file of that name in the working folder comes first; nothing above the shipped folder can be named."""
    monkeypatch.chdir(tmp_path)
    shipped = files.found_file("instances/one-node.yaml")
    assert shipped.is_absolute() and shipped == files.shipped_instances() / "one-node.yaml"
    (tmp_path / "instances").mkdir()
    (tmp_path / "instances" / "one-node.yaml").write_text("mine")
    assert files.read_text("instances/one-node.yaml") == "mine"
    for name in ("instances/no-such.yaml", "instances/../setup.cfg", "one-node.yaml"):
        assert files.found_file(name) == Path(name)


def test_the_version_is_written_once():
    """`polygon.__version__` is what a wheel is called and what people are asked to cite."""
    assert f"\nversion: {polygon.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {polygon.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    for name in ("setup.cfg", "setup.py", "pyproject.toml"):
        assert polygon.__version__ not in (ROOT / name).read_text()
