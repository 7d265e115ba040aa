"""Everything that needs a GPU, on the one at hand, into one file: `make gpu-check`.

    python -m benchmarks.gpu_check [PART ...] [-o out/gpu-check.json] [--device cuda] [--quick]
    python -m benchmarks.gpu_check --plan-for h100-sxm [-o ...]

One after the other: streams and an NCCL communicator of one rank with itself; `runners.bench_device`;
`runners.profile_layers`; all tiny recipes; configurations (models, experts, long sequences, micro-batches,
recomputation, precision) up to 2.7 billion parameters, planned and predicted from the catalogue alone, run, and
predicted again with what was measured of the device. Of some configurations the profiler records a last step: kernels
by name, and what the host needed to launch them.
The file says of each what was run, how long it took and what came out, of which machine and which commit; it is written
after every part, and parts that are named (by the beginning of their name) are done again in a file that is there.
`--plan-for` makes plans and predictions where there is no GPU, in the folder beside the file: where they are there the
machine with the GPU only runs them (with `--only-run`, which leaves out what is predicted from its bench: the
planner's kernels take a minute or two to compile).
Without a GPU one line and exit 2; exit 1 where a part failed, the others being done all the same. `--device cpu
--quick` rehearses it with a small model on a core. Two ranks need two GPUs: NCCL refuses two on one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.host_launches import engine_launches
from polygon.domain.model import Model
from polygon.formats.catalogue import device as known_device
from polygon.formats.catalogue import runtime
from polygon.formats.files import read_plan, write_plan
from runners.profile_layers import processor_name
from runners.traces.kineto import FOLDER as PROFILE_FOLDER
from runners.traces.kineto import GPU_CATEGORIES, load
from runners.traces.record import trace_name

ROOT = Path(__file__).resolve().parents[1]
LLAMA = {
    "family": "llama", "gated_mlp": True, "learned_positions": False, "rms_norm": True, "linear_bias": False,
    "qkv_bias": False, "vocab_size": 32000, "max_seq_len": 32768,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "experts-8": LLAMA
    | {"blocks": 12, "hidden_size": 1024, "heads": 16, "experts": 8, "experts_per_token": 2, "expert_ffn_size": 3584},
    "experts-32": LLAMA
    | {"blocks": 12, "hidden_size": 1024, "heads": 16, "experts": 32, "experts_per_token": 4, "expert_ffn_size": 1024},
    "experts-8-wide": LLAMA
    | {"blocks": 6, "hidden_size": 2048, "heads": 16, "experts": 8, "experts_per_token": 2, "expert_ffn_size": 5632},
    "experts-128": LLAMA
    | {"blocks": 4, "hidden_size": 1024, "heads": 16, "experts": 128, "experts_per_token": 8, "expert_ffn_size": 768},
    "long": LLAMA | {"blocks": 8, "hidden_size": 2048, "heads": 16, "kv_heads": 4, "ffn_size": 5632},
    "windows": LLAMA
    | {"blocks": 8, "hidden_size": 2048, "heads": 16, "kv_heads": 4, "ffn_size": 5632, "window": 4096}
    | {"attention_pattern": ["window"]},
    "experts-tiny": LLAMA
    | {"blocks": 2, "hidden_size": 64, "heads": 4, "experts": 4, "experts_per_token": 2, "expert_ffn_size": 64}
    | {"vocab_size": 512, "max_seq_len": 256},
}
"""Models of our own by their shape: what the catalogue has none of that a GPU holds with its optimizer."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A model and its batch, and what of its plan the search does not choose."""

    model: str
    sequences: int
    """Of a step."""
    tokens: int
    """Of a sequence."""
    options: tuple[str, ...] = ()
    """Further ones of the search."""
    micro_batch_size: int | None = None
    recompute: str | None = None
    profiled: bool = False
    """Whether the profiler records a step after those that are timed."""

    @property
    def name(self) -> str:
        """What it is called as a part."""
        chosen = [] if self.micro_batch_size is None else [f"micro-batches of {self.micro_batch_size}"]
        chosen += [] if self.recompute is None else [f"{self.recompute} recomputation"]
        return " ".join((f"{self.model}, {self.sequences} x {self.tokens}", *self.options, *chosen))

    @property
    def file_name(self) -> str:
        """The same without what file names lack."""
        return re.sub(r"[^a-z0-9.]+", "-", self.name)


