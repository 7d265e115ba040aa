"""Everything that needs a GPU, on the one at hand, into one file: `make gpu-check`.

    python -m benchmarks.gpu_check [PART ...] [-o out/gpu-check.json] [--device cuda] [--quick]

One after the other: streams and an NCCL communicator of one rank with itself; `runners.bench_device`;
`runners.profile_layers`; all tiny recipes; eleven configurations (models, micro-batches, recomputation, precision) up
to 2.7 billion parameters, planned and predicted from the catalogue alone, run, and predicted again with what was
measured of the device.
The file says of each what was run, how long it took and what came out, of which machine and which commit; it is written
after every part, and parts that are named (by the beginning of their name) are done again in a file that is there.
Without a GPU one line and exit 2; exit 1 where a part failed, the others being done all the same. `--device cpu
--quick` rehearses it with a small model on a core. Two ranks need two GPUs: NCCL refuses two on one.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from polygon.formats.catalogue import runtime

ROOT = Path(__file__).resolve().parents[1]
CONFIGURATIONS = (
    ("gpt3-125m", 8, 2048, ()),
    ("gpt3-350m", 8, 2048, ()),
    ("gpt3-760m", 8, 1024, ()),
    ("gpt2-xl", 4, 1024, ()),
    ("gpt3-1.3b", 8, 2048, ()),
    ("gpt3-1.3b", 8, 2048, ("--precision", "fp8")),
    ("gpt3-2.7b", 8, 2048, ()),
    ("llama3.2-1b", 8, 2048, ()),
    ("qwen3-1.7b", 4, 4096, ()),
    ("gemma2-2b", 4, 2048, ()),
    ("opt-350m", 16, 1024, ()),
)
"""Model, sequences a step, tokens of a sequence, further options of the search."""
QUICK = (("gpt-tiny", 4, 64, ("--precision", "fp32")), ("gpt-tiny", 2, 128, ("--precision", "fp8")))
STEPS = 8


class CommandError(Exception):
    """A part that ended badly: what it said last."""


def output_of(*command: str) -> str:
    """Standard output of `python -m ...`, run at the root."""
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise CommandError(f"{' '.join(command)}: exit {done.returncode}: {said[-1] if said else 'nothing said'}")
    return done.stdout


def streams_and_nccl(device: str) -> dict[str, Any]:
    """Work of several threads with a stream each, and sums of one rank with itself; whether the numbers are right."""
    import torch
    from polygon_comm.transport import gloo_devices
    from torch.distributed import AllreduceOptions, HashStore

    from runners.engine.device import accelerator_of

    accelerator = accelerator_of(torch.device(device, 0))
    group = accelerator.group(HashStore(), 0, 1, gloo_devices(1, "127.0.0.1"), 60.0)
    values = torch.arange(1 << 20, dtype=torch.float32, device=accelerator.device)
    threads = accelerator.threads(4, "check")

    def sums(times: int) -> float:
        total = values * times
        group.allreduce([total], AllreduceOptions()).wait()
        return float(accelerator.to_host(total)[-1])

    # One thread issues what goes over a communicator: the jobs come one after the other.
    found = [threads.submit(sums, times).result() for times in range(1, 5)]
    start = accelerator.instant()
    back = accelerator.from_host(accelerator.to_host(values))
    end = accelerator.instant()
    accelerator.finish()
    threads.shutdown()
    right = found == [float(values[-1]) * times for times in range(1, 5)] and bool((back == values).all())
    if not right:
        raise CommandError(f"streams: sums of {found}, expected multiples of {float(values[-1])}")
    return {"sums": found, "bytes_there_and_back": 2 * values.nbytes, "seconds": end() - start()}


def bench(folder: Path, device: str, *, quick: bool) -> dict[str, Any]:
    """What single operators reach."""
    path = folder / "bench.json"
    output_of(
        "runners.bench_device", "-o", str(path), "--device", device, "--seconds", "5" if quick else "120", "--quiet"
    )
    return dict(json.loads(path.read_text(encoding="utf-8")))


def profile(folder: Path, device: str, *, quick: bool) -> dict[str, Any]:
    """Times of layers."""
    model, path = "gpt-tiny" if quick else "gpt3-350m", folder / "profile.json"
    few = ("--seconds", "0.05", "--micro-batch-sizes", "1", "--seq-len", "64") if quick else ()
    output_of("runners.profile_layers", model, "-o", str(path), "--device", device, *few)
    return dict(json.loads(path.read_text(encoding="utf-8")))


def recipes(folder: Path, device: str, *, quick: bool) -> list[dict[str, Any]]:
    """Tiny recipes that one device can hold, each for a few steps."""
    rows = []
    for path in sorted((ROOT / "instances" / "recipes").glob("*tiny*.yaml"))[: 1 if quick else None]:
        try:
            text = output_of(
                "runners.train", str(path), "--steps", "3", "--device", device, "--json", "-o",
                str(folder / path.stem),
            )  # fmt: skip
            rows.append({"recipe": path.stem, **json.loads(text)})
        except CommandError as error:
            # A recipe for several devices says so in one line, which is what there is to know of it here.
            rows.append({"recipe": path.stem, "not_run": str(error)})
    return rows


def configuration(
    folder: Path, device: str, model: str, sequences: int, tokens: int, options: Sequence[str]
) -> dict[str, Any]:
    """A model planned for this device and trained for some steps: step and memory, measured and predicted.

    The plan is the catalogue's; `errors` are predicted over measured less 1, per what the prediction is made from, and
    `memory_error` that of what torch hands out, which has no CUDA context in it.
    """
    name = "-".join((model, str(sequences), str(tokens), *options))
    plan, bench_file = folder / f"{name}.json", folder / "bench.json"
    output_of(
        "polygon.search", "--cluster", str(folder / "cluster.yaml"), "--model", model, "--global-batch", str(sequences),
        "--seq-len", str(tokens), "--time-limit", "60", "-o", str(plan), "--quiet", *options,
    )  # fmt: skip
    known = {"catalogue": ()} | ({"bench": ("--bench", str(bench_file))} if bench_file.is_file() else {})
    predicted = {
        of: json.loads(output_of("polygon.evaluate", str(plan), *more, "--json")) for of, more in known.items()
    }
    measured = json.loads(
        output_of("runners.launch", str(plan), "--steps", str(STEPS), "--device", device, "--json", "--log-dir",
                  str(folder / name))
    )  # fmt: skip
    blind = predicted["catalogue"]
    peak_bytes, context_bytes = blind["workers"][0]["peak_bytes"], runtime(blind["runtime"]).context_bytes
    return {
        "model": model,
        "sequences": sequences,
        "tokens": tokens,
        "plan": json.loads(plan.read_text(encoding="utf-8")),
        "predicted": predicted,
        "measured": measured,
        "errors": {of: found["step_s"] / measured["median_step_s"] - 1 for of, found in predicted.items()},
        "memory_error": (peak_bytes - context_bytes) / measured["memory_bytes"] - 1,
        "mfu": measured["mfu"],
    }


def provenance(device: str) -> dict[str, Any]:
    """Of which machine, versions and commit the numbers are."""
    import torch

    def said(*command: str) -> str:
        if shutil.which(command[0]) is None:
            return ""
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": said("git", "rev-parse", "HEAD"),
        "changed": bool(said("git", "status", "--porcelain", "--untracked-files=no")),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if device == "cuda" else None,
        "python": platform.python_version(),
    }


def cluster_file(folder: Path, device: str) -> None:
    """Write what a search is told: this machine's device alone."""
    import torch

    from runners.profile_layers import device_name

    kind = device_name(None, torch.device(device))
    (folder / "cluster.yaml").write_text(
        "format: polygon-cluster\nversion: 1\nname: this-machine\nregions:\n  - name: here\n    nodes:\n"
        f"      - {{device: {kind}, count: 1, devices_per_node: 1}}\n",
        encoding="utf-8",
    )


