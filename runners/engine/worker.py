"""One worker of a stage: executes its actions of a step, in the plan's order.

The order is `polygon.domain.schedule.worker_order`, the list that the planner simulates. Receives are posted some
actions ahead, over the border of the step too; sends are not waited for.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from polygon_comm.compression import Codec, activation_codec, relative_error
from polygon_comm.exchange import ExchangeGroup
from polygon_comm.parameter_server import ServerGroup
from polygon_comm.reduction import SumGroup
from polygon_comm.sharding import PartExchange
from polygon_comm.tensor_group import TensorGroup
from polygon_comm.transport import Receipt, Sending, Wires
from torch import nn
from torch.utils.checkpoint import checkpoint

from polygon.domain.schedule import Action, worker_order
from runners.engine.context import part_of
from runners.engine.data import Samples, Shuffled, count_targets
from runners.engine.experts import EXPERT, BalanceLoss
from runners.engine.gradients import Bucket, Reducer
from runners.engine.layers import (
    TIED_COPY,
    TIED_WEIGHT,
    Attention,
    Head,
    attach_groups,
    build_layers,
    layer_name,
    shard_dim,
)
from runners.engine.layout import MESSAGES, Layout
from runners.engine.log import RunLog
from runners.engine.options import Options
from runners.engine.own_model import OwnModel
from runners.engine.pretrained import Pretrained
from runners.engine.sequence import TOKENS
from runners.engine.sharding import ShardedBucket, Sharding

COMPUTE_DTYPE = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class WorkerGroups(NamedTuple):
    """Whom a rank works with on one micro-batch, beside the stages' neighbours."""

    tp: TensorGroup | None = None
    """Those with the other slices of its layers, for computing."""
    tp_sums: TensorGroup | None = None
    """The same, for the thread that sums."""
    context: ExchangeGroup | None = None
    """Those with the other parts of the sequences."""
    experts: ExchangeGroup | None = None
    """Those with the other experts."""


