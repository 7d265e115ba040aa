"""ZeRO where every worker of a stage in a region keeps a part: of 32-bit weights, of gradients, of all weights.

In 16 bits layers have all weights in these, and each worker the 32-bit ones of the part that it updates (ZeRO-1 and 2).
ZeRO-2: a layer's gradient exists whole only while its backward runs; then every owner gets its part and adds it up.
ZeRO-3: a layer's weights are fetched from their owners before its forward and its backward, one layer ahead, and
dropped after it. Every rank knows the order of actions of the others (it is the plan's), so an owner sends without
being asked, and a worker may take more micro-batches than its neighbour, or others first.

torch's `fully_shard` does this by collectives: all workers of a stage would have to compute equally many micro-batches
in the same order, and without a reduction after every micro-batch it keeps gradients whole.

References
----------
Rajbhandari et al., SC 2020 (arXiv:1910.02054, ZeRO).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from polygon_comm.accelerator import Accelerator
from polygon_comm.line import Pending
from polygon_comm.reduction import SumGroup
from polygon_comm.sharding import PartExchange
from polygon_comm.transport import Sending

from polygon.domain.model import Model
from polygon.domain.schedule import Action, worker_order
from runners.engine.experts import EXPERT
from runners.engine.gradients import Bucket
from runners.engine.layers import layer_name
from runners.engine.rank_layout import Layout


class PartedBucket(Bucket):
    """A bucket whose layers have its weights in 16 bits, and of whose 32-bit weights this rank keeps those that it
    updates (ZeRO-1).

    A micro-batch's gradients have 16 bits, as autograd wants them of such weights; their sum has 32.
    """

    def __init__(self, *args: Any, zero: int, owners: SumGroup, dtype: torch.dtype, **more: Any) -> None:
        super().__init__(*args, **more)
        self.zero, self.owners = zero, owners
        self._whole_weights = self.weights
        """What the parameters look into."""
        if dtype != self.weights.dtype:
            self._whole_weights = self.weights.to(dtype)
            self._keep_part()
            for key, (start, stop, shape) in self.places.items():
                parameter = self.parameters[key]
                parameter.grad = None
                parameter.data = self.whole_weights[start:stop].view(shape)
        if zero == 1:
            for key, parameter in self.parameters.items():
                parameter.register_post_accumulate_grad_hook(lambda _, key=key: self.collect(key))

    def _keep_part(self) -> None:
        self.weights, self.weights_start = self.weights[self.own].clone(), self.own.start

    @property
    def whole_weights(self) -> torch.Tensor:
        """All weights of the bucket, as layers have them."""
        return self._whole_weights

    @property
    def apart(self) -> bool:
        """Whether layers have weights of their own at all times."""
        return self.zero < 3 and self._whole_weights is not self.weights

    @property
    def weights_bytes(self) -> int:
        """Of the weights that are here between two steps, in whatever formats."""
        return self.weights.nbytes + (self.whole_weights.nbytes if self.apart else 0)

    def put(self, weights: torch.Tensor) -> None:
        """Take new weights, of which all are given."""
        super().put(weights)
        if self.apart:
            self.whole_weights.copy_(weights)

    def updated(self) -> torch.Tensor | None:
        """All weights as layers have them, with this rank's as they are now; none under ZeRO-3."""
        if self.zero == 3:
            return None
        if self.apart:
            self.whole_weights[self.own] = self.weights
        return self.whole_weights

    def collect(self, name: str) -> None:
        """Add a parameter's gradient of a micro-batch to the sum; under ZeRO-2 and 3 a layer's are scattered."""
        parameter, (start, stop, _) = self.parameters[name], self.places[name]
        if self.zero == 1 and parameter.grad is not None:
            self.vector[start:stop] += parameter.grad.reshape(-1)
            parameter.grad = None


