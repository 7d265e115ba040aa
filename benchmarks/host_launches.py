"""What the host needs to launch blocks of the engine, and what checkpointing a block costs it.

    python -m benchmarks.host_launches

Tensors are so small that nothing but dispatch is timed, on one core, without an accelerator where there is none: what
counts are the ratios, for an accelerator's host runs the same Python. The block that is checkpointed has the operations
of Megatron-LM's of 2021 without fusions, the fork of the random state around dropout among them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from polygon.domain.model import Model
from runners.profile_layers import LayerBench

WIDTH, HEADS, LENGTH, REPEATS = 8, 2, 4, 300


class Block(nn.Module):
    """A transformer block whose element-wise kernels follow one another."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (length, batch, width)."""
        length, batch, _ = x.shape
        mixed = self.qkv(self.before(x)).view(length, batch, HEADS, -1)
        query, key, value = (t.reshape(length, batch * HEADS, -1).transpose(0, 1) for t in mixed.chunk(3, -1))
        weights = torch.softmax(torch.bmm(query, key.transpose(1, 2)).masked_fill(self.mask, -1e4), -1)
        state = torch.get_rng_state()
        weights = functional.dropout(weights, 0.1)
        torch.set_rng_state(state)
        found = torch.bmm(weights, value).transpose(0, 1).reshape(length, batch, WIDTH)
        x = x + functional.dropout(self.out(found), 0.1)
        return x + functional.dropout(self.down(functional.gelu(self.up(self.behind(x)))), 0.1)


def seconds(run: Callable[[], object]) -> float:
    """Least mean of some rounds."""
    rounds = []
    for _ in range(8):
        began = time.perf_counter()
        for _ in range(REPEATS):
            run()
        rounds.append((time.perf_counter() - began) / REPEATS)
    return min(rounds)


EXPERTS = (0, 8, 32)
"""Of the engine's blocks."""
SEQUENCES, TOKENS = 4, 64
"""Of their inputs: every expert gets some."""


def engine_block(*, gated: bool, experts: int) -> Model:
    """A narrow model whose block has all that a wide one launches: as of GPT, or with a gate and turned positions."""
    return Model(
        name="narrow", family="llama" if gated else "gpt", blocks=1, hidden_size=64, heads=1, kv_heads=1, head_dim=64,
        ffn_size=64, vocab_size=64, max_seq_len=TOKENS, gated_mlp=gated, rms_norm=gated, learned_positions=not gated,
        linear_bias=not gated, qkv_bias=not gated, experts=experts, experts_per_token=min(4, experts),
        expert_ffn_size=64 if experts else 0,
    )  # fmt: skip


def engine_launches(device: torch.device, seconds: float) -> list[dict[str, Any]]:
    """Seconds of the host for forward and backward of the engine's blocks in bf16."""
    rows = []
    for gated in (False, True):
        for experts in EXPERTS:
            bench = LayerBench(engine_block(gated=gated, experts=experts), "block", 1, device, "bf16")
            forward_s, backward_s = bench.launches(SEQUENCES, TOKENS, seconds)
            rows.append({"gated": gated, "experts": experts, "forward_s": forward_s, "backward_s": backward_s})
    return rows


def main() -> None:
    """Print the host's time of the engine's blocks; then of a forward, both passes, and both with a checkpoint."""
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for row in engine_launches(device, 1.0):
        block_of = f"{'gated, turned' if row['gated'] else 'GPT'} block, {row['experts']} experts"
        print(f"{block_of}: forward {1e6 * row['forward_s']:.0f} us, backward {1e6 * row['backward_s']:.0f}")
    block, x = Block(), torch.randn(LENGTH, 1, WIDTH, requires_grad=True)
    forward = seconds(lambda: block(x))
    both = seconds(lambda: block(x).sum().backward())
    again = seconds(lambda: checkpoint(block, x, use_reentrant=True).sum().backward())
    more = again - both - forward
    print(f"forward {1e6 * forward:.0f} us, both passes {1e6 * both:.0f}, both with a checkpoint {1e6 * again:.0f}")
    print(f"a checkpoint costs {1e6 * more:.0f} us beyond a second forward: {more / both:.2f} of both passes")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