CONFIGURATIONS = tuple(
    Configuration(model=model, sequences=sequences, tokens=tokens, **more)
    for model, sequences, tokens, more in (
        ("gpt3-125m", 8, 2048, {"profiled": True}),
        ("gpt3-350m", 8, 2048, {}),
        ("gpt3-760m", 8, 1024, {}),
        ("gpt3-1.3b", 8, 2048, {"profiled": True}),
        ("llama3.2-1b", 8, 2048, {"profiled": True}),
        ("experts-8", 8, 2048, {"profiled": True}),
        ("experts-32", 8, 2048, {"profiled": True}),
        ("experts-8", 8, 2048, {"micro_batch_size": 1}),
        ("experts-32", 8, 2048, {"micro_batch_size": 1}),
        ("experts-8-wide", 8, 2048, {}),
        ("experts-128", 8, 2048, {"profiled": True}),
        ("experts-128", 8, 2048, {"micro_batch_size": 1}),
        ("gpt3-1.3b", 8, 2048, {"options": ("--precision", "fp8"), "profiled": True}),
        ("gpt3-1.3b", 8, 2048, {"micro_batch_size": 1}),
        ("gpt3-350m", 8, 2048, {"micro_batch_size": 1, "profiled": True}),
        ("llama3.2-1b", 8, 2048, {"micro_batch_size": 1}),
        ("gpt3-1.3b", 8, 2048, {"options": ("--runtime", "polygon-compiled")}),
        ("llama3.2-1b", 8, 2048, {"options": ("--runtime", "polygon-compiled")}),
        ("gpt3-1.3b", 8, 2048, {"recompute": "full"}),
        ("long", 1, 32768, {"profiled": True}),
        ("windows", 1, 32768, {"profiled": True}),
        ("gpt3-2.7b", 8, 2048, {}),
        ("qwen3-1.7b", 4, 4096, {}),
        ("gpt2-xl", 4, 1024, {}),
        ("gemma2-2b", 4, 2048, {}),
        ("opt-350m", 16, 1024, {}),
    )
)
QUICK = (
    Configuration(model="gpt-tiny", sequences=4, tokens=64, options=("--precision", "fp32"), micro_batch_size=1),
    Configuration(model="experts-tiny", sequences=2, tokens=64, profiled=True),
    Configuration(model="gpt-tiny", sequences=2, tokens=128, options=("--precision", "fp8")),
)
STEPS = 8
PROFILED_AFTER = 2
"""Steps after those that are timed, the last of which is recorded."""
KERNELS = 60
"""Names of kernels that are kept of a recorded step, those that take most time."""


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


def bench(folder: Path, device: str, *, seconds: float) -> dict[str, Any]:
    """What single operators reach."""
    path = folder / "bench.json"
    output_of("runners.bench_device", "-o", str(path), "--device", device, "--seconds", str(seconds), "--quiet")
    return dict(json.loads(path.read_text(encoding="utf-8")))


def host(device: str, *, quick: bool) -> list[dict[str, Any]]:
    """What the host needs to launch blocks of the engine, experts among them."""
    import torch

    return engine_launches(torch.device(device), 0.05 if quick else 1.0)


