"""Seconds of compute: forward and backward of every layer on a worker, the optimizer, and the FLOP behind them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import numpy as np

from polygon.cost.blocks import LayerSplit, Seconds, block_s, linear_s
from polygon.cost.kernels import Silicon, gemm_s, silicon, stream_s
from polygon.cost.memory import FUSED
from polygon.cost.network import Group, all_reduce_s, fabric_of, one_node
from polygon.domain.block import Block
from polygon.domain.cluster import Device, Link
from polygon.domain.errors import require
from polygon.domain.model import Batch, Model
from polygon.domain.optimizer import OPTIMIZERS
from polygon.domain.plan import RECOMPUTE
from polygon.domain.runtime import Runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Seconds that one micro-batch spends in each layer on one worker, tensor-parallel communication included."""

    forward_s: np.ndarray
    """Shape (layers,): embedding, blocks, head with the loss."""
    backward_s: np.ndarray
    """Shape (layers,); includes what is recomputed."""
    communication_s: np.ndarray
    """Shape (layers,): exposed seconds of tensor, context and expert parallelism within the two above."""
    source: str
    """`spec`, `profile` or `calibrated`."""
    relative_error: float
    """Half of a 90 % interval over the value."""
    host_error: float = 0.0
    """Of this, what a slower host adds (`polygon.cost.blocks.HOST_ERROR`)."""


LOSS_BYTES = {"torch": (18, 14), "vocab-parallel": (38, 14), "fused": (6, 4)}
"""Bytes moved per logit beside the product itself, forward and backward: torch's cross entropy in fp32; Megatron's,
which takes maximum, difference, exponential, sum and quotient in kernels of their own; one fused kernel."""


HOST_COPY_BYTES_PER_S, HOST_MEMORY_BYTES_PER_S = 4e9, 2e10
"""Of copies between a device and memory that its host has not pinned (a judgement: PCIe 3.0 gives 11 to 12 GB/s to
pinned memory, and here the host copies once more and waits), and what a device's part of a host's processors moves (a
judgement, of four cores, operation by operation: one core of a Xeon E5 v3 reaches 20 GB/s in STREAM and twenty 102,
pugetsystems.com/labs/hpc/memory-performance-for-intel-xeon-haswell-ep-ddr4-596)."""


APART_BYTES = 4 + 8 + 4
"""Of a gradient in fp32, whose norm is found, which is clipped and set to zero, each in a kernel of its own
(runners/engine/update.py, runners/engine/agreement.py)."""


class LayerProfile(Protocol):
    """Measured layer times (see `polygon.cost.profiles`)."""

    def times(self, model: Model, batch: Batch, device: Device, split: LayerSplit) -> LayerTimes | None:
        """Times of every layer, or None where nothing was measured that applies."""