def check(out: Path, device: str, only: Sequence[str], *, quick: bool) -> bool:
    """Do all of it, or parts whose names begin so, and write what was found; whether all that was done went well."""
    folder = out.resolve().with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    cluster_file(folder, device)
    parts: dict[str, Callable[[], Any]] = {
        "streams and NCCL": lambda: streams_and_nccl(device),
        "bench": lambda: bench(folder, device, quick=quick),
        "profile": lambda: profile(folder, device, quick=quick),
        "recipes": lambda: recipes(folder, device, quick=quick),
    }
    for given in QUICK if quick else CONFIGURATIONS:
        name = " ".join((f"{given[0]}, {given[1]} x {given[2]}", *given[3]))
        parts[name] = partial(configuration, folder, device, *given)
    if unknown := [name for name in only if not any(part.startswith(name) for part in parts)]:
        print(f"gpu-check: no part begins with {unknown[0]!r}; parts: {'; '.join(parts)}", file=sys.stderr)
        return False
    done = json.loads(out.read_text(encoding="utf-8"))["parts"] if only and out.is_file() else {}
    found = {"provenance": provenance(device), "parts": done}
    chosen = {name: part for name, part in parts.items() if not only or name.startswith(tuple(only))}
    for name, part in chosen.items():
        start_s = time.monotonic()
        try:
            row = {"result": part()}
        except Exception as error:  # noqa: BLE001 - what one part cannot do is part of what is found
            row = {"failed": f"{type(error).__name__}: {error}"}
        done[name] = row | {"seconds": time.monotonic() - start_s}
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        said = row.get("failed") or (row["result"].get("errors") if isinstance(row["result"], dict) else None) or "done"
        print(f"{name}: {said}", file=sys.stderr, flush=True)
    return all("result" in done[name] for name in chosen)


def main(argv: Sequence[str] | None = None) -> int:
    """Check; 0 fine, 1 a part failed or none has that name, 2 no GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help="beginning of a part's name (default: all of them)")
    parser.add_argument("-o", "--out", type=Path, default=Path("out/gpu-check.json"), help="default %(default)s")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="default %(default)s")
    parser.add_argument("--quick", action="store_true", help="small models and few seconds: a rehearsal")
    args = parser.parse_args(argv)
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu-check: torch sees no GPU here: nothing was checked", file=sys.stderr)
        return 2
    return 0 if check(args.out, args.device, args.parts, quick=args.quick) else 1


if __name__ == "__main__":
    raise SystemExit(main())