def masked_attention(device: str, *, quick: bool) -> list[dict[str, Any]]:
    """Attention of a piece of queries to the keys that a window lets any of them see, under a mask, and causal
    attention as far: `runners.engine.windows`."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as attend

    from runners.bench_device import BenchWork, Timer
    from runners.engine.windows import window_mask

    window, heads = (64, 2) if quick else (4096, 16)
    place, kind = torch.device(device), torch.float32 if quick else torch.bfloat16
    rows = []
    for keys, head_dim in ((2 * window - 1, 128), (2 * window - 1, 64), (window, 128)):
        q = torch.randn(1, heads, window, head_dim, device=place, dtype=kind, requires_grad=True)
        k, v = (torch.randn(1, heads, keys, head_dim, device=place, dtype=kind, requires_grad=True) for _ in range(2))
        mask = window_mask(window, keys - window, window, kind, place) if keys > window else None
        forward = partial(attend, q, k, v, attn_mask=mask, is_causal=mask is None)
        backward = partial(torch.autograd.grad, forward(), (q, k, v), torch.randn_like(q), retain_graph=True)
        seconds = []
        for call in (forward, backward):
            work = BenchWork(call=call)
            for _ in range(5):
                Timer(place).visit(work)
            seconds.append(median(work.samples_s))
        rows.append(
            {"queries": window, "keys": keys, "heads": heads, "head_dim": head_dim, "masked": mask is not None}
            | {"forward_s": seconds[0], "backward_s": seconds[1]}
        )
    return rows


EXPERT_SHAPES = ((8, 1024, 3584, 2048), (8, 1024, 3584, 16384), (32, 1024, 1024, 2048), (128, 2048, 768, 8192))
"""Experts, width, width inside, and rows that they get together."""


def experts_at_once(device: str, *, quick: bool) -> list[dict[str, Any]]:
    """The engine's experts with gates one after another and all in one kernel, on the same rows, of which one expert
    gets none: how far outputs and gradients are apart, over the largest of what each gives by itself; seconds and the
    most bytes of forward and backward."""
    import torch

    from runners.bench_device import BenchWork, Timer
    from runners.engine import experts
    from runners.engine.gradients import Bucket
    from runners.engine.layers import build_layer
    from runners.engine.narrow_weights import NarrowWeights

    place, known = torch.device(device), experts.has_kernel
    found = []
    for count, width, inside, rows in ((4, 64, 32, 50),) if quick else EXPERT_SHAPES:
        shape: dict[str, Any] = LLAMA | {"blocks": 1, "hidden_size": width, "heads": width // 64, "head_dim": 64}
        shape |= {"kv_heads": width // 64, "ffn_size": inside, "expert_ffn_size": inside, "experts": count}
        draw = torch.Generator().manual_seed(0)
        busy = torch.randint(1, count, (rows,), generator=draw).bincount(minlength=count).to(place)
        x = torch.randn(rows, width, generator=draw).to(place).requires_grad_()
        upstream = torch.randn(rows, width, generator=draw).to(place)
        row: dict[str, Any] = {"experts": count, "width": width, "inside": inside, "rows": rows}
        results = []
        for name, at_once in (("alone", False), ("at_once", True)):
            experts.has_kernel = lambda *of, allowed=at_once: allowed and (quick or known(*of))
            layer = build_layer(Model(name="experts", **shape, experts_per_token=1), 1, 0, place).mlp
            assert isinstance(layer, experts.Experts)
            row["in_one_kernel"] = at_once and layer.may_run_at_once(place, torch.bfloat16)
            bucket = Bucket("blocks.0", dict(layer.named_parameters()), None)
            narrow = NarrowWeights([layer], [bucket], torch.bfloat16)
            experts.has_kernel = known

            def passes(layer: experts.Experts = layer, x: Any = x, busy: Any = busy, upstream: Any = upstream) -> Any:
                with torch.autocast(device, dtype=torch.bfloat16):
                    out = layer._run(x, busy)
                out.backward(upstream.to(out.dtype))
                return out

            with narrow.in_place():
                passes()
                x.grad = None
                bucket.vector.zero_()
                if device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                    row[f"{name}_held_bytes"] = torch.cuda.memory_allocated()
                out = passes()
                if device == "cuda":
                    row[f"{name}_peak_bytes"] = torch.cuda.max_memory_allocated()
                tensors = [tensor for tensor in (out, x.grad, bucket.vector) if tensor is not None]
                results.append([tensor.detach().float().clone() for tensor in tensors])
                work = BenchWork(call=passes)
                for _ in range(2 if quick else 5):
                    Timer(place).visit(work)
                row[f"{name}_s"] = median(work.samples_s)
        apart = [(a - b).abs().max() / a.abs().max().clamp_min(1e-30) for a, b in zip(*results, strict=True)]
        row["apart"] = float(torch.stack(apart).max())  # of which a NaN is the largest
        found.append(row)
        del layer, bucket, narrow, passes, work, results
        if device == "cuda":
            torch.cuda.empty_cache()  # other parts are processes of their own
    return found


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


def planned(folder: Path, of: Configuration) -> Path:
    """A configuration's plan file, with the prediction of the catalogue; the one that is there, if there is one."""
    path, model = folder / f"{of.file_name}.json", of.model
    if path.is_file():
        return path
    if model in MODELS:
        shape = folder / f"{model}.yaml"
        shape.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in MODELS[model].items()))
        model = str(shape)
    output_of(
        "polygon.search", "--cluster", str(folder / "cluster.yaml"), "--model", model, "--global-batch",
        str(of.sequences), "--seq-len", str(of.tokens), "--time-limit", "60", "-o", str(path), "--quiet", *of.options,
    )  # fmt: skip
    problem, plan, _ = read_plan(path)
    if of.micro_batch_size is not None:
        count = of.sequences // of.micro_batch_size
        routes = np.zeros((count, 1), dtype=plan.routes.dtype)
        plan = replace(plan, micro_batch_size=of.micro_batch_size, routes=routes, spans=((1,),))
    if of.recompute is not None:
        stages = tuple(replace(stage, recompute=of.recompute, recompute_blocks=None) for stage in plan.stages)
        plan = replace(plan, stages=stages)
    write_plan(path, problem, plan)
    write_plan(path, problem, plan, json.loads(output_of("polygon.evaluate", str(path), "--json")))
    return path


