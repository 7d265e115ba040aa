"""Formats that are not polygon's own: Hugging Face's `config.json`, PTAFM's text file, hostfiles.

Every function takes text or parsed JSON and gives what `polygon.schema` describes, or a model; faults are `InputError`
with the place inside the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from polygon.domain.errors import InputError, Phrase, one_of, require, require_number
from polygon.domain.model import Model

# Hugging Face: config.json


class _Family(NamedTuple):
    """What a `model_type` implies: HF's defaults for keys that a file leaves out, and the shape's fixed features."""

    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any]


_SYNONYMS = {
    "blocks": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "ffn_size": ("intermediate_size", "ffn_dim", "n_inner"),
    "vocab_size": ("vocab_size",),
    "max_seq_len": ("max_position_embeddings", "n_positions"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "expert_ffn_size": ("moe_intermediate_size",),
    "image_size": ("image_size",),
    "patch_size": ("patch_size",),
    "channels": ("num_channels",),
}
"""Our field: the keys that config.json may use for it."""

_MAY_BE_NULL = ("kv_heads", "head_dim", "ffn_size", "experts", "experts_per_token", "expert_ffn_size")

_LLAMA = {
    "family": "llama",
    "gated_mlp": True,
    "rms_norm": True,
    "learned_positions": False,
    "linear_bias": False,
    "qkv_bias": False,
}
_GPT: dict[str, Any] = {"family": "gpt"}
_BASE = {"blocks": 32, "hidden_size": 4096, "heads": 32}
_QWEN = _BASE | {"kv_heads": 32, "ffn_size": 22016, "vocab_size": 151936, "max_seq_len": 32768}
_QWEN_MOE = {"blocks": 24, "hidden_size": 2048, "vocab_size": 151936, "max_seq_len": 32768}
_MISTRAL = _BASE | {"kv_heads": 8, "ffn_size": 14336, "vocab_size": 32000, "max_seq_len": 131072}
_SMALL = {"blocks": 12, "hidden_size": 768, "heads": 12}

FAMILIES: Mapping[str, _Family] = {
    "gpt2": _Family({**_SMALL, "vocab_size": 50257, "max_seq_len": 1024, "tied": True}, _GPT),
    "opt": _Family({**_SMALL, "ffn_size": 3072, "vocab_size": 50272, "max_seq_len": 2048, "tied": True}, _GPT),
    "gpt_neo": _Family(
        {"blocks": 24, "hidden_size": 2048, "heads": 16, "vocab_size": 50257, "max_seq_len": 2048, "tied": True},
        {**_GPT, "qkv_bias": False},
    ),
    "gpt_neox": _Family(
        {"blocks": 44, "hidden_size": 6144, "heads": 64, "ffn_size": 24576, "vocab_size": 50432, "max_seq_len": 2048},
        {**_GPT, "learned_positions": False},
    ),
    "llama": _Family({**_BASE, "ffn_size": 11008, "vocab_size": 32000, "max_seq_len": 2048}, _LLAMA),
    "qwen2": _Family(_QWEN, {**_LLAMA, "qkv_bias": True}),
    "qwen3": _Family({**_QWEN, "head_dim": 128}, _LLAMA),
    "mistral": _Family(_MISTRAL, _LLAMA),
    "mixtral": _Family({**_MISTRAL, "experts": 8, "experts_per_token": 2}, _LLAMA),
    "qwen2_moe": _Family(
        {**_QWEN_MOE, "heads": 16, "kv_heads": 16, "ffn_size": 5632}
        | {"experts": 60, "experts_per_token": 4, "expert_ffn_size": 1408, "shared_ffn_size": 5632},
        {**_LLAMA, "qkv_bias": True},
    ),
    "qwen3_moe": _Family(
        {**_QWEN_MOE, "heads": 32, "kv_heads": 4, "ffn_size": 6144}
        | {"experts": 128, "experts_per_token": 8, "expert_ffn_size": 768},
        _LLAMA,
    ),
    "vit": _Family(
        {**_SMALL, "ffn_size": 3072, "image_size": 224, "patch_size": 16, "channels": 3},
        {"family": "vit", "causal": False},
    ),
}
"""By `model_type`; defaults as of transformers 4.57 (tests hold some of them against its configuration classes)."""

_MLA_KEYS = ("kv_lora_rank", "q_lora_rank")


def is_hugging_face(data: Any) -> bool:
    """Whether parsed JSON looks like a Hugging Face `config.json`."""
    return isinstance(data, Mapping) and any(key in data for key in ("model_type", "architectures", "text_config"))


def hugging_face_model(data: Mapping[str, Any], name: str) -> Model:
    """The model of a parsed `config.json`.

    Leaves out what changes no shape that polygon models: sliding windows, scaled rotary positions, norms of queries and
    keys (Qwen3; 2 * head_dim parameters a block), OPT-350M's projection of its embeddings.

    Raises
    ------
    InputError
        For a `model_type` that is not supported, and for numbers that are not whole numbers >= 1.
    """
    config = _text_part(data)
    model_type = config.get("model_type", data.get("model_type"))
    require(isinstance(model_type, str), "model_type", model_type, f"one of {', '.join(sorted(FAMILIES))}")
    if model_type not in FAMILIES:
        raise InputError(f"model_type: found {model_type!r}, expected {one_of(str(model_type), FAMILIES)}")
    for key in _MLA_KEYS:
        require(config.get(key) is None, key, config.get(key), "nothing: latent attention is not supported")
    defaults, fixed = FAMILIES[model_type]
    found = {field: _number(config, field, defaults) for field in _SYNONYMS}
    hidden_size, heads = found["hidden_size"], found["heads"]
    assert hidden_size is not None and heads is not None
    head_dim = found["head_dim"] or hidden_size // heads
    fields: dict[str, Any] = {**fixed, **{k: v for k, v in found.items() if v is not None}}
    fields |= {
        "name": str(data.get("_name_or_path") or name),
        "head_dim": head_dim,
        "kv_heads": found["kv_heads"] or heads,
        "ffn_size": found["ffn_size"] or 4 * hidden_size,
        "tied_embeddings": bool(config.get("tie_word_embeddings", defaults.get("tied", False))),
        "source": "Hugging Face config.json",
    }
    fields |= _floats(config)
    if config.get("attention_bias"):
        fields["qkv_bias"] = True
    if config.get("enable_bias") is False:
        fields["qkv_bias"] = fields["linear_bias"] = False
    if fields.get("experts"):
        fields |= _experts(config, fields, defaults)
    if fixed["family"] == "vit":
        fields |= _vit(config, fields)
    return Model(**fields)


def _floats(config: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of norms and rotary positions, where the config has them."""
    nested = config.get("rope_parameters")
    rope = nested if isinstance(nested, Mapping) and "rope_theta" in nested else config
    found = {"norm_eps": (config, "rms_norm_eps"), "rope_theta": (rope, "rope_theta")}
    for where, key in found.values():
        if where.get(key) is not None:
            require_number(where[key], key, above=0)
    return {field: float(where[key]) for field, (where, key) in found.items() if where.get(key) is not None}


