"""Optimizers: what one step of each reads, writes and keeps. The one table; a further optimizer is a row of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """Bytes per parameter in fp32, beside the weight's own 16-bit copy and the gradient."""

    label: str
    """Its name as its authors write it."""
    moment_bytes: int
    """Kept between steps beside the master weight, in transformer blocks: two moments, or one momentum."""
    outside_moment_bytes: int
    """The same of the embedding and the head."""
    update_bytes: int
    """Read and written by a fused step beside the gradient's first reading."""
    unfused_bytes: int
    """Read and written in all by a step of element-wise tensor operations, each a pass of its own."""
    orthogonal: bool = False
    """Whether products make the step of a matrix orthogonal (`polygon.cost.compute.orthogonal_s`)."""


OPTIMIZERS = {
    "adamw": Optimizer(label="AdamW", moment_bytes=8, outside_moment_bytes=8, update_bytes=24, unfused_bytes=84),
    "sgd": Optimizer(label="SGD", moment_bytes=4, outside_moment_bytes=4, update_bytes=16, unfused_bytes=42),
    "muon": Optimizer(
        label="Muon", moment_bytes=4, outside_moment_bytes=8, update_bytes=16, unfused_bytes=42, orthogonal=True
    ),
    "adafactor": Optimizer(
        label="Adafactor", moment_bytes=0, outside_moment_bytes=0, update_bytes=16, unfused_bytes=42
    ),
}
"""By the name that files say. AdamW reads and writes master weight and two moments, some twenty operations where it is
not fused; SGD with momentum one moment. Muon does so for matrices of blocks and is AdamW outside (Jordan et al.,
https://kellerjordan.github.io/posts/muon). Adafactor reads gradient and weight twice and writes the weight; it keeps a
number of each row and column of a matrix, which is left out: 1 part in 1,000 of a parameter's 4 bytes at 2,000 rows
(Shazeer and Stern, ICML 2018)."""