class StageWorker:
    """The layers of a stage on one rank, and what is under way between it and its neighbours."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        wires: Wires,
        sums: dict[str, SumGroup],
        groups: WorkerGroups,
        samples: Samples,
        options: Options,
        log: RunLog,
        parts: tuple[PartExchange, PartExchange] | None = None,
        own_model: OwnModel | None = None,
        on_action: Callable[[str], None] = lambda action: None,
    ) -> None:
        self.on_action = on_action
        self.tp, self._tp_sums, self.context, self.experts = groups
        self._by_tokens: TensorGroup | None = None
        """Ranks between which activations are split by tokens."""
        if self.tp is not None and options.sequence_parallel:
            self.tp.by_tokens, self._by_tokens = True, self.tp
        self.layout, self.rank, self.wires, self.samples, self.log = layout, rank, wires, samples, log
        self.plan, model, batch = layout.plan, layout.problem.model, layout.problem.batch
        self.stage, self.worker, _ = self.plan.rank_places[rank]
        self.place = layout.tensor_ranks(rank).index(rank)
        """Which slices of the layers are here."""
        self.part = layout.context_ranks(rank).index(rank)
        """Which part of the sequences is here."""
        self.is_first, self.is_last = self.stage == 0, self.stage == len(self.plan.stages) - 1
        self.actions = worker_order(self.plan, self.stage, self.worker)
        self.executed: list[Action] = []
        self.dtype = COMPUTE_DTYPE[batch.precision]
        stage = self.plan.stages[self.stage]
        self._zero = layout.zero_of([self.stage])
        # Where weights will be split, they need not all fit the device before they are.
        place = torch.device("cpu") if self._zero == 3 else wires.device
        held = range(stage.first_layer, stage.last_layer)
        if own_model is None:
            pretrained = None if options.weights is None else Pretrained(options.weights, model)
            self.layers = build_layers(model, held, options.seed, place, self.tp, pretrained)
        else:
            self.layers = own_model.build(held, place)
        self.balance = BalanceLoss(weight=options.balance)
        attach_groups(self.layers, self.context, self.experts, self.balance)
        self.global_batch = self.plan.micro_batches * self.plan.micro_batch_size
        self.targets_per_sample = 1 if model.family == "vit" or own_model is not None else batch.seq_len
        self.loss_scale = 1.0
        """One over the targets of the step's global batch."""
        self.overflow_scale = 1.0
        """Factor on the loss, and so on all gradients, that keeps small fp16 gradients from vanishing."""
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=wires.device)
        self._shape = (self.plan.micro_batch_size, batch.seq_len // layout.context, model.hidden_size)
        self._shapes: dict[str, tuple[int, ...]] = dict.fromkeys(MESSAGES, self._shape)
        """Of what is received before a forward and before a backward."""
        self.step_flops: float | None = None
        if own_model is not None:
            before, after = own_model.shapes[stage.first_layer - 1], own_model.shapes[stage.last_layer - 1]
            self._shapes = {"F": before, "B": after, "V": before}
            self.step_flops = own_model.micro_batch_flops * self.plan.micro_batches
        self._recompute = stage.recompute == "full"
        for module in self.layers.modules():
            if isinstance(module, Attention):
                module.recompute_core = stage.recompute == "selective"
        self.packing_error: dict[str, float] = {}
        """Relative error of the step's first packed message of each kind."""
        self._held: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}
        self._sendings: deque[tuple[int, Sending]] = deque()
        self._posted: dict[tuple[int, Action], Receipt] = {}
        self._ahead: Iterator[tuple[int, Action]] = iter(())
        self._first_sample = 0
        self._lookahead = options.lookahead
        buckets, dtype = self._buckets(sums), _gradient_dtype(batch.gradient_precision)
        self.reducer = Reducer(buckets, dtype, log, self._pass_gradient)
        sharded = [bucket for bucket in buckets if isinstance(bucket, ShardedBucket)]
        self._sharding: Sharding | None = None
        if sharded and parts is not None:
            self._sharding = Sharding(layout, rank, sharded, *parts, dtype)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The stage's parameters under their names in the full model; one that two layers share is named once."""
        model = self.layout.problem.model
        named: dict[str, nn.Parameter] = {}
        for layer, module in self.layers.items():
            for name, parameter in module.named_parameters():
                if not any(parameter is known for known in named.values()):
                    named[f"{layer_name(model, int(layer))}.{name}"] = parameter
        return named

    def _buckets(self, sums: dict[str, SumGroup]) -> list[Bucket]:
        """One a layer, last layer first, then the weight that first and last stage share."""
        model, layout, last = self.layout.problem.model, self.layout, len(self.plan.stages) - 1
        named, buckets = self.parameters(), []
        tied: list[nn.Parameter] = []
        if layout.tied_apart:
            tied = [named.pop(name) for name in (TIED_WEIGHT, TIED_COPY) if name in named]
        for layer in reversed(list(self.layers)):
            prefix = layer_name(model, int(layer))
            parameters = {name: p for name, p in named.items() if name.startswith(f"{prefix}.")}
            if layout.expert > 1 and model.layer_kind(int(layer)) == "moe":
                apart = {name: parameters.pop(name) for name in list(parameters) if EXPERT in name}
                buckets.append(self._bucket(f"{prefix}{EXPERT}", apart, "experts", [self.stage], sums))
            if parameters:
                buckets.append(self._bucket(prefix, parameters, "stage", [self.stage], sums))
        if tied:
            buckets.append(self._bucket("tied", {TIED_WEIGHT: tied[0]}, "tied", [0, last], sums))
        return buckets

    def _bucket(
        self,
        name: str,
        parameters: dict[str, nn.Parameter],
        kind: str,
        stages: list[int],
        sums: dict[str, SumGroup],
    ) -> Bucket:
        whole = self.layout.sums_whole(stages)
        size = 1 if self.tp is None else self.tp.size
        dims = {key: dim for key in parameters if (dim := shard_dim(self.layout.problem.model, key, size)) is not None}
        group = self.layout.group_of(self.rank, kind, stages)
        zero, sum_group = self.layout.zero_of(stages), sums.get(group)
        bucket: Bucket
        if zero >= 2 and sum_group is not None and sum_group.near_size > 1:
            bucket = ShardedBucket(
                *(name, parameters, sum_group, self._tp_sums, dims),
                device=self.wires.device,
                rank=self.rank,
                zero=zero,
            )
        else:
            bucket = Bucket(name, parameters, sum_group, self._tp_sums, dims, whole=whole, device=self.wires.device)
            bucket.zero = min(zero, 1)
        members = self.layout.groups[group].ranks
        bucket.leads = self.rank in self.layout.tensor_ranks(members[0])
        bucket.writers = members
        if bucket.group is not None:
            bucket.fraction = self.layout.local_fraction(self.rank, group)
        if isinstance(bucket.group, ServerGroup):
            central = self.plan.reduction == "central-server"
            bucket.parts = bucket.group.parts(len(bucket.vector), central=central)
        return bucket

    @property
    def tokens(self) -> int:
        """Tokens that this rank computes in a step."""
        return len(self.actions) // 2 * self._shape[0] * self._shape[1]

    def take_exchanged_bytes(self) -> dict[str, int]:
        """Bytes sent to ranks with other parts of the sequences or other experts since the last call."""
        sent = {}
        for name, group in (("context", self.context), ("experts", self.experts)):
            if group is not None:
                sent[name], group.sent_bytes = group.sent_bytes, 0
        return sent

    def begin(self, first_step: int, steps: int, first_sample: int) -> None:
        """Prepare to run the steps from `first_step` to `steps` on samples from `first_sample` on."""
        self._ahead = self._receives(first_step, steps)
        self._first_sample = first_sample - first_step * self.global_batch

    def _receives(self, first_step: int, steps: int) -> Iterator[tuple[int, Action]]:
        for step in range(first_step, steps) if self.place == 0 else ():
            for action in self.actions:
                if not (self.is_first if action.kind == "F" else self.is_last):
                    yield step, action

    def _peer(self, action: Action) -> int:
        """Who sends what this action needs; the other way round, who needs what the opposite action makes."""
        return self.layout.peer(action.micro_batch, self.stage + (1 if action.kind == "B" else -1), self.part)

    def _codec(self, source: int, target: int, kind: str, shape: Sequence[int]) -> Codec:
        use = self.plan.link_use(self.layout.region_of[source], self.layout.region_of[target])
        return activation_codec(use.activation_gradients if kind == "B" else use.activations, shape)

    def _post(self, count: int) -> None:
        """Post receives until so many are posted."""
        while len(self._posted) < count and (wanted := next(self._ahead, None)) is not None:
            self._post_receive(*wanted)

    def _post_receive(self, step: int, action: Action) -> None:
        """Post the receive of what lets an action start."""
        peer, shape = self._peer(action), self._shapes[action.kind]
        n_bytes = self._codec(peer, self.rank, action.kind, shape).payload_bytes(math.prod(shape), self.dtype)
        tag = self.layout.tag(step, action.kind, action.micro_batch)
        self._posted[step, action] = self.wires.post_receive(peer, tag, n_bytes)

    def _receive(self, step: int, action: Action) -> torch.Tensor:
        start_s = time.time()
        with self.log.interval("wait", f"recv {action}"):
            if self.place == 0:
                self._post(1)
                payload = self._posted.pop((step, action)).wait()
                self.log.waited_s[str(action)] = start_s, time.time()
                shape = self._shapes[action.kind]
                codec = self._codec(self._peer(action), self.rank, action.kind, shape)
                received = codec.decompress(payload, shape, self.dtype)
            else:
                received = torch.empty(self._shapes[action.kind], dtype=self.dtype, device=self.wires.device)
            if self.tp is not None:
                self.tp.broadcast_(received)
                self.log.waited_s[str(action)] = start_s, time.time()
        return received if self._by_tokens is None else self._by_tokens.part(received, TOKENS).clone()

    def _send(self, step: int, kind: str, micro_batch: int, tensor: torch.Tensor) -> None:
        """Send what lets the action of that kind start on the neighbouring stage (a worker's first rank does)."""
        if self._by_tokens is not None:
            tensor = self._by_tokens.gather(tensor.detach(), TOKENS)
        if self.place:
            return
        peer = self.layout.peer(micro_batch, self.stage + (-1 if kind == "B" else 1), self.part)
        with self.log.interval("send", f"send {kind}{micro_batch}"):
            codec = self._codec(self.rank, peer, kind, tensor.shape)
            payload = codec.compress(tensor)
            self.log.handed_s[f"{kind}{micro_batch}"] = time.time()
            self._sendings.append((step, self.wires.send(peer, self.layout.tag(step, kind, micro_batch), payload)))
            what = "activation_gradients" if kind == "B" else "activations"
            # One message of a kind a step is measured: unpacking all of them again would cost as much as packing.
            if codec.name != "none" and what not in self.packing_error:
                self.packing_error[what] = relative_error(codec, payload, tensor)

    def _numbers(self, step: int, micro_batch: int) -> range:
        size = self.plan.micro_batch_size
        first = self._first_sample + step * self.global_batch + micro_batch * size
        return range(first, first + size)

    def _part(self, drawn: torch.Tensor) -> torch.Tensor:
        """Of inputs or targets, this rank's part of the sequences."""
        return drawn if self.context is None else part_of(drawn, self.context)

    def _precision(self) -> AbstractContextManager:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.wires.device.type, dtype=self.dtype)

    def _forward(self, step: int, micro_batch: int) -> None:
        inputs = None if self.is_first else self._receive(step, Action("F", micro_batch)).requires_grad_()
        with self.log.interval("compute", f"F{micro_batch}"):
            x = self._run_layers(inputs, lambda: self.samples.batch(self._numbers(step, micro_batch)))
        if not self.is_last:
            self._send(step, "F", micro_batch, x)
        self._held[micro_batch] = (inputs, x)

    def _run_layers(
        self, inputs: torch.Tensor | None, draw: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """The stage's layers on what came from the stage before, or on samples; the last stage adds up the loss."""
        device = self.wires.device
        with self._precision():
            targets: torch.Tensor | None = None
            if self.is_first or self.is_last:
                drawn, targets = map(self._part, draw())
            x = drawn.to(device) if inputs is None else inputs
            for layer, module in self.layers.items():
                if self._sharding is not None:
                    self._sharding.enter(int(layer))
                if int(layer) == self.layout.problem.model.layers - 1 and targets is not None:
                    x = module(x, targets.to(device))
                elif self._recompute and x.requires_grad:
                    x = checkpoint(module, x, use_reentrant=False).to(self.dtype)
                else:
                    x = module(x).to(self.dtype)
                if self._sharding is not None and x.requires_grad:
                    x.register_hook(partial(self._enter_backward, int(layer)))
            if self.is_last:
                self.loss_sum += x.detach()
        return x

    @torch.no_grad()
    def validate(self, samples: Shuffled) -> torch.Tensor:
        """Forward of all samples, each once: the sum of their losses and how many were right (of this rank's)."""
        self.loss_sum.zero_()
        head = self.layers[str(self.layout.problem.model.layers - 1)] if self.is_last else None
        correct = torch.zeros((), dtype=torch.int64, device=self.wires.device)
        if isinstance(head, Head):
            head.correct = correct
        # As many micro-batches as in a step, on the same routes; the last round is filled with blank samples.
        for first in range(0, len(samples), self.global_batch):
            if self._sharding is not None:
                self._sharding.begin_validation()
            for action in self.actions:
                if action.kind == "F":
                    self._validate(first, Action("V", action.micro_batch), samples)
            if self._sharding is not None:
                self._sharding.end_schedule()
            while self._sendings:
                self._sendings.popleft()[1].wait()
        if isinstance(head, Head):
            head.correct = None
        return torch.stack([self.loss_sum, correct.to(torch.float64)])

    def _validate(self, first: int, action: Action, samples: Shuffled) -> None:
        """Forward of a micro-batch of the samples from `first` on."""
        size, round_ = self.plan.micro_batch_size, first // self.global_batch
        self.on_action(f"{action} of a validation")
        inputs = None
        if not self.is_first:
            if self.place == 0:
                self._post_receive(round_, action)
            inputs = self._receive(round_, action)
        with self.log.interval("validate", str(action)):
            x = self._run_layers(inputs, lambda: samples.batch_or_fill(first + action.micro_batch * size, size))
        if not self.is_last:
            self._send(round_, "V", action.micro_batch, x)

    def _enter_backward(self, layer: int, gradient: torch.Tensor) -> None:
        """Called when the gradient of a layer's output is there."""
        assert self._sharding is not None
        self._sharding.enter_backward(layer)

    def _pass_gradient(self, bucket: Bucket) -> None:
        """Called when a bucket's gradient of a micro-batch is there."""
        if self._sharding is not None and isinstance(bucket, ShardedBucket):
            self._sharding.scatter(bucket)

    def _backward(self, step: int, micro_batch: int) -> None:
        gradient = None if self.is_last else self._receive(step, Action("B", micro_batch))
        inputs, output = self._held.pop(micro_batch)
        with self.log.interval("compute", f"B{micro_batch}"):
            last = self._lookahead > 0 and self.actions[-1] == Action("B", micro_batch)
            self.reducer.begin_backward(last=last)
            if gradient is None:
                (output * (self.loss_scale * self.overflow_scale)).backward()
            else:
                output.backward(gradient)
            self.reducer.end_backward()
        if inputs is not None:
            assert inputs.grad is not None
            self._send(step, "B", micro_batch, inputs.grad)

    def run_schedule(self, step: int) -> None:
        """Forward and backward of all micro-batches of this worker; sums of finished layers start on the way."""
        self.loss_sum.zero_()
        first = self._first_sample + step * self.global_batch
        everything = range(first, first + self.global_batch)
        self.loss_scale = 1.0 / max(1, count_targets(self.samples, everything, self.targets_per_sample))
        self.balance.scale = self.loss_scale * self.overflow_scale
        self.executed = []
        self.packing_error.clear()
        if self._sharding is not None:
            self._sharding.begin_step()
        for action in self.actions:
            self._post(self._lookahead)
            self.executed.append(action)
            self.on_action(f"{action} of step {step}")
            (self._forward if action.kind == "F" else self._backward)(step, action.micro_batch)
        self._post(self._lookahead)
        self.reducer.finish()
        if self._sharding is not None:
            self._sharding.end_schedule()

    def finish_sends(self, before_step: int) -> None:
        """Wait for the messages of earlier steps.

        Those of the step before the current one never wait for anything that comes after: no circle can form.
        """
        while self._sendings and self._sendings[0][0] < before_step:
            self._sendings.popleft()[1].wait()

    @property
    def passing_bytes(self) -> int:
        """Most bytes of weights and gradients that were whole here for a while, though they are split."""
        return 0 if self._sharding is None else self._sharding.most_passing_bytes

    def close(self) -> None:
        """End the threads."""
        self.reducer.close()
        if self._sharding is not None:
            self._sharding.close()


def _gradient_dtype(precision: str) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
