"""What an export hands over: files, the plan that they start, and what was lost on the way."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from polygon.cost.estimate import Estimate
from polygon.domain.message import Message
from polygon.domain.plan import Plan, Problem
from polygon.formats.convert_plan import plan_data
from polygon.formats.serialization import format_json
from polygon.messages.report import seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Something of a plan that the target cannot express."""

    what: Message
    cost_s: float | None = None
    """Seconds that it adds to a step, by the same estimate as the plan's; None where time is not what is lost."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """Files for one target."""

    target: str
    files: Mapping[str, str]
    """Text by name; names that end in .sh are made executable."""
    losses: tuple[Loss, ...] = ()
    plan_step_s: float = 0.0
    """Step of the plan as it was searched [s]."""
    step_s: float = 0.0
    """Step of what the files start [s]."""
    start: str | Message = ""
    """How to start it, in one command line."""
    notes: tuple[Message, ...] = field(default_factory=tuple)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "target": self.target,
            "files": dict(self.files),
            "losses": [{"what": loss.what, "cost_s": loss.cost_s} for loss in self.losses],
            "plan_step_s": self.plan_step_s,
            "step_s": self.step_s,
            "start": self.start,
            "notes": list(self.notes),
        }


def describe(export: Export) -> str:
    """What the target cannot express and what that costs, in words."""
    lines = [f"step          {seconds(export.plan_step_s)} as planned, {seconds(export.step_s)} with {export.target}"]
    lines.append(
        f"what {export.target} cannot express, and what that costs per step:" if export.losses else "lost nothing"
    )
    for loss in export.losses:
        lines.append(f"  {_signed(loss.cost_s):>10}  {loss.what}")
    lines += [f"note: {note}" for note in export.notes]
    if export.start:
        lines.append(f"start         {export.start}")
    return "\n".join(lines)


def _signed(cost_s: float | None) -> str:
    if cost_s is None:
        return "-"
    return ("+" if cost_s >= 0 else "-") + seconds(abs(cost_s))


REHEARSED = """
Rehearsed on one machine before, with a small model:

    polygon launch plan.json --rehearse --max-ranks 8
"""


def readme(problem: Problem, plan: Plan, export: Export, name: str) -> str:
    """A README beside the files: what it is, how it is started, what was lost."""
    one_line = re.sub(r"\s+", " ", problem.cluster.name)
    listing = "\n".join(f"- `{file}`" for file in sorted(export.files))
    rehearsed = REHEARSED if "plan.json" in export.files else ""
    return f"""# {name}

{problem.model.name} on {plan.world_size} devices of cluster {one_line!r}, for {export.target}: global batch
{problem.batch.global_batch}, sequence length {problem.batch.seq_len}, {problem.batch.precision}.

## Start

    bash check.sh        # looks at every file, changes nothing, starts nothing
    {export.start}
{rehearsed}
Hosts are listed in `hosts.txt`, in the order of their ranks. Put your own names in (export again with `--hosts`), copy
this folder to the same place on every host.

## What to expect

```
{describe(export)}
```

## Files

{listing}
"""


def check_script(files: Iterable[str]) -> str:
    """A dry run: every script is parsed by bash, every JSON file read; starts nothing."""
    lines = ["#!/usr/bin/env bash", "# Looks at the files beside it; starts nothing.", "set -euo pipefail"]
    lines += ['cd "$(dirname "$0")"', ""]
    for name in sorted(files):
        if name.endswith((".sh", ".sbatch")):
            lines.append(f"bash -n {shlex.quote(name)}")
        elif name.endswith(".json"):
            lines.append(f"python3 -m json.tool {shlex.quote(name)} > /dev/null")
    return "\n".join([*lines, 'echo "all files can be read"', ""])


def plan_text(problem: Problem, plan: Plan, priced: Estimate) -> str:
    """The plan file, with its estimate; without the bound, which ranks never read and which takes up to a hundred times
    as long as all files."""
    return json_text(plan_data(problem, plan, priced.to_dict()))


def json_text(data: Any) -> str:
    """Plain data as JSON text."""
    return format_json(data)
