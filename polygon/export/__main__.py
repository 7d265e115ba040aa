"""Write a plan as what other systems read, and say what that costs.

    python -m polygon.export plan.json --to deepspeed -o DIR

Targets: deepspeed, megatron, torchtitan, torchrun, slurm, kubernetes, skypilot, tc. What a target cannot
express is listed with what it adds to a step, by the same estimate as the plan's. Exit code 3 where the target can
express no plan that fits.
"""

from __future__ import annotations

import sys
from pathlib import Path

from polygon.commands import cli


def main(argv: list[str] | None = None) -> int:
    """Entry point; see the module's docstring."""
    from polygon.export.targets import TARGETS, export

    parser = cli.CommandParser(
        prog="polygon export",
        description="Write a plan as what other systems read, and say what that costs.",
        parents=[cli.output_options()],
    )
    parser.add_argument("plan", help="plan.json")
    parser.add_argument("--to", required=True, choices=list(TARGETS), help="the system that is to run it")
    parser.add_argument("-o", "--out", metavar="DIR", required=True, help="folder for the files; made if missing")
    parser.add_argument("--hosts", metavar="FILE", help="a line a node, in the cluster's order: name, or name address")
    args = parser.parse_args(argv)

    from polygon.domain.errors import located
    from polygon.domain.message import Message
    from polygon.export.bundle import describe
    from polygon.export.launch_hosts import read_hosts
    from polygon.formats import files

    problem, plan, _ = files.read_plan(args.plan)
    hosts = None
    if args.hosts:
        text = files.read_text(args.hosts)
        with located(f"{args.hosts}: "):
            hosts = read_hosts(text, problem.cluster, plan)
    result = export(problem, plan, args.to, hosts=hosts, name=Path(args.out).name)
    if result is None:
        return cli.infeasible(Message("reason.not_expressible", target=args.to))
    files.write_folder(args.out, result.files)
    cli.Talk(quiet=args.quiet).say(f"{len(result.files)} files in {args.out}")
    data = result.to_dict()
    data["files"] = sorted(result.files)
    cli.emit(data, describe(result), as_json=args.json)
    return cli.EXIT_OK


if __name__ == "__main__":
    sys.exit(cli.run(main))
