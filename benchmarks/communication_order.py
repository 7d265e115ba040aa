"""Plans of every kind on a stand-in for GPUs and NCCL, late at random: how many runs hang, and whether losses hold.

    python -m benchmarks.communication_order [--runs 10] [--seed 0] [--only WORD] [--one-stream] [--json]

On the stand-in (`tests/comm/stand_in.py`) work is done later than it is handed over, operations of a communicator are
done in the order in which they were issued, and a wait holds up a stream, not the thread. `--one-stream` gives all
threads of a rank one stream, as CUDA does where nobody asks for more: so ran the runtime before it had streams of its
own. Of every plan: ranks, runs that hung, the largest relative difference of a loss from one process's (of packed sums
and local steps from the same plan's on cores), most operations of communicators under way at once on a rank (of GPUs
whose queues are fewer, streams would wait for one another), and how often the host waited for its main stream in a
step. Exits 1 where a run hangs or a loss is off by more than 1e-5.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from polygon.messages.report import table
from tests.comm.stand_in import HangError, watched_ranks
from tests.real_ranks import run_ranks
from tests.runners.stand_in_plans import OPTIONS, PLANS, losses_on_cores, losses_on_stand_in, made, reference_of

LOSS_LIMIT = 1e-5


def row_of(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run a plan so many times."""
    problem, plan = made(name)
    expected = run_ranks(losses_on_cores, *reference_of(name), OPTIONS)
    if len(expected) == 1:
        expected *= plan.world_size
    row: dict[str, Any] = {"plan": name, "ranks": plan.world_size, "runs": args.runs, "hung": 0, "loss_difference": 0.0}
    row |= {"most_under_way": 0, "host_waits_per_step": 0.0}
    late = {"one_stream": args.one_stream}
    for seed in range(args.seed, args.seed + args.runs):
        try:
            found, board = watched_ranks(
                losses_on_stand_in, plan.world_size, problem, plan, OPTIONS, seed, late
            )  # fmt: skip
        except HangError as hang:
            row["hung"] += 1
            row["waiting"] = hang.args[0]
            continue
        # Rank by rank: between two meetings regions have losses of their own.
        pairs = zip(found, expected, strict=True)
        worst = max(abs(a - b) / b for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))
        row["loss_difference"] = max(row["loss_difference"], worst)
        row["most_under_way"] = max(row["most_under_way"], *board.most_running)
        row["host_waits_per_step"] = max(board.host_waits) / OPTIONS.steps
    return row


def main() -> int:
    """Print the table; 1 where a run hangs or a loss is off."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--runs", type=int, default=10, help="of every plan (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the next one's is one more")
    parser.add_argument("--only", default="", metavar="WORD", help="plans with this in their name")
    parser.add_argument("--one-stream", action="store_true", help="all threads of a rank share a stream")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    for name in PLANS:
        if args.only in name:
            rows.append(row_of(name, args))
            print(f"{name}: {rows[-1]['hung']} of {args.runs} hung", file=sys.stderr, flush=True)
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        cells = [
            [
                row["plan"], str(row["ranks"]), f"{row['hung']} of {row['runs']}", f"{row['loss_difference']:.1e}",
                str(row["most_under_way"]), f"{row['host_waits_per_step']:.1f}",
            ]
            for row in rows
        ]  # fmt: skip
        print(table(["plan", "ranks", "hung", "loss", "under way", "host waits"], cells))
        print(f"{sum(row['hung'] for row in rows)} of {sum(row['runs'] for row in rows)} runs hung")
    good = all(not row["hung"] and row["loss_difference"] <= LOSS_LIMIT for row in rows)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
