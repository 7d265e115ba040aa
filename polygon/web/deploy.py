"""Deployments: exports written below one folder under names from a whitelist, and checked without starting anything."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from polygon import files
from polygon.domain.errors import InputError
from polygon.export.bundle import Export
from polygon.planning.violations import violations

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,120}")
MOST_DEPLOYMENTS = 200


def write_deployment(root: Path, name: str, export: Export) -> Path:
    """Write an export into `root/name`, which it replaces.

    Raises
    ------
    InputError
        For a name that is none, and where there are too many.
    """
    if not NAME.fullmatch(name):
        raise InputError(f"name: found {name!r}, expected letters a-z, digits and '-', at most 40")
    folder = root / name
    if folder.is_symlink():
        raise InputError(f"name: found a link at {name!r}, expected a folder or nothing")
    if not folder.exists() and root.exists() and len(list(root.iterdir())) >= MOST_DEPLOYMENTS:
        raise InputError(f"deployments: found {MOST_DEPLOYMENTS}, expected fewer (remove some)")
    if folder.exists():
        shutil.rmtree(folder)
    files.write_folder(folder, export.files)
    return folder


def check_folder(folder: Path) -> list[dict[str, Any]]:
    """A dry run: bash parses every script, JSON is read, batch sizes multiply out, the plan breaks no rule."""
    checks: list[dict[str, Any]] = []
    for path in sorted(folder.iterdir()):
        if path.suffix == ".sh":
            run = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, timeout=20, check=False)
            checks.append({"what": f"bash -n {path.name}", "passed": run.returncode == 0, "found": run.stderr[:500]})
        elif path.name == "plan.json":
            problem, plan, _ = files.read_plan(path)
            broken = violations(problem, plan)
            checks.append({"what": "plan.json breaks no rule", "passed": not broken, "found": "; ".join(broken)[:500]})
        elif path.suffix == ".json":
            found = json.loads(path.read_text("utf-8"))
            checks.append({"what": f"{path.name} can be read", "passed": isinstance(found, dict), "found": ""})
            if path.name == "ds_config.json":
                checks.append(_batch_check(folder, found))
    return checks


def _batch_check(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """train_batch_size = micro-batch x accumulation x replicas, which DeepSpeed asserts."""
    slots = [int(n) for n in re.findall(r"slots=(\d+)", (folder / "hostfile").read_text("utf-8"))]
    stages = int(json.loads((folder / "model.json").read_text("utf-8"))["stages"])
    replicas = sum(slots) // stages
    product = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * replicas
    found = f"{config['train_micro_batch_size_per_gpu']} x {config['gradient_accumulation_steps']} x {replicas}"
    passed = product == config["train_batch_size"]
    return {"what": "batch sizes multiply out", "passed": passed, "found": f"{found} = {config['train_batch_size']}"}


def deployment_files(root: Path) -> list[dict[str, Any]]:
    """Names of deployments and their files."""
    if not root.is_dir():
        return []
    return [
        {"name": folder.name, "files": sorted(path.name for path in folder.iterdir() if path.is_file())}
        for folder in sorted(root.iterdir())
        if folder.is_dir() and not folder.is_symlink() and NAME.fullmatch(folder.name)
    ]


def read_deployment(root: Path, name: str, file: str) -> str | None:
    """Text of a file of a deployment; None where there is none (or the name is none)."""
    path = root / name / file
    if not (NAME.fullmatch(name) and FILE.fullmatch(file)) or path.is_symlink() or (root / name).is_symlink():
        return None
    return path.read_text("utf-8") if path.is_file() else None
