"""What is known of training frameworks: which kernels they use, what they fuse and hide, by name and date."""

from __future__ import annotations

import re

from polygon.cost.compute import Kernels

EAGER = ("llm-foundry", "sailor", "titan", "fsdp", "pytorch", "huggingface", "transformers", "internevo")
"""Frameworks that run element-wise work as separate operations, unless a note says that they compile (InternEvo: its
blocks add, drop out and norm fp32 copies one after the other, internlm/model/modeling_internlm.py)."""


def _fused(framework: str, text: str) -> bool:
    """Whether element-wise work runs in fused kernels; `unfused` or `compile` in the notes decides."""
    if "unfused" in text or "no fus" in text:
        return False
    said = f"{framework} {text}"
    eager = re.search(r"no (torch\.)?compile|without (torch\.)?compile|eager", said)
    compiled = ("compile" in said or "float8" in said) and not eager  # torchao's float8 needs the compiler
    return compiled or not any(word in framework for word in EAGER)


def _loss(framework: str, text: str, year: int, megatron: bool) -> str:
    """How the loss is computed; torchtitan compiled its blocks alone in 2024, other compiled programs the loss too."""
    if megatron or "nemo" in framework:
        return "vocab-parallel"
    compiled = "torch.compile" in text and not re.search(r"(no|without) torch.compile", text)
    whole = compiled and ("titan" not in framework or year > 2024)
    return "fused" if whole or "fused cross entropy" in text else "torch"


def kernels_of(framework: str, date: str, overlap: str = "", notes: str = "") -> Kernels:
    """What is known of a framework's kernels at a date.

    Megatron-LM and what derives from it wrote the attention scores to memory until FlashAttention came in (2023);
    NeMo and torch's compiled models fuse element-wise work.
    """
    name, text = framework.lower(), f"{overlap} {notes}".lower()
    year = int(date[:4]) if date[:4].isdigit() else 2024
    megatron = any(word in name for word in ("megatron", "vtrain", "bigscience"))
    # vTrain measured what its own model is: scores in memory, and fused kernels (its src/model/gpt_modeling.py).
    flash = "flash" in text or not (megatron and (year < 2023 or "deepspeed" in name or "vtrain" in name))
    if "userbuffers" in text or "async tp" in text:
        tp_overlap = "pipelined"
    elif "weight-gradient gemm" in text:
        tp_overlap = "backward"
    else:
        tp_overlap = "none"
    vendor = any(word in name for word in ("megatron", "nemo", "maxtext", "transformer engine"))
    attention = "materialised" if not flash else "triton" if "triton" in text else "flash" if vendor else "flash2"
    return Kernels(
        attention=attention,
        loss=_loss(name, text, year, megatron),
        fused=_fused(name, text),
        # Megatron-LM got them with sequence parallelism (2022); DeepSpeed's engines and torch's never had them. What
        # gradients cost in MosaicML's runs is in the fit of fully sharded training.
        fused_accumulation=(year >= 2022 and vendor and "deepspeed" not in name) or "llm-foundry" in name,
        dropout=(megatron and year < 2025) or "dropout 0.1" in text,
        attention_dropout="attention dropout 0.1" in text,
        deterministic="deterministic" in text,
        keeps_outputs="deepspeed" in name,
        keeps_gathered="titan" in name,
        cached_casts=vendor,
        selective="operators" if "titan" in name else "attention",
        tp_overlap=tp_overlap,
    )


PROGRAM_ERRORS = {"known": 0.0, "other": 0.2, "context": 0.35, "experts": 0.5}
"""What not knowing a program adds to half of a 90 % interval over its time: nothing where the model was fitted to it or
its kernels are documented (llm-foundry, Megatron, NeMo, torchtitan on sequences of one device); others; long sequences
over several devices; mixtures of experts (how far off each was: docs/prediction.md). vTrain's tables do not say which
Megatron was run."""


def program_error(framework: str, *, experts: int = 0, cp: int = 1) -> float:
    """See `PROGRAM_ERRORS`."""
    name = framework.lower()
    if experts:
        return PROGRAM_ERRORS["experts"]
    vendor = any(word in name for word in ("megatron", "nemo")) and "deepspeed" not in name
    if cp > 1 and not vendor:
        return PROGRAM_ERRORS["context"]
    known = (vendor and "vtrain" not in name) or any(word in name for word in ("llm-foundry", "titan", "sailor"))
    return PROGRAM_ERRORS["known" if known else "other"]
