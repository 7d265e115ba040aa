"""The only place where the planner reads and writes files.

Every reader raises `InputError` with one line that begins with the file's name. `-` is standard input or output.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from polygon.domain.bench import DeviceBench
from polygon.domain.cluster import Cluster
from polygon.domain.errors import InputError, Phrase, fault, located
from polygon.domain.groups import Groups
from polygon.domain.message import Message
from polygon.domain.model import Batch, Model
from polygon.domain.plan import Constraints, Plan, Problem
from polygon.formats import bench_file, catalogue, convert, convert_plan
from polygon.formats import recognition as formats
from polygon.formats.convert_plan import PlanFile
from polygon.formats.schema import (
    BatchSpec,
    BenchSpec,
    ConstraintsSpec,
    GroupsSpec,
    PlanSpec,
    ProblemSpec,
    Strict,
    check,
)
from polygon.formats.serialization import check_filled, format_json, format_yaml, parse_json

PathLike = str | os.PathLike[str]
S = TypeVar("S", bound=Strict)
T = TypeVar("T")


MOST_BYTES = 2**30
"""Of a file that is read; far more than anything of ours, and what a machine's memory bears."""


INSTANCES = "instances"
"""Folder of the checkout, and of the installed package, with clusters, recipes and measured data."""


def shipped_instances() -> Path:
    """The folder `instances` that came with this polygon: inside an installed package, beside one in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / INSTANCES
    return inside if inside.is_dir() else package.parent / INSTANCES


def found_file(path: PathLike) -> Path:
    """The file itself, or for `instances/...` that is not there the one that came with polygon."""
    given = Path(path)
    if given.parts[:1] == (INSTANCES,) and not given.exists():
        shipped = shipped_instances().joinpath(*given.parts[1:])
        return shipped if shipped.exists() and ".." not in given.parts else given
    return given


def read_text(path: PathLike) -> str:
    """Text of a file (`-`: of standard input; `instances/...`: see `found_file`)."""
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if str(path) == "-" else found_file(path).open("rb") as file:
            data = bytearray()
            while len(data) <= MOST_BYTES and (piece := file.read(2**24)):
                data += piece
    except FileNotFoundError:
        raise fault(str(path), Phrase("no such file"), "a file") from None
    except IsADirectoryError:
        raise fault(str(path), Phrase("a directory"), "a file") from None
    except (OSError, ValueError) as error:
        why = str(getattr(error, "strerror", None) or error)
        raise InputError(Message("input.unreadable", path=str(path), why=why)) from None
    if len(data) > MOST_BYTES:
        raise fault(str(path), Message("found.more_bytes", most=MOST_BYTES), "at most so many")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = Message("found.byte", byte=data[error.start], at=error.start)
        raise fault(str(path), found, "UTF-8 text") from None
    check_filled(text, str(path), "text in it")
    return text


def check_writable(path: PathLike) -> None:
    """Raise `InputError` where `write_text` would fail: the folder is missing or read-only, or the name is one."""
    target = Path(path)
    if str(path) == "-" or (target.exists() and not target.is_file() and not target.is_dir()):
        return  # standard output, a pipe or a device
    if target.is_dir():
        raise fault(str(path), Phrase("a directory"), "a file")
    if not target.resolve().parent.is_dir():
        raise fault(str(path), Message("found.no_folder", folder=str(target.parent)), "one that exists")
    if not os.access(target.resolve().parent, os.W_OK):
        raise InputError(Message("input.read_only", path=str(path), folder=str(target.parent)))


def write_text(path: PathLike, text: str) -> None:
    """Write a file so that a reader sees the old text or the new one, never a part (`-`: to standard output)."""
    if str(path) == "-":
        sys.stdout.write(text)
        return
    target = Path(path)
    try:
        if target.exists() and not stat.S_ISREG(target.stat().st_mode):
            target.write_text(text, encoding="utf-8")  # a pipe or a device: cannot be replaced
            return
        _replace(target.resolve(), text)
    except OSError as error:
        raise InputError(Message("input.unwritable", path=str(path), why=str(error.strerror))) from None


def make_folder(folder: PathLike) -> None:
    """Make a folder for what a command writes, with those above it; one that is there is fine."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(Message("input.unmakeable", path=str(folder), why=str(error.strerror))) from None


def write_folder(folder: PathLike, texts: Mapping[str, str]) -> None:
    """Write texts into a folder, made if missing; names that end in .sh are made executable."""
    make_folder(folder)
    for name, text in texts.items():
        target = Path(folder) / name
        write_text(target, text)
        if name.endswith(".sh"):
            target.chmod(0o755)


def _replace(target: Path, text: str) -> None:
    """Write beside the target, then rename over it."""
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else usual_mode()
        Path(temporary).chmod(mode)
        Path(temporary).replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise


