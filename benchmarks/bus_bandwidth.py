"""How far are latency-bandwidth models of an all-reduce from nccl-tests?

    python benchmarks/bus_bandwidth.py

Measured: 2..8 A100 (NVSwitch) and V100 (hybrid cube mesh), 1 MB .. 1 GB, as fitted and sampled in
`instances/measured/allreduce_lut_fit.json` (vTrain's nccl-tests tables). Held against each other, as errors in time:

- data sheet: the ring formula with the link's data sheet rate and latency, nothing fitted;
- one line: T = alpha + M / B, least relative error;
- two regimes: a line on either side of the protocol switch (16 MB), through the two nearest samples;
- table: interpolated between the two nearest samples in the logarithms of size and time (what the planner does).

The fitted ones predict every size from the OTHER sizes alone; 1 MB and 1 GB are therefore extrapolated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from polygon.cost.collectives import bus_bandwidth_factor, ring_all_reduce_s
from polygon.formats import catalogue

MEASURED = Path(__file__).resolve().parents[1] / "instances" / "measured" / "allreduce_lut_fit.json"
SIZES = {"1MB": 1e6, "16MB": 16e6, "64MB": 64e6, "256MB": 256e6, "1GB": 1e9}
LINKS = {"a100": "nvlink3", "v100": "nvlink2"}


def measured_s(entry: dict[str, float], ranks: int) -> np.ndarray:
    """Seconds at the sampled sizes, from the bus bandwidths."""
    factor = bus_bandwidth_factor("all_reduce", ranks)
    return np.array([size * factor / (entry[f"busbw_{name}"] * 1e9) for name, size in SIZES.items()])


def data_sheet_s(device: str, ranks: int) -> np.ndarray:
    """The ring formula with data sheet numbers."""
    link = catalogue.link(LINKS[device])
    latency, rate = np.full(ranks, link.latency_s), np.full(ranks, link.bytes_per_s)
    return np.array([ring_all_reduce_s(size, latency, rate) for size in SIZES.values()])


def held_out_s(times_s: np.ndarray, predict: Callable[[np.ndarray, np.ndarray, float], float]) -> np.ndarray:
    """Every sample as a model of the other samples predicts it."""
    sizes = np.array(list(SIZES.values()))
    keep = [np.arange(len(sizes)) != i for i in range(len(sizes))]
    return np.array([predict(sizes[k], times_s[k], size) for k, size in zip(keep, sizes, strict=True)])


def one_line_s(sizes: np.ndarray, times_s: np.ndarray, size: float) -> float:
    """alpha + M / B with the least squares of relative errors."""
    columns = np.stack([1 / times_s, sizes / times_s], axis=1)
    alpha, per_byte = np.linalg.lstsq(columns, np.ones(len(sizes)), rcond=None)[0]
    return float(alpha + per_byte * size)


def nearest(sizes: np.ndarray, size: float) -> np.ndarray:
    """The two samples nearest in the logarithm, on either side where there are two sides."""
    place = int(np.clip(np.searchsorted(sizes, size), 1, len(sizes) - 1))
    return np.array([place - 1, place])


def two_regimes_s(sizes: np.ndarray, times_s: np.ndarray, size: float) -> float:
    """A line through the two nearest samples."""
    a, b = nearest(sizes, size)
    slope = (times_s[b] - times_s[a]) / (sizes[b] - sizes[a])
    return float(times_s[a] + slope * (size - sizes[a]))


def table_s(sizes: np.ndarray, times_s: np.ndarray, size: float) -> float:
    """The same in logarithms."""
    return float(np.exp(two_regimes_s(np.log(sizes), np.log(times_s), float(np.log(size)))))


def errors() -> dict[str, dict[str, np.ndarray]]:
    """Relative errors in time by model and device group: shape (sizes,)."""
    data = json.loads(MEASURED.read_text(encoding="utf-8"))
    found = {}
    for name, entry in data.items():
        device, ranks = name.split("_")
        times_s = measured_s(entry, int(ranks))
        models = {
            "data sheet": data_sheet_s(device, int(ranks)),
            "one line": held_out_s(times_s, one_line_s),
            "two regimes": held_out_s(times_s, two_regimes_s),
            "table": held_out_s(times_s, table_s),
        }
        found[name] = {model: predicted / times_s - 1 for model, predicted in models.items()}
    return found


def main() -> None:
    """Print the errors."""
    print(f"{'error in time':24}" + "".join(f"{size:>9}" for size in SIZES) + f"{'mean':>9}")
    totals: dict[tuple[str, str], list[np.ndarray]] = {}
    for name, models in errors().items():
        for model, error in models.items():
            totals.setdefault((name.split("_")[0], model), []).append(np.abs(error))
            row = "".join(f"{100 * value:8.1f}%" for value in error)
            print(f"{name:8}{model:16}{row}{100 * np.abs(error).mean():8.1f}%")
    for (device, model), values in totals.items():
        row = "".join(f"{100 * value:8.1f}%" for value in np.mean(values, axis=0))
        print(f"{device + ' |e|':8}{model:16}{row}{100 * np.mean(values):8.1f}%")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