def layer_times(
    model: Model,
    batch: Batch,
    device: Device,
    intra_node: Link,
    *,
    tp: int = 1,
    tp_group: Group | None = None,
    micro_batch_size: int = 1,
    recompute: str = "none",
    sequence_parallel: bool = False,
    cp: int = 1,
    cp_link: Link | None = None,
    ep: int = 1,
    ep_group: Group | None = None,
    runtime: Runtime = FUSED,
    profile: LayerProfile | None = None,
    communication: float = 1.0,
) -> LayerTimes:
    """Seconds of one micro-batch in each layer on a worker of `tp` devices of one node.

    Parameters
    ----------
    intra_node : Link
        Between two devices of the node; carries the tensor-parallel all-reduces.
    tp_group : optional
        Where the tensor-parallel devices lie on several nodes.
    recompute : str
        `none`, `selective` (attention scores) or `full` (whole blocks, with their tensor-parallel communication).
    sequence_parallel : bool
        Whether norms and dropout work on a share of the sequence (Korthikanti et al.).
    cp, ep : int
        Context- and expert-parallel degrees; `cp_link` is what one device of a ring gets, `ep_group` where the experts
        lie (`intra_node` and one node if not given), on ep x tp devices where these hold whole ones.
    communication : float
        Factor of all that is sent.
    profile : optional
        Measured layer times; each layer kind that it holds replaces the model's.
    """
    require(recompute in RECOMPUTE, "recompute", recompute, " or ".join(RECOMPUTE))
    whole = runtime.whole_experts(model.experts, tp=tp, ep=ep, sequence_parallel=sequence_parallel)
    split = LayerSplit(
        micro_batch_size=micro_batch_size,
        seq_len=batch.seq_len,
        tp=tp,
        group=tp_group or one_node(tp, intra_node, fabric=fabric_of(device, tp, intra_node)),
        recompute=recompute,
        sequence_parallel=sequence_parallel and tp > 1,
        cp=cp,
        cp_link=cp_link or intra_node,
        experts=ep_group or one_node(ep * (tp if whole else 1), intra_node),
        whole_experts=whole,
        runtime=runtime,
        gradient_bytes=batch.gradient_bytes,
        hosted=not device.is_cpu,
        communication=communication,
    )
    if profile is not None:
        measured = profile.times(model, batch, device, split)
        if measured is not None:
            return measured
    return _layer_times(model, silicon(device, batch.precision), split)


@lru_cache(maxsize=4096)
def _layer_times(model: Model, chip: Silicon, split: LayerSplit) -> LayerTimes:
    kinds = model.layer_kinds()
    by_kind = {kind: _layer_s(kinds.index(kind), model, chip, split) for kind in set(kinds)}
    arrays = [np.array([by_kind[kind][part] for kind in kinds]) for part in range(4)]
    for array in arrays:
        array.setflags(write=False)
    # What a slower host adds is known of each layer; of the whole it counts by the time that it is a part of.
    host_error = float(arrays[3].sum() / (arrays[0].sum() + arrays[1].sum()))
    return LayerTimes(
        forward_s=arrays[0],
        backward_s=arrays[1],
        communication_s=arrays[2],
        source=chip.efficiency.source,
        relative_error=math.hypot(chip.efficiency.relative_error, host_error),
        host_error=host_error,
    )


def _layer_s(layer: int, model: Model, chip: Silicon, split: LayerSplit) -> Seconds:
    """A layer, with the sum of its gradients where the runtime adds them up in a kernel of its own."""
    kind = model.layer_kind(layer)
    if kind == "embedding":
        times = _whole_embedding_s(model, chip, split)
    elif kind == "head":
        times = _whole_head_s(model, chip, split)
    else:
        times = _one_block_s(layer, model, chip, split)
    if split.runtime.fused_accumulation:
        return times
    # The sum is read and written, the new product read. A device has its group's part of the experts.
    spread = split.experts.members // (split.tp if split.whole_experts else 1)
    held = model.layer_parameters(layer) / split.tp / (spread if model.is_sparse(layer) else 1)
    added = stream_s(chip, held * (2 * split.gradient_bytes + chip.element_bytes))
    return times[0], times[1] + added, times[2], times[3]


def _one_block_s(layer: int, model: Model, chip: Silicon, split: LayerSplit) -> Seconds:
    # Casts to 8 bits were fitted with the weights of the first block for every block.
    return block_s(model.block(layer), model.layer_parameters(1) / split.tp, chip, split)


def _sum(times: list[Seconds]) -> Seconds:
    forward, backward, communication, host = (sum(part) for part in zip(*times, strict=True))
    return forward, backward, communication, host


def _whole_embedding_s(model: Model, chip: Silicon, split: LayerSplit) -> Seconds:
    """The embedding, and a tower of another modality before it: one input a sequence, no loss of its own."""
    own = (*_embedding_s(model, chip, split), 0.0)
    tower = model.tower
    if tower is None:
        return own
    # A tower's input is an image, whatever the length of the text that it is put into; its head is never computed.
    inside = replace(split, seq_len=tower.tokens_per_input)
    blocks = [_one_block_s(layer, tower, chip, inside) for layer in range(1, tower.blocks + 1)]
    return _sum([own, _whole_embedding_s(tower, chip, inside), *blocks])