class ShardedBucket(PartedBucket):
    """A bucket of which this rank keeps a part: of the gradients (ZeRO-2), of the weights too (ZeRO-3).

    `owners` keep the parts of one copy, `copies` the same part of several in the region (see `Bucket`). `dtype` is what
    layers compute in: whole weights, and gradients until they are scattered, have it; parts have 32 bits.
    """

    def __init__(
        self,
        *args: Any,
        accelerator: Accelerator,
        zero: int,
        owners: SumGroup,
        copies: SumGroup | None,
        dtype: torch.dtype,
        **more: Any,
    ) -> None:
        super().__init__(*args, zero=zero, owners=owners, dtype=dtype, **more)
        assert self.group is not None
        self.copies = copies
        self._accelerator = accelerator
        if zero == 3:  # whole weights have memory only while a layer is computed
            if self._whole_weights is self.weights:
                self._keep_part()
            self.drop()
        self.given = self.weights
        """This rank's part as others are sent it."""
        self.vector, self.vector_start = self.vector[self.own].clone(), self.own.start
        self._lock = threading.Lock()
        self._missing_parts = 0
        self._complete: Future[None] = Future()
        self.passing: torch.Tensor | None = None
        """The gradient of the micro-batch whose backward is under way."""
        self._drop_gradient()

    def view(self, start: int, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
        """Of the weights as layers have them, whose memory need not be there now."""
        away = self.zero == 3
        if away:
            self._accelerator.fill_again(self.whole_weights)
        found = super().view(start, shape, strides)
        if away:
            self.drop()
        return found

    def _drop_gradient(self) -> None:
        self.passing = None
        for parameter in self.parameters.values():
            parameter.grad = None

    def renew(self) -> None:
        """Let others be sent the weights as they are now."""
        self.given = self.weights.to(self.whole_weights.dtype)

    def drop(self) -> None:
        """Give back the memory of the whole weights."""
        self._accelerator.free(self.whole_weights)

    def fill(self, parts: Iterable[tuple[slice, torch.Tensor]]) -> None:
        """Put the whole weights together from this rank's and the others' parts."""
        whole = self.whole_weights
        self._accelerator.fill_again(whole)
        whole[self.own] = self.weights
        for part, values in parts:
            whole[part] = values

    def expect(self, parts: int) -> None:
        """So many parts of gradients will be added in this step, this rank's own among them."""
        self._missing_parts, self._complete = parts, Future()
        if not parts:
            self._complete.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Some part will not come."""
        with self._lock:
            if not self._complete.done():
                self._complete.set_exception(error)

    def add(self, part: torch.Tensor) -> None:
        """Add somebody's gradient of a micro-batch to this rank's part; it must be there (see `PartExchange.take`)."""
        with self._lock:
            self.vector += part
            # Another thread's stream adds next.
            self._accelerator.finish()
            self._missing_parts -= 1
            if not self._missing_parts and not self._complete.done():
                self._complete.set_result(None)

    def open_gradient(self) -> None:
        """Make room for the gradient of a micro-batch."""
        if self.passing is None:
            self.passing = torch.zeros_like(self.whole_weights)
            for key, (start, stop, shape) in self.places.items():
                self.parameters[key].grad = self.passing[start:stop].view(shape)

    def take_gradient(self) -> torch.Tensor:
        """The gradient of the micro-batch, no longer the parameters'."""
        self.open_gradient()
        assert self.passing is not None
        passing = self.passing
        self._drop_gradient()
        return passing

    def begin(self, dtype: torch.dtype) -> Pending:
        """Start to sum over copies and regions (within a copy parts were added up all along)."""
        group = self.group
        assert group is not None
        self._complete.result()
        if self.alone and self.fraction is not None:
            self.vector.mul_(1 / self.fraction if self.fraction else 0.0)
        elif len(group.members.regions) > 1:
            # Between regions parts differ where their widths do: the sum goes as for whole vectors, one at a time.
            return self._begin_whole(dtype, lambda total: group.begin(total, self.name, self.shapes))
        if len(self.split.owners) == group.near_size:
            return Pending(lambda: None)
        if self.copies is None:
            return self._begin_whole(dtype, group.begin_near)
        part = self.vector.to(dtype)
        return self.copies.begin_near(part).then(lambda: self._take(part))

    def _begin_whole(self, dtype: torch.dtype, begin: Callable[[torch.Tensor], Pending]) -> Pending:
        """Start a sum of whole vectors in which this rank has its part alone."""
        total = torch.zeros(self.size, dtype=dtype, device=self.vector.device)
        total[self.own] = self.vector.to(dtype)
        return begin(total).then(lambda: self._take(total[self.own]))

    def _take(self, part: torch.Tensor) -> None:
        if part is not self.vector:
            self.vector.copy_(part)


class Use(NamedTuple):
    """A layer that is computed, forward or backward."""

    layer: int
    buckets: tuple[str, ...]
    fetched: tuple[str, ...]
    """Those that the layer before did not use."""


def buckets_by_layer(layout: Layout, stage: int) -> dict[int, tuple[str, ...]]:
    """Names of the buckets that a stage's layers take their weights from; some may have no parameters left."""
    model, held = layout.problem.model, layout.plan.stages[stage]
    found = {}
    for layer in range(held.first_layer, held.last_layer):
        name = layer_name(model, layer)
        experts = (name + EXPERT,) if layout.experts_apart(stage) > 1 and model.is_sparse(layer) else ()
        found[layer] = (name, *experts, *_tied_bucket(model, layer, apart=layout.tied_apart))
    return found


def _tied_bucket(model: Model, layer: int, *, apart: bool) -> tuple[str, ...]:
    if not model.tied_embeddings or model.family == "vit" or layer not in (0, model.layers - 1):
        return ()
    if apart:
        return ("tied",)
    return (layer_name(model, 0),) if layer else ()


def uses(actions: Sequence[Action], chunks: Sequence[Mapping[int, tuple[str, ...]]]) -> Iterator[Use]:
    """The layers that a worker computes in a step, one after the other, of its stages' (`buckets_by_layer`)."""
    before: tuple[str, ...] = ()
    for action in actions:
        layers = chunks[action.chunk]
        for layer in layers if action.kind == "F" else reversed(list(layers)):
            buckets = layers[layer]
            yield Use(layer, buckets, tuple(name for name in buckets if name not in before))
            before = buckets


class Sharding:
    """Parts that one rank sends and gets in the course of a step.

    Parameters
    ----------
    layout : Layout
    rank : int
    buckets : sequence of ShardedBucket
        In the order in which backward completes them.
    gradients, weights : PartExchange
    dtype : torch.dtype
        In which gradients travel.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        buckets: Sequence[ShardedBucket],
        gradients: PartExchange,
        weights: PartExchange,
        dtype: torch.dtype,
    ) -> None:
        self._rank, self._buckets, self._dtype = rank, {bucket.name: bucket for bucket in buckets}, dtype
        self._parted = {name: bucket for name, bucket in self._buckets.items() if bucket.zero == 3}
        """Those whose weights are whole only while they are used (ZeRO-3)."""
        self._gradients, self._weights = gradients, weights
        self._sent: tuple[torch.Tensor, list[Sending]] | None = None
        self._fetching: dict[str, list[tuple[slice, Callable[[], torch.Tensor]]]] = {}
        self._held: set[str] = set()
        self._at = 0
        self.most_passing_bytes = 0
        """Most bytes of whole weights, of those on their way, and of whole gradients at one time."""
        peers = sorted({owner for bucket in buckets for owner in bucket.split.owners})
        self._training: dict[int, list[Use]] = {}
        self._validation: dict[int, list[Use]] = {}
        self._uses = self._training
        """By peer, the layers that it computes in a step or in a round of validation."""
        self._backwards: dict[int, list[int]] = {}
        """By peer, the chunk of each of its backwards in a step."""
        self._chunk_of: dict[int, dict[str, int]] = {}
        """By peer, in which of its chunks it uses a bucket."""
        for peer in peers:
            stage, worker, _ = layout.plan.rank_places[peer]
            actions = worker_order(layout.plan, stage, worker)
            layers = [buckets_by_layer(layout, s) for s in layout.stages_of(peer)]
            self._training[peer] = list(uses(actions, layers))
            self._validation[peer] = list(uses([action for action in actions if action.kind == "F"], layers))
            self._chunk_of[peer] = {
                name: chunk for chunk, held in enumerate(layers) for names in held.values() for name in names
            }
            self._backwards[peer] = [action.chunk for action in actions if action.kind == "B"]

    def _shared(self, peer: int, *, zero: int = 2) -> list[ShardedBucket]:
        return [bucket for bucket in self._buckets.values() if peer in bucket.split.owners and bucket.zero >= zero]

    def begin_step(self) -> None:
        """Start to take gradients from the other owners and to send them weights."""
        for bucket in self._buckets.values():
            bucket.expect(
                sum(self._backwards[owner].count(self._chunk_of[owner][bucket.name]) for owner in bucket.split.owners)
            )
        for peer in self._training:
            if peer != self._rank:
                shared = self._shared(peer)
                chunk_of = self._chunk_of[peer]
                splits = [b.split for chunk in self._backwards[peer] for b in shared if chunk_of[b.name] == chunk]
                self._gradients.collect(
                    *(peer, splits, self._dtype),
                    lambda split, part: self._buckets[split.name].add(part),
                )
        for job in self._gradients.jobs:
            job.add_done_callback(self._pass_on)
        self._begin_weights(self._training)

    def begin_validation(self) -> None:
        """Start to send the other owners weights for a round of forwards."""
        self._begin_weights(self._validation)

    def _begin_weights(self, uses_by_peer: dict[int, list[Use]]) -> None:
        self._at, self._uses = 0, uses_by_peer
        for bucket in self._parted.values():
            bucket.renew()
        for peer in self._uses:
            if peer == self._rank:
                continue
            shared = {bucket.name: bucket for bucket in self._shared(peer, zero=3)}
            self._weights.serve(
                peer, [shared[name].given for use in self._uses[peer] for name in use.fetched if name in shared]
            )
        self._fetch(0)

    def _pass_on(self, job: Future[None]) -> None:
        error = job.exception()
        for bucket in self._buckets.values() if error is not None else ():
            bucket.fail(error)  # type: ignore[arg-type]

    def _fetch(self, at: int) -> None:
        """Ask for the weights of a use that those of the one before do not include."""
        mine = self._uses[self._rank]
        for name in mine[at].fetched if at < len(mine) else ():
            if name not in self._parted:
                continue
            bucket = self._parted[name]
            self._fetching[name] = [
                (
                    bucket.split.part(owner),
                    self._weights.post(owner, bucket.split.length(owner), bucket.whole_weights.dtype),
                )
                for owner in bucket.split.owners
                if owner != self._rank
            ]

    def enter(self, layer: int) -> None:
        """Have a layer's weights there, no longer those of the layer before, and the next one's on their way."""
        mine = self._uses[self._rank]
        # A layer without parameters at the start of the model has no backward.
        while mine[self._at].layer != layer:
            self._at += 1
            self._fetch(self._at)
        use = mine[self._at]
        for name in self._held - set(use.buckets):
            self._buckets[name].drop()
            self._held.remove(name)
        for name in use.fetched:
            if name in self._fetching:
                self._buckets[name].fill((part, arrive()) for part, arrive in self._fetching.pop(name))
                self._held.add(name)
        self._at += 1
        self._fetch(self._at)
        self._note_passing()

    def _note_passing(self) -> None:
        buckets = self._buckets.values()
        n_bytes = sum(bucket.whole_weights.untyped_storage().nbytes() for bucket in self._parted.values())
        n_bytes += sum(bucket.passing.nbytes for bucket in buckets if bucket.passing is not None)
        n_bytes += 0 if self._sent is None else self._sent[0].nbytes
        for name in self._fetching:
            bucket = self._buckets[name]
            n_bytes += (bucket.size - len(bucket.weights)) * bucket.whole_weights.element_size()
        self.most_passing_bytes = max(self.most_passing_bytes, n_bytes)

    def enter_backward(self, layer: int) -> None:
        """As `enter`, with room for the layer's gradients."""
        self.enter(layer)
        for name in self._uses[self._rank][self._at - 1].buckets:
            if name in self._buckets:
                self._buckets[name].open_gradient()
        self._note_passing()

    def scatter(self, bucket: ShardedBucket) -> None:
        """Hand the gradient of a micro-batch to its owners."""
        # One layer's gradient travels while the next one's is computed; more would only take memory.
        self._wait_sent()
        gradient = bucket.take_gradient().to(self._dtype)
        sendings = [
            self._gradients.send(owner, gradient[bucket.split.part(owner)])
            for owner in bucket.split.owners
            if owner != self._rank
        ]
        self._gradients.take(gradient[bucket.split.part(self._rank)], bucket.add)
        self._sent = gradient, sendings

    def _wait_sent(self) -> None:
        """Return when the gradient handed over last has left."""
        for sending in self._sent[1] if self._sent is not None else ():
            sending.wait()
        self._sent = None

    def end_schedule(self) -> None:
        """Drop the weights of the last layer; return when the others have all that they get from this rank."""
        for name in self._held:
            self._buckets[name].drop()
        self._held.clear()
        self._wait_sent()
        self._weights.finish()
        self._gradients.finish()

    def close(self) -> None:
        """End the threads."""
        self._weights.close()
        self._gradients.close()
