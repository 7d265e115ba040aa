"""First weights from a folder of Hugging Face: safetensors files of Llama, Qwen2, Mistral and Mixtral models.

A layer reads its own tensors alone, by the names that those models give them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from polygon.domain.errors import InputError, require
from polygon.domain.model import Model

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
OUTSIDE = {
    "embedding.tokens.weight": "model.embed_tokens.weight",
    "head.norm.weight": "model.norm.weight",
    "head.output.weight": "lm_head.weight",
}
INSIDE = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp.router": "block_sparse_moe.gate",
}
EXPERT = {"gate": "w1", "up": "w3", "down": "w2"}
"""Mixtral's names of an expert's matrices."""


def their_name(name: str) -> str:
    """Hugging Face's name of a parameter (`blocks.3.attention.query.weight` -> `model.layers.3.self_attn...`)."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    found = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", name)
    assert found is not None, name
    block, part, kind = found.groups()
    expert = re.fullmatch(r"mlp\.experts\.(\d+)\.(gate|up|down)", part)
    if expert:
        return f"model.layers.{block}.block_sparse_moe.experts.{expert[1]}.{EXPERT[expert[2]]}.{kind}"
    if part not in INSIDE:
        raise InputError(f"weights: found a model with {part}, expected a Llama, Qwen2, Mistral or Mixtral shape")
    return f"model.layers.{block}.{INSIDE[part]}.{kind}"


class Pretrained:
    """The weights in a folder.

    Parameters
    ----------
    folder : Path
        With `model.safetensors`, or several files and their index.
    model : Model
        What the weights are for.

    Raises
    ------
    InputError
        No such files, or safetensors is not installed.
    """

    def __init__(self, folder: Path, model: Model) -> None:
        self.folder, self.model = folder, model
        if model.family != "llama":
            raise InputError(f"weights: found a model of family {model.family}, expected llama")
        self._files: dict[str, str] = {}
        """File of every tensor, where there are several files."""
        index = folder / INDEX
        try:
            if index.exists():
                self._files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (OSError, ValueError, KeyError) as error:
            raise InputError(f"{index}: {error!r}, expected an index of safetensors files") from None
        if not self._files and not (folder / SINGLE).exists():
            raise InputError(f"weights: {folder}: found no {SINGLE} and no {INDEX}")

    def tensor(self, name: str, shape: torch.Size) -> torch.Tensor:
        """A parameter by its name in the full model, in fp32.

        Raises
        ------
        InputError
            The folder has no such tensor, or it has another shape.
        """
        theirs = their_name(name)
        if name == "head.output.weight" and self.model.tied_embeddings:
            theirs = OUTSIDE["embedding.tokens.weight"]
        path = self.folder / self._files.get(theirs, SINGLE)
        with self._open(path) as file:
            if theirs not in file.keys():  # noqa: SIM118 - not a mapping
                raise InputError(f"{path}: found no tensor {theirs}")
            found = file.get_tensor(theirs)
        require(found.shape == shape, f"{path}: {theirs}: shape", tuple(found.shape), str(tuple(shape)))
        return found.float()

    def _open(self, path: Path) -> Any:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise InputError("weights: expected safetensors installed (pip install safetensors)") from None
        try:
            return safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path}: {error}, expected a safetensors file") from None
