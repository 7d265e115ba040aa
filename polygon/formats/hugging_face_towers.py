"""Vision towers of multi-modal models, from the `vision_config` of a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polygon.domain.errors import require
from polygon.domain.model import Model
from polygon.formats.hugging_face_config import ConfigReader, is_list, mlp_ratio, repeated
from polygon.formats.hugging_face_types import ANY_SIZE, TOWER_OF, TOWERS

GATED = ("qwen2_5_vl", "pixtral")
"""Towers whose blocks are Llama's."""


def vision_tower(data: Mapping[str, Any], whole: str, text_size: int) -> Model | None:
    """The vision transformer of a multi-modal config; what joins it to the text is its head."""
    config = data.get("vision_config")
    known = TOWER_OF.get(whole, whole)
    if config is None and known not in TOWERS:
        return None
    config = config or {}
    require(isinstance(config, Mapping), "vision_config", type(config).__name__, "a mapping")
    kind = str(config.get("model_type", known)).removesuffix("_vision")
    reader = ConfigReader(config, TOWERS.get(kind, TOWERS.get(known, {})))
    if kind == "qwen2_5_vl":  # the width of what it gives has the other one's key there
        reader = ConfigReader(
            {**config, "embed_dim": config.get("hidden_size", reader.defaults["hidden_size"])}, reader.defaults
        )
    elif kind == "qwen2_vl":
        reader = ConfigReader({key: config[key] for key in config if key != "hidden_size"}, reader.defaults)
    needed = ("blocks", "hidden_size", "heads", "patch_size")
    if any(reader.number(field) is None for field in needed):
        return None
    sizes: dict[str, Any] = {field: reader.required(field) for field in needed}
    h, patch = sizes["hidden_size"], sizes["patch_size"]
    ffn_size = reader.number("ffn_size") or mlp_ratio(reader, 4) * h
    image = reader.number("image_size") or ANY_SIZE
    joins = _joining(kind, config, h, ffn_size, text_size)
    return Model(
        name="vision tower",
        family="vit",
        **sizes,
        kv_heads=sizes["heads"],
        head_dim=h // sizes["heads"],
        ffn_size=ffn_size,
        vocab_size=max(1, round(joins / h)),
        image_size=image // patch * patch,
        channels=(reader.number("channels") or 3) * (reader.whole("temporal_patch_size") or 1),
        max_seq_len=(image // patch) ** 2 + 1,
        **_windows(config, sizes["blocks"], patch),
        gated_mlp=kind in GATED,
        rms_norm=kind in GATED,
        learned_positions=kind != "pixtral",
        linear_bias=kind != "pixtral",
        qkv_bias=kind != "pixtral",
        causal=False,
        tied_embeddings=False,
        source="Hugging Face config.json",
    )


def _windows(config: Mapping[str, Any], blocks: int, patch_size: int) -> dict[str, Any]:
    """Qwen2.5-VL: all but a few blocks look at squares of `window_size` pixels."""
    whole, side = config.get("fullatt_block_indexes"), config.get("window_size")
    if not is_list(whole) or not isinstance(side, int) or side < patch_size:
        return {}
    kinds = tuple("full" if i in whole else "chunk" for i in range(blocks))
    return {"window": (side // patch_size) ** 2, "attention_pattern": repeated(kinds)}


def _joining(kind: str, config: Mapping[str, Any], h: int, ffn_size: int, text_size: int) -> int:
    """Parameters between a tower of width h and the text: a projection, or what its type has there."""
    if kind == "siglip_vision_model":  # may pool by attention and an MLP of its own
        pools = config.get("vision_use_head", True)
        return h * text_size + (4 * h * h + 2 * h * ffn_size + 9 * h + ffn_size if pools else 0)
    if kind == "llama4_vision_model":
        numbers = ConfigReader(
            config, {"projector_input_dim": 4096, "projector_output_dim": 4096, "vision_output_dim": 7680}
        )
        into, out = numbers.whole("projector_input_dim"), numbers.whole("projector_output_dim")
        return ffn_size * into + into * out + numbers.whole("vision_output_dim") * text_size
    if kind == "pixtral":  # four patches to one, a norm, two layers
        return 4 * h * h + h + h * text_size + text_size * text_size
    if kind in ("qwen2_vl", "qwen2_5_vl"):  # patches are merged four to one
        merged = h * (ConfigReader(config, {"spatial_merge_size": 2}).whole("spatial_merge_size")) ** 2
        return merged * merged + merged + merged * text_size + text_size
    return h * text_size
