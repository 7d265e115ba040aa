"""Brings what all ranks measured to rank 0 while the run goes on, for the trackers.

Every rank puts its line of a step into the store, rank 0 takes them out and merges them, both in a thread of their own:
training never waits for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch.distributed import Store

from runners.engine.metrics import StepFigures, flat
from runners.engine.trackers import Trackers


class Collector:
    """One rank's part.

    Parameters
    ----------
    store : Store
        A connection of its own.
    rank : int
    figures : StepFigures
    trackers : Trackers
        Given the merged figures on rank 0.
    """

    def __init__(self, store: Store, rank: int, figures: StepFigures, trackers: Trackers) -> None:
        self._store, self._rank, self._figures, self._trackers = store, rank, figures, trackers
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="collector")
        self._last: Future[None] | None = None

    def add(self, line: Mapping[str, Any]) -> None:
        """Hand over this rank's line of a step."""
        self._last = self._thread.submit(self._bring, json.dumps(line), int(line["step"]))

    def _bring(self, text: str, step: int) -> None:
        self._store.set(f"figures/{step}/{self._rank}", text)
        if self._rank:
            return
        keys = [f"figures/{step}/{rank}" for rank in range(self._figures.plan.world_size)]
        merged = self._figures.merge([json.loads(self._store.get(key)) for key in keys])
        for key in keys:
            self._store.delete_key(key)
        self._trackers.scalars(step, {name: value for name, value in flat(merged) if name != "step"})

    def close(self) -> None:
        """Wait for the last step's figures; raises what went wrong with them."""
        self._thread.shutdown()
        if self._last is not None:
            self._last.result()
