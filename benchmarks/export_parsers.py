"""Hold exports against the targets' own parsers, as many as are installed.

    pip install skypilot             # in an environment of its own: these bring a lot
    pip install torchtitan triton
    pip install megatron-core
    python benchmarks/export_parsers.py [--plans 40]

Plans of random allocations are exported; every SkyPilot task is read by `sky.Task.from_yaml`, torchtitan's flags by its
`ConfigManager` and their stages counted. Megatron-LM's arguments are held against the recorded names, types and choices
of its parser (`tests/megatron_flags.py`; it is in no package), a pipeline layout is read by megatron-core where that is
installed, which also checks that it has all layers. (DeepSpeed's parser reads 200 plans in the tests.) Prints what was
read and what was refused, and fails on the latter. Ours need nothing of the targets: --write DIR writes the files,
--read DIR reads them elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests import megatron_flags


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


def read_skypilot(folder: Path) -> int:
    """Every task of a folder by SkyPilot; how many."""
    import sky

    paths = sorted(folder.glob("sky-*.yaml"))
    with contextlib.chdir(folder):  # mounts are beside the file
        for path in paths:
            sky.Task.from_yaml(str(path))
    return len(paths)


def read_torchtitan(folder: Path) -> int:
    """Flags by torchtitan's own manager; as many parts of the model as stages."""
    from torchtitan.config import ConfigManager

    words = (folder / "flags.txt").read_text("utf-8").split()
    config = ConfigManager().parse_args(["--module=llama3", "--config=llama3_8b", *words])
    parts = config.parallelism.module_fqns_per_model_part or [[]]
    chunked = config.parallelism.pipeline_parallel_schedule == "Interleaved1F1B"
    if (
        len(parts) % config.parallelism.pipeline_parallel_degree
        or (len(parts) > config.parallelism.pipeline_parallel_degree) != chunked
    ):
        raise ValueError(f"{parts} for {config.parallelism.pipeline_parallel_degree} stages")
    return 1


def read_megatron(folder: Path) -> int:
    """Arguments by the record of Megatron-LM's flags, a pipeline layout by megatron-core."""
    arguments = megatron_flags.parse((folder / "arguments.txt").read_text("utf-8").split())
    text = arguments.pipeline_model_parallel_layout
    if text is not None and importlib.util.find_spec("megatron") is not None:
        from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

        layout = PipelineParallelLayerLayout(text, arguments.pipeline_model_parallel_size)
        layout.validate_layer_layout(num_layers=arguments.num_layers, mtp_num_layers=0)
    return 1


READERS: dict[str, tuple[str, Callable[[Path], int]]] = {
    "skypilot": ("sky", read_skypilot),
    "torchtitan": ("torchtitan", read_torchtitan),
    "megatron": ("argparse", read_megatron),
}
"""By target: the module that must be there, and what reads a folder of one plan's export."""


def read(root: Path) -> int:
    """Read everything that can be read; 1 if anything was refused."""
    refused = 0
    for target, (module, reader) in READERS.items():
        if importlib.util.find_spec(module) is None:
            print(f"{target}: {module} is not installed")
            continue
        done, faults = 0, []
        for folder in sorted((root / target).iterdir()):
            said = io.StringIO()
            try:
                with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    done += reader(folder)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a parser's own way to refuse
                faults.append(f"{folder.name}: {type(error).__name__}: {error} {said.getvalue()[-600:]}")
        print(f"{target}: {done} read, {len(faults)} refused")
        print("".join(f"  {fault}\n" for fault in faults[:3]), end="")
        refused += len(faults)
    return int(refused > 0)


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