def configuration(folder: Path, device: str, of: Configuration, *, only_run: bool = False) -> dict[str, Any]:
    """A model planned for this device and trained for some steps: step and memory, measured and predicted.

    The plan is the catalogue's; `errors` are predicted over measured less 1, per what the prediction is made from, and
    `memory_error` that of what torch hands out, which has no CUDA context in it. `seconds` are those of a step by what
    they went into.
    """
    path, bench_file, logs = planned(folder, of), folder / "bench.json", folder / of.file_name
    plan = json.loads(path.read_text(encoding="utf-8"))
    known = {"bench": ("--bench", str(bench_file))} if bench_file.is_file() and not only_run else {}
    predicted = {"catalogue": plan["estimate"]} | {
        source: json.loads(output_of("polygon.evaluate", str(path), *more, "--json")) for source, more in known.items()
    }
    steps: int = STEPS
    recording: tuple[str, ...] = ()
    if of.profiled:
        steps, recording = STEPS + PROFILED_AFTER, ("--profiled-steps", "1", "--profiled-after", str(steps + 1))
    measured = json.loads(
        output_of("runners.launch", str(path), "--steps", str(steps), "--device", device, "--json", "--log-dir",
                  str(logs), *recording)
    )  # fmt: skip
    lines = [json.loads(line) for line in (logs / "rank-0.jsonl").read_text(encoding="utf-8").splitlines()]
    timed = [line for line in lines if line["type"] == "step"][1:STEPS]
    step_s = median(line["seconds"] for line in timed)
    blind = predicted["catalogue"]
    peak_bytes, context_bytes = blind["workers"][0]["peak_bytes"], runtime(blind["runtime"]).context_bytes
    return {
        "model": of.model,
        "shape": MODELS.get(of.model),
        "sequences": of.sequences,
        "tokens": of.tokens,
        "plan": {name: value for name, value in plan.items() if name not in ("problem", "estimate")},
        "predicted": predicted,
        "measured": measured | {"step_s": step_s, "steps_s": [line["seconds"] for line in timed]},
        "seconds": {
            kind: median(line["seconds_by_kind"].get(kind, 0.0) for line in timed)
            for kind in timed[0]["seconds_by_kind"]
        },
        "errors": {source: found["step_s"] / step_s - 1 for source, found in predicted.items()},
        "memory_error": (peak_bytes - context_bytes) / measured["memory_bytes"] - 1,
        "mfu": measured["mfu"],
    } | ({"recorded": recorded_step(logs / PROFILE_FOLDER / trace_name(0))} if of.profiled else {})


def recorded_step(trace: Path) -> dict[str, Any]:
    """Of a trace, by what the host launched it for (`forward`, `backward`, `update`, `other`): how long the host was at
    it and stood still for the device, how many kernels, their seconds, and those that take most by name."""
    events = [event for event in load(trace)["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    spans = [
        (event["ts"], event["ts"] + event["dur"], phase)
        for event in events
        for begin, phase in (("compute: F", "forward"), ("compute: B", "backward"), ("update: ", "update"))
        if event.get("cat") == "user_annotation" and event["name"].startswith(begin)
    ]
    calls = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }

    def phase_of(ts: float) -> str:
        return next((phase for start, end, phase in spans if start <= ts < end), "other")

    found = {phase: {"host_s": 0.0, "waited_s": 0.0, "kernels": 0, "device_s": 0.0} for _, _, phase in spans}
    found["other"] = {"host_s": 0.0, "waited_s": 0.0, "kernels": 0, "device_s": 0.0}
    for start, end, phase in spans:
        found[phase]["host_s"] += 1e-6 * (end - start)
    names: dict[str, Counter] = {phase: Counter() for phase in found}
    counts: dict[str, Counter] = {phase: Counter() for phase in found}
    for call in calls.values():
        if "Synchronize" in call["name"]:
            found[phase_of(call["ts"])]["waited_s"] += 1e-6 * call["dur"]
    for event in events:
        if event.get("cat") in GPU_CATEGORIES:
            call = calls.get(event.get("args", {}).get("correlation"))
            phase = "other" if call is None else phase_of(call["ts"])
            found[phase]["kernels"] += 1
            found[phase]["device_s"] += 1e-6 * event["dur"]
            names[phase][event["name"][:160]] += 1e-6 * event["dur"]
            counts[phase][event["name"][:160]] += 1
    return {
        phase: row | {"longest": [[name, counts[phase][name], s] for name, s in names[phase].most_common(KERNELS)]}
        for phase, row in found.items()
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
        "host": f"{os.cpu_count()} cores of {processor_name()}",
    }


