"""Records a rank's first steps after warm-up with the PyTorch Profiler, as one Chrome trace a rank."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import distributed
from torch.profiler import ProfilerActivity, profile, schedule

from polygon.domain.errors import require


def trace_name(rank: int | str) -> str:
    """File name of a rank's trace; of `*` the pattern of all."""
    return f"rank{rank}_trace.json"


class Recorder:
    """Records steps `warmup` to `warmup + steps - 1`; `step` is to be called after every step.

    Threads that communicate are recorded too. The shapes of operators are kept, so that traffic can be counted.

    Parameters
    ----------
    directory : Path
        Where `trace_name` is written, once the last recorded step is over.
    rank, world_size : int
    steps, warmup : int
        How many steps to record, after how many that are not.
    """

    def __init__(self, directory: Path, rank: int, world_size: int, *, steps: int = 3, warmup: int = 1) -> None:
        require(steps >= 1, "profiled steps", steps, "a whole number >= 1")
        require(warmup >= 1, "profiler warm-up", warmup, "a whole number >= 1")
        self.path = directory / trace_name(rank)
        # Those of an earlier run in this folder would pass for this one's, also of ranks that it no longer has.
        self.path.unlink(missing_ok=True)
        if rank == 0:
            for path in directory.glob(trace_name("*")):
                number = path.name.removeprefix("rank").removesuffix("_trace.json")
                if number.isdecimal() and int(number) >= world_size:
                    path.unlink(missing_ok=True)
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=warmup - 1, warmup=1, active=steps, repeat=1),
            on_trace_ready=self._write,
            record_shapes=True,
            acc_events=True,
            experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
        )
        self._open = True
        self._profile.start()
        if not distributed.is_initialized():  # torch writes the same of its default group
            self._profile.add_metadata_json("distributedInfo", json.dumps({"rank": rank, "world_size": world_size}))

    def _write(self, recorded: profile) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(self.path))

    def step(self) -> None:
        """A step is over."""
        if self._open:
            self._profile.step()
            if self.path.exists() and self._profile.current_action.name == "NONE":
                self.close()

    def close(self) -> None:
        """Stop; what was recorded so far is written."""
        if self._open:
            self._open = False
            self._profile.stop()
