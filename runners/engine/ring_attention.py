"""Causal attention over sequences that are cut into parts: keys and values pass round a ring, beside the computation.

A rank attends with its own tokens to the keys and values that are there, while the next ones come from its neighbour.
Results of the parts are put together by their log-sum-exp. In backward keys and values pass round once more, and with
them the gradients that every rank adds to; after a round these are back where the keys are from. Between messages a
rank holds the keys and values of two ranks, not of all.

With two pieces of a sequence a rank, from the front and from the back (`runners.engine.context.spans_of`), every
rank computes as much at every step: to its own keys causally; to those of ranks before it, all its queries to the front
piece; to those of ranks after it, its back queries to both pieces.

torch has this for DTensors (`torch.distributed.tensor.experimental.context_parallel`), over process groups of a device
mesh, which these groups are not.

References
----------
Liu et al., arXiv:2310.01889; pieces from both ends: Grattafiori et al., arXiv:2407.21783, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from polygon_comm.exchange import ExchangeGroup

from polygon.domain.errors import InputError

aten = torch.ops.aten


class _Part(NamedTuple):
    """Which of this rank's queries look at which of the keys that are there."""

    queries: slice
    keys: slice
    causal: bool


def part_of_ring(own: int, others: int, tokens: int, *, halved: bool) -> _Part | None:
    """What a rank computes with the keys of another, or its own; None: nothing.

    Parameters
    ----------
    own, others : int
        Places in the ring.
    tokens : int
        That each rank has.
    halved : bool
        Whether these are two pieces, from front and back.
    """
    every = slice(0, tokens)
    if own == others:
        return _Part(every, every, causal=True)
    if not halved:
        return _Part(every, every, causal=False) if others < own else None
    # Rank i has piece i from the front and piece 2 n - 1 - i: of an earlier rank it sees the front half of the keys
    # alone, a later one's it sees with its back half alone. So every rank computes as much in every round.
    half = tokens // 2
    if others < own:
        return _Part(every, slice(0, half), causal=False)
    return _Part(slice(half, tokens), every, causal=False)


def check_ring(device: torch.device, dtype: torch.dtype) -> None:
    """Require numbers that the kernel takes; raises `InputError`."""
    if device.type == "cuda" and dtype not in (torch.float16, torch.bfloat16):
        expected = "bf16, fp16 or fp8 (the flash kernel, which gives the log-sum-exp, takes no others on a GPU)"
        raise InputError(f"batch.precision: found {dtype} with a ring of keys, expected {expected}")


class _Forward(NamedTuple):
    """What torch's kernel gives: the result, the log-sum-exp of the scores, and on a GPU the random state, which its
    backward asks for although there is no dropout."""

    out: torch.Tensor
    scores: torch.Tensor
    more: tuple[Any, ...] = ()


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> _Forward:
    if q.is_cuda:
        out, scores, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        return _Forward(out, scores, (seed, offset))
    return _Forward(*aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal))


def _attend_back(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, found: _Forward, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values, where `found` is of all keys and not of these alone."""
    back: Callable[..., Any]
    if q.is_cuda:
        back = aten._scaled_dot_product_flash_attention_backward
        lengths = None, None, q.shape[2], k.shape[2]
        return back(gradient, q, k, v, found.out, found.scores, *lengths, 0.0, causal, *found.more)
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return back(gradient, q, k, v, found.out, found.scores, 0.0, causal)


def _repeated(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Keys or values for all query heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _of_group(gradient: torch.Tensor, heads: int) -> torch.Tensor:
    """Gradients of keys or values from those of all query heads."""
    return gradient if gradient.shape[1] == heads else gradient.unflatten(1, (heads, -1)).sum(2)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: ExchangeGroup, halved: bool
    ) -> torch.Tensor:
        size, place, tokens, heads = group.size, group.place, q.shape[2], q.shape[1]
        # In fp32 whatever the precision is: a result is rounded once, not in every round.
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        scores = torch.full(q.shape[:3], -torch.inf, device=q.device)
        there, more = torch.stack([k, v]), ()
        for step in range(size):
            passing = group.pass_on(there) if step < size - 1 else None
            part = part_of_ring(place, (place - step) % size, tokens, halved=halved)
            if part is not None:
                keys, values = (_repeated(x[:, :, part.keys], heads) for x in there)
                found = _attend(q[:, :, part.queries], keys, values, causal=part.causal)
                # Softmax over both sets of keys from that over each: a result weighs exp(its log-sum-exp - the common).
                own, total = scores[:, :, part.queries], torch.logaddexp(scores[:, :, part.queries], found.scores)
                mixed = out[:, :, part.queries]
                mixed.mul_((own - total).exp()[..., None]).add_(found.out * (found.scores - total).exp()[..., None])
                own.copy_(total)
                more = found.more
            if passing is not None:
                there = passing()
        result = out.to(q.dtype)
        ctx.group, ctx.halved, ctx.more = group, halved, more
        ctx.save_for_backward(q, k, v, result, scores)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        q, k, v, out, scores = ctx.saved_tensors
        group, gradient = ctx.group, gradients[0].contiguous()
        size, place, tokens = group.size, group.place, q.shape[2]
        back = torch.zeros_like(q)
        there, passing_back = torch.stack([k, v]), None
        for step in range(size):
            passing = group.pass_on(there) if step < size - 1 else None
            part = part_of_ring(place, (place - step) % size, tokens, halved=ctx.halved)
            own = torch.zeros_like(there)
            if part is not None:
                keys, values = (_repeated(x[:, :, part.keys], q.shape[1]) for x in there)
                rows = part.queries
                found = _Forward(out[:, :, rows], scores[:, :, rows].contiguous(), ctx.more)
                of_q, *others = _attend_back(
                    gradient[:, :, rows], q[:, :, rows], keys, values, found, causal=part.causal
                )
                back[:, :, rows] += of_q
                for total, one in zip(own, others, strict=True):
                    total[:, :, part.keys] += _of_group(one, k.shape[1])
            # What ranks add to the gradients of these keys goes round with them, and home in the last round.
            if passing_back is not None:
                own += passing_back()
            passing_back = group.pass_on(own)
            if passing is not None:
                there = passing()
        assert passing_back is not None
        of_k, of_v = passing_back()
        return back, of_k, of_v, None, None


def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: ExchangeGroup, *, halved: bool
) -> torch.Tensor:
    """Causal attention of this rank's queries to the keys and values of all ranks of a group.

    Parameters
    ----------
    q : tensor, shape (batch, heads, tokens / cp, head_dim)
    k, v : tensor, shape (batch, kv_heads, tokens / cp, head_dim)
    halved : bool
        Whether the tokens are two pieces of the sequence, from front and back.

    Returns
    -------
    tensor, shape of q
    """
    return _Ring.apply(q, k, v, group, halved)
