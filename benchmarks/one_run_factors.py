"""How far off predictions are whose factor was found on another run.

    python benchmarks/one_run_factors.py [FILES]

Of every pair of measured runs of one collection, program and device type: the prediction of one, times measured over
predicted of the other. `polygon.cost.calibration.OTHER_RUN_ERROR` is the median over these groups of the 90 % quantile
of the errors. A factor over the whole step; `polygon calibrate` has one for compute and one for communication.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from polygon.accuracy.rows import predict
from polygon.commands.validate import read_runs
from polygon.domain.errors import InputError

MEASURED = Path(__file__).resolve().parents[1] / "instances/measured"
LEAST_RUNS = 5


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    files = sorted(str(path) for path in MEASURED.glob("*_runs.json"))
    parser.add_argument("files", nargs="*", default=files)
    errors = defaultdict(list)
    for run in read_runs(parser.parse_args().files)[0]:
        if not run.step_s or run.calibration:
            continue
        try:
            predicted_s = predict(run)[0].step_s
        except InputError:
            continue
        group = (run.dataset, run.problem.runtime.name, "+".join(sorted(run.devices)))
        errors[group].append(math.log(run.step_s / predicted_s))
    print("collection, program, device: runs, 90 % of runs as predicted, 90 % of pairs")
    quantiles = []
    for group, found in sorted(errors.items()):
        if len(found) < LEAST_RUNS:
            continue
        pairs = np.abs(np.subtract.outer(found, found))[~np.eye(len(found), dtype=bool)]
        quantiles.append(float(np.quantile(pairs, 0.9)))
        print(", ".join(group) + f": {len(found)}, {np.quantile(np.abs(found), 0.9):.3f}, {quantiles[-1]:.3f}")
    print(f"median of {len(quantiles)}: {np.median(quantiles):.3f}")


if __name__ == "__main__":
    main()