def usual_mode() -> int:
    """Who may read and write a new file, as the user's umask says: what is renamed into place has other rights."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def read_yaml(path: PathLike) -> Any:
    """Plain data of a YAML (or JSON) file."""
    text = read_text(path)
    with located(f"{path}: "):
        return formats.parse(text)


def read_json(path: PathLike) -> Any:
    """Plain data of a JSON file."""
    text = read_text(path)
    with located(f"{path}: "):
        return parse_json(text)


def write_json(path: PathLike, data: Any) -> None:
    """Write plain data (numpy values too) as JSON; the same data gives the same bytes."""
    write_text(path, format_json(data))


def read_cluster(path: PathLike) -> Cluster:
    """A cluster, from polygon's YAML (or JSON), from PTAFM's text or a hostfile, told apart by content."""
    text = read_text(path)
    with located(f"{path}: "):
        return formats.cluster_from_text(text, stem(path))


def read_cluster_or_problem(path: PathLike) -> Cluster | Problem:
    """What a command takes that plans from scratch: a cluster in any format, or a whole problem."""
    text = read_text(path)
    with located(f"{path}: "):
        data = formats.parse_cluster(text)
        is_problem = isinstance(data, dict) and data.get("format") == "polygon-problem"
        return problem_beside(path, data) if is_problem else formats.cluster_from_data(data, stem(path))


def write_cluster(path: PathLike, cluster: Cluster) -> None:
    """Write a cluster as YAML, or as JSON where the name ends so."""
    data = convert.cluster_data(cluster)
    write_text(path, format_json(data) if str(path).endswith(".json") else format_yaml(data))


HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/(?!.*\.(json|ya?ml)$)[A-Za-z0-9][\w.-]*")
"""What may be the name of a model on Hugging Face's Hub."""


def read_model(name_or_path: PathLike) -> Model:
    """A model of the catalogue, or one that a file spells out: polygon's own YAML or Hugging Face's `config.json`."""
    if not _is_path(name_or_path):
        with located("model: "):
            return catalogue.model(str(name_or_path))
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "config.json"
    if HUB_NAME.fullmatch(str(name_or_path)) and not path.exists():
        raise fault("model", str(name_or_path), Message("expected.hub_file", name=str(name_or_path)))
    text = read_text(path)
    with located(f"{path}: "):
        return formats.model_from_text(text, model_name(path))


def model_name(path: PathLike) -> str:
    """What a model is called that does not say: its file, or the folder of a ``config.json``."""
    return Path(path).resolve().parent.name if Path(path).name == "config.json" else stem(path)


def read_batch(data: Mapping[str, Any]) -> Batch:
    """A batch from plain data (a request, command-line options)."""
    spec: Any = check(BatchSpec, data)
    return Batch(**spec.model_dump())


def read_constraints(path: PathLike) -> Constraints:
    """Constraints from a YAML file."""
    data = read_yaml(path)
    with located(f"{path}: "):
        return convert.constraints_from_spec(check(ConstraintsSpec, data))


def read_problem(path: PathLike) -> Problem:
    """A problem file; its cluster may be a path (seen from the file), its model a path or a catalogue name."""
    data = read_yaml(path)
    with located(f"{path}: "):
        return problem_beside(path, data)


def problem_beside(path: PathLike, data: Any) -> Problem:
    """The problem of parsed data, with what it names read from the files beside it and from the catalogue."""
    if isinstance(data, dict):
        data = dict(data)
        folder = Path(path).parent
        if isinstance(data.get("cluster"), str):
            with located("cluster: "):
                data["cluster"] = convert.cluster_data(read_cluster(folder / data["cluster"]))
        if isinstance(data.get("model"), str):
            name = data["model"]
            data["model"] = convert.model_data(read_model(folder / name if _is_path(name) else name))
    return convert.problem_from_spec(check(ProblemSpec, data), default_name=stem(path))


def _read_checked(path: PathLike, spec: type[S], convert: Callable[[S], T]) -> T:
    """A JSON file, checked against its schema and converted; errors name the file."""
    text = read_text(path)
    with located(f"{path}: "):
        if spec.wanted and text.lstrip()[:1] not in ("{", "["):
            raise fault("", Phrase("no JSON"), spec.wanted)
        return convert(check(spec, parse_json(text)))


def read_groups(path: PathLike) -> Groups:
    """A groups file."""
    return _read_checked(path, GroupsSpec, convert_plan.groups_from_spec)


def write_groups(path: PathLike, groups: Groups) -> None:
    """Write a groups file."""
    write_json(path, convert_plan.groups_data(groups))


def read_plan(path: PathLike) -> PlanFile:
    """A plan file: its problem, the plan, the estimate that was written with it."""
    return _read_checked(path, PlanSpec, convert_plan.plan_from_spec)


def write_plan(path: PathLike, problem: Problem, plan: Plan, estimate: Mapping[str, Any] | None = None) -> None:
    """Write a plan file; `estimate` is free in form."""
    write_json(path, convert_plan.plan_data(problem, plan, estimate))


def read_bench(path: PathLike) -> DeviceBench:
    """A file of `polygon bench-device`."""
    return _read_checked(path, BenchSpec, bench_file.bench_from_spec)


def write_bench(path: PathLike, bench: DeviceBench) -> None:
    """Write what was measured on a device."""
    write_json(path, bench_file.bench_data(bench))


def _is_path(name: PathLike) -> bool:
    """Whether a model is given by a file or a folder; what is also a name of the catalogue is that name."""
    text = str(name)
    if "/" in text or text == "-" or text.endswith((".json", ".yaml", ".yml")):
        return True
    return not catalogue.knows_model(text) and Path(text).exists()


def stem(path: PathLike) -> str:
    """What a thing that a file holds is called if it does not say."""
    return Path(path).stem if str(path) != "-" else "stdin"
