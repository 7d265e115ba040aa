"""Command lines of pages that one looks things up in: each is run, or there is a reason why not.

    python -m tests.docs.example_lines docs/objectives.md ...      # runs those of some pages, as printed

Pages to be followed from top to bottom are run whole (`page_commands`). Lines of the others name files that their
reader has: here they are small ones, in a folder of their own, and whatever takes seconds then is run. Why the rest is
not stands in `REASONS`. Words without arguments (`polygon search`) name programs and are no lines.
"""

from __future__ import annotations

import functools
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.docs.command_lines import PAGES, ROOT, command_lines, fault_of, module_of_line
from tests.docs.page_commands import blocks
from tests.real_programs import ran

FOLLOWED = ("README.md", "docs/tutorial.md", "docs/concepts.md", "docs/overhead.md")
"""Run whole by `make pages`, with all how-tos."""
TIMEOUT_S = 900.0

ROOT_USER = "makes network namespaces, as root: tests/lab/test_lab_running.py runs the same programs"
HOSTS = "one rank of several hosts: tests/runners/test_launch.py starts all of them here"
GPU = "measures a GPU, or trains on several: benchmarks/gpu_check.py is for machines that have one"
WEIGHTS = "needs weights, data or a run of one's own: tests/runners/test_export_hf.py goes the way with small ones"
SERVES = "serves until it is ended: tests/web/test_api.py and tests/web/test_page.py talk to it"
TRAINS = "many ranks or all recipes: tests/recipes/test_recipes.py trains them with fewer steps"
MINUTES = "takes minutes: tests/runners/test_sweep.py and tests/commands/test_pareto.py run small ones"
MEASURES = "prints a page's figures in minutes to hours: benchmarks/__init__.py"
TARGET = "a target: tests/docs/test_command_lines.py holds it against the Makefile"

REASONS = {
    r"python -m runners\.(lab|lab_launch)\b.*": ROOT_USER,
    r"python -m runners\.launch PLAN --rehearse --emulate-links": ROOT_USER,
    r"python -m runners\.probe --dist-url .*": HOSTS,
    r"(python runners/dist_runner\.py|polygon dist-runner) .*--dist-url .*": HOSTS,
    r"torchrun .* runners/dist_runner\.py .*": HOSTS,
    r"deepspeed .*": GPU,
    r"python -m runners\.profile_layers (gpt3.*|MODEL)": GPU,
    r"polygon bench-device -o bench\.json": GPU,
    r".* --weights DIR .*|.* --model DIR .*|.* --base DIR|python -m runners\.generate out .*": WEIGHTS,
    r"python -m runners\.analyze --scaling .*": WEIGHTS,
    r"(python -m polygon\.|polygon )serve.*": SERVES,
    r"(python -m|torchrun .* -m) runners\.train (--table .*|instances/recipes/llm-3d-tiny\.yaml)": TRAINS,
    r"python -m runners\.sweep .*": MINUTES,
    r"polygon (pareto|explain) .*": MINUTES,
    r"python -m polygon validate .*": MINUTES,
    r".*(--model deepseek-v3|--model opt-350m|--method exhaustive|--cluster big\.yaml|huge-10240-drawn).*": MINUTES,
    r"python (-m benchmarks\.|benchmarks/)(?!matmul_ceilings).*": MEASURES,
    r"make [a-z-]+": TARGET,
    r"polygon launch plan\.json --rehearse": "docs/tutorial.md does it with the step count that it prints",
    r"polygon search (\.\.\. .*|--method grid3d)": "stands for any search",
}
"""By the whole line: why it is not run here. Files named in a reason are there (`test_example_lines`)."""

FILLED_IN = {"LOG_DIR...": "run", "out/.../plan.json": "run/plan.json", "out/.../trace.json": "run/trace.json"}
"""Words that stand for files of the reader's."""

