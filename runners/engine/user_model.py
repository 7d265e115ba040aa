"""A model that the user gives as a list of layers, in a Python file.

    def layers():
        return [nn.Conv2d(1, 16, 3), Block(16), ..., nn.Linear(64, 10)]

    def loss(output, targets):
        return functional.cross_entropy(output, targets, reduction="sum")   # the sum over the samples

    def samples(seed):                          # optional; else --data
        return MySamples(seed)                  # batch(range of numbers) -> inputs, targets

Layer i of the plan is the i-th of the list; it takes and returns one tensor. All ranks call `layers` after the same
`torch.manual_seed`, so they draw the same first weights.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from polygon.domain.errors import InputError, require
from polygon.domain.plan import Plan, Problem
from runners.data.samples import Samples


class _WithLoss(nn.Module):
    """The last layer and the loss."""

    def __init__(self, layer: nn.Module, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self._loss = loss

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self._loss(self.layer(x), targets)


class OwnModel:
    """What a user's file defines.

    Parameters
    ----------
    path : Path
        The file.
    seed : int
        Of the first weights and of the samples.
    layers : int
        How many there must be.

    Raises
    ------
    InputError
        The file cannot be run, or does not define what it must.
    """

    def __init__(self, path: Path, seed: int, layers: int) -> None:
        self._path = path
        self.shapes: list[tuple[int, ...]] = []
        """Of what the layers return for a micro-batch; set by `measure`, as is the next."""
        self.micro_batch_flops = 0.0
        """Of forward and backward."""
        module = self._guarded("the file", lambda: _run(path))
        for name in ("layers", "loss"):
            if not callable(getattr(module, name, None)):
                raise InputError(f"--model-file {path}: found no function {name}, expected layers and loss")
        torch.manual_seed(seed)
        self.layers: list[nn.Module] = self._guarded("layers()", lambda: list(module.layers()))
        require(
            len(self.layers) == layers, f"--model-file {path}: layers", len(self.layers), f"{layers}, as in the plan"
        )
        for number, layer in enumerate(self.layers):
            self._check(number, layer)
        self._check_apart()
        if not any(parameter.requires_grad for layer in self.layers for parameter in layer.parameters()):
            raise InputError(f"--model-file {path}: layers(): found no weight that is trained, expected some")
        self._loss = module.loss
        self.samples: Samples | None = None
        if hasattr(module, "samples"):
            self.samples = self._guarded("samples(seed)", lambda: module.samples(seed))

    def _guarded(self, what: str, work: Callable[[], Any]) -> Any:
        """What some of the user's code returns; its errors as one line."""
        try:
            return work()
        except Exception as error:
            places = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(self._path)]
            line = f", line {places[-1].lineno}" if places else ""
            reason = str(error).splitlines()[0] if str(error) else ""
            raise InputError(f"--model-file {self._path}{line}: {what}: {type(error).__name__}: {reason}") from error

    def _check(self, number: int, layer: object) -> None:
        where = f"--model-file {self._path}: layers()[{number}]"
        if not isinstance(layer, nn.Module):
            raise InputError(f"{where}: found {type(layer).__name__}, expected a torch.nn.Module")
        kept = sorted(set(layer.state_dict()) - {name for name, _ in layer.named_parameters()})
        if kept:
            raise InputError(
                f"{where}: found the buffer {kept[0]!r}, expected none in state_dict: statistics of a batch would "
                "depend on the plan (a norm over channels or groups does not)"
            )

    def _check_apart(self) -> None:
        """Layers are on different devices, each with its own weights, gradients and file of the checkpoint."""
        first: dict[nn.Parameter, int] = {}
        for number, layer in enumerate(self.layers):
            for name, parameter in layer.named_parameters():
                if first.setdefault(parameter, number) != number:
                    raise InputError(
                        f"--model-file {self._path}: layers()[{number}]: found {name}, which layers()"
                        f"[{first[parameter]}] has too, expected weights of its own"
                    )

    def build(self, numbers: Iterable[int], device: torch.device) -> nn.ModuleDict:
        """Some of the layers by their number (as text), the last one with the loss."""
        last = len(self.layers) - 1
        return nn.ModuleDict(
            {str(i): _WithLoss(self.layers[i], self._loss) if i == last else self.layers[i] for i in numbers}
        ).to(device)

    def measure(self, samples: Samples, micro_batch_size: int) -> None:
        """Find the shapes that the layers return for a micro-batch, and the FLOP of its forward and backward.

        Computed without numbers (on the meta device), so that nothing takes memory.
        """
        inputs, targets = samples.batch(range(micro_batch_size))
        x = inputs.to("meta")
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            for number, layer in enumerate(self.layers):
                twin = copy.deepcopy(layer).to("meta")
                x = self._guarded(f"layers()[{number}] on {tuple(x.shape)}", lambda twin=twin, x=x: twin(x))  # type: ignore[misc]
                where = f"--model-file {self._path}: layers()[{number}]"
                if not isinstance(x, torch.Tensor) or not x.is_floating_point():
                    raise InputError(f"{where}: found {type(x).__name__} returned, expected one tensor of real numbers")
                self.shapes.append(tuple(x.shape))
            total = self._guarded("loss(output, targets)", lambda: self._loss(x, targets.to("meta")))
        found = tuple(total.shape) if isinstance(total, torch.Tensor) else type(total).__name__
        if found != ():
            raise InputError(f"--model-file {self._path}: loss: found {found}, expected a tensor of one number (a sum)")
        self.micro_batch_flops = 3.0 * counter.get_total_flops()


def _run(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InputError(f"--model-file: found {path}, expected a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def own_problem(problem: Problem, plan: Plan, path: Path) -> Problem:
    """The problem with nothing of the planned model left but its number of layers.

    Raises
    ------
    InputError
        The plan asks for what needs to know the inside of layers.
    """
    for s, stage in enumerate(plan.stages):
        for w, worker in enumerate(stage.workers):
            if len(worker.devices) > 1:
                raise InputError(
                    f"plan.stages[{s}].workers[{w}]: found {len(worker.devices)} devices, expected 1 "
                    "(with --model-file)"
                )
        if stage.recompute == "selective":
            raise InputError(
                f"plan.stages[{s}].recompute: found 'selective', expected none or full (with --model-file)"
            )
    model = replace(problem.model, name=path.stem, tied_embeddings=False, experts=0)
    return replace(problem, model=model)


def content_digest(path: Path) -> str:
    """A short name of what a file says."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError as error:
        raise InputError(f"--model-file: found {path} ({error.strerror}), expected a Python file") from error
