"""Documents that share a sample: what attention may see, and where in its document every token is.

Every rank derives both from the order of the data, which is the same for all: nothing travels with activations. As
packing does elsewhere: positions begin anew with every document, attention is causal inside it (Hugging Face's
padding-free training, torchtune's `PackedDataset`; in Megatron `--reset-position-ids --reset-attention-mask`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Documents(NamedTuple):
    """Of the samples of a micro-batch."""

    positions: torch.Tensor
    """Of every token in its document, shape (batch, tokens)."""
    mask: torch.Tensor
    """Whether a token [2] sees another one [3], shape (batch, 1, tokens, tokens)."""


def documents_at(positions: torch.Tensor, *, causal: bool) -> Documents:
    """Documents by the places of their tokens: one begins wherever the place is 0."""
    number = (positions == 0).cumsum(1)
    mask = number[:, :, None] == number[:, None, :]
    return Documents(positions, (mask.tril() if causal else mask)[:, None])
