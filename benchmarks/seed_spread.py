"""How far the plans found lie from the best that any seed or effort found, and CPU seconds of a search.

    python benchmarks/seed_spread.py [--seeds 2] [--efforts quick,thorough] [--instances ptafm-7dc,aws-regions] \
        [--tasks gpt3-13b:128:2048] [--drawn 20 --first 0 [--tight | --large | --wide]]

Every cluster of `instances/` with every task: model, sequences of a step, tokens of a sequence, and problems of
`instances/native` by `native/NAME`; or drawn clusters, of up to eight regions and 128 devices, with any task; or
(`--tight`) models of which all devices together hold the states less than twice; or (`--large`) of up to 32 regions and
192 to 4,096 devices; or (`--wide`) of any cards and models that the catalogue has. Kernels are compiled before.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from polygon import Batch, Cluster, InputError, Problem, load
from polygon.commands.generate import generate
from polygon.domain.message import say
from polygon.formats import catalogue
from polygon.planning.efforts import EFFORTS
from polygon.planning.search_engine import Effort

ROOT = Path(__file__).resolve().parents[1]
INSTANCES = (
    "aws-regions,dtfm-two-universities,ptafm-7dc,regional-64,dtfm-worldwide,dtfm-spot,sailor-5zones,ptafm-testbed"
)
MODELS = (
    "gpt3-1.3b", "gpt3-2.7b", "gpt3-6.7b", "llama2-7b", "gpt3-13b", "qwen3-30b-a3b", "mixtral-8x7b", "llama3-8b"
)  # fmt: skip
"""Of drawn problems."""
LARGE_MODELS = (
    "gpt3-6.7b", "llama2-7b", "gpt3-13b", "llama2-13b", "qwen3-30b-a3b", "mixtral-8x7b", "llama3-8b", "llama3-70b",
    "llama2-70b", "gpt3-2.7b",
)  # fmt: skip
USUAL_MODELS = (
    "gpt3-6.7b", "llama2-7b", "gpt3-13b", "llama3-8b", "mixtral-8x7b", "llama3-70b", "llama2-70b", "qwen3-30b-a3b",
    "gpt3-1.3b", "gpt3-175b",
)  # fmt: skip
"""Of drawn large problems."""
TIGHT, STATE_BYTES = (0.95, 1.9), 18
"""Of tight problems: memory of all devices over states of so many bytes a parameter."""
KINDS_OF_MODELS = ("vit", "dinov2", "siglip", "t5", "bert", "roberta", "modernbert", "gpt-tiny")
"""How models begin that wide problems leave out: they take no tokens one after another, or are for tests."""
KINDS_OF_DEVICES = ("cpu", "trainium", "tpu", "gaudi", "ascend")
"""The same of devices: no GPU."""
ROUND = "round"
"""Of efforts: one round of the default, which quick and thorough ones have before or after it."""
TASKS = "gpt3-6.7b:64:1024,gpt3-13b:128:2048,gpt3-1.3b:512:2048"


def problem_of(instance: str, task: str) -> Problem:
    """A cluster of `instances/` with a task, or a problem of `instances/native`."""
    if instance.startswith("native/"):
        native = load(ROOT / "instances" / f"{instance}.yaml")
        assert isinstance(native, Problem)
        return native
    model, sequences, tokens = task.split(":")
    cluster = Cluster.from_yaml(ROOT / "instances" / f"{instance}.yaml")
    return Problem(cluster, model, Batch(global_batch=int(sequences), seq_len=int(tokens)))


def _generated(
    number: int, shape: tuple[int, int, int], model: str, batch: tuple[int, int]
) -> tuple[str, Problem] | None:
    """A cluster of so many regions, types and devices with a task, and what it is; None where these do not go
    together."""
    (regions, types, devices), (sequences, tokens) = shape, batch
    try:
        cluster = Cluster(generate(regions, types, devices, np.random.default_rng(number)))
    except InputError:
        return None
    what = f"{number}: {regions} regions, {types} types, {devices} devices, {model}:{sequences}:{tokens}"
    return what, Problem(cluster, model, Batch(global_batch=sequences, seq_len=tokens))


def drawn_problem(number: int) -> tuple[str, Problem] | None:
    """A drawn problem and what it is; None where its numbers do not go together."""
    rng = np.random.default_rng(9000 + number)
    regions, types = int(rng.choice([1, 2, 3, 4, 6, 8])), int(rng.integers(1, 5))
    devices = max(int(rng.choice([8, 16, 24, 32, 48, 64, 96, 128])), 2 * regions)
    model = str(rng.choice(MODELS))
    sequences, tokens = int(rng.choice([32, 64, 128, 256, 512, 1024])), int(rng.choice([1024, 2048, 4096]))
    tokens = min(tokens, 2048) if model.startswith("gpt3") else tokens
    return _generated(number, (regions, types, devices), model, (sequences, tokens))


def large_problem(number: int) -> tuple[str, Problem] | None:
    """As `drawn_problem`, of up to 32 regions and 4,096 devices."""
    rng = np.random.default_rng(555_000 + number)
    regions, types = int(rng.choice([1, 2, 3, 4, 6, 8, 12, 16, 24, 32])), int(rng.integers(1, 7))
    devices = max(int(rng.choice([192, 256, 384, 512, 768, 1024, 1536, 2048, 4096])), 4 * regions)
    model = str(rng.choice(USUAL_MODELS))
    sequences, tokens = int(rng.choice([256, 512, 1024, 2048, 4096])), int(rng.choice([1024, 2048, 4096, 8192]))
    tokens = min(tokens, {"gpt3": 2048, "llama2": 4096}.get(model.split("-")[0], tokens))
    return _generated(number, (regions, types, devices), model, (sequences, tokens))


def wide_problem(number: int) -> tuple[str, Problem] | None:
    """A problem of whatever the catalogue has: one to eight regions of one to four types, 4 to 256 devices, networks in
    regions of 1 to 1,600 Gbit/s and between them of 50 Mbit/s to 25 Gbit/s a pair of nodes, sequences of 512 to 131,072
    tokens; None where its numbers do not go together."""
    rng = np.random.default_rng(880_000 + number)
    names = [name for name in catalogue.devices() if not name.startswith(KINDS_OF_DEVICES)]
    regions = int(rng.choice([1, 1, 2, 2, 3, 4, 6, 8]))
    types = [str(name) for name in rng.choice(names, size=int(rng.integers(1, 5)), replace=False)]
    each = max(1, int(rng.choice([4, 8, 16, 32, 64, 128, 256])) // regions)
    drawn = []
    for r in range(regions):
        network = {"latency_us": 20, "bandwidth_gbps": float(rng.choice([1, 10, 25, 100, 400, 1600]))}
        nodes, left = [], each
        for last in (False, True)[: int(rng.integers(1, 3))]:
            per_node = int(rng.choice([1, 2, 4, 8]))
            count = max(1, (left if last or rng.random() < 0.5 else left // 2) // per_node)
            group = {"device": str(rng.choice(types)), "count": count, "devices_per_node": per_node}
            nodes.append(group | {"inter_node": network})
            left -= count * per_node
            if left <= 0:
                break
        drawn.append({"name": f"r{r}", "nodes": nodes})
    far_ms, gbps = float(rng.choice([1, 10, 40, 120])), float(rng.choice([0.05, 0.2, 1, 5, 25]))
    links = [
        {
            "between": [f"r{a}", f"r{b}"],
            "latency_ms": far_ms * float(rng.uniform(0.3, 2)),
            "bandwidth_gbps": gbps * float(rng.uniform(0.3, 2)),
        }
        for a in range(regions)
        for b in range(a)
    ]
    models = [name for name in catalogue.models() if not name.startswith(KINDS_OF_MODELS)]
    model = catalogue.model(str(rng.choice(models)))
    tokens = min(int(rng.choice([512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072])), model.max_seq_len)
    sequences = int(rng.choice([4, 8, 16, 64, 128, 256, 512, 1024]))
    sequences = min(sequences, 64) if tokens > 8192 else sequences
    what = f"{number}: {regions} regions of {'/'.join(types)}, {model.name}:{sequences}:{tokens}"
    try:
        cluster = Cluster.from_dict({"regions": drawn} | ({"links": links} if links else {}))
        return what, Problem(cluster, model.name, Batch(global_batch=sequences, seq_len=tokens))
    except InputError:
        return None


def tight_problem(number: int) -> tuple[str, Problem] | None:
    """A drawn cluster with the model that fills it most, and what it is; None where none of `LARGE_MODELS` does."""
    rng = np.random.default_rng(77_000 + number)
    regions, types = int(rng.choice([1, 2, 3, 4, 6, 8])), int(rng.integers(1, 5))
    devices = max(int(rng.choice([4, 8, 12, 16, 24, 32, 48, 64])), 2 * regions)
    tokens, sequences = int(rng.choice([1024, 2048, 4096])), int(rng.choice([32, 64, 128, 256]))
    found: list[tuple[float, str, Problem]] = []
    try:
        cluster = generate(regions, types, devices, np.random.default_rng(number))
    except InputError:
        return None
    for model in LARGE_MODELS:
        own = min(tokens, 2048) if model.startswith("gpt3") else tokens
        problem = Problem(Cluster(cluster), model, Batch(global_batch=sequences, seq_len=own))
        tables = problem.tables
        held = float(tables.limit_bytes @ np.array([pool.devices for pool in tables.problem.cluster.pools]))
        part = held / (STATE_BYTES * tables.problem.model.parameters)
        if TIGHT[0] < part < TIGHT[1]:
            found.append((part, f"{model}:{sequences}:{own}, {part:.2f} of its states", problem))
    if not found:
        return None
    _, task, problem = min(found, key=lambda entry: entry[0])
    return f"{number}: {regions} regions, {types} types, {devices} devices, {task}", problem


def steps_of(problem: Problem, effort: str, seeds: int) -> tuple[list[float], float]:
    """Step time by seed [s], and CPU seconds of a search."""
    began_s = time.process_time()
    limits = EFFORTS.get(effort, Effort())
    found = [problem.search(effort=limits, seed=seed).estimate for seed in range(seeds)]
    steps = [np.inf if estimate is None else estimate.step_s for estimate in found]
    return steps, (time.process_time() - began_s) / seeds


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--efforts", default="quick,thorough", metavar="A,B", help="of quick, round, thorough and long")
    parser.add_argument("--instances", default=INSTANCES, metavar="A,B", help="files of instances/ without .yaml")
    parser.add_argument("--tasks", default=TASKS, metavar="MODEL:SEQUENCES:TOKENS,...")
    parser.add_argument("--drawn", type=int, metavar="N", help="so many drawn problems in place of these")
    parser.add_argument("--first", type=int, default=0, help="number of the first of them")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--tight", action="store_true", help="drawn problems with models that barely fit")
    kind.add_argument("--large", action="store_true", help="drawn problems of up to 32 regions and 4,096 devices")
    kind.add_argument("--wide", action="store_true", help="drawn problems of any cards and models")
    args = parser.parse_args()
    efforts = args.efforts.split(",")
    if unknown := set(efforts) - {*EFFORTS, ROUND}:
        parser.error(f"no effort {', '.join(sorted(unknown))}")
    pairs = [
        (instance, task)
        for instance in args.instances.split(",")
        for task in (("",) if instance.startswith("native/") else args.tasks.split(","))
    ]
    named = ((f"{instance} {task}", problem_of(instance, task)) for instance, task in pairs)
    if args.drawn is not None:
        numbers = range(args.first, args.first + args.drawn)
        kinds = (
            (args.tight, tight_problem),
            (args.large, large_problem),
            (args.wide, wide_problem),
            (True, drawn_problem),
        )
        draw = next(draw for asked, draw in kinds if asked)
        named = (pair for number in numbers if (pair := draw(number)) is not None)
    over: dict[str, list[float]] = {effort: [] for effort in efforts}
    cpu_s: dict[str, list[float]] = {effort: [] for effort in efforts}
    for name, problem in named:
        short = problem.search(effort=Effort(fluid_evaluations=20, exact_evaluations=5, patience=20))
        if short.reason is not None:
            print(f"{name}: {say(short.reason)}", flush=True)
            continue
        found = {effort: steps_of(problem, effort, args.seeds) for effort in efforts}
        best = min(min(steps) for steps, _ in found.values())
        for effort, (steps, seconds) in found.items():
            over[effort] += [100 * (step / best - 1) for step in steps]
            cpu_s[effort].append(seconds)
        said = "; ".join(
            f"{effort} {' '.join(f'{step:.3f}' for step in steps)} s, {seconds:.1f} CPU-s"
            for effort, (steps, seconds) in found.items()
        )
        print(f"{name}: {said}", flush=True)
    for effort in efforts:
        values = np.array(over[effort])
        print(
            f"{effort}: over the best seen {values.mean():.1f} % in the mean, {values.max():.1f} % at most, "
            f"more than 5 % in {np.sum(values > 5)} of {len(values)}; {np.mean(cpu_s[effort]):.1f} CPU-s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
