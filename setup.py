"""What `setup.cfg` cannot say: in the wheel, `runners` and `solvers` lie inside `polygon`, and so do the instances.

The folders `runners/` and `solvers/` are packages of the checkout (`python -m runners.launch`), where their names are
short. A wheel must not put such names into everybody's site-packages: there they are `polygon.runners` and
`polygon.solvers`, and what imports them, runs them or speaks of them is told so while it is copied. Editable installs
are the checkout itself and stay as they are.

With `POLYGON_SHIP_KERNELS=1`, and what the planner needs installed (`pip wheel --no-build-isolation`), a wheel holds
the planner's kernels compiled (`polygon/jit/shipped.py`).
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.egg_info import egg_info

INSIDE = ("runners", "solvers")
"""Packages of the checkout that the wheel keeps inside polygon."""

OF_THE_CHECKOUT = ("runners/sweep.py", "runners/sweeps")
"""Compares our search with rivals', which live in `benchmarks/` and are not for users."""

IMPORTED = re.compile(rf"^(\s*(?:from|import) )(?=(?:{'|'.join(INSIDE)})\b)", re.MULTILINE)
NAMED = re.compile(rf"(?<![\w./])(?<!from )(?<!import )(?=(?:{'|'.join(INSIDE)})\.[a-z_])")
AS_A_WORD = re.compile(rf"(?<=\")(?=(?:{'|'.join(INSIDE)})\")")
ROOT = re.compile(r"^(\s+_root = Path\(__file__\)\.resolve\(\)\.parents)\[1\]$", re.MULTILINE)


def renamed(text: str, inside: bool) -> str:
    """Source text with the wheel's names; `inside`: of a module that itself lies one folder deeper there."""
    text = AS_A_WORD.sub("polygon.", NAMED.sub("polygon.", IMPORTED.sub(r"\1polygon.", text)))
    return ROOT.sub(r"\1[2]", text) if inside else text


class BuildPy(build_py):
    """Copies the packages, and in a wheel gives them their places and names there."""

    def run(self):
        if self.editable_mode:
            super().run()
            return
        built = Path(self.build_lib)
        shutil.rmtree(built, ignore_errors=True)  # nothing of an earlier version may come along
        super().run()
        home = built / "polygon"
        for path in [*home.rglob("*.py"), *(path for name in INSIDE for path in (built / name).rglob("*.py"))]:
            text = path.read_text("utf-8")
            path.write_text(renamed(text, inside=home not in path.parents), "utf-8")
        for name in OF_THE_CHECKOUT:
            shutil.rmtree(built / name) if (built / name).is_dir() else (built / name).unlink()
        for name in INSIDE:
            shutil.move(built / name, home / name)
        shutil.copytree("instances", home / "instances")
        if os.environ.get("POLYGON_SHIP_KERNELS"):
            # Of the sources as they are here: a kernel of other ones would be made anew.
            folder = home / "jit" / "shipped"
            command = [sys.executable, "-m", "polygon.commands.kernels", "--ship", folder.resolve()]
            subprocess.run(command, env={**os.environ, "PYTHONPATH": str(built.resolve())}, cwd=built, check=True)
            for cache in built.rglob("__pycache__"):
                shutil.rmtree(cache)


class EggInfo(egg_info):
    """Names only what the wheel puts at the top."""

    def run(self):
        super().run()
        path = Path(self.egg_info) / "top_level.txt"
        names = [name for name in path.read_text("utf-8").split() if name not in INSIDE]
        path.write_text("\n".join(names) + "\n", "utf-8")


setup(cmdclass={"build_py": BuildPy, "egg_info": EggInfo})
