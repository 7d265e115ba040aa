"""Variations of Sailor's planning problems, and what rivals' plans become on them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.rivals.sailor import Setup
from benchmarks.rivals.sailor_score import Measured, measured_degrees

Form = dict[str, Any]
BATCHES = (64, 128, 256, 512, 1000, 1024, 2048)
MODELS = ("OPT-350", "GPT-Neo-2.7", "OPT-30")


def variations(
    setups: Sequence[Setup], profiles: Mapping[str, Any], count: int, rng: np.random.Generator
) -> Iterator[Setup]:
    """Setups with other device counts (a quarter to twice), other batches, some zones and types exchanged or dropped.

    Models are those of `MODELS` that the profiles hold; a zone may get V100 beside its A100.
    """
    models = [name for name in MODELS if name in profiles["models"]]
    for number in range(count):
        base = setups[number % len(setups)]
        devices = {}
        zones = list(dict.fromkeys(zone for zone, _ in base.devices))
        kept = [zone for zone in zones if rng.random() < 0.8] or zones[:1]
        for (zone, gpu), n in base.devices.items():
            if zone in kept:
                nodes = max(1, int(n / base.devices_per_node * rng.choice([0.25, 0.5, 0.75, 1, 1.5, 2])))
                devices[zone, gpu] = nodes * base.devices_per_node
                if rng.random() < 0.3:
                    other = "V100-16" if gpu == "A100-40" else "A100-40"
                    devices.setdefault((zone, other), base.devices_per_node * int(rng.integers(1, 9)))
        model, batch = str(rng.choice(models, p=_likely(models))), int(rng.choice(BATCHES))
        described = ",".join(f"{zone[-4:]}:{gpu.split('-')[0]}x{n}" for (zone, gpu), n in devices.items())
        yield replace(
            base,
            name=f"{number} {model} B={batch} {described}"[:64],
            model=model,
            global_batch=batch,
            devices=devices,
            results={},
        )


def _likely(models: Sequence[str]) -> list[float]:
    """Half of the variations keep the model of the setups."""
    if len(models) == 1:
        return [1.0]
    return [0.5, *[0.5 / (len(models) - 1)] * (len(models) - 1)]


def rival_forms(setup: Setup, bases: Sequence[Setup], measured: Measured) -> Iterator[tuple[str, Form]]:
    """Rivals' plans of the same model with as many workers more or less as the setup has devices, in every micro-batch
    size; and every uniform split (`uniform_forms`)."""
    for base in bases:
        for planner, result in base.results.items():
            form = result.get("plan") or {}
            if base.model == setup.model and form.get("stages"):
                stages = _rescaled(form, base, setup)
                for size in _sizes(setup, measured) if stages else ():
                    yield planner, {"micro_batch_size_sequences": size, "stages": stages}
    yield from (("uniform", form) for form in uniform_forms(setup, measured))


def _sizes(setup: Setup, measured: Measured) -> list[int]:
    """Micro-batch sizes that were measured and divide the batch."""
    return [size for size in sorted({size for _, size, _ in measured.forward_s}) if setup.global_batch % size == 0]


def _rescaled(form: Mapping[str, Any], base: Setup, setup: Setup) -> list[Form] | None:
    """Stages with the workers of every kind in proportion; None where a stage has none left.

    The first stage is made no wider than any other, as it is in all plans of the file: Sailor's score counts
    micro-batches by its width alone, and would take the others to be as wide.
    """
    stages: list[Form] = []
    for stage in form["stages"]:
        workers: list[Form] = []
        kinds = {(w["zone"], w["gpu_type"], int(w["tp"])): w for w in stage["workers"]}
        for (zone, gpu, tp), worker in kinds.items():
            count = sum((w["zone"], w["gpu_type"], int(w["tp"])) == (zone, gpu, tp) for w in stage["workers"])
            factor = setup.devices.get((zone, gpu), 0) / base.devices[zone, gpu]
            workers += [worker] * int(count * factor + 1e-9)
        if not workers:
            return None
        stages.append({"layers": stage["layers"], "workers": workers})
    narrowest = min(len(stage["workers"]) for stage in stages)
    stages[0]["workers"] = stages[0]["workers"][:narrowest]
    return stages


def uniform_forms(setup: Setup, measured: Measured) -> Iterator[Form]:
    """Every plain 3D split: 1 to 16 stages of about equally many layers, one degree and size, over all devices of one
    type or of all, in one zone or in all."""
    zones = list(dict.fromkeys(zone for zone, _ in setup.devices))
    types = list(dict.fromkeys(gpu for _, gpu in setup.devices))
    places = [[z] for z in zones] + ([zones] if len(zones) > 1 else [])
    kinds = [[t] for t in types] + ([types] if len(types) > 1 else [])
    for where, what, tp in itertools.product(places, kinds, measured_degrees(measured)):
        if tp > setup.devices_per_node:
            continue
        workers = [
            {"gpu_type": gpu, "tp": tp, "zone": zone}
            for zone in where
            for gpu in what
            for _ in range(setup.devices.get((zone, gpu), 0) // tp)
        ]
        for stages in range(1, 17):
            width = len(workers) // stages
            if not width:
                break
            bounds = [measured.layers * s // stages for s in range(stages + 1)]
            made = [
                {"layers": list(range(bounds[s], bounds[s + 1])), "workers": workers[s * width : (s + 1) * width]}
                for s in range(stages)
            ]
            for size in _sizes(setup, measured):
                yield {"micro_batch_size_sequences": size, "stages": made}
