"""Messages between a worker and its neighbours in other stages: posted ahead, packed, sent without waiting.

Receives are posted in the order of this worker's actions. On a pair of workers that is the order in which the other
one sends, because both lists are parts of one order of the whole step (`polygon.domain.schedule`): NCCL, which has no
tags, needs that.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from polygon_comm.compression import Codec, activation_codec, relative_error
from polygon_comm.tensor_group import TensorGroup
from polygon_comm.transport import Receipt, Sending, Wires

from polygon.domain.schedule import Action
from runners.engine.log import RunLog
from runners.engine.rank_layout import AHEAD_BYTES, FEWEST_AHEAD, Layout
from runners.engine.sequence import TOKENS


class StageMessages:
    """What one rank receives from, and sends to, the stages before and after its own.

    Parameters
    ----------
    layout : Layout
    rank : int
    wires : Wires
    tp : TensorGroup or None
        Whose first rank receives and sends for all of it.
    dtype : torch.dtype
        Of activations and their gradients.
    shape_of : callable
        Shape of what lets an action start.
    log : RunLog
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        wires: Wires,
        tp: TensorGroup | None,
        *,
        dtype: torch.dtype,
        shape_of: Callable[[Action], Sequence[int]],
        log: RunLog,
    ) -> None:
        self._layout, self._rank, self._wires, self._tp = layout, rank, wires, tp
        self._dtype, self._shape_of, self._log = dtype, shape_of, log
        self._talks = tp is None or tp.place == 0
        self._posted: dict[tuple[int, Action], Receipt] = {}
        self._ahead: Iterator[tuple[int, Action]] = iter(())
        self._posted_bytes = 0
        self._wanted: tuple[int, Action] | None = None
        """The next to be posted."""
        self._sent = ThreadPoolExecutor(1, thread_name_prefix="sent")
        """Waits until messages have left, so that they do not take memory until the end of the step."""
        self._fetched = wires.accelerator.threads(1, "fetched") if wires.accelerator.later else None
        """Fetches messages from a device and sends them, where the device does not send itself."""
        self._sendings: deque[tuple[int, Future[None] | Sending]] = deque()
        self.packing_error: dict[str, torch.Tensor] = {}
        """Relative error of the step's first packed message of each kind."""

    def begin(self, actions: Sequence[Action], steps: Iterable[int]) -> None:
        """Prepare to receive what the actions of each of the steps need."""
        needed = [action for action in actions if self._talks and self._layout.source(self._rank, action) is not None]
        self._ahead = ((step, action) for step in steps for action in needed)
        self._wanted = next(self._ahead, None)

    def _codec(self, source: int, target: int, kind: str, shape: Sequence[int]) -> Codec:
        region_of = self._layout.region_of
        use = self._layout.plan.link_use(region_of[source], region_of[target])
        return activation_codec(use.activation_gradients if kind == "B" else use.activations, shape)

    def post(self, count: int) -> None:
        """Post receives until so many are posted, or as many as `AHEAD_BYTES` allows."""
        while self._wanted is not None and len(self._posted) < count:
            n_bytes = self._payload_bytes(self._wanted[1])
            if len(self._posted) >= FEWEST_AHEAD and self._posted_bytes + n_bytes > AHEAD_BYTES:
                return
            self.post_receive(*self._wanted)
            self._wanted = next(self._ahead, None)

    def _payload_bytes(self, action: Action) -> int:
        """Bytes of the message that lets an action start."""
        source, shape = self._layout.source(self._rank, action), self._shape_of(action)
        assert source is not None
        return self._codec(source, self._rank, action.kind, shape).payload_bytes(math.prod(shape), self._dtype)

    def post_receive(self, step: int, action: Action) -> None:
        """Post the receive of what lets an action start, on the rank that receives."""
        source = self._layout.source(self._rank, action)
        if source is None or not self._talks:
            return
        n_bytes = self._payload_bytes(action)
        self._posted_bytes += n_bytes
        self._posted[step, action] = self._wires.post_receive(source, self._layout.tag(step, action), n_bytes)

    def _split_over(self, stage: int) -> TensorGroup | None:
        """Ranks between which the activations of a stage are split by tokens."""
        return self._tp if self._layout.plan.stages[stage].sequence_parallel else None

    def receive(self, step: int, action: Action) -> torch.Tensor | None:
        """What lets an action start, once it has come; None where nothing has to."""
        source = self._layout.source(self._rank, action)
        if source is None:
            return None
        start, shape = self._wires.accelerator.instant(), tuple(self._shape_of(action))
        with self._log.interval("wait", f"recv {action}"):
            if self._talks:
                self.post(1)
                payload = self._posted.pop((step, action)).wait()
                self._posted_bytes -= payload.numel()
                self._log.waited_s[str(action)] = start, self._wires.accelerator.instant()
                received = self._codec(source, self._rank, action.kind, shape).decompress(payload, shape, self._dtype)
            else:
                received = torch.empty(shape, dtype=self._dtype, device=self._wires.device)
            if self._tp is not None:
                self._tp.broadcast_(received)
                self._log.waited_s[str(action)] = start, self._wires.accelerator.instant()
        group = self._split_over(self._layout.stage_of(self._rank, action))
        return received if group is None else group.part(received, TOKENS).clone()

    def send(self, step: int, action: Action, tensor: torch.Tensor) -> None:
        """Send what an action has made to whom it lets go on, if anybody (a worker's first rank does)."""
        target = self._layout.target(self._rank, action)
        if target is None:
            return
        group = self._split_over(self._layout.stage_of(self._rank, action))
        if group is not None:
            tensor = group.gather(tensor.detach(), TOKENS)
        if not self._talks:
            return
        peer, needs = target
        with self._log.interval("send", f"send {action}"):
            codec = self._codec(self._rank, peer, needs.kind, tensor.shape)
            payload = codec.compress(tensor)
            self._log.handed_s[str(needs)] = self._wires.accelerator.instant()
            while self._sendings and self._sendings[0][1].done():
                self._sendings.popleft()[1].result()
            self._sendings.append((step, self._start(peer, self._layout.tag(step, needs), payload)))
            what = "activation_gradients" if action.kind == "B" else "activations"
            # One message of a kind a step is measured: unpacking all of them again would cost as much as packing.
            if codec.name != "none" and what not in self.packing_error:
                self.packing_error[what] = relative_error(codec, payload, tensor)

    def _start(self, peer: int, tag: int, payload: torch.Tensor) -> Future[None] | Sending:
        """Start sending; what is returned has ended when the message has left."""
        if self._fetched is None or self._wires.sends_itself(peer):
            sending = self._wires.send(peer, tag, payload)
            return sending if sending.on_device else self._sent.submit(sending.wait)
        begun = self._fetched.submit(self._wires.send, peer, tag, payload)
        return self._sent.submit(lambda: begun.result().wait())

    def finish_sends(self, before_step: float = math.inf) -> None:
        """Wait for the messages of earlier steps.

        Those of the step before the current one never wait for anything that comes after: no circle can form.
        """
        while self._sendings and self._sendings[0][0] < before_step:
            self._sendings.popleft()[1].result()

    def close(self) -> None:
        """End the threads."""
        if self._fetched is not None:
            self._fetched.shutdown()
        self._sent.shutdown()
