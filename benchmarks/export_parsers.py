"""Hold exports against the targets' own parsers, as many as are installed.

    pip install skypilot             # in an environment of its own: it brings a lot
    make targets                     # torchtitan and Megatron-LM, beside the environment
    python benchmarks/export_parsers.py [--plans 40]

Plans of random allocations are exported; every SkyPilot task is read by `sky.Task.from_yaml`, torchtitan's flags by its
`ConfigManager` and their stages counted, Megatron-LM's by its `parse_args` and `validate_args`, with the ranks and the
variables of the scripts (`tests/target_parsers.py`). (DeepSpeed's parser reads 60 plans in the tests.) Prints what was
read and what was refused, and fails on the latter, and where nothing could be read. SkyPilot needs nothing else
of ours: --write DIR writes the files, --read DIR reads them elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests import megatron_flags, target_parsers


def write(root: Path, count: int) -> None:
    """Exports of plans, a folder a plan and target."""
    from polygon.cost.tables import CostTables
    from polygon.export.targets import export
    from polygon.formats.files import write_folder
    from tests.exported_plans import DIMENSIONS, drawn, of_dimensions, planned, wide

    cases = [(*planned(), None), (*wide(), None), *(of_dimensions(*case) for case in DIMENSIONS), *drawn(count)]
    for number, (problem, plan, tables) in enumerate(cases):
        for target in READERS:
            result = export(problem, plan, target, tables=tables or CostTables(problem))
            if result is not None:
                write_folder(root / target / f"{number:03d}", result.files)


def read_skypilot(folders: Sequence[Path]) -> list[str]:
    """Every task of each folder by SkyPilot; what it says of those that it refuses."""
    import sky

    said = []
    for folder in folders:
        with contextlib.chdir(folder):  # mounts are beside the file
            for path in sorted(folder.glob("sky-*.yaml")):
                try:
                    sky.Task.from_yaml(str(path))
                    said.append("")
                except Exception as error:  # noqa: BLE001 - a parser's own way to refuse
                    said.append(f"{path.name}: {error}")
    return said


def read_torchtitan(folders: Sequence[Path]) -> list[str]:
    """Flags by torchtitan's own manager; as many parts of the model as stages."""
    said = []
    for read in target_parsers.read_by_torchtitan([(f / "flags.txt").read_text("utf-8").split() for f in folders]):
        if "refused" in read:
            said.append(read["refused"])
            continue
        parallelism = read["parallelism"]
        stages, parts = parallelism["pipeline_parallel_degree"], parallelism["module_fqns_per_model_part"] or [[]]
        chunked = parallelism["pipeline_parallel_schedule"] == "Interleaved1F1B"
        right = len(parts) % stages == 0 and (len(parts) > stages) == chunked
        said.append("" if right else f"{parts} for {stages} stages")
    return said


def read_megatron(folders: Sequence[Path]) -> list[str]:
    """The scripts' arguments by Megatron-LM's own parser, held to be those of its record."""
    starts = [target_parsers.megatron_start({p.name: p.read_text("utf-8") for p in f.iterdir()}) for f in folders]
    for folder in folders:
        megatron_flags.parse((folder / "arguments.txt").read_text("utf-8").split())
    return [read.get("refused", "") for read in target_parsers.read_by_megatron(starts)]


READERS: dict[str, tuple[Callable[[], bool], Callable[[Sequence[Path]], list[str]]]] = {
    "skypilot": (lambda: importlib.util.find_spec("sky") is not None, read_skypilot),
    "torchtitan": (lambda: target_parsers.installed("torchtitan"), read_torchtitan),
    "megatron": (lambda: target_parsers.installed("megatron"), read_megatron),
}
"""By target: whether its program is there, and what it says of folders of exports, nothing of those that it takes."""


def read(root: Path) -> int:
    """Read everything that can be read; 1 if anything was refused, or nothing was read."""
    refused = done = 0
    for target, (installed, reader) in READERS.items():
        if not installed():
            print(f"{target}: not installed")
            continue
        said = reader(sorted((root / target).iterdir()))
        faults = [fault for fault in said if fault]
        print(f"{target}: {len(said) - len(faults)} read, {len(faults)} refused")
        print("".join(f"  {fault}\n" for fault in faults[:3]), end="")
        refused, done = refused + len(faults), done + len(said)
    return int(refused > 0 or not done)


def main() -> int:
    """Write, read, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=40)
    parser.add_argument("--write", type=Path, metavar="DIR", help="only write the exports")
    parser.add_argument("--read", type=Path, metavar="DIR", help="only read them")
    args = parser.parse_args()
    if args.write:
        write(args.write, args.plans)
        return 0
    if args.read:
        return read(args.read)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), args.plans)
        return read(Path(folder))


if __name__ == "__main__":
    sys.exit(main())
