"""What every parallel dimension sends in a step: message, operation, group, count.

The group of a dimension is wired like the whole: a ring of the members, a tree of the members, ... In a hierarchical
cluster ranks are dealt tp first, then cp, dp, pp (Megatron's order), which decides how many members share a node.
Other groups' traffic on the same links is left out, except that `inter` is the share of one rank in its node's cards.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from polygon.domain.divisors import divisors
from polygon.domain.errors import require
from polygon.overhead.collective_table import Cell, collective_cell
from polygon.overhead.topologies import Topology, most_square

Messages = Iterable[tuple[str, str, Topology, float, float]]
"""What is sent, by which operation, in which group, bytes of one message, messages per step."""

CP_MODES = ("all-to-all", "ring", "all-gather")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What decides the sizes of messages."""

    parameters: float
    """Of the whole model, experts included."""
    expert_parameters: float = 0.0
    blocks: int | None = None
    """None: unknown; per-layer traffic is then counted for one layer."""
    moe_blocks: int = 0
    hidden_size: int | None = None
    seq_len: int | None = None
    query_share: float = 1.0
    """Width of all query heads over the hidden size."""
    kv_share: float = 1.0
    """Width of all key (value) heads over the hidden size."""
    experts_per_token: int = 0
    micro_batch_size: int = 1
    micro_batches: int = 1
    """Per step and data-parallel replica."""
    element_bytes: int = 2
    gradient_bytes: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """How the model is spread."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    recompute: str = "none"
    sequence_parallel: bool = False
    interleave: int = 1
    cp_mode: str = "all-to-all"

    @property
    def devices(self) -> int:
        """Devices used."""
        return self.dp * self.tp * self.pp * self.cp


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisTraffic:
    """One kind of message of one dimension, as the busiest device sees it."""

    dimension: str
    what: str
    cell: Cell
    count: float
    """Per step."""

    @property
    def time_s(self) -> float:
        """Seconds per step if nothing hides it."""
        return self.count * self.cell.chosen.time_s

    @property
    def sent_bytes(self) -> float:
        """Bytes per step that a device sends."""
        return self.count * self.cell.chosen.sent_bytes


def group_topology(whole: Topology, members: int, stride: int) -> Topology:
    """Wiring of a group of ranks that are `stride` apart."""
    if whole.kind == "hierarchical":
        room = max(1, whole.per_node // stride) if stride <= whole.per_node else 1
        per_node = max(d for d in divisors(members) if d <= room)
        return replace(whole, ranks=members, per_node=per_node)
    if members == whole.ranks:
        return whole
    nx, ny = most_square(members)
    return replace(whole, ranks=members, nx=nx, ny=ny)


def _need(shape: Shape, degree: str, value: int) -> tuple[int, int]:
    """Sequence length and hidden size, which messages of this dimension are made of."""
    for name, found in (("--seq-length", shape.seq_len), ("--hidden-size", shape.hidden_size)):
        require(found is not None, name, None, f"it (or --model) beside --{degree} {value}")
    assert shape.seq_len is not None and shape.hidden_size is not None
    return shape.seq_len, shape.hidden_size


def _tokens_bytes(shape: Shape, degrees: Degrees, name: str, value: int) -> float:
    """Bytes of one micro-batch's activations at a layer boundary on one context-parallel rank."""
    seq_len, hidden = _need(shape, name, value)
    return shape.micro_batch_size * seq_len / degrees.cp * hidden * shape.element_bytes


def _layers(shape: Shape, degrees: Degrees) -> float:
    return 1.0 if shape.blocks is None else shape.blocks / degrees.pp


