"""What local updates cost in loss at equal tokens: `python benchmarks/local_updates.py`.

Two regions of one device each train a GPT of 1.2 million parameters on English text, 8 sequences of 64 tokens a step,
with the runner and int8 between the regions; links are not emulated, since losses do not depend on them. Compared with
a run that sums fp32 gradients in every step. Writes out/local_updates.json (what is measured already is kept there and
not measured again) and prints a table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "comm"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks.lab_prediction import BATCH, MODEL, Network, cluster_of, plan_of, symmetric
from polygon.domain.plan import Problem
from runners.engine.options import Options
from runners.engine.summary import log_lines
from runners.launch import run

NETWORK = Network(
    name="two regions",
    hosts=(("cpu-core",), ("cpu-core",)),
    latency_ms=symmetric(2, {(0, 1): 30}),
    mbit_per_s=symmetric(2, {(0, 1): 50}),
)
LEARNING_RATE = 1e-3
"""Of 6e-4, 1e-3, 1.5e-3 and 3e-3 the one with which the synchronous loss is least after 500 steps."""
RECORD = Path("out/local_updates.json")
WIDTH = 25
"""Steps whose losses are averaged at the end."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How the regions train."""

    packing: str = "int8"
    local_steps: int = 1
    synchronous: float = 0.2
    """Part of the run before local steps begin."""
    fragments: int = 1
    overlap: int = 0
    rate: float = 0.7
    momentum: float = 0.9

    def losses(self, steps: int, seed: int) -> list[float]:
        """Loss of every step; of a local one the mean over the regions."""
        cluster = cluster_of(NETWORK)
        plan = plan_of(cluster, [(0, MODEL.layers)], [[0, 1]], size=2, compression=self.packing, spans=1)
        plan = replace(plan, local_steps=self.local_steps)
        by_step: dict[int, set[float]] = {}
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(Path(os.devnull).open("w")):
            options = Options(
                steps=steps,
                log_dir=Path(folder),
                device="cpu",
                learning_rate=LEARNING_RATE,
                seed=seed,
                synchronous_steps=round(self.synchronous * steps),
                outer_fragments=self.fragments,
                outer_overlap=self.overlap,
                outer_rate=self.rate,
                outer_momentum=self.momentum,
            )
            code, _ = run(Problem(cluster=cluster, model=MODEL, batch=BATCH), plan, options)
            assert code == 0
            for rank in range(plan.world_size):
                for line in log_lines(Path(folder), rank):
                    if line["type"] == "step":
                        by_step.setdefault(line["step"], set()).add(line["loss"])
        return [float(np.mean(sorted(by_step[step]))) for step in sorted(by_step)]

    @property
    def cells(self) -> list[str]:
        """Of the table's row."""
        if self.local_steps == 1:
            return [f"every step, {self.packing}", "1", "", "", ""]
        kind = f"local updates, {self.packing}"
        if self.fragments > 1:
            kind += f", {self.fragments} fragments, overlap {self.overlap}"
        first = f"{100 * self.synchronous:.0f} %"
        return [kind, str(self.local_steps), first, f"{self.rate:g}", f"{self.momentum:g}"]


PLAIN: dict[str, Any] = {"rate": 1.0, "momentum": 0.0}
SETTINGS = (
    Setting(packing="none"),
    Setting(local_steps=20),
    Setting(local_steps=20, fragments=2, overlap=1),
    Setting(local_steps=50),
    Setting(local_steps=20, synchronous=0.0),
    Setting(),
    Setting(packing="int4"),
    Setting(local_steps=20, fragments=2, overlap=5),
    Setting(local_steps=100),
    Setting(local_steps=20, synchronous=0.1),
    Setting(local_steps=20, **PLAIN),
    Setting(local_steps=20, synchronous=0.0, **PLAIN),
)


def main() -> None:
    """Train, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of first weights and data order")
    parser.add_argument("--first", type=int, default=len(SETTINGS), metavar="N", help="only the first N settings")
    args = parser.parse_args()
    rows: dict[str, list[float]] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    lines = [
        "| kind | H | together at first | outer rate | momentum | last loss | against every step, fp32 |",
        "|---|---|---|---|---|---|---|",
    ]
    reference = float("nan")
    for setting in SETTINGS[: args.first]:
        key = f"{args.steps} steps, seed {args.seed}: {setting}"
        if key not in rows:
            rows[key] = setting.losses(args.steps, args.seed)
            RECORD.parent.mkdir(exist_ok=True)
            RECORD.write_text(json.dumps(rows))
        last = float(np.mean(rows[key][-WIDTH:]))
        reference = last if setting == SETTINGS[0] else reference
        lines.append(f"| {' | '.join([*setting.cells, f'{last:.4f}', f'{100 * (last / reference - 1):+.1f} %'])} |")
        sys.stderr.write(lines[-1] + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
