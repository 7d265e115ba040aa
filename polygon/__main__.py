"""The command `polygon`: runs `python -m polygon.COMMAND`, importing only that command."""

from __future__ import annotations

import argparse
import runpy
import sys
from importlib import import_module, util

import polygon
from polygon.commands import cli
from polygon.domain.errors import one_of

COMMANDS = {
    "init": "cluster, model and batch -> groups: which devices form which pipeline stage (ant colony)",
    "search": "groups or cluster -> plan (genetic algorithm with local search)",
    "pareto": "plans between the fastest and the cheapest",
    "explain": "plan -> other plans, what was rejected and why, what more bandwidth or devices would bring",
    "evaluate": "plan -> estimate, breakdown, lower bound, violations, trace",
    "compare": "plan and measured traces -> where prediction and measurement differ",
    "generate": "draw a cluster at random",
    "validate": "hold the predictions against published measurements",
    "calibrate": "fit the cost model's constants to measurements",
    "bench-device": "measure this machine's device for two minutes: what --bench of the others reads (needs torch)",
    "overhead": "communication and memory of collectives and configurations, formula by formula",
    "grid3d": "every (data, tensor, pipeline) split of a number of devices, ranked",
    "export": "plan -> what other systems read",
    "show": "devices, models and links of the catalogues",
    "serve": "the web application",
    "kernels": "compile the planner's kernels, which the first command does otherwise",
    "launch": "plan -> training by ranks on this machine, or a rehearsal of it (needs torch)",
    "dist-runner": "one rank of a plan, the same command on every device (needs torch)",
    "train": "a recipe -> training in one to five dimensions (needs torch)",
    "probe": "measure the links between hosts",
    "profile-layers": "measure a model's layers on this device: what --profile of the others reads (needs torch)",
}
"""What each command is for; one whose module is not installed is not offered."""

ENDS = "Exit codes: 0 done, 2 bad input, 3 no plan fits, 130 or 143 interrupted (what was found so far is kept)."
WITHOUT_TORCH = {"probe"}
"""Of the programs that run plans; all others need it."""
PROGRAMS = "runners"
"""Package of the programs that run plans; never imported by the planner, only run."""


def module_of(command: str) -> str | None:
    """Name of the module that holds a command's `main`; None where there is none.

    One of `polygon.commands`, a module at the top of polygon, a package's `__main__`, or a program of the runtime; none
    of them is imported.
    """
    name = command.replace("-", "_")
    modules = [f"polygon.commands.{name}", f"polygon.{name}"]
    if util.find_spec(PROGRAMS) is not None:
        modules.append(f"{PROGRAMS}.{name}")
    for module in modules:
        found = util.find_spec(module)
        if found is not None and found.submodule_search_locations is None:
            return module
        if found is not None and util.find_spec(f"{module}.__main__") is not None:
            return f"{module}.__main__"
    return None


def main(argv: list[str] | None = None) -> int:
    """Run the command that the first argument names."""
    known = {command: module for command in COMMANDS if (module := module_of(command))}
    width = max(map(len, known), default=0)
    listing = "\n".join(f"  {command:{width}}  {COMMANDS[command]}" for command in known)
    parser = cli.CommandParser(
        prog="polygon",
        description="Plans the training of foundation models on unequal devices in distant data centers.",
        epilog=f"commands:\n{listing}\n\npolygon COMMAND --help says more. {ENDS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"polygon {polygon.__version__}")
    parser.add_argument("command", metavar="COMMAND", help="one of those below")
    arguments = sys.argv[1:] if argv is None else argv
    name = parser.parse_args(arguments[:1]).command
    if name not in known:
        parser.error(f"found command {name!r}, expected {one_of(name, known)}")
    if known[name].startswith(f"{PROGRAMS}."):  # it ends its process in its own way
        if name not in WITHOUT_TORCH:
            cli.require_torch(name)
        cli.started_by = f"polygon {name}"
        sys.argv = [name, *arguments[1:]]
        runpy.run_module(known[name], run_name="__main__", alter_sys=True)
        return cli.EXIT_OK
    command: cli.Main = import_module(known[name]).main
    return command(arguments[1:])


def program() -> int:
    """The installed command: `main` with errors as exit codes."""
    return cli.run(main)


if __name__ == "__main__":
    sys.exit(program())