def _text_part(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config (multi-modal models nest it)."""
    nested = data.get("text_config")
    if nested is None:
        return data
    require(isinstance(nested, Mapping), "text_config", type(nested).__name__, "a mapping")
    if "vision_config" in data and any(key in data for key in _SYNONYMS["blocks"]):
        return data
    # Before transformers 4.50 some models kept this one key outside.
    outside = {"tie_word_embeddings": data["tie_word_embeddings"]} if "tie_word_embeddings" in data else {}
    return {**outside, **nested}


def _number(config: Mapping[str, Any], field: str, defaults: Mapping[str, Any]) -> int | None:
    """A whole number of the config by any of its keys; the family's default where it is left out, None for null."""
    for key in _SYNONYMS[field]:
        if key in config:
            value = config[key]
            if value is None and field in _MAY_BE_NULL:
                return None
            fits = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            require(fits, key, value, "a whole number >= 1")
            return int(value)
    default = defaults.get(field)
    if field == "kv_heads" and any(key in config for key in _SYNONYMS["heads"]) and default is not None:
        # A file that names its heads and leaves this out was written where both were equal or is older than the key.
        heads = _number(config, "heads", defaults)
        return default if heads is not None and heads % default == 0 and heads >= default else heads
    return default


def _experts(config: Mapping[str, Any], fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Mixture of experts: sizes, shared experts, leading dense blocks."""
    step = config.get("decoder_sparse_step", 1)
    require(step == 1, "decoder_sparse_step", step, "1: experts in every block")
    dense = config.get("mlp_only_layers") or []
    require(dense == list(range(len(dense))), "mlp_only_layers", dense, "leading layers only")
    expert_ffn_size = fields.get("expert_ffn_size") or fields["ffn_size"]
    shared_size = config.get("shared_expert_intermediate_size", defaults.get("shared_ffn_size", 0)) or 0
    require(
        shared_size % expert_ffn_size == 0, "shared_expert_intermediate_size", shared_size, "a multiple of experts'"
    )
    return {
        "expert_ffn_size": expert_ffn_size,
        "shared_experts": config.get("n_shared_experts") or shared_size // expert_ffn_size,
        "dense_blocks": config.get("first_k_dense_replace") or len(dense),
    }


def _vit(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Vision transformer: classes instead of a vocabulary, patches instead of positions."""
    labels = config.get("id2label")
    classes = config.get("num_labels") or (len(labels) if isinstance(labels, Mapping) else 2)
    tokens = (fields["image_size"] // fields["patch_size"]) ** 2 + 1
    return {
        "vocab_size": classes,
        "max_seq_len": tokens,
        "tied_embeddings": False,
        "qkv_bias": bool(config.get("qkv_bias", True)),
    }


# PTAFM: data-center-config.txt


def is_ptafm(text: str) -> bool:
    """Whether a text is in the format of PTAFM's data-center-config.txt."""
    return bool(re.search(r"^\s*(NUM_STAGE\s*:|(POWER|LATENCY|BANDWIDTH)_SECTION\s*$)", text, re.MULTILINE))


def ptafm_cluster(text: str) -> dict[str, Any]:
    """The cluster of PTAFM's text format, as `polygon.schema.ClusterSpec` reads it.

    ``NUM_STAGE:5``, then sections that end with ``end``: ``POWER_SECTION`` with ``CENTER [A100s,T4s]``,
    ``LATENCY_SECTION`` with ``CENTER CENTER ms`` (one way, as its cost adds it once) and ``BANDWIDTH_SECTION`` with
    ``CENTER CENTER Gbit/s``. Pairs are symmetric and given once; a center with itself is its inner network, in which
    every device is a node of its own. The A100 are taken as 40 GB ones; the format does not say.

    References
    ----------
    nsccsuperli/PTAFM at 72f7481, ACO/ACO_CVRP.py (`getData`, `generateGraph`).
    """
    stages, sections = _ptafm_sections(text)
    centers: dict[int, list[dict[str, Any]]] = {}
    for line, content in sections["POWER_SECTION"]:
        match = re.fullmatch(r"(\d+)\s*\[\s*(\d+)\s*,\s*(\d+)\s*\]", content)
        if match is None:
            raise InputError(f"line {line}: found {content!r}, expected 'CENTER [A100s,T4s]'")
        center, a100, t4 = map(int, match.groups())
        require(center not in centers, f"line {line}: POWER_SECTION", center, "a center that no earlier line gives")
        require(a100 + t4 > 0, f"line {line}: POWER_SECTION", content, "at least one device")
        counts = (("a100-40gb", a100), ("t4", t4))
        centers[center] = [{"device": kind, "count": count} for kind, count in counts if count]
    latency_ms = _ptafm_pairs(sections, "LATENCY_SECTION", centers, at_least_zero=True)
    gbps = _ptafm_pairs(sections, "BANDWIDTH_SECTION", centers, at_least_zero=False)
    for pair in sorted({(a, b) for a in centers for b in centers if a <= b} - (latency_ms.keys() & gbps.keys())):
        section = "LATENCY_SECTION" if pair not in latency_ms else "BANDWIDTH_SECTION"
        raise InputError(f"{section}: found no line for centers {pair[0]} {pair[1]}, expected one a pair")
    return {
        "stages": stages,
        "source": "PTAFM data-center-config.txt",
        "regions": [
            {
                "name": f"dc{center}",
                "intra_region": {"latency_ms": latency_ms[center, center], "bandwidth_gbps": gbps[center, center]},
                "nodes": nodes,
            }
            for center, nodes in centers.items()
        ],
        "links": [
            {"between": [f"dc{a}", f"dc{b}"], "latency_ms": latency_ms[a, b], "bandwidth_gbps": gbps[a, b]}
            for a, b in sorted(latency_ms)
            if a != b
        ],
    }


def _ptafm_sections(text: str) -> tuple[int, dict[str, list[tuple[int, str]]]]:
    """NUM_STAGE, and the numbered lines of every section."""
    sections: dict[str, list[tuple[int, str]]] = {}
    stages: int | None = None
    open_section: str | None = None
    names = ("POWER_SECTION", "LATENCY_SECTION", "BANDWIDTH_SECTION")
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line:
            continue
        if match := re.fullmatch(r"NUM_STAGE\s*:\s*(\S+)", line):
            require(match[1].isdigit() and int(match[1]) >= 1, f"line {number}: NUM_STAGE", match[1], "a number >= 1")
            stages = int(match[1])
        elif line in names:
            require(open_section is None, f"line {number}", line, f"'end' of {open_section} before it")
            require(line not in sections, f"line {number}", line, "each section once")
            open_section = line
            sections[line] = []
        elif line.lower() == "end":
            open_section = None
        elif open_section is None:
            raise InputError(f"line {number}: found {line!r}, expected NUM_STAGE:n or {', '.join(names)}")
        else:
            sections[open_section].append((number, line))
    require(open_section is None, str(open_section), Phrase("the end of the file"), "a line 'end'")
    require(stages is not None, "NUM_STAGE", Phrase("nothing"), "a line NUM_STAGE:n")
    for name in names:
        require(bool(sections.get(name)), name, Phrase("nothing"), "a section with at least one line")
    assert stages is not None
    return stages, sections


def _ptafm_pairs(
    sections: Mapping[str, list[tuple[int, str]]], name: str, centers: Mapping[int, Any], *, at_least_zero: bool
) -> dict[tuple[int, int], float]:
    """Numbers of a section by pair of centers, the smaller one first."""
    values: dict[tuple[int, int], float] = {}
    for line, content in sections[name]:
        match = re.fullmatch(r"(\d+)\s+(\d+)\s+([-+.\deE]+)", content)
        try:
            value = float(match[3]) if match else None
        except ValueError:
            value = None
        if match is None or value is None:
            raise InputError(f"line {line}: found {content!r}, expected 'CENTER CENTER NUMBER'")
        a, b = sorted((int(match[1]), int(match[2])))
        for center in (a, b):
            require(center in centers, f"line {line}: {name}", center, "a center of POWER_SECTION")
        fits = value >= 0 if at_least_zero else value > 0
        require(fits, f"line {line}: {name}", value, "a number >= 0" if at_least_zero else "a number > 0")
        known = values.setdefault((a, b), value)
        require(known == value, f"line {line}: {name}", value, f"{known:g}, which an earlier line gives for {a} {b}")
    return values


# Hostfiles of DeepSpeed and FlagScale

_HOST = re.compile(r"(?P<host>\S+)\s+slots=(?P<slots>\d+)(?:\s+type=(?P<type>\S+))?")


def is_hostfile(text: str) -> bool:
    """Whether the first line that says something is a host of a hostfile."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    first = next((line for line in lines if line), "")
    return _HOST.fullmatch(first) is not None


def hostfile_cluster(text: str) -> dict[str, Any]:
    """The cluster of a hostfile with device types, as `polygon.schema.ClusterSpec` reads it.

    Lines ``HOST slots=N type=DEVICE``; `type` is FlagScale's addition, which DeepSpeed ignores. One region; a hostfile
    says nothing about links, so they have the defaults of a cluster file.

    References
    ----------
    deepspeed/launcher/runner.py (`_parse_hostfile`); flagos-ai/FlagScale, hetero training.
    """
    nodes: dict[tuple[str, int], int] = {}
    hosts: set[str] = set()
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.split("#")[0].strip()
        if not line:
            continue
        match = _HOST.fullmatch(line)
        if match is None or int(match["slots"]) < 1:
            raise InputError(f"line {number}: found {line!r}, expected 'HOST slots=N type=DEVICE' with N >= 1")
        require(match["host"] not in hosts, f"line {number}", match["host"], "each host once")
        found = Phrase(f"{line!r} without a type")
        require(match["type"] is not None, f"line {number}", found, "type=DEVICE at the end of the line")
        hosts.add(match["host"])
        kind = (match["type"], int(match["slots"]))
        nodes[kind] = nodes.get(kind, 0) + 1
    listed = [{"device": kind, "count": n, "devices_per_node": slots} for (kind, slots), n in nodes.items()]
    return {"source": "hostfile", "regions": [{"name": "cluster", "nodes": listed}]}