def cluster_file(folder: Path, kind: str) -> None:
    """Write what a search is told: one device alone."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cluster.yaml").write_text(
        "format: polygon-cluster\nversion: 1\nname: this-machine\nregions:\n  - name: here\n    nodes:\n"
        f"      - {{device: {kind}, count: 1, devices_per_node: 1}}\n",
        encoding="utf-8",
    )


def check(
    out: Path, device: str, only: Sequence[str], *, quick: bool, seconds: float = 120.0, only_run: bool = False
) -> bool:
    """Do all of it, or parts whose names begin so, and write what was found; whether all that was done went well."""
    import torch

    from runners.profile_layers import device_name

    folder = out.resolve().with_suffix("")
    cluster_file(folder, device_name(None, torch.device(device)))
    parts: dict[str, Callable[[], Any]] = {
        "streams and NCCL": lambda: streams_and_nccl(device),
        "bench": lambda: bench(folder, device, seconds=5.0 if quick else seconds),
        "host": lambda: host(device, quick=quick),
        "experts at once": lambda: experts_at_once(device, quick=quick),
        "masked attention": lambda: masked_attention(device, quick=quick),
        "profile": lambda: profile(folder, device, quick=quick),
        "recipes": lambda: recipes(folder, device, quick=quick),
    }
    for given in QUICK if quick else CONFIGURATIONS:
        parts[given.name] = partial(configuration, folder, device, given, only_run=only_run)
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


def plan_for(kind: str, out: Path, *, quick: bool) -> None:
    """Make plans and predictions for a device that need not be here, and print them."""
    folder = out.resolve().with_suffix("")
    cluster_file(folder, known_device(kind).name)
    for of in QUICK if quick else CONFIGURATIONS:
        plan = json.loads(planned(folder, of).read_text(encoding="utf-8"))
        said, stage = plan["estimate"], plan["stages"][0]
        print(
            f"{of.name}: {1e3 * said['step_s']:.1f} ms ({1e3 * said['low_s']:.1f} to {1e3 * said['high_s']:.1f}), "
            f"{said['workers'][0]['peak_bytes'] / 1e9:.1f} GB, micro-batches of {plan['micro_batch_size']}, recompute "
            f"{stage['recompute']} {stage['recompute_blocks'] or ''}".rstrip()
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Check; 0 fine, 1 a part failed or none has that name, 2 no GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help="beginning of a part's name (default: all of them)")
    parser.add_argument("-o", "--out", type=Path, default=Path("out/gpu-check.json"), help="default %(default)s")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="default %(default)s")
    parser.add_argument("--quick", action="store_true", help="small models and few seconds: a rehearsal")
    parser.add_argument("--bench-seconds", type=float, default=120.0, help="of the bench (default %(default)g)")
    parser.add_argument("--only-run", action="store_true", help="predict nothing from the bench")
    parser.add_argument("--plan-for", metavar="DEVICE", help="only plan and predict, for a device of the catalogue")
    args = parser.parse_args(argv)
    if args.plan_for:
        plan_for(args.plan_for, args.out, quick=args.quick)
        return 0
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu-check: torch sees no GPU here: nothing was checked", file=sys.stderr)
        return 2
    done = check(
        *(args.out, args.device, args.parts),
        quick=args.quick,
        seconds=args.bench_seconds,
        only_run=args.only_run,
    )
    return 0 if done else 1


if __name__ == "__main__":
    raise SystemExit(main())
