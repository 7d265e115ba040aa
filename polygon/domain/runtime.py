"""The program that executes a step: which kernels it has, what it fuses, overlaps, sends and keeps in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from polygon.domain.errors import require, require_number

ATTENTION = ("flash", "flash2", "flash1", "triton", "materialised")
TP_OVERLAP = ("none", "backward", "pipelined")
DP_OVERLAP = ("none", "backward", "full")
LOSSES = ("torch", "vocab-parallel", "fused")
SELECTIVE = ("attention", "operators", "norms")
EXPERT_DISPATCH = ("experts", "nodes")
CONTEXT = ("ring", "heads", "gathered")
CASTS = ("fused", "apart")
GRAPHS = ("none", "routing", "step")
EXPERTS = ("cut", "whole")
PLANS = ("any", "uniform", "equal", "even", "sharded", "megatron", "nanotron", "torchtitan", "deepspeed")
UPDATES = ("", "fused", "apart", "operations")
NORMS = ("", "fused", "copies", "operations")
POSITIONS = ("", "fused", "operations")


def turns_of_region(nodes: Sequence[int] | np.ndarray, region: int, most: int) -> int:
    """In how many turns a region deals out to its nodes what it adds up of a vector that regions sum.

    Of n regions each adds up an equal part of the vector for all, in as many equal cells as turns times nodes, which
    go to its nodes in turn; every other region has an equal stretch of that part on each of its nodes. So a node of
    the other region meets about as many of this one's as there are cells in its stretch, all where there are as many
    turns as the other region has nodes. Messages between two nodes are one whatever they meet in.

    There are at least as many turns as let a node of the largest other region meet `most`, or all. Of twice as many,
    or of their first multiples where all meet, the fewest are taken under which no two nodes share much more than their
    part: of nine turns a seventh is one or two cells of a node, of fourteen two.

    Parameters
    ----------
    nodes : sequence or ndarray of int
        Of every region; those without any have no part.
    region : int
        Place of the region, which has some.
    most : int
        `Runtime.sum_turns`: how many nodes of the smaller region one of the larger meets.
    """
    own, largest = nodes[region], 1
    for other in range(len(nodes)):
        if other != region:
            largest = max(largest, nodes[other])
    fewest = max(1, min(largest, -(-most * max(own, largest) // own)))
    all_meet = fewest == largest
    chosen, least = fewest, math.inf
    for turns in range(fewest, (3 if all_meet else 2) * fewest + 1, fewest if all_meet else 1):
        worst = 1.0
        for other in range(len(nodes)):
            count = nodes[other]
            if other != region and count > 0:
                rounds = turns // count
                share = (rounds + min(1.0, (turns - rounds * count) * own / count)) / (own * turns)
                worst = max(worst, share * min(own * count, most * max(own, count)))
        if worst < least - 1e-9:
            chosen, least = turns, worst
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """How a program executes a step. Every field is a switch that a measured row, a problem or a user may set."""

    name: str = "unknown"
    version: str = ""
    plans: str = "any"
    """Which plans it runs: `any`; `uniform` ones (one degree of each kind, stages of equal width), of these those with
    as many blocks in all stages (`equal`: neither parts of sequences nor ZeRO-2, as before Megatron-Core), or nearly as
    many and one stage a device (`even`), or with data parallelism alone (`sharded`); or those that the configuration
    of `megatron`, `nanotron`, `torchtitan` or `deepspeed` says (`polygon.domain.runnable`)."""
    attention: str = "flash"
    """Kernel: `flash` (the vendor's), `flash2` and `flash1` (FlashAttention-2 and the one before), `triton` (that in
    Triton), `materialised` (scores written)."""
    fused: bool = True
    """Whether element-wise operations run as fused kernels; norms, positions and the optimizer where `norms`,
    `positions` and `update` do not say."""
    norms: str = ""
    """How RMS norms run: one kernel (`fused`); one over a copy of its input in 32 bits, which backward keeps
    (`copies`); or operation by operation in 32 bits (`operations`). Empty: by `fused`, the first or the last."""
    positions: str = ""
    """How rotary positions of blocks with RMS norms turn queries and keys: in one kernel (`fused`), or as complex
    numbers of 32 bits (`operations`); those of blocks with layer norms are priced as one kernel. Empty: by `fused`."""
    update: str = ""
    """How the optimizer runs: one kernel that clips and writes 16-bit weights too (`fused`); one kernel, beside which
    norm, clipping, zeroing gradients and 16-bit copies of weights pass through memory by themselves (`apart`); or
    operation by operation (`operations`). Empty: by `fused`, the first or the last."""
    host_forward_factor: float = 1.0
    """What the host needs to launch the forward of an eager block over what it needs for one in Sailor's profiles
    (`polygon.cost.kernels.EAGER_HOST_S`)."""
    graphs: str = "none"
    """Which launches CUDA graphs take from the host: `none`; those of a mixture's router and of what prepares its
    dispatch (`routing`); or all of the `step`, which then waits for no routing either."""
    loss: str = "torch"
    """How the loss is computed from the logits (`polygon.cost.compute.LOSS_BYTES`)."""
    logit_bytes: float = 0.0
    """Bytes held per logit beside it while the loss is computed; 0: as that way of computing it does
    (`polygon.cost.memory.LOGIT_BYTES`)."""
    autograd: bool = False
    """Whether what backward needs is counted as torch's autograd keeps it, operation by operation, of eager layers and
    weights in 32 bits (`polygon.cost.autograd_memory`)."""
    fused_accumulation: bool = True
    """Whether weight gradients are added up inside the products, not in a pass of their own."""
    dropout: bool = False
    """Of hidden states (and of materialised attention scores)."""
    attention_dropout: bool = False
    """Inside a fused attention kernel."""
    deterministic: bool = False
    selective: str = "attention"
    """What selective recomputation repeats: `attention`; every second product and what is element-wise (`operators`,
    torchtitan's per-operator checkpointing); or `norms` and the activation of experts (Megatron-LM's
    --recompute-modules layernorm moe_act)."""
    cached_casts: bool = False
    """Whether weights are cast to 8 bits once a step and not in every micro-batch (TransformerEngine's "FP8 weight
    caching", docs.nvidia.com/deeplearning/transformer-engine, Performance Optimizations)."""
    casts: str = "fused"
    """How numbers get 8 bits: one kernel casts and transposes, by the largest of steps before (`fused`); or finding the
    largest, cast and transposed copy are kernels each, and backward casts what products took once more (`apart`)."""
    windows_in_blocks: bool = False
    """Whether attention to a window goes in blocks of as many queries as the window has, each with the keys that any of
    its queries sees: twice a window's. Else the kernel leaves out what a query does not see."""
    context: str = "ring"
    """How devices that hold parts of a sequence attend to the others': keys and values pass round a `ring`, beside
    attention; or for attention each gets some `heads` of all tokens (DeepSpeed-Ulysses, arXiv:2309.14509), and where
    these cannot be shared out all keys and values (arXiv:2407.21783, section 3.3.2); or as torch's context_parallel
    does it (`gathered`): keys and values, of as many heads as queries have, are gathered beside the first part of
    attention, the parts are put together in 32 bits, and their gradients pass round in these."""
    experts: str = "cut"
    """What a tensor-parallel group that splits the tokens has of routed experts: slices of each (`cut`), or each device
    some of its own, to which all send tokens (`whole`): they are then spread over ep x tp devices, which may be more
    than dp x cp (Megatron Core's parallel folding, arXiv:2504.14960; its --expert-tensor-parallel-size 1)."""
    tp_overlap: str = "none"
    """What hides tensor-parallel traffic: `none`, weight-gradient products (`backward`), all of them (`pipelined`)."""
    dp_overlap: str = "backward"
    """What hides data-parallel traffic: nothing; the last backward; that and the first forward (gathers of weights)."""
    hidden_part: float = 0.9
    """Of the last backward that may hide sums of gradients: the first of them starts when the last layers are done."""
    last_bucket: float = 0.05
    """Part of the gradients whose sum starts when backward has ended."""
    by_layer: bool = False
    """Whether the sums of gradients go layer by layer: `hidden_part` and `last_bucket` then follow from the layers."""
    contention: float = 0.126
    """How much slower compute is while a collective runs beside it (Galvatron's measured overlap coefficient)."""
    bucket_bytes: float = 5e8
    """Largest message of a reduction: gradients go in buckets, each of which waits for the latency of its ring (the
    default of DeepSpeed, InternEvo and Sailor)."""
    sum_turns: int = 1
    """How many nodes of the smaller of two regions a node of the larger one exchanges sums with, as far as there are so
    many (`turns_of_region`)."""
    sum_trees: bool = False
    """Whether regions sum over the trees that a plan gives (`polygon.domain.plan.SumTree`)."""
    message_s: float = 0.0
    """Processor time of the rank that sends or receives a message of a sum between regions."""
    tied_once: bool = False
    """Whether the gradient of a weight that first and last stage both hold is summed once, over the workers of both,
    after all others. Else each stage sums it with its other gradients, and pairs of workers then exchange the sums
    (Megatron-LM's embedding group)."""
    expert_dispatch: str = "experts"
    """To whom tokens are sent: a copy to each of a token's `experts`, or one to each of the `nodes` that have some of
    them, where it is passed on over the node's fabric (DeepEP; arXiv:2412.19437, section 3.2.2)."""
    sorts_arrivals: bool = False
    """Whether a device with several experts sorts the tokens that others send to its `experts` once more when they have
    arrived, rank by rank, and puts results back into that order before they return."""
    fused_experts: bool = False
    """Whether the products of experts add biases, limit and apply the activation, and cast to 8 bits in their own
    kernels, so that none of it passes through memory by itself (TransformerEngine's fused grouped MLP)."""
    looped_experts: bool = False
    """Whether experts are layers that run one after another, each with launches of its own, once the host knows how
    many rows each gets; else grouped products take all of them at once."""
    grouped_experts: bool = False
    """Whether looped experts run as one where torch has a kernel for it (`torch.nn.functional.grouped_mm`: bf16 on
    Hopper and the Blackwell of data centers), without biases and not cut by tensor parallelism: the device alone knows
    how many rows each gets, and the host waits for nothing but what other devices send."""
    narrow_dispatch: bool = False
    """Whether tokens go to experts in 8 bits where products are in 8 bits; they come back in full precision."""
    ep_overlap: bool = False
    """Whether tokens travel to and from experts beside the compute of another micro-batch (DualPipe; Megatron-LM's
    --overlap-moe-expert-parallel-comm)."""
    p2p_overlap: bool = False
    """Whether stages send while they compute."""
    p2p_buffer_bytes: float = 0.0
    """What buffers on both sides take of a message that is sent beside compute; for the rest of it sender and receiver
    stand still. 0: they never do."""
    exchanges_apart: bool = False
    """Whether the messages for which a stage does not compute follow one another (DeepSpeed's instructions); else it
    exchanges both ways at once with a neighbour, or with both (Megatron-LM's batched sends and receives)."""
    host_buffer_bytes_per_s: float = 0.0
    """Rate at which the host makes the buffer of every message that a stage receives, in 32 bits, and copies it to the
    device, which stands still for it. 0: the device has such buffers."""
    scattered_sends: bool = True
    """Whether each tensor-parallel rank sends its part of a message between stages, and not the whole of it."""
    scattered_gradients: bool = True
    """Whether that holds for gradients of activations too."""
    message_gathers: int = 0
    """Gathers among the tensor-parallel ranks of a stage after a gradient has come; where there are any, there is one
    after an activation too."""
    host_update: bool = False
    """Whether weights and optimizer are kept by the host, which gets the gradients, updates, and gives weights back
    (`polygon.cost.compute.update_s`)."""
    gathers_per_layer: int = 1
    """Collectives in which ZeRO-3 gathers a layer: one (FSDP), or one a parameter (DeepSpeed)."""
    gathers_again: bool = False
    """Whether ZeRO-3 lets go of a recomputed layer before its backward, and gathers it once more."""
    zero2_by_micro_batch: bool = False
    """Whether ZeRO-2 scatters gradients after every micro-batch, and not once a step."""
    owned_weights: bool = False
    """Whether ZeRO-1 and 2 deal out whole weight matrices: gradients are then summed on every rank, and each owner
    broadcasts its matrices (InternEvo). Else every weight is divided."""
    keeps_outputs: bool = False
    """Whether a pipeline stage holds what it has sent until the backward of it (DeepSpeed; Megatron-LM frees it)."""
    posted_messages: int = 0
    """Messages between stages that a device makes room for before they arrive, whatever they take."""
    posted_bytes: float = 0.0
    """Of more, smaller ones."""
    keeps_8_bit: bool = False
    """Whether inputs of 8-bit products are kept for backward as they were multiplied, a byte each."""
    keeps_gathered: bool = False
    """Whether sequence parallelism keeps its gathered inputs for the weight gradients, as autograd does by itself
    (DTensor); Megatron-LM keeps the shares and gathers them once more (Korthikanti et al., section 4.2)."""
    context_bytes: float = 1.5e9
    """CUDA context and communication buffers (1.3-1.6 GB beyond the allocator's, BigScience)."""
    gradient_copies: float = 0.0
    """Flattened copies of the gradients that the reduction keeps."""
    reserved_factor: float = 1.0
    """What the allocator reserves over what it has handed out at the peak."""
    pads_vocabulary: bool = False
    """Whether the vocabulary is padded to a multiple of 128 times the tensor-parallel degree (Megatron-LM)."""
    time_error: float = 0.0
    """What not knowing the program adds to half of a 90 % interval over its time."""
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, hash=False)
    """Where each switch is from, by its name."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("attention", ATTENTION),
            ("loss", LOSSES),
            ("selective", SELECTIVE),
            ("expert_dispatch", EXPERT_DISPATCH),
            ("casts", CASTS),
            ("graphs", GRAPHS),
            ("context", CONTEXT),
            ("experts", EXPERTS),
            ("update", UPDATES),
            ("plans", PLANS),
            ("norms", NORMS),
            ("positions", POSITIONS),
            ("tp_overlap", TP_OVERLAP),
            ("dp_overlap", DP_OVERLAP),
        ):
            value = getattr(self, name)
            require(value in allowed, f"runtime.{name}", value, " or ".join(word for word in allowed if word))
        for name in (
            *("hidden_part", "last_bucket", "contention", "context_bytes", "gradient_copies", "time_error"),
            *("posted_messages", "posted_bytes", "p2p_buffer_bytes", "host_buffer_bytes_per_s", "message_gathers"),
            *("logit_bytes", "message_s"),
        ):
            require_number(getattr(self, name), f"runtime.{name}", at_least=0)
        for name in ("bucket_bytes", "reserved_factor", "host_forward_factor"):
            require_number(getattr(self, name), f"runtime.{name}", above=0)
        for name in ("gathers_per_layer", "sum_turns"):
            require(getattr(self, name) >= 1, f"runtime.{name}", getattr(self, name), "a number >= 1")

    @property
    def update_way(self) -> str:
        """How the optimizer runs: `fused`, `apart` or `operations`."""
        return self._way(self.update)

    @property
    def norm_way(self) -> str:
        """How RMS norms run: `fused`, `copies` or `operations`."""
        return self._way(self.norms)

    @property
    def position_way(self) -> str:
        """How rotary positions are applied: `fused` or `operations`."""
        return self._way(self.positions)

    def _way(self, said: str) -> str:
        return said or ("fused" if self.fused else "operations")

    def whole_experts(self, experts: int, *, tp: int, ep: int, sequence_parallel: bool) -> bool:
        """Whether tensor-parallel devices hold whole experts: told to, where they split tokens and all get as many."""
        folded = self.experts == "whole" and sequence_parallel and tp > 1
        return folded and experts > 0 and experts % (ep * tp) == 0


POLYGON = Runtime(
    name="polygon",
    version="0.1",
    attention="flash",
    fused=False,
    autograd=True,
    loss="torch",
    fused_accumulation=False,
    norms="fused",
    update="apart",
    host_forward_factor=0.57,
    looped_experts=True,
    grouped_experts=True,
    casts="apart",
    cached_casts=True,
    windows_in_blocks=True,
    context="heads",
    dp_overlap="backward",
    by_layer=True,
    contention=0.0,
    p2p_overlap=True,
    sum_turns=7,
    sum_trees=True,
    message_s=0.17e-3,
    tied_once=True,
    zero2_by_micro_batch=True,
    keeps_outputs=True,
    posted_messages=2,
    posted_bytes=float(1 << 26),
    sources={
        "attention": "torch's scaled_dot_product_attention, runners/engine/layers.py",
        "fused": "eager torch, runners/engine/layers.py",
        "autograd": "eager torch, runners/engine/layers.py; measured by benchmarks/every_dimension.py",
        "loss": "torch's cross_entropy in fp32, runners/engine/layers.py",
        "fused_accumulation": "autograd adds to .grad, runners/engine/gradients.py",
        "update": "AdamW(fused=True) on flat vectors, runners/engine/optimizers.py, runners/engine/update.py",
        "norms": "one kernel in the numbers' own format, runners/engine/layers.py",
        "host_forward_factor": "0.61 and 0.75 ms for the forward of GPT's block on the hosts of two H100, "
        "instances/measured/gpu_check_h100.json and gpu_check_h100_second.json",
        "looped_experts": "runners/engine/experts.py",
        "grouped_experts": "runners/engine/experts.py",
        "casts": "runners/engine/float8.py",
        "cached_casts": "weights are cast once a step, runners/engine/float8.py",
        "windows_in_blocks": "runners/engine/windows.py",
        "context": "runners/engine/context.py",
        "by_layer": "layers are summed one after another beside backward, runners/engine/gradients.py",
        "p2p_overlap": "threads send while the next micro-batch is computed, runners/engine/worker.py",
        "sum_turns": "more than seven connections of a node to a region hardly help, comm/polygon_comm/members.py; "
        "judgement",
        "sum_trees": "comm/polygon_comm/members.py",
        "message_s": "packed, sent or received, unpacked; measured by benchmarks/sum_messages.py",
        "tied_once": "a bucket and a group of its own, runners/engine/worker.py, runners/engine/rank_layout.py",
        "zero2_by_micro_batch": "runners/engine/zero_sharding.py",
        "keeps_outputs": "backward starts at them, runners/engine/worker.py",
        "posted_messages": "receives that wait whatever they take, runners/engine/stage_messages.py",
        "posted_bytes": "ten times what a link of 1 Gbit/s and 50 ms has under way: more would hide nothing",
    },
)
"""Our engine as it is."""


def is_ours(runtime: Runtime) -> bool:
    """Whether our engine executes it: as it is, compiled, with context parallelism in a ring, or with whole experts."""
    free = {name: getattr(POLYGON, name) for name in ("name", "context", "fused", "experts")}
    return replace(runtime, **free) == POLYGON