def data_parallel(shape: Shape, degrees: Degrees, whole: Topology) -> Messages:
    """Gradients (and sharded weights) over dp x cp; experts over what expert parallelism leaves.

    ZeRO-0: all-reduce of gradients. ZeRO-1, 2: reduce-scatter of gradients, all-gather of weights. ZeRO-3: weights are
    gathered per layer in forward and backward of every micro-batch, gradients scattered there (Rajbhandari et al.
    2020).
    """
    dense = shape.parameters - shape.expert_parameters
    parts = [("", dense, degrees.dp * degrees.cp, degrees.tp)]
    if shape.expert_parameters:
        stride = degrees.tp * degrees.ep
        parts.append(("expert ", shape.expert_parameters / degrees.ep, degrees.dp * degrees.cp // degrees.ep, stride))
    for kind, parameters, members, stride in parts:
        if members < 2:
            continue
        group = group_topology(whole, members, stride)
        held = parameters / (degrees.tp * degrees.pp)
        weights, gradients = held * shape.element_bytes, held * shape.gradient_bytes
        if degrees.zero == 0:
            yield f"{kind}gradients", "all_reduce", group, gradients, 1
        elif degrees.zero < 3:
            yield f"{kind}gradients", "reduce_scatter", group, gradients, 1
            yield f"{kind}weights", "all_gather", group, weights, 1
        else:
            layers = _layers(shape, degrees)
            times = layers * shape.micro_batches
            yield f"{kind}weights, forward and backward", "all_gather", group, weights / layers, 2 * times
            yield f"{kind}gradients", "reduce_scatter", group, gradients / layers, times


def tensor_parallel(shape: Shape, degrees: Degrees, whole: Topology) -> Messages:
    """Two all-reduces per layer in forward, two in backward, two more if the layer is recomputed.

    With sequence parallelism each is an all-gather and a reduce-scatter of the same bytes; what was gathered is not
    kept, so backward gathers it once more (Korthikanti et al. 2023).
    """
    if degrees.tp < 2:
        return
    message = _tokens_bytes(shape, degrees, "tp", degrees.tp)
    group = group_topology(whole, degrees.tp, 1)
    layers = _layers(shape, degrees) * shape.micro_batches
    each = 6 if degrees.recompute == "full" else 4
    for op, times in (("all_gather", each + 2), ("reduce_scatter", each)) if degrees.sequence_parallel else (
        ("all_reduce", each),
    ):  # fmt: skip
        yield "activations and their gradients", op, group, message, times * layers


def pipeline_parallel(shape: Shape, degrees: Degrees, whole: Topology) -> Messages:
    """An inner stage sends each micro-batch's activations on and its gradient back, once per chunk of layers."""
    if degrees.pp < 2:
        return
    message = _tokens_bytes(shape, degrees, "pp", degrees.pp) / (degrees.tp if degrees.sequence_parallel else 1)
    stride = degrees.tp * degrees.cp * degrees.dp
    group = group_topology(whole, degrees.pp, stride)
    sends = (degrees.pp > 2) + 1 if degrees.interleave == 1 else 2
    count = sends * shape.micro_batches * degrees.interleave
    yield "activations and their gradients", "p2p", group, message, count


def context_parallel(shape: Shape, degrees: Degrees, whole: Topology) -> Messages:
    """Attention over a sequence that is spread over cp ranks.

    all-to-all (Ulysses): queries, keys, values and outputs change from sequence to head shards, forward and backward.
    ring: cp - 1 neighbours' keys and values in forward; those and their gradients in backward. all-gather (Llama 3):
    keys and values once in forward and backward, their gradients scattered.
    """
    if degrees.cp < 2:
        return
    own = _tokens_bytes(shape, degrees, "cp", degrees.cp) / degrees.tp
    group = group_topology(whole, degrees.cp, degrees.tp)
    layers = _layers(shape, degrees) * shape.micro_batches
    again = degrees.recompute == "full"
    keys_values = 2 * shape.kv_share * own
    if degrees.cp_mode == "all-to-all":
        yield "queries, outputs", "all_to_all", group, shape.query_share * own, (4 + 2 * again) * layers
        yield "keys, values", "all_to_all", group, shape.kv_share * own, (4 + 2 * again) * layers
    elif degrees.cp_mode == "ring":
        yield "keys and values", "p2p", group, keys_values, (degrees.cp - 1) * (3 + again) * layers
    else:
        yield "keys and values", "all_gather", group, degrees.cp * keys_values, (2 + again) * layers
        yield "gradients of keys and values", "reduce_scatter", group, degrees.cp * keys_values, layers


def expert_parallel(shape: Shape, degrees: Degrees, whole: Topology) -> Messages:
    """Tokens go to their experts and back: two all-to-alls in forward, two in backward (four, if recomputed)."""
    if degrees.ep < 2:
        return
    require(shape.experts_per_token > 0, "--ep", degrees.ep, "1, or a --model with experts")
    tokens = _tokens_bytes(shape, degrees, "ep", degrees.ep) / (degrees.tp if degrees.sequence_parallel else 1)
    group = group_topology(whole, degrees.ep, degrees.tp)
    blocks = shape.moe_blocks / degrees.pp if shape.moe_blocks else _layers(shape, degrees)
    count = (6 if degrees.recompute == "full" else 4) * blocks * shape.micro_batches
    yield "tokens to and from experts", "all_to_all", group, tokens * shape.experts_per_token, count


DIMENSIONS = {
    "DP": data_parallel,
    "TP": tensor_parallel,
    "PP": pipeline_parallel,
    "CP": context_parallel,
    "EP": expert_parallel,
}


def traffic(
    shape: Shape, degrees: Degrees, whole: Topology, *, tree_algorithm: bool = False
) -> tuple[AxisTraffic, ...]:
    """All messages of a step, dimension by dimension.

    Parameters
    ----------
    whole : Topology
        Of all devices.
    tree_algorithm : bool
        All-reduces by the binomial tree (flat topologies only).
    """
    found = []
    for dimension, messages in DIMENSIONS.items():
        for what, op, group, message, count in messages(shape, degrees, whole):
            # Without sequence parallelism the ranks of a tensor group hold the same message and may send a part each.
            same = op == "p2p" and dimension == "PP" and not degrees.sequence_parallel
            shards = min(degrees.tp, whole.per_node) if same and group.kind == "hierarchical" else 1
            cell = collective_cell(op, group, message, shards=shards)
            if tree_algorithm and op == "all_reduce" and group.ranks > 1:
                cell = cell.only(("binomial-tree", "double-tree"))
            found.append(AxisTraffic(dimension=dimension, what=what, cell=cell, count=count))
    return tuple(found)
