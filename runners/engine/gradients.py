"""Weights and their gradients in flat vectors, the gradients summed over the stage's workers while backward still runs.

A bucket is the gradients of one layer; ``parameter.grad`` is a view into it, so what is summed is what the optimizer
uses. A bucket goes to the summing threads when the worker's last micro-batch of the step has passed its layer, and
buckets go in one fixed order, so that all members sum the same ones at the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from polygon_comm.accelerator import Accelerator
from polygon_comm.line import BYTES_UNDER_WAY, MOST_UNDER_WAY, SUMS_UNDER_WAY, Pending, SumLine
from polygon_comm.parameter_server import Part, ServerGroup
from polygon_comm.reduction import SumGroup
from polygon_comm.sharding import Split
from polygon_comm.tensor_group import TensorGroup
from torch import nn
from torch.utils.hooks import RemovableHandle

from runners.engine.log import RunLog


class Bucket:
    """Some parameters and their gradients, each in one vector: matrices first, what has one dimension last.

    Parameters
    ----------
    name : str
    parameters : mapping of name to parameter
    group : SumGroup or None
        Who sums; None on ranks whose worker's first rank sums for them.
    tp : TensorGroup or None
        The devices that hold slices of the parameters.
    dims : mapping of name to int
        Dimension along which a parameter is cut; those not named are whole on every device.
    whole : bool
        Sum uncut tensors, because the workers are cut differently.
    device : torch.device or None
        Where the vectors are to be; None: where the parameters are.
    """

    zero = 0
    """ZeRO stage: 1: optimizer state is split among the members in a region; 2 and 3: `ShardedBucket`."""

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, nn.Parameter],
        group: SumGroup | None,
        tp: TensorGroup | None = None,
        dims: Mapping[str, int] | None = None,
        *,
        whole: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.fraction: float | None = None
        """Part of the samples that this region computes, where it may train by itself (local updates)."""
        self.alone = False
        """Whether only the members in this region sum."""
        self.leads = False
        """Of equal copies one leads: it counts in the gradient's norm."""
        self.writers: tuple[int, ...] = ()
        """Ranks that hold the same (first slices), of which any may write it."""
        self.parts: list[Part] = []
        """Owners of stretches, where the group has parameter servers."""
        self.owners = group
        """Between whose members in this region ZeRO divides: all of the group, or those that share a copy."""
        self.copies: SumGroup | None = None
        """Those that hold the same part, where there are several copies in this region and all are cut alike."""
        self.name, self.group, self.tp, self.dims, self.whole = name, group, tp, dict(dims or {}), whole
        self.parameters = dict(sorted(parameters.items(), key=lambda item: item[1].ndim < 2))
        self.shapes = [tuple(parameter.shape) for parameter in self.parameters.values()]
        self.matrix_elements = sum(p.numel() for p in self.parameters.values() if p.ndim > 1)
        self.places: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        """Start, stop and shape of every parameter in the vectors."""
        self.weights = torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters.values()]).to(device)
        self.vector = torch.zeros_like(self.weights)
        self.size = len(self.vector)
        self.weights_start = self.vector_start = 0
        """Where in the bucket the held weights and gradients start."""
        start = 0
        for key, parameter in self.parameters.items():
            stop = start + parameter.numel()
            self.places[key] = (start, stop, tuple(parameter.shape))
            parameter.data = self.weights[start:stop].view_as(parameter)
            parameter.grad = self.vector[start:stop].view_as(parameter)
            start = stop
        self.leaves: list[torch.Tensor] = list(self.parameters.values())
        """What gradients come to: the parameters, or what products take in their place (`NarrowWeights`)."""
        self.missing = 0
        """Leaves whose gradient of the micro-batch under way is not there yet."""
        self.complete = False
        """Whether the gradients of all of this rank's micro-batches of the step are there."""
        self.chunk = 0
        """Which of a worker's stages the parameters are in."""
        self._buffer_bytes: dict[torch.dtype, int] = {}
        """`buffer_bytes`, once asked for."""

    @property
    def whole_weights(self) -> torch.Tensor:
        """All weights of the bucket, as layers have them."""
        return self.weights

    @property
    def divided(self) -> bool:
        """Whether the owners in this region each update a stretch (ZeRO)."""
        return self.zero > 0 and self.owners is not None

    @cached_property
    def split(self) -> Split:
        """What each of the owners updates."""
        assert self.owners is not None
        # Equal to within one weight, wherever tensors begin: a flat optimizer does not care.
        return Split(self.name, tuple(self.owners.near_ranks), self.size)

    @cached_property
    def own(self) -> slice:
        """What this rank updates."""
        if not self.divided:
            return slice(0, self.size)
        assert self.owners is not None
        return self.split.part(self.owners.near_ranks[self.owners.near_place])

    def fill_in(self, vector: torch.Tensor) -> None:
        """Fill in the stretches of the other owners; a collective of theirs."""
        if self.divided:
            assert self.owners is not None
            split = self.split
            self.owners.share_parts(vector, [(part.start, part.stop) for part in map(split.part, split.owners)])

    def whole_of(self, part: torch.Tensor) -> torch.Tensor:
        """A vector of which every owner has its stretch; a collective of theirs, but for one that is whole already."""
        if len(part) == self.size:
            return part
        whole = part.new_zeros(self.size)
        whole[self.own] = part
        self.fill_in(whole)
        return whole

    def put(self, weights: torch.Tensor) -> None:
        """Take new weights, of which all are given."""
        self.weights.copy_(weights[self.weights_start : self.weights_start + len(self.weights)])

    def updated(self) -> torch.Tensor | None:
        """All weights, those that this rank keeps as they are now, for others to fill in theirs; None where layers
        fetch them."""
        return self.weights

    def collect(self, name: str) -> None:
        """Take a parameter's gradient of a micro-batch to where gradients are added up, if that is elsewhere."""

    @property
    def weights_bytes(self) -> int:
        """Of the weights that are here between two steps, in whatever formats."""
        return self.weights.nbytes

    def equally_far(self, names: Sequence[str], multiple: int) -> bool:
        """Whether parameters of one shape lie equally far apart, all at a multiple of so many numbers."""
        starts = [self.places[name][0] for name in names]
        alike = len({self.places[name][2] for name in names}) == 1
        return alike and len(set(np.diff(starts))) <= 1 and not any(start % multiple for start in starts)

    def view(self, start: int, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
        """Of the weights as layers have them."""
        return self.whole_weights.as_strided(shape, strides, start)

    def weights_of(self, start: int, stop: int) -> torch.Tensor:
        """A held stretch of the weights."""
        return self.weights[start - self.weights_start : stop - self.weights_start]

    def gradient_of(self, start: int, stop: int) -> torch.Tensor:
        """A held stretch of the gradient."""
        return self.vector[start - self.vector_start : stop - self.vector_start]

    def begin(self, dtype: torch.dtype) -> Pending:
        """Start to sum over the group, in the given number format; the call of the result ends it."""
        if self.whole:
            self._sum_whole(dtype)
            return Pending(lambda: None)
        assert self.group is not None
        narrow = self.vector.to(dtype)
        near_only = self.alone and self.fraction is not None
        if isinstance(self.group, ServerGroup):
            sum_ = self.group.begin_to_owners(narrow, self.name, self.parts)
        elif near_only:
            sum_ = self.group.begin_near(narrow)
        else:
            sum_ = self.group.begin(narrow, self.name, self.shapes)

        def finish() -> None:
            if near_only:
                # The mean over the region's own samples, as the mean over all would be if it had all.
                narrow.mul_(1 / self.fraction if self.fraction else 0.0)
            if narrow is not self.vector:
                self.vector.copy_(narrow)

        return sum_.then(finish)

    def first_here(self, place: int) -> bool:
        """Whether a rank, by its place in its tensor-parallel group, speaks for what no rank has slices of: the first
        one, and each where the others of the group have nothing of this."""
        return self.tp is None or place == 0

    @property
    def has_others(self) -> bool:
        """Whether the gradients of others, or other slices of them, are to be summed with those here."""
        return self.whole or self.group is None or len(self.group.members.ranks) > 1

    @property
    def may_ask(self) -> bool:
        """Whether others can be asked for their part of the sum before this rank's is there."""
        return self.group is not None and not self.whole and not isinstance(self.group, ServerGroup)

    def buffer_bytes(self, dtype: torch.dtype) -> int:
        """Of its sum while it is under way."""
        if dtype not in self._buffer_bytes:
            known = self.size * dtype.itemsize
            if self.group is not None and self.may_ask:
                known = self.group.buffer_bytes(self.size, dtype, self.shapes)
            self._buffer_bytes[dtype] = known
        return self._buffer_bytes[dtype]

    def ask(self, dtype: torch.dtype) -> None:
        """Ask for them."""
        assert self.group is not None
        self.group.expect(self.size, dtype, self.name, self.shapes)

    def _sum_whole(self, dtype: torch.dtype) -> None:
        """Gather the slices, let the worker's first rank sum whole tensors, and cut the result."""
        # Workers of another tensor-parallel degree have other slices: only whole tensors are the same everywhere.
        tensors = [self.gathered(key, self.vector[a:b].view(shape)) for key, (a, b, shape) in self.places.items()]
        total = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(dtype)
        if self.group is not None:
            self.group.sum_(total, self.name, [tensor.shape for tensor in tensors])
        if self.tp is not None:
            self.tp.broadcast_(total)
        start = 0
        for key, tensor in zip(self.places, tensors, strict=True):
            a, b, _ = self.places[key]
            stop = start + tensor.numel()
            self.vector[a:b] = self.cut(key, total[start:stop].view_as(tensor)).reshape(-1)
            start = stop

    def owned_by(self, rank: int) -> list[tuple[int, int]]:
        """Stretches that a rank owns where there are parameter servers; else the whole."""
        if not self.parts:
            return [(self.vector_start, self.vector_start + len(self.vector))]
        return [(part.start, part.stop) for part in self.parts if part.owner == rank]

    def gathered(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """A parameter's tensor, or one shaped like it, uncut; a collective of the worker's devices."""
        return self.tp.gather(tensor, self.dims[key]) if self.tp is not None and key in self.dims else tensor

    def cut(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """This device's slice of a parameter's whole tensor."""
        return self.tp.part(tensor, self.dims[key]) if self.tp is not None and key in self.dims else tensor


class Reducer:
    """Sums buckets in their order, in threads of its own, when their last gradient of the step is there.

    Parameters
    ----------
    buckets : sequence of Bucket
        In the order in which backward completes them, those of the last stage (chunk) of a worker first; groups that
        other stages share last.
    dtype : torch.dtype
        In which gradients travel.
    accelerator : Accelerator
        Where the buckets are.
    on_micro_batch : callable
        Called with a bucket when the gradient of any micro-batch is there.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        dtype: torch.dtype,
        log: RunLog,
        accelerator: Accelerator,
        on_micro_batch: Callable[[Bucket], None] = lambda bucket: None,
    ) -> None:
        self._on_micro_batch = on_micro_batch
        self.buckets, self.dtype, self._log = list(buckets), dtype, log
        self.line = SumLine(accelerator)
        self._to_expect: deque[Bucket] = deque()
        """Buckets whose sums are to be expected in this step, in their order, and those that are."""
        self._expected: deque[Bucket] = deque()
        self._passing: deque[Bucket] = deque()
        """Those of the stage whose backward is under way, that it has not passed yet."""
        self._passed = 0
        """How many of them it has."""
        self._next = 0
        """The first that is not handed over in this step."""
        self._last = False
        self._handles: list[RemovableHandle] = []
        # Hooks cost 3 % of a small model's step: they are there only where and when somebody waits for a gradient.
        self._always = any(bucket.zero >= 2 for bucket in self.buckets)
        if self._always:
            self._set_hooks()

    def _set_hooks(self) -> None:
        if not any(bucket.has_others for bucket in self.buckets):
            return
        for bucket in self.buckets:
            hook = self._hook(bucket)
            self._handles += [leaf.register_post_accumulate_grad_hook(hook) for leaf in bucket.leaves]

    def _hook(self, bucket: Bucket) -> Callable[[torch.Tensor], None]:
        def done(_: torch.Tensor) -> None:
            bucket.missing -= 1
            self._pass_ready()

        return done

    def begin_backward(self, chunk: int, *, last: bool) -> None:
        """Expect the gradients of a micro-batch in one of the worker's stages; `last`: those of the step there."""
        self._passing, self._last = deque(bucket for bucket in self.buckets if bucket.chunk == chunk), last
        self._passed = 0
        for bucket in self._passing:
            bucket.missing = len(bucket.leaves)
        if last and not self._always:
            self._set_hooks()

    def end_backward(self) -> None:
        """Take the buckets that did not come by themselves: some of their parameters had no part in the loss."""
        for bucket in self._passing:
            bucket.missing = 0
        self._pass_ready()
        while self._handles and not self._always:
            self._handles.pop().remove()

    def finish(self) -> None:
        """End the step: hand over what was not, of a stage that had no micro-batch or where nothing overlaps."""
        for bucket in self.buckets:
            bucket.complete = True
        self._hand_over()
        self._next = 0
        for bucket in self.buckets:
            bucket.complete = False

    def _pass_ready(self) -> None:
        while self._passing and self._passing[0].missing <= 0:
            bucket = self._passing.popleft()
            if self._log.pace is not None:
                self._log.pace.reach(self._passed)
            self._passed += 1
            self._on_micro_batch(bucket)
            if self._last:
                bucket.complete = True
                self._hand_over()

    def _hand_over(self) -> None:
        """All members of a group sum the same buckets in the same order, whichever is complete first."""
        while self._next < len(self.buckets) and self.buckets[self._next].complete:
            self._add(self.buckets[self._next])
            self._next += 1

    def _add(self, bucket: Bucket) -> None:
        # A sum of one is the gradient as it is; ZeRO moves even that to where it keeps it.
        if not bucket.has_others and bucket.zero < 2:
            return
        self.line.add(lambda: self._begin(bucket), bucket.buffer_bytes(self.dtype))

    def _begin(self, bucket: Bucket) -> Pending:
        with self._log.interval("reduce", f"begin {bucket.name}"):
            begun = bucket.begin(self.dtype)
            if self._expected and self._expected[0] is bucket:
                self._expected.popleft()
            self._expect_more()

        def end() -> None:
            with self._log.interval("reduce", f"reduce {bucket.name}"):
                begun()

        return Pending(end, gather=begun.gather, rounds=begun.rounds, share=begun.share)

    def expect(self) -> None:
        """Let the others send early, from now on, what this rank sums in the step; some sums ahead."""

        def begin() -> None:
            self._to_expect = deque(bucket for bucket in self.buckets if bucket.may_ask and bucket.has_others)
            self._expect_more()

        self.line.submit(begin)

    def _expect_more(self) -> None:
        """Expect the next sums: without that, each pays a latency for asking before it pays one for the answer."""
        while self._to_expect:
            bucket, ahead = self._to_expect[0], len(self._expected)
            n_bytes = sum(other.buffer_bytes(self.dtype) for other in (*self._expected, bucket))
            if ahead >= SUMS_UNDER_WAY and (n_bytes > BYTES_UNDER_WAY or ahead >= MOST_UNDER_WAY):
                return
            self._expected.append(self._to_expect.popleft())
            bucket.ask(self.dtype)

    def wait(self) -> None:
        """Return when the sums handed over are done; raise what went wrong in them."""
        self.line.wait()

    def close(self) -> None:
        """End the threads."""
        self.line.close()
