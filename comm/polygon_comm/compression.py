"""Packings of messages for slow links: one small interface, six ways.

A codec turns a tensor into bytes and back, ``decompress(compress(x)) ~ x``, and knows beforehand how many bytes it will
send, so that a receive can be posted before the message exists. Codecs hold no state except `PowerSgd`, whose power
iteration starts from the last result. What a lossy codec drops is kept by `ErrorFeedback` and added to the next
message: used for weight gradients, which are summed over steps. Activations and their gradients belong to samples
that never return, so nothing is carried over for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

CODECS = ("none", "bf16", "int8", "int4", "topk", "powersgd")
INT8_BLOCK = 256
INT4_BLOCK = 64
TOPK_DENSITY = 0.05
POWERSGD_RANK = 8
ACTIVATION_ITERATIONS = 2
"""Of low-rank factors that are found anew: 2 to 16 % over the least error possible at rank 8, where singular values
fall by 1 to 10 % from one to the next; a third iteration gains half of that."""


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _blocks(tensor: torch.Tensor, block: int) -> torch.Tensor:
    """The elements in fp32 as rows of `block`, the last row filled with zeros."""
    flat = tensor.detach().reshape(-1).float()
    missing = -flat.numel() % block
    return torch.nn.functional.pad(flat, (0, missing)).view(-1, block)


class Codec:
    """Sends the tensor as it is (`none`); the base of the others."""

    name = "none"

    def payload_bytes(self, elements: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes that `compress` makes of a tensor with so many elements."""
        return elements * dtype.itemsize

    def compress(self, tensor: torch.Tensor) -> torch.Tensor:
        """Bytes (uint8, one dimension, same device) that stand for the tensor."""
        return _as_bytes(tensor.detach())

    def decompress(self, payload: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The tensor that the bytes stand for."""
        return payload.view(dtype).view(*shape)

    def state(self) -> list[torch.Tensor]:
        """What one message leaves for the next."""
        return []

    def restore(self, state: Sequence[torch.Tensor]) -> None:
        """Go on from what `state` gave."""

    def ratio(self, elements: int, dtype: torch.dtype = torch.float32) -> float:
        """How many times fewer bytes than unpacked."""
        return elements * dtype.itemsize / max(1, self.payload_bytes(elements, dtype))


class Bf16(Codec):
    """Rounds to bfloat16: 2 bytes an element, relative error at most 2**-9."""

    name = "bf16"

    def payload_bytes(self, elements: int, dtype: torch.dtype = torch.float32) -> int:
        return 2 * elements

    def compress(self, tensor: torch.Tensor) -> torch.Tensor:
        return _as_bytes(tensor.detach().to(torch.bfloat16))

    def decompress(self, payload: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return payload.view(torch.bfloat16).view(*shape).to(dtype)


class Int8(Codec):
    """Rounds each block of 256 to 255 levels: about 1 byte an element, error at most max|block| / 254.

    A block with an infinity or NaN comes back as NaN, so that an overflow is seen, not hidden.
    """

    name = "int8"

    def payload_bytes(self, elements: int, dtype: torch.dtype = torch.float32) -> int:
        return 4 * math.ceil(elements / INT8_BLOCK) + elements

    def compress(self, tensor: torch.Tensor) -> torch.Tensor:
        rows = _blocks(tensor, INT8_BLOCK)
        # Symmetric: zero stays zero, and -128 is not used. A block of zeros has scale 0 and must not be divided by it;
        # of an infinite scale levels would be NaN, which int8 lacks: 0 times infinity brings it back over there.
        scale = torch.linalg.vector_norm(rows, ord=math.inf, dim=1, keepdim=True).div_(127)
        levels = torch.round(rows / scale.clamp(min=1e-38)).nan_to_num_(0.0).to(torch.int8)
        return torch.cat([_as_bytes(scale), _as_bytes(levels)[: tensor.numel()]])

    def decompress(self, payload: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        elements = math.prod(shape)
        n_blocks = math.ceil(elements / INT8_BLOCK)
        scale = payload[: 4 * n_blocks].view(torch.float32)
        levels = _blocks(payload[4 * n_blocks :].view(torch.int8), INT8_BLOCK)
        return levels.mul_(scale[:, None]).view(-1)[:elements].view(*shape).to(dtype)


class Int4(Codec):
    """Rounds each block of 64 to 15 levels: about 0.56 byte an element, error at most max|block| / 14."""

    name = "int4"

    def payload_bytes(self, elements: int, dtype: torch.dtype = torch.float32) -> int:
        n_blocks = math.ceil(elements / INT4_BLOCK)
        return (4 + INT4_BLOCK // 2) * n_blocks

    def compress(self, tensor: torch.Tensor) -> torch.Tensor:
        rows = _blocks(tensor, INT4_BLOCK)
        scale = torch.linalg.vector_norm(rows, ord=math.inf, dim=1, keepdim=True).div_(7)
        levels = torch.round(rows / scale.clamp(min=1e-38)).nan_to_num_(0.0).add_(8).to(torch.uint8)
        # Levels -7 .. 7 as 1 .. 15, two to a byte, the first in the low half.
        packed = levels[:, 0::2] | (levels[:, 1::2] << 4)
        return torch.cat([_as_bytes(scale), _as_bytes(packed)])

    def decompress(self, payload: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        elements = math.prod(shape)
        n_blocks = math.ceil(elements / INT4_BLOCK)
        scale = payload[: 4 * n_blocks].view(torch.float32)
        packed = payload[4 * n_blocks :].view(n_blocks, INT4_BLOCK // 2)
        levels = torch.stack([packed & 15, packed >> 4], dim=2).view(n_blocks, INT4_BLOCK).float().sub_(8)
        return levels.mul_(scale[:, None]).view(-1)[:elements].view(*shape).to(dtype)


class TopK(Codec):
    """Keeps the largest 5 % of the elements: 4 bytes for the place and 2 (bf16) for the value of each."""

    name = "topk"

    def __init__(self, density: float = TOPK_DENSITY) -> None:
        self.density = density

    def _kept(self, elements: int) -> int:
        return min(elements, max(1, math.ceil(elements * self.density)))

    def payload_bytes(self, elements: int, dtype: torch.dtype = torch.float32) -> int:
        return 6 * self._kept(elements)

    def compress(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.detach().reshape(-1)
        places = flat.abs().topk(self._kept(flat.numel()), sorted=False).indices
        return torch.cat([_as_bytes(places.to(torch.int32)), _as_bytes(flat[places].to(torch.bfloat16))])

    def decompress(self, payload: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        elements = math.prod(shape)
        kept = self._kept(elements)
        places = payload[: 4 * kept].view(torch.int32).long()
        values = payload[4 * kept :].view(torch.bfloat16).to(dtype)
        return torch.zeros(elements, dtype=dtype, device=payload.device).index_copy_(0, places, values).view(*shape)


class PowerSgd(Codec):
    """Low-rank factors of every matrix in a flat vector of tensors; vectors travel as bf16.

    One power iteration per message, started from the last message's right factor:
    P = orthonormal(M Q), Q = M^T P, and P Q^T stands for M. Bytes of an n x m matrix: 4 r (n + m).

    Parameters
    ----------
    shapes : sequence of shapes
        Of the tensors that lie one after the other in the vector.
    rank : int
        Columns of the factors.
    iterations : int
        For messages that have nothing to do with the one before (activations): so many iterations each, from a fixed
        start, and nothing is kept. 0: one, from where the last message's ended.

    References
    ----------
    Vogels, Karimireddy and Jaggi, NeurIPS 2019 (PowerSGD).
    """

    name = "powersgd"

    def __init__(self, shapes: Sequence[Sequence[int]], rank: int = POWERSGD_RANK, iterations: int = 0) -> None:
        self.rank, self._iterations = rank, iterations
        self.parts: list[tuple[int, int, int]] = []
        for shape in shapes:
            rows = shape[0] if len(shape) > 1 else 0
            columns = math.prod(shape) // rows if rows else math.prod(shape)
            used = min(rank, rows, columns) if rows else 0
            # A matrix too small to gain from factors travels whole.
            if used and 4 * used * (rows + columns) >= 2 * rows * columns:
                rows, columns, used = 0, rows * columns, 0
            self.parts.append((rows, columns, used))
        # The receiver needs no start: both factors travel. A fixed one makes runs repeatable.
        generator = torch.Generator().manual_seed(0)
        self._right = [torch.randn(columns, used, generator=generator) for _, columns, used in self.parts]

    def state(self) -> list[torch.Tensor]:
        return self._right

    def restore(self, state: Sequence[torch.Tensor]) -> None:
        self._right = list(state)

    def payload_bytes(self, elements: int, dtype: torch.dtype = torch.float32) -> int:
        return sum(4 * used * (rows + columns) if used else 2 * columns for rows, columns, used in self.parts)

    def compress(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.detach().reshape(-1).float()
        pieces, start = [], 0
        for index, (rows, columns, used) in enumerate(self.parts):
            n = max(rows, 1) * columns
            part = flat[start : start + n]
            start += n
            if not used:
                pieces.append(_as_bytes(part.to(torch.bfloat16)))
                continue
            matrix = part.view(rows, columns)
            right = self._right[index].to(matrix.device)
            for _ in range(max(1, self._iterations)):
                # Only the left factor is orthonormal: the right one then carries the sizes, and P Q^T is the projection
                # of M onto the span of P, the nearest to M that this span has.
                left = torch.linalg.qr(matrix @ right).Q
                right = matrix.T @ left
            # From zeros or infinities no later iteration would come back.
            if not self._iterations and bool(torch.isfinite(right).all()) and bool(right.any()):
                self._right[index] = right
            pieces += [_as_bytes(left), _as_bytes(right)]
        return torch.cat(pieces)

    def decompress(self, payload: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        pieces, start = [], 0
        for rows, columns, used in self.parts:
            n_bytes = 4 * used * (rows + columns) if used else 2 * columns
            part = payload[start : start + n_bytes]
            start += n_bytes
            if not used:
                pieces.append(part.view(torch.bfloat16).to(dtype))
                continue
            # Parts may start at bytes that fp32 views may not start at.
            factors = part.clone().view(torch.float32)
            left, right = factors[: rows * used].view(rows, used), factors[rows * used :].view(columns, used)
            pieces.append((left @ right.T).reshape(-1).to(dtype))
        return torch.cat(pieces).view(*shape)


class ErrorFeedback:
    """Adds to a message what the codec dropped from the one before.

    .. math:: c_t = C(x_t + e_{t-1}), \\quad e_t = x_t + e_{t-1} - D(c_t)

    References
    ----------
    Karimireddy et al., ICML 2019 (Error feedback fixes SignSGD).
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.error: torch.Tensor | None = None
        self.relative_error = 0.0
        """Norm of what the last message dropped over the norm of what it was to say."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The bytes, and the tensor that the other side will make of them."""
        if self.codec.name == "none":
            return self.codec.compress(tensor), tensor
        wanted = tensor if self.error is None else tensor + self.error
        payload = self.codec.compress(wanted)
        restored = self.codec.decompress(payload, tensor.shape, tensor.dtype)
        error = wanted - restored
        # An overflow (fp16 loss scaling finds the right scale by trying) must not poison later steps.
        dropped, said = float(error.norm()), float(wanted.norm())
        self.error = error if math.isfinite(dropped) else None
        self.relative_error = dropped / said if said and math.isfinite(dropped) else 0.0
        return payload, restored

    def state(self, scale: float = 1.0) -> dict[str, Any]:
        """What was dropped from the last message, divided by `scale`, and what the codec keeps."""
        return {"error": None if self.error is None else self.error / scale, "codec": self.codec.state()}

    def restore(self, state: Mapping[str, Any], scale: float = 1.0) -> None:
        """Go on from what `state` gave, times `scale`."""
        self.error = None if state["error"] is None else state["error"] * scale
        self.codec.restore(state["codec"])


def activation_codec(name: str, shape: Sequence[int]) -> Codec:
    """The codec of that name for activations (or their gradients) of a shape: for `powersgd` samples x width."""
    if name == "powersgd":
        return PowerSgd([(math.prod(shape[:-1]), shape[-1])], iterations=ACTIVATION_ITERATIONS)
    return make_codec(name)


def relative_error(codec: Codec, payload: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Norm of what packing dropped from a tensor over the norm of the tensor; 0 for a zero tensor.

    A number on the tensor's device, which nobody has waited for.
    """
    said = tensor.detach().float().norm()
    restored = codec.decompress(payload, tensor.shape, torch.float32)
    return torch.where(said > 0, (tensor.detach().float() - restored).norm() / said, 0.0)


def make_codec(name: str, shapes: Sequence[Sequence[int]] = ()) -> Codec:
    """The codec of that name; `shapes` are those of the tensors in a vector (`powersgd` raises ValueError without)."""
    simple = {"none": Codec, "bf16": Bf16, "int8": Int8, "int4": Int4, "topk": TopK}
    if name in simple:
        return simple[name]()
    if name == "powersgd" and shapes:
        return PowerSgd(shapes)
    raise ValueError(f"codec: found {name!r}, expected one of {[c for c in CODECS if shapes or c != 'powersgd']}")
