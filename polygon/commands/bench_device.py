"""Measure this device: `polygon bench-device -o bench.json`, what `--bench` of the other commands reads.

The measuring program needs torch and is part of the runtime (`runners.bench_device`): it runs in a process of its own,
the planner never imports it.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys

from polygon.commands import cli

PROGRAM = "runners.bench_device"
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


def _precisions(text: str) -> list[str]:
    """An argparse type."""
    words = list(dict.fromkeys(text.split(",")))
    wrong = next((word for word in words if word not in PRECISIONS), None)
    if wrong is not None:
        raise argparse.ArgumentTypeError(f"found {wrong!r}, expected {', '.join(PRECISIONS)}, with commas between")
    return words


def parser() -> cli.CommandParser:
    """Options of the measurement, here and in the program."""
    made = cli.CommandParser(
        prog="polygon bench-device",
        description="Measure products, attention and memory of this device, for --bench of the other commands.",
        parents=[cli.output_options(out="where the measurements go")],
    )
    made.add_argument(
        "--seconds",
        type=cli.number(above=0),
        default=120.0,
        help="that it may take, beside one pass over all operators (default %(default)g)",
    )
    made.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    made.add_argument("--device-name", help="type in the cluster file (default: this GPU's, or cpu-core)")
    made.add_argument(
        "--dtype",
        type=_precisions,
        metavar="LIST",
        help="such as bf16,tf32 (default: bf16 or fp16 on a GPU, fp32,bf16 on a CPU)",
    )
    made.add_argument("--threads", type=cli.whole(1), default=1, help="on a CPU (default %(default)s)")
    made.add_argument("--date", default="", help="written into the file as it is")
    return made


def main(argv: list[str] | None = None) -> int:
    """Entry point; see the module's docstring."""
    given = sys.argv[1:] if argv is None else argv
    parser().parse_args(given)
    cli.require_torch("bench-device")
    command = [sys.executable, "-m", PROGRAM, *given]
    # The program answers signals itself: Ctrl-C reaches it too, another is handed on.
    with (
        cli.handled_signals([signal.SIGINT], lambda number, frame: None),
        subprocess.Popen(command) as program,
        cli.handled_signals([signal.SIGTERM], lambda number, frame: program.send_signal(number)),
    ):
        code = program.wait()
    return code if code >= 0 else cli.EXIT_BY_SIGNAL - code


if __name__ == "__main__":
    sys.exit(cli.run(main))
