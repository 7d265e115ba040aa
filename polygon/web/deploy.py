"""Deployments: exports written below one folder under names from a whitelist, and checked without starting anything."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from polygon.domain.errors import fault
from polygon.domain.message import Message
from polygon.formats import files
from polygon.planning.checker import violations

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
NAME_IN_WORDS = "letters a-z, digits and '-', at most 40"
FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,120}")
MOST_DEPLOYMENTS = 200
OWNER = "@"
"""Begins the name of a user's folder, which no deployment has."""


class TakenError(Exception):
    """A deployment of that name is there, and is not to be replaced."""


def folder_of(user: str) -> str:
    """Where below the root a user's deployments are; of the only one, who need not say who that is, there itself."""
    return OWNER + quote(user, safe="") if user else ""


def owner_of(parts: tuple[str, ...]) -> str | None:
    """Whose a path below the root is; None: everybody's."""
    return unquote(parts[0].removeprefix(OWNER)) if parts and parts[0].startswith(OWNER) else None


def check_free(root: Path, name: str, *, replace: bool) -> None:
    """Raise `TakenError` for a deployment that is there and is not to be replaced."""
    if not replace and (root / name).exists():
        raise TakenError


def write_deployment(root: Path, name: str, texts: Mapping[str, str], *, replace: bool = False) -> Path:
    """Write an export's files into `root/name`.

    Raises
    ------
    InputError
        For a name that is none, and where there are too many.
    TakenError
        Where it is there, unless it is to be replaced.
    """
    if not NAME.fullmatch(name):
        raise fault("name", name, NAME_IN_WORDS)
    folder = root / name
    if folder.is_symlink():
        raise fault("name", Message("found.link", name=name), "a folder or nothing")
    if not folder.exists() and root.exists() and len(list(root.iterdir())) >= MOST_DEPLOYMENTS:
        raise fault("deployments", MOST_DEPLOYMENTS, "fewer (remove some)")
    check_free(root, name, replace=replace)
    if folder.exists():
        shutil.rmtree(folder)
    files.write_folder(folder, texts)
    return folder


def check_folder(folder: Path) -> list[dict[str, Any]]:
    """A dry run: bash parses every script, JSON is read, batch sizes multiply out, the plan breaks no rule."""
    checks: list[dict[str, Any]] = []
    for path in sorted(folder.iterdir()):
        if path.suffix in (".sh", ".sbatch"):
            run = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, timeout=20, check=False)
            checks.append(_check("check.script", run.returncode == 0, run.stderr[:500], file=path.name))
        elif path.name == "plan.json":
            problem, plan, _ = files.read_plan(path)
            broken = violations(problem, plan)
            checks.append(_check("check.plan", not broken, Message("check.violations", broken=tuple(broken[:5]))))
        elif path.suffix == ".json":
            found = json.loads(path.read_text("utf-8"))
            checks.append(_check("check.readable", isinstance(found, dict), "", file=path.name))
            if path.name == "ds_config.json":
                checks.append(_batch_check(folder, found))
    return checks


def _check(kind: str, passed: bool, found: Message | str, **arguments: str) -> dict[str, Any]:
    return {"what": Message(kind, **arguments), "passed": passed, "found": found}


def _batch_check(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """train_batch_size = micro-batch x accumulation x replicas, which DeepSpeed asserts."""
    slots = [int(n) for n in re.findall(r"slots=(\d+)", (folder / "hostfile").read_text("utf-8"))]
    stages = int(json.loads((folder / "model.json").read_text("utf-8"))["stages"])
    replicas = sum(slots) // stages
    product = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * replicas
    found = f"{config['train_micro_batch_size_per_gpu']} x {config['gradient_accumulation_steps']} x {replicas}"
    passed = product == config["train_batch_size"]
    return _check("check.batch", passed, f"{found} = {config['train_batch_size']}")


def deployment_files(root: Path) -> list[dict[str, Any]]:
    """Names of deployments and their files."""
    if not root.is_dir():
        return []
    return [
        {"name": folder.name, "files": sorted(path.name for path in folder.iterdir() if path.is_file())}
        for folder in sorted(root.iterdir())
        if folder.is_dir() and not folder.is_symlink() and NAME.fullmatch(folder.name)
    ]


def pack_deployment(root: Path, name: str) -> bytes | None:
    """A zip of a deployment's files; None where there is none (or the name is none)."""
    folder = root / name
    if not NAME.fullmatch(name) or folder.is_symlink() or not folder.is_dir():
        return None
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.iterdir()):
            if path.is_file() and not path.is_symlink():
                archive.write(path, f"{name}/{path.name}")
    return packed.getvalue()


def read_deployment(root: Path, name: str, file: str) -> str | None:
    """Text of a file of a deployment; None where there is none (or the name is none)."""
    path = root / name / file
    if not (NAME.fullmatch(name) and FILE.fullmatch(file)) or path.is_symlink() or (root / name).is_symlink():
        return None
    return path.read_text("utf-8") if path.is_file() else None
