"""First weights of a vision transformer from Hugging Face's safetensors (ViTForImageClassification, ViTModel)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from polygon.domain.errors import InputError, require
from polygon.domain.model import Model

if TYPE_CHECKING:
    import torch
    from torch import nn

BLOCK = {
    "attention.query": ("attention.attention.query", "attention.q_proj"),
    "attention.key": ("attention.attention.key", "attention.k_proj"),
    "attention.value": ("attention.attention.value", "attention.v_proj"),
    "attention.output": ("attention.output.dense", "attention.o_proj"),
    "attention_norm": ("layernorm_before",),
    "mlp_norm": ("layernorm_after",),
    "mlp.up": ("intermediate.dense", "mlp.fc1"),
    "mlp.down": ("output.dense", "mlp.fc2"),
}
"""Our modules of a block and their names in transformers' files (of several versions)."""


def weight_files(folder: Path) -> list[Path]:
    """The files of a folder; raises `InputError` where there are none, or nothing to read them with."""
    if find_spec("safetensors") is None:
        raise InputError("model.weights: found no safetensors, expected it (pip install safetensors)")
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    require(bool(files), "model.weights", str(folder), "a folder with *.safetensors")
    return files


def _read(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        tensors |= load_file(path)
    return {name.removeprefix("vit."): tensor for name, tensor in tensors.items()}


def load_weights(layers: nn.ModuleDict, model: Model, folder: Path) -> list[str]:
    """Copy weights into the layers; a head for other classes keeps what it drew.

    Returns
    -------
    list of str
        Parameters that were not in the files.

    Raises
    ------
    InputError
        No file, a weight missing or of another shape.
    """
    files = _read(folder)

    def find(*names: str) -> torch.Tensor:
        for name in names:
            if name in files:
                return files[name]
        raise InputError(f"{folder}: found no {names[0]}, expected the weights of {model.name}")

    wanted: dict[str, torch.Tensor] = {
        "0.class_token": find("embeddings.cls_token").flatten(),
        "0.positions.weight": find("embeddings.position_embeddings")[0],
        "0.patches.weight": find("embeddings.patch_embeddings.projection.weight").flatten(1),
        "0.patches.bias": find("embeddings.patch_embeddings.projection.bias"),
    }
    for block in range(model.blocks):
        for ours, theirs in BLOCK.items():
            for kind in ("weight", "bias"):
                names = [f"{top}.{block}.{name}.{kind}" for top in ("encoder.layer", "layers") for name in theirs]
                wanted[f"{block + 1}.{ours}.{kind}"] = find(*names)
    last = model.layers - 1
    wanted[f"{last}.norm.weight"], wanted[f"{last}.norm.bias"] = find("layernorm.weight"), find("layernorm.bias")
    if "classifier.weight" in files and len(files["classifier.weight"]) == model.vocab_size:
        wanted[f"{last}.output.weight"], wanted[f"{last}.output.bias"] = (
            find("classifier.weight"),
            find("classifier.bias"),
        )
    return _copy(layers, wanted, folder)


def _copy(layers: nn.ModuleDict, wanted: dict[str, torch.Tensor], folder: Path) -> list[str]:
    import torch

    missing = []
    for name, parameter in layers.named_parameters():
        if name not in wanted:
            missing.append(name)
            continue
        found, shape = tuple(wanted[name].shape), tuple(parameter.shape)
        require(found == shape, f"{folder}: {name}", found, f"shape {shape}, as the recipe's model has")
        with torch.no_grad():
            parameter.copy_(wanted[name])
    return missing