CLUSTER = """
name: two
regions:
  - name: tokyo
    intra_region: {latency_ms: 0.1, bandwidth_gbps: 25}
    nodes: [{device: a100-40gb, count: 1, devices_per_node: 2}]
  - name: berlin
    intra_region: {latency_ms: 0.1, bandwidth_gbps: 10}
    nodes: [{device: t4, count: 1, devices_per_node: 2}]
links:
  - {between: [tokyo, berlin], latency_ms: 5, bandwidth_gbps: 1}
"""
PREPARED = """
python -m runners.probe --iperf3 tokyo:berlin=p1.json -o report.json
polygon init c.yaml --model gpt2 --global-batch 32 --seq-len 128 --precision fp32 -o groups.json
polygon search groups.json --effort quick -o plan.json
polygon launch plan.json --rehearse --max-ranks 4 --steps 8 --log-dir run
"""


def lines_of(page: Path) -> list[str]:
    """Whole command lines of a page, without their comments; of pages that are followed, those that nobody runs."""
    name = page.relative_to(ROOT).as_posix()
    followed = name in FOLLOWED or name.startswith("docs/how-to/")
    run = "\n".join(block.text for block in blocks(page) if block.kind == "bash") if followed else ""
    run = re.sub(r"\\\n\s*", "", run)
    found = list[str]()
    for line, shortened in command_lines(page):
        bare = re.sub(r"\s+#.*", "", line).strip()
        names_only = len(bare.removeprefix("python -m ").split()) < 2 + bare.startswith("polygon ")
        is_name = shortened and names_only and "benchmarks" not in bare
        if is_name or bare in run or (shortened and fault_of(bare) is not None and "LOG_DIR" not in bare):
            continue
        found.append(bare)
    return list(dict.fromkeys(found))


def reason(line: str) -> str | None:
    """Why a line is not run; None for one that is."""
    return next((why for pattern, why in REASONS.items() if re.fullmatch(pattern, line)), None)


def prepare(folder: Path, *, anew: bool = True) -> None:
    """Put the files there that lines name, made by programs that are started as `fault_in` does."""
    from tests.lab.test_probe_fit import iperf3_file

    for name in ("instances", "runners", "comm", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "c.yaml").write_text(CLUSTER, "utf-8")
    iperf3_file(folder / "p1.json", 1, 100, 10_000)
    iperf3_file(folder / "p8.json", 8, 600, 10_000)
    for line in PREPARED.strip().splitlines():
        fault = fault_in(line, folder, anew=anew)
        if fault is not None:
            raise RuntimeError(fault)


def _run_module(name: str, words: list[str]) -> int:
    """Be what `python -m` runs."""
    sys.argv[1:] = words
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return 0


def fault_in(line: str, folder: Path, *, anew: bool = True) -> str | None:
    """Run a line by a shell, or its program alone in a process that is forked; what is wrong, if anything."""
    for word, file in FILLED_IN.items():
        line = line.replace(word, file)
    if not anew:
        name, words = module_of_line(shlex.split(line))
        code, _, said = ran(functools.partial(_run_module, name), words, folder)
        return f"exit {code} of {line}\n{said[-1500:]}" if code else None
    programs = Path(sys.executable).parent
    paths = os.pathsep.join([str(ROOT), str(ROOT / "comm")])
    environment = dict(os.environ, PATH=f"{programs}{os.pathsep}{os.environ['PATH']}", PYTHONPATH=paths)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", line], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=TIMEOUT_S, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return f"exit {done.returncode} of {line}\n{done.stderr[-1500:]}" if done.returncode else None


def main() -> int:
    """Run the lines of pages, or say why not."""
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for page in map(Path, sys.argv[1:]) if sys.argv[1:] else sorted(PAGES):
            for line in lines_of(page.resolve()):
                why = reason(line)
                fault = fault_in(line, folder) if why is None else None
                wrong += fault is not None
                print(f"{page}: {line}\n    {why or fault or 'done'}", flush=True)
        shutil.rmtree(folder / "run", ignore_errors=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
