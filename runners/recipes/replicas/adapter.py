"""Low-rank additions in peft's files: what a run with LoRA leaves, and what one may start from.

A folder holds `adapter_config.json` and `adapter_model.safetensors`, whose tensors have the names that peft gives them
beside a model of transformers 5: `PeftModel.from_pretrained(base, folder)` loads them. Names of vision transformers of
transformers 4 are read too. A model of GPT-2's kind keeps our own names: transformers cuts its projections otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polygon.domain.errors import InputError, require
from polygon.domain.model import Model
from polygon.formats.files import usual_mode
from runners.engine.additions import Additions, lora_layers
from runners.engine.architectures import architecture_of
from runners.recipes.recipe_schema import LoraPart
from runners.recipes.replicas.whole import WholeModel
from runners.recipes.weights import BLOCK

if TYPE_CHECKING:
    import torch

FOLDER = "adapter"
"""Of a run's output."""
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Before every name in peft's files."""
OTHERWISE = ("use_dora", "use_rslora", "lora_bias", "rank_pattern", "alpha_pattern", "fan_in_fan_out")
"""Settings of peft's that make other additions of the same tensors."""


def _theirs(model: Model, layer: int, part: str) -> tuple[str, ...]:
    """Names of a module in models of transformers, those of the newest version first."""
    if layer == model.layers - 1:
        return ("classifier",)
    if model.family == "vit":
        tops = ("layers", "encoder.layer")
        return tuple(f"vit.{top}.{layer - 1}.{name}" for top, name in zip(tops, reversed(BLOCK[part]), strict=True))
    if model.family == "llama":
        return (architecture_of(model).place(f"blocks.{layer - 1}.{part}.weight", model).name.removesuffix(".weight"),)
    return (f"layers.{layer}.{part}",)


def tensors(model: Model, part: Additions) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
    """By the name of a trained parameter in `WholeModel`: its names in files (written: the first) and its shape."""
    found: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {}
    for name, linear in lora_layers(model, part).items():
        _, layer, inside = name.split(".", maxsplit=2)
        shapes = {"A": (part.rank, linear.in_features), "B": (linear.out_features, part.rank)}
        for which, shape in shapes.items():
            names = [f"{PREFIX}{module}.lora_{which}.weight" for module in _theirs(model, int(layer), inside)]
            found[f"{name}.lora_{which}.default.weight"] = tuple(names), shape
    if model.family == "vit":
        head = model.layers - 1
        [name] = _theirs(model, head, "output")
        for kind, head_shape in (("weight", (model.vocab_size, model.hidden_size)), ("bias", (model.vocab_size,))):
            found[f"layers.{head}.output.{kind}"] = (f"{PREFIX}{name}.{kind}",), head_shape
    return found


def trained(whole: WholeModel) -> dict[str, torch.Tensor]:
    """What was trained beside the frozen weights, by name."""
    return {name: p.detach().cpu() for name, p in whole.named_parameters() if p.requires_grad}


def save_adapter(
    model: Model, part: Additions, held: Mapping[str, torch.Tensor], folder: Path, base: Path | None
) -> None:
    """Write what was trained as peft would.

    Parameters
    ----------
    model : Model
    part : Additions
    held : mapping of name to tensor
        What was trained, by its name in `WholeModel`.
    folder : Path
    base : Path, optional
        Where the frozen weights came from.
    """
    from peft import LoraConfig
    from safetensors.torch import save_file

    names = tensors(model, part)
    modules = {names[name][0][0].rpartition(".lora_")[0] for name in names if ".lora_" in name}
    settings: dict[str, Any] = {"r": part.rank, "lora_alpha": part.alpha, "lora_dropout": part.dropout}
    config = LoraConfig(
        **settings,
        target_modules=sorted({module.rpartition(".")[2] for module in modules}),
        modules_to_save=["classifier"] if model.family == "vit" else None,
        task_type="CAUSAL_LM" if model.family == "llama" else None,
        base_model_name_or_path=None if base is None else str(base),
        inference_mode=True,
    )
    config.save_pretrained(str(folder))
    save_file({names[name][0][0]: tensor.contiguous() for name, tensor in held.items()}, folder / TENSORS)
    (folder / TENSORS).chmod(usual_mode())


def read_adapter(model: Model, part: Additions, folder: Path) -> dict[str, torch.Tensor]:
    """Trained parameters by their names in `WholeModel`; a head may be missing.

    Raises
    ------
    InputError
        No such files, or additions of another rank, scale, kind or to other layers than the recipe has.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    _check_config(part, folder / CONFIG)
    path = folder / TENSORS
    try:
        held = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"lora.adapter: {path}: {error}, expected peft's tensors") from None
    found = {}
    for name, (names, shape) in tensors(model, part).items():
        theirs = next((theirs for theirs in names if theirs in held), None)
        if theirs is None and ".lora_" not in name:
            continue
        if theirs is None:
            raise InputError(f"lora.adapter: {path}: found no {names[0]}, expected it (lora.targets)")
        found[name] = held.pop(theirs)
        require(tuple(found[name].shape) == shape, f"{path}: {theirs}: shape", tuple(found[name].shape), str(shape))
    if held:
        raise InputError(f"lora.adapter: {path}: found {min(held)}, expected none of it (lora.targets)")
    return found


def _check_config(part: Additions, path: Path) -> None:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"lora.adapter: {path}: {why}, expected peft's settings") from None
    wanted = {"peft_type": "LORA", "r": part.rank, "lora_alpha": part.alpha, "bias": "none"}
    for key, value in (wanted | dict.fromkeys(OTHERWISE)).items():
        found = said.get(key) if isinstance(said, dict) else None
        require(found == value or not (found or value), f"lora.adapter: {path}: {key}", found, repr(value))


def load_adapter(whole: WholeModel, part: LoraPart, folder: Path) -> None:
    """Start from an adapter; raises as `read_adapter`."""
    import torch

    parameters = dict(whole.named_parameters())
    with torch.no_grad():
        for name, tensor in read_adapter(whole.model, part, folder).items():
            parameters[name].copy_(tensor)
