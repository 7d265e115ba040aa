"""One rank of a worker: executes the worker's actions of a step, in the plan's order.

The order is `polygon.domain.schedule.worker_order`, the list that the planner simulates. A worker holds a stage, or
several that micro-batches come back to (chunks).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from polygon_comm.exchange import ExchangeGroup
from polygon_comm.parameter_server import ServerGroup
from polygon_comm.reduction import SumGroup
from polygon_comm.sharding import PartExchange
from polygon_comm.tensor_group import TensorGroup
from polygon_comm.transport import Wires
from torch import nn
from torch.utils.checkpoint import checkpoint

from polygon.domain.schedule import Action, worker_order
from runners.data.samples import Samples, Shuffled, count_targets, positions_of
from runners.engine.additions import add_lora
from runners.engine.compilation import compiler_of
from runners.engine.context import part_of
from runners.engine.documents import Documents, documents_at
from runners.engine.experts import EXPERT, BalanceLoss
from runners.engine.float8 import forget, has_products
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
    tune,
    use_eight_bits,
)
from runners.engine.log import RunLog
from runners.engine.narrow_weights import NarrowWeights
from runners.engine.options import Options
from runners.engine.pretrained import Pretrained
from runners.engine.rank_layout import Layout
from runners.engine.ring_attention import check_ring
from runners.engine.stage_messages import StageMessages
from runners.engine.user_model import OwnModel
from runners.engine.zero_sharding import PartedBucket, ShardedBucket, Sharding

COMPUTE_DTYPE = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,  # but for the products of blocks (runners.engine.float8)
}


class WorkerGroups(NamedTuple):
    """Whom a rank works with on one micro-batch, beside the stages' neighbours."""

    tp: TensorGroup | None = None
    """Those with the other slices of its layers, for computing."""
    tp_sums: TensorGroup | None = None
    """The same, for the thread that sums."""
    context: ExchangeGroup | None = None
    """Those with the other parts of the sequences."""
    experts: Mapping[int, ExchangeGroup] = {}
    """Those with the other experts of a stage, by its number; where all are here, none."""


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
        self.layout, self.rank, self.wires, self.samples, self.log = layout, rank, wires, samples, log
        self.plan, model, batch = layout.plan, layout.problem.model, layout.problem.batch
        self._numbers = layout.stages_of(rank)
        """Of the stages that are here, by chunk."""
        self.stages = [self.plan.stages[s] for s in self._numbers]
        self.place = layout.tensor_ranks(rank).index(rank)
        """Which slices of the layers are here."""
        self.is_last = self._numbers[-1] == len(self.plan.stages) - 1
        """Whether the model's last layer is here."""
        _, worker, _ = self.plan.rank_places[rank]
        self.actions = worker_order(self.plan, self._numbers[0], worker)
        self.shares = [int(self.plan.shares(s)[worker]) for s in self._numbers]
        """Micro-batches of a step, by chunk."""
        self._last_backwards = {a.chunk: a for a in self.actions if a.kind == "B"}
        self.executed: list[Action] = []
        self.dtype = COMPUTE_DTYPE[batch.precision]
        self.layers = self._build(options, own_model)
        self._own = own_model is not None
        """Whether the layers are a user's, whose weights keep their format but for those of products."""
        self.balance = BalanceLoss(weight=options.balance)
        self.eight_bits = batch.precision == "fp8" and has_products(wires.device)
        """Whether products of blocks have 8 bits."""
        ring = layout.problem.runtime.context == "ring"
        if ring and self.context is not None:
            check_ring(wires.device, self.dtype)
        for number, stage in zip(self._numbers, self.stages, strict=True):
            held = [self.layers[str(layer)] for layer in range(*stage.layers)]
            attach_groups(held, self.context, self.experts.get(number), self.balance, ring=ring)
            if self.eight_bits:
                use_eight_bits(held, keeps=stage.zero < 3)
            again = held[: stage.recomputed_until - stage.first_layer] if stage.recompute == "selective" else []
            for module in (part for layer in again for part in layer.modules()):
                if isinstance(module, Attention):
                    module.recompute_core = True
        if options.lora is not None:
            add_lora(self.layers, model, options.lora, options.seed, self.tp)
        apart = self.tp is not None or self.context is not None or any(stage.zero == 3 for stage in self.stages)
        tune(
            self.layers,
            compiler=compiler_of(layout.problem.runtime, options),
            loss_chunk=options.loss_chunk,
            apart=apart,
        )
        self.global_batch = self.plan.micro_batches * self.plan.micro_batch_size
        self.targets_per_sample = 1 if model.family == "vit" or own_model is not None else batch.seq_len
        self.loss_scale = 1.0
        """One over the targets of the step's global batch."""
        self.overflow_scale = 1.0
        """Factor on the loss, and so on all gradients, that keeps small fp16 gradients from vanishing."""
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=wires.device)
        tokens = batch.seq_len // layout.worker_of(rank).cp
        self._shape = (self.plan.micro_batch_size, tokens, model.hidden_size)
        self._layer_shapes = None if own_model is None else own_model.shapes
        self.step_flops = None if own_model is None else own_model.micro_batch_flops * self.plan.micro_batches
        self.messages = StageMessages(
            *(layout, rank, wires, self.tp), dtype=self.dtype, shape_of=self._shape_of, log=log
        )
        self._held: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        self._first_sample = 0
        self._lookahead = options.lookahead
        buckets, dtype = self._buckets(sums), _gradient_dtype(batch.gradient_precision)
        self._narrow = NarrowWeights(self.layers.values(), buckets, self.dtype)
        self.reducer = Reducer(buckets, dtype, log, wires.accelerator, self._pass_gradient)
        sharded = [bucket for bucket in buckets if isinstance(bucket, ShardedBucket)]
        self._sharding: Sharding | None = None
        if sharded and parts is not None:
            self._sharding = Sharding(layout, rank, sharded, *parts, dtype)

    def _build(self, options: Options, own_model: OwnModel | None) -> nn.ModuleDict:
        """The layers of all stages that are here, by their number (as text)."""
        model, built = self.layout.problem.model, nn.ModuleDict()
        pretrained = None
        if own_model is None and options.weights is not None:
            pretrained = Pretrained(options.weights, model)
        for number, stage in zip(self._numbers, self.stages, strict=True):
            held = range(stage.first_layer, stage.last_layer)
            # Where weights will be split, they need not all fit the device before they are.
            place = torch.device("cpu") if self.layout.zero_of([number]) == 3 else self.wires.device
            if own_model is None:
                by_tokens = stage.sequence_parallel
                experts = self.experts.get(number)
                layers = build_layers(
                    *(model, held, options.seed, place, self.tp, pretrained, experts),
                    by_tokens=by_tokens,
                    whole_experts=self.layout.whole_experts(number),
                )
            else:
                layers = own_model.build(held, place)
            built.update(dict(layers.items()))
        if pretrained is not None:
            self.log.write("weights", folder=str(options.weights), read_bytes=pretrained.read_bytes)
        return built

    def _shape_of(self, action: Action) -> tuple[int, ...]:
        """Of what is received before an action."""
        if self._layer_shapes is None:
            return self._shape
        stage = self.stages[action.chunk]
        return self._layer_shapes[stage.last_layer - 1 if action.kind == "B" else stage.first_layer - 1]

    def parameters(self) -> dict[str, nn.Parameter]:
        """The trained parameters here under their names in the full model; one that two layers share is named once."""
        model = self.layout.problem.model
        named: dict[str, nn.Parameter] = {}
        for layer, module in self.layers.items():
            for name, parameter in module.named_parameters():
                if parameter.requires_grad and not any(parameter is known for known in named.values()):
                    named[f"{layer_name(model, int(layer))}.{name}"] = parameter
        return named

    def _buckets(self, sums: dict[str, SumGroup]) -> list[Bucket]:
        """One a layer, last layer first, then the weight that first and last stage share."""
        model, layout, last = self.layout.problem.model, self.layout, len(self.plan.stages) - 1
        named, buckets = self.parameters(), []
        tied: list[nn.Parameter] = []
        if layout.tied_apart:
            tied = [named.pop(name) for name in (TIED_WEIGHT, TIED_COPY) if name in named]
        for chunk, number in reversed(list(enumerate(self._numbers))):
            stage = self.plan.stages[number]
            for layer in reversed(range(stage.first_layer, stage.last_layer)):
                prefix = layer_name(model, layer)
                parameters = {name: p for name, p in named.items() if name.startswith(f"{prefix}.")}
                if layout.experts_apart(number) > 1 and model.is_sparse(layer):
                    apart = {name: parameters.pop(name) for name in list(parameters) if EXPERT in name}
                    if apart:
                        buckets.append(self._bucket(f"{prefix}{EXPERT}", apart, "experts", [number], chunk, sums))
                if parameters:
                    buckets.append(self._bucket(prefix, parameters, "stage", [number], chunk, sums))
        if tied:
            chunk = self._numbers.index(0 if 0 in self._numbers else last)
            buckets.append(self._bucket("tied", {TIED_WEIGHT: tied[0]}, "tied", [0, last], chunk, sums))
        return buckets

    def _bucket(
        self,
        name: str,
        parameters: dict[str, nn.Parameter],
        kind: str,
        stages: list[int],
        chunk: int,
        sums: dict[str, SumGroup],
    ) -> Bucket:
        whole = self.layout.sums_whole(stages)
        # Whole experts are of this rank alone, whatever the others of its tensor-parallel group have.
        tp_sums = None if kind == "experts" and self.layout.whole_experts(stages[0]) else self._tp_sums
        size = 1 if tp_sums is None else tp_sums.size
        dims = {key: dim for key in parameters if (dim := shard_dim(self.layout.problem.model, key, size)) is not None}
        group = self.layout.group_of(self.rank, kind, stages)
        zero, sum_group = self.layout.zero_of(stages), sums.get(group)
        owners, copies = (sums.get(f"{kind}/{group}") for kind in ("shards", "parts"))
        owners = owners or sum_group
        bucket: Bucket
        common, device = (name, parameters, sum_group, tp_sums, dims), self.wires.device
        divided = zero if sum_group is not None and owners is not None and owners.near_size > 1 else 0
        parts = divided == 3 or (divided > 0 and not self._own)
        dtype = self.dtype if parts else torch.float32
        if divided >= 2:
            assert owners is not None
            bucket = ShardedBucket(
                *common, device=device, accelerator=self.wires.accelerator, zero=zero, owners=owners,
                copies=copies, dtype=dtype,
            )  # fmt: skip
        elif dtype != torch.float32:
            assert owners is not None
            bucket = PartedBucket(*common, device=device, zero=zero, owners=owners, dtype=dtype)
        else:
            bucket = Bucket(*common, whole=whole, device=device)
            bucket.zero, bucket.owners = min(zero, 1), owners
        members = self.layout.groups[group].ranks
        bucket.chunk = chunk
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
        """Tokens that this rank computes in a step, in its first stage."""
        return self.shares[0] * self._shape[0] * self._shape[1]

    def take_exchanged_bytes(self) -> dict[str, int]:
        """Bytes sent to ranks with other parts of the sequences or other experts since the last call."""
        sent: dict[str, int] = {}
        groups = [("context", self.context), *(("experts", group) for group in set(self.experts.values()))]
        for name, group in groups:
            if group is not None:
                sent[name], group.sent_bytes = sent.get(name, 0) + group.sent_bytes, 0
        return sent

    def begin(self, first_step: int, steps: int, first_sample: int) -> None:
        """Prepare to run the steps from `first_step` to `steps` on samples from `first_sample` on."""
        self.messages.begin(self.actions, range(first_step, steps))
        self._first_sample = first_sample - first_step * self.global_batch

    def _samples_of(self, step: int, micro_batch: int) -> range:
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

    def _forward(self, step: int, action: Action) -> None:
        inputs = self.messages.receive(step, action)
        if inputs is not None:
            inputs.requires_grad_()
        with self.log.interval("compute", str(action)):
            numbers = self._samples_of(step, action.micro_batch)
            positions = positions_of(self.samples, numbers)
            x = self._run_layers(action.chunk, inputs, lambda: self.samples.batch(numbers), positions)
        self.messages.send(step, action, x)
        self._held[action.micro_batch, action.chunk] = (inputs, x)

    def _run_layers(
        self,
        chunk: int,
        inputs: torch.Tensor | None,
        draw: Callable[[], tuple[torch.Tensor, torch.Tensor]],
        positions: torch.Tensor | None,
    ) -> torch.Tensor:
        """A stage's layers on what came from the stage before, or on samples; the last stage adds up the loss.

        `positions`: see `positions_of`.
        """
        accelerator, stage = self.wires.accelerator, self.stages[chunk]
        has_loss = stage.last_layer == self.layout.problem.model.layers
        with self._precision():
            targets: torch.Tensor | None = None
            if inputs is None or has_loss:
                drawn, targets = map(self._part, draw())
            x = accelerator.from_host(drawn) if inputs is None else inputs
            # Layers of others take one tensor: more is given only where samples hold several documents.
            held: tuple[Documents, ...] = ()
            if positions is not None:
                held = (documents_at(accelerator.from_host(positions), causal=self.layout.problem.model.causal),)
            for layer in range(stage.first_layer, stage.last_layer):
                module, given = self.layers[str(layer)], x
                if self._sharding is not None:
                    self._sharding.enter(layer)
                if layer == self.layout.problem.model.layers - 1 and targets is not None:
                    x = module(x, accelerator.from_host(targets))
                elif stage.recompute == "full" and layer < stage.recomputed_until and x.requires_grad:
                    x = checkpoint(module, x, *held, use_reentrant=False).to(self.dtype)
                else:
                    x = module(x, *held).to(self.dtype)
                if self._sharding is not None and x.requires_grad:
                    # Hooks of one tensor are called in their order: a layer that returns what it took (nn.Identity)
                    # would enter its backward after the layer before it.
                    x = x.view_as(x) if x is given else x
                    x.register_hook(partial(self._enter_backward, layer))
            if has_loss:
                self.loss_sum += x.detach()
        return x

    @torch.no_grad()
    def validate(self, samples: Shuffled) -> torch.Tensor:
        """Forward of all samples, each once: the sum of their losses and how many were right (of this rank's)."""
        self.loss_sum.zero_()
        forget(self.layers.values())
        head = self.layers[str(self.layout.problem.model.layers - 1)] if self.is_last else None
        correct = torch.zeros((), dtype=torch.int64, device=self.wires.device)
        if isinstance(head, Head):
            head.correct = correct
        with self._narrow.in_place():
            self._validate_all(samples)
        if isinstance(head, Head):
            head.correct = None
        return torch.stack([self.loss_sum, correct.to(torch.float64)])

    def _validate_all(self, samples: Shuffled) -> None:
        """Forward of all samples, in rounds."""
        # As many micro-batches as in a step, on the same routes; the last round is filled with blank samples.
        for round_, first in enumerate(range(0, len(samples), self.global_batch)):
            if self._sharding is not None:
                self._sharding.begin_validation()
            for action in self.actions:
                if action.kind == "F":
                    self._validate(round_, first, action._replace(kind="V"), samples)
            if self._sharding is not None:
                self._sharding.end_schedule()
            self.messages.finish_sends()

    def _validate(self, round_: int, first: int, action: Action, samples: Shuffled) -> None:
        """Forward of a micro-batch of a round's samples, of which it has those from `first` on."""
        size = self.plan.micro_batch_size
        self.on_action(f"{action} of a validation")
        self.messages.post_receive(round_, action)
        inputs = self.messages.receive(round_, action)
        with self.log.interval("validate", str(action)):
            here = first + action.micro_batch * size
            positions = samples.positions_or_fill(here, size)
            x = self._run_layers(action.chunk, inputs, lambda: samples.batch_or_fill(here, size), positions)
        self.messages.send(round_, action, x)

    def _enter_backward(self, layer: int, gradient: torch.Tensor) -> None:
        """Called when the gradient of a layer's output is there."""
        assert self._sharding is not None
        self._sharding.enter_backward(layer)

    def _pass_gradient(self, bucket: Bucket) -> None:
        """Called when a bucket's gradient of a micro-batch is there."""
        if self._sharding is not None and isinstance(bucket, ShardedBucket):
            self._sharding.scatter(bucket)

    def _backward(self, step: int, action: Action) -> None:
        gradient = self.messages.receive(step, action)
        inputs, output = self._held.pop((action.micro_batch, action.chunk))
        with self.log.interval("compute", str(action)):
            last = self._lookahead > 0 and self._last_backwards[action.chunk] == action
            self.reducer.begin_backward(action.chunk, last=last)
            if not output.requires_grad:
                pass  # nothing is trained here, nor before
            elif gradient is None:
                (output * (self.loss_scale * self.overflow_scale)).backward()
            else:
                output.backward(gradient)
            self.reducer.end_backward()
        if inputs is not None:
            assert inputs.grad is not None
            self.messages.send(step, action, inputs.grad)

    def run_schedule(self, step: int) -> None:
        """Forward and backward of all micro-batches of this worker; sums of finished layers start on the way."""
        self.loss_sum.zero_()
        forget(self.layers.values())
        first = self._first_sample + step * self.global_batch
        everything = range(first, first + self.global_batch)
        self.loss_scale = 1.0 / max(1, count_targets(self.samples, everything, self.targets_per_sample))
        self.balance.scale = self.loss_scale * self.overflow_scale
        self.executed = []
        self.messages.packing_error.clear()
        if self._sharding is not None:
            self._sharding.begin_step()
        with self._narrow.in_place():
            for action in self.actions:
                self.messages.post(self._lookahead)
                self.executed.append(action)
                self.on_action(f"{action} of step {step}")
                (self._forward if action.kind == "F" else self._backward)(step, action)
        self.messages.post(self._lookahead)
        self.reducer.finish()
        if self._sharding is not None:
            self._sharding.end_schedule()

    @property
    def passing_bytes(self) -> int:
        """Most bytes of weights and gradients that were whole here for a while, though they are split."""
        return 0 if self._sharding is None else self._sharding.most_passing_bytes

    def close(self) -> None:
        """End the threads."""
        self.messages.close()
        self.reducer.close()
        if self._sharding is not None:
            self._sharding.close()


def _gradient_dtype(precision: str) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
