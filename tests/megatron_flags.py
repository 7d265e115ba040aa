"""The flags of Megatron-LM that exports use, as its parser has them: names, types and choices.

Recorded from megatron/training/arguments.py of NVIDIA/Megatron-LM at commit d98e8a64ddf34856e74b24714e3bedb2f5a39553,
for where its own parser is not installed (`tests/target_parsers.py`), against which the tests hold this. A flag that is
not here is refused, as Megatron-LM refuses it; so is an abbreviation.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

WHOLE_NUMBERS = (
    "num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "kv-channels", "num-query-groups",
    "seq-length", "max-position-embeddings", "vocab-size", "rotary-base", "num-experts", "moe-router-topk",
    "moe-ffn-hidden-size", "moe-shared-expert-intermediate-size", "tensor-model-parallel-size",
    "pipeline-model-parallel-size", "micro-batch-size", "global-batch-size", "recompute-num-layers", "train-iters",
    "context-parallel-size", "expert-model-parallel-size",
    "expert-tensor-parallel-size", "num-distributed-optimizer-instances", "q-lora-rank",
    "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim", "mtp-num-layers", "moe-router-num-groups",
    "moe-router-group-topk",
)  # fmt: skip
NUMBERS = ("lr", "norm-epsilon", "rope-scaling-factor", "attention-dropout", "hidden-dropout")
TEXTS = ("pipeline-model-parallel-layout", "window-size")
PATTERNS = ("moe-layer-freq", "window-attn-skip-freq")
SWITCHES = (
    "group-query-attention", "swiglu", "untie-embeddings-and-output-weights", "disable-bias-linear", "add-qkv-bias",
    "bf16", "fp16", "sequence-parallel", "use-distributed-optimizer", "overlap-grad-reduce", "mock-data",
    "use-megatron-fsdp", "no-gradient-accumulation-fusion", "use-rope-scaling",
    "multi-latent-attention", "qk-layernorm",
)  # fmt: skip
CHOICES = {
    "normalization": ("LayerNorm", "RMSNorm"),
    "position-embedding-type": ("learned_absolute", "rope", "mrope", "relative", "none"),
    "rope-type": ("rope", "yarn"),
    "optimizer": ("adam", "sgd", "muon", "dist_muon"),
    "recompute-granularity": ("full", "selective"),
    "recompute-method": ("uniform", "block"),
    "fp8-format": ("e4m3", "hybrid"),
    "data-parallel-sharding-strategy": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "ckpt-format": ("torch", "torch_dist", "torch_dcp", "fsdp_dtensor"),
    "tokenizer-type": (
        "BertWordPieceLowerCase", "BertWordPieceCase", "GPT2BPETokenizer", "SentencePieceTokenizer",
        "GPTSentencePieceTokenizer", "HuggingFaceTokenizer", "Llama2Tokenizer", "TikTokenizer", "MultimodalTokenizer",
        "NullTokenizer", "NullMultimodalTokenizer", "SFTTokenizer",
    ),
}  # fmt: skip


def layer_pattern(text: str) -> list[int]:
    """What `--moe-layer-freq` says of the layers, 1 with experts: a list, or `([0]*a+[1]*b)`; windows likewise."""
    if text.startswith("["):
        return [int(digit) for digit in text.strip("[]").split(",")]
    pattern: list[int] = []
    for part in text.strip("()").split("+"):
        digit, _, count = part.partition("*")
        pattern += [{"[0]": 0, "[1]": 1}[digit]] * int(count)
    return pattern


class _Parser(argparse.ArgumentParser):
    """Raises ValueError where argparse would end the program."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise ValueError(message)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments as Megatron-LM reads them.

    Raises
    ------
    ValueError
        For a flag that it does not have, and a value of another type.
    """
    parser = _Parser(allow_abbrev=False)
    kinds: list[tuple[Sequence[str], Callable[[str], object]]] = [
        (WHOLE_NUMBERS, int), (NUMBERS, float), (TEXTS, str), (PATTERNS, layer_pattern)
    ]  # fmt: skip
    for names, kind in kinds:
        for name in names:
            parser.add_argument(f"--{name}", type=kind)
    for name in SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    for name, choices in CHOICES.items():
        parser.add_argument(f"--{name}", choices=choices)
    return parser.parse_args(words)