def _whole_head_s(model: Model, chip: Silicon, split: LayerSplit) -> Seconds:
    """The head with the loss, and for each further token that is predicted a block, what joins it, and a loss."""
    own = (*_head_s(model, chip, split), 0.0)
    if not model.predicted_ahead:
        return own
    # The state and the next token's embedding, side by side, go through one matrix (DeepSeek-V3, section 2.2).
    joined = linear_s(chip, split.tokens, model.hidden_size, 2 * model.hidden_size)
    ahead = _sum([own, (*joined, 0.0, 0.0), _one_block_s(model.blocks, model, chip, split)])
    return _sum([own, *[ahead] * model.predicted_ahead])


def _embedding_s(model: Model, chip: Silicon, split: LayerSplit) -> tuple[float, float, float]:
    h, e, tokens = model.hidden_size, chip.element_bytes, split.tokens
    if model.family == "vit":
        patch = model.channels * model.patch_size**2
        moved_s = stream_s(chip, 3 * e * tokens * h, 2)
        # Backward has the weights' gradient alone: nobody asks for that of an image.
        return gemm_s(chip, tokens, h, patch) + moved_s, gemm_s(chip, patch, h, tokens) + moved_s, 0.0
    # Each device has some rows of the vocabulary, and zeros for the tokens of others: their sum is the embedding.
    reduce_s = split.communication * all_reduce_s(e * tokens * h, split.group)
    return stream_s(chip, 5 * e * tokens * h, 3) + reduce_s, stream_s(chip, 8 * e * tokens * h, 3), reduce_s


def _head_s(model: Model, chip: Silicon, split: LayerSplit) -> tuple[float, float, float]:
    h, e, tokens = model.hidden_size, chip.element_bytes, split.tokens
    once = model.answers_once
    rows = split.micro_batch_size if once else tokens
    # Classes are few enough to be whole on every device, a vocabulary is cut.
    columns = model.answers / (1 if once else split.tp)
    in_16_bits = chip._replace(operand_bytes=e, peak_flops=chip.peak_flops_16)  # frameworks keep the logits out of fp8
    forward, backward = linear_s(in_16_bits, rows, columns, h)
    if model.head_transform or model.classes:
        dense = linear_s(chip, rows, h, h)
        forward, backward = forward + dense[0], backward + dense[1]
    loss_f, loss_b = LOSS_BYTES[split.runtime.loss]
    forward += stream_s(chip, rows * columns * loss_f + 3 * e * tokens * h, 8)
    backward += stream_s(chip, rows * columns * loss_b + 4 * e * tokens * h, 6)
    # Each device's columns of the vocabulary give a part of the input's gradient.
    reduce_s = split.communication * all_reduce_s(e * rows * h, split.group)
    return forward, backward + reduce_s, reduce_s


def update_s(
    parameters_held: float, device: Device, batch: Batch, *, way: str = "fused", by_host: bool = False
) -> float:
    """Seconds of the optimizer for as many parameters as one device updates.

    Gradient, what the optimizer reads and writes (`OPTIMIZERS`) and the low-precision copy; fp16 adds the passes that
    unscale, check and clip. Memory bound; the products that make Muon's step orthogonal are `orthogonal_s`. `way` is
    that of `Runtime.update`: where these are passes apart, fp32 gradients are read for their norm, read and written
    clipped, and written as zeros, and weights are read once more to be cast. An optimizer whose state is as narrow as
    the weights moves half, and casts nothing. Where the host updates (`by_host`), the same passes are over its memory,
    after fp32 gradients have been copied there and before weights are copied back.
    """
    chip = silicon(device, batch.precision)
    # 16-bit weights are written beside the fp32 ones that are updated.
    low = chip.element_bytes if chip.element_bytes < batch.state_bytes else 0
    optimizer, narrow = OPTIMIZERS[batch.optimizer], batch.state_bytes / 4
    per_parameter: float = optimizer.update_bytes * narrow + batch.gradient_bytes + low
    per_parameter += 4 + batch.gradient_bytes  # norm of the gradients and clipping
    if batch.precision == "fp16":
        per_parameter += 6 + 4
    if way == "apart":
        per_parameter = (optimizer.update_bytes + 4 + APART_BYTES) * narrow + (4 + low if low else 0)
    elif way == "operations":
        per_parameter = optimizer.unfused_bytes * narrow
    if by_host:
        copied = 4 * narrow + (low or 4 * narrow)
        return parameters_held * (copied / HOST_COPY_BYTES_PER_S + per_parameter / HOST_MEMORY_BYTES_PER_S)
    return stream_s(chip, parameters_held * per_parameter, 2)


def orthogonal_s(hidden_size: int, device: Device) -> float:
    """Seconds per parameter of the products that make Muon's step orthogonal.

    Five times three 16-bit products, priced for square matrices as wide as the model: a matrix four times as long
    takes three quarters of that per parameter (Jordan et al., https://kellerjordan.github.io/posts/muon). Under tensor
    parallelism every device makes them for whole matrices; that is not in here.
    """
    return 15 * gemm_s(silicon(device, "bf16"), hidden_size, hidden_size, hidden_size) / hidden_size**2


def model_flops_per_step(model: Model, batch: Batch) -> float:
    """FLOP of one step by the convention of MFU: no recomputation, causal attention counted by half.

    Per token and block :math:`2 p_{active}` for the linear layers plus, for attention, :math:`2 k H (d_k + d_v)` over
    the k keys that a query sees (`Block.keys_seen`); the head's :math:`2 h V`; backward twice the forward.
    """
    return 3.0 * batch.global_batch * (_trunk_flops(model, batch.seq_len) + _head_flops(model, batch.seq_len))


@lru_cache(maxsize=256)
def _trunk_flops(model: Model, seq_len: int) -> float:
    """Forward of all but the head for one sequence, its towers included."""
    kinds = model.layer_kinds()
    blocks = {kind: _block_flops(model.block(kinds.index(kind)), seq_len) for kind in set(kinds[1:-1])}
    per_token = sum(blocks[kind] for kind in kinds[1:-1])
    if model.family == "vit":
        per_token += 2 * model.channels * model.patch_size**2 * model.hidden_size
    tower = 0.0 if model.tower is None else _trunk_flops(model.tower, model.tower.tokens_per_input)
    return seq_len * per_token + tower


def _head_flops(model: Model, seq_len: int) -> float:
    """Forward of the head for one sequence, with the blocks that predict further tokens."""
    h = model.hidden_size
    head = 2 * h * model.answers + (2 * h * h if model.head_transform or model.classes else 0)
    rows = 1 if model.answers_once else seq_len
    if not model.predicted_ahead:
        return rows * head
    # The joining matrix is 2 h x h: 4 h^2 FLOP a token.
    ahead = head + _block_flops(model.block(model.blocks), seq_len) + 4 * h * h
    return rows * head + seq_len * model.predicted_ahead * ahead


def _block_flops(block: Block, seq_len: int) -> float:
    """Forward of one block for one token; linear attention writes, reads and corrects its state."""
    linear = sum(product.flops_per_token for product in block.products())
    if block.linear is not None:
        return linear + 6 * block.linear.value_heads * block.linear.key_dim * block.linear.value_dim
    # Scores against every key that is seen, and as much to weigh the values; of an encoder's output all are seen.
    keys = block.keys_seen(seq_len) + (seq_len if block.cross else 0)
    return linear + 2 * keys * block.heads * (block.head_dim + block.value_dim)
