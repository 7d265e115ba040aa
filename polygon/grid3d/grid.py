"""All splits in parallel, best first; in processes here, or on a Dask or Ray cluster."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from polygon.domain.errors import InputError
from polygon.domain.message import Message
from polygon.domain.uniform import ParallelConfig
from polygon.grid3d.grid_rows import FIELDS, KEYS, GridRow
from polygon.grid3d.splits import GridSplit

BACKENDS = ("loky", "dask", "ray", "serial")


class PricedSplits(Protocol):
    """A case that can price a split (and travel to another process)."""

    def rows(self, split: GridSplit) -> list[GridRow]:
        """Every configuration of the split."""


@dataclass(frozen=True, slots=True)
class GridResult:
    """Every configuration, the best first, rejected ones last."""

    rows: Sequence[GridRow]
    interrupted: bool = False
    """Whether an interrupt left splits out."""

    @property
    def accepted(self) -> int:
        """Configurations that can be run."""
        return sum(not row.rejected for row in self.rows)

    def top(self, count: int) -> list[dict[str, Any]]:
        """The best configurations as plain data."""
        return [json.loads(row.line) for row in self.rows[:count] if not row.rejected]

    def write(self, path: str, head: dict[str, Any]) -> None:
        """Write the file: what was asked (`head`), then one configuration a line; the same result, the same bytes."""
        from polygon.formats import files

        head = {"format": "polygon-grid", **head, "accepted": self.accepted}
        if self.interrupted:
            head["interrupted"] = True
        text = json.dumps(head, ensure_ascii=False)[:-1]
        lines = ",\n".join(row.line for row in self.rows)
        files.write_text(path, f'{text}, "configurations": [\n{lines}\n]}}\n')

    def best(self) -> ParallelConfig | None:
        """The best configuration; None if all are rejected."""
        first = self.top(1)
        return parallel_config(first[0]) if first else None

    def why_none(self, devices: int) -> Message:
        """What to say where no configuration is accepted."""
        if not self.rows:
            return Message("reason.no_degrees", devices=devices)
        rejected = tuple(Message("reason.rejected_by", count=n, why=why) for why, n in self.reasons().items())
        return Message("reason.no_configuration_fits", devices=devices, rejected=rejected)

    def reasons(self) -> dict[str, int]:
        """How many were rejected for what (the words before the first colon or number)."""
        counts: dict[str, int] = {}
        for row in self.rows:
            if row.rejected:
                words = json.loads(row.line)["rejected"].split()
                kind = words[0].rstrip(":")
                counts[kind] = counts.get(kind, 0) + 1
        return dict(sorted(counts.items()))


def parallel_config(values: dict[str, Any]) -> ParallelConfig:
    """The configuration that a row describes."""
    known = {field.name for field in fields(ParallelConfig)}
    named = {FIELDS.get(key, key): values[key] for key in KEYS if key in values}
    return ParallelConfig(**{name: value for name, value in named.items() if name in known})


def evaluate_all(
    case: PricedSplits,
    splits: Sequence[GridSplit],
    *,
    jobs: int = -1,
    backend: str = "loky",
    scheduler: str | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> GridResult:
    """Price every split; the result does not depend on where or in which order.

    Parameters
    ----------
    jobs : int
        Processes; -1: one a core (a cluster decides for itself).
    backend : str
        `loky` (processes here), `dask` (a distributed cluster: `scheduler` is its address; none: the client that
        already exists, or one of this machine), `ray` (needs ray), `serial`.
    progress : callable
        Told how many splits are done.

    Returns
    -------
    Result
        All configurations; those priced so far after an interrupt.

    Raises
    ------
    InputError
        For a backend whose package is missing, or a scheduler that does not answer.
    """
    if backend not in BACKENDS:
        raise InputError(f"backend: found {backend!r}, expected {' or '.join(BACKENDS)}")
    rows: list[GridRow] = []
    interrupted = False
    with contextlib.closing(_results(case, splits, jobs, backend, scheduler)) as results:
        try:
            for done, found in enumerate(results, start=1):
                rows += found
                progress(done)
        except KeyboardInterrupt:
            interrupted = True
    return GridResult(sorted(rows), interrupted)


def _results(
    case: PricedSplits, splits: Sequence[GridSplit], jobs: int, backend: str, scheduler: str | None
) -> Generator[list[GridRow], None, None]:
    if backend == "serial" or jobs == 1:
        yield from map(case.rows, splits)
        return
    import joblib

    with _registered(backend, scheduler):
        # Results come as they are ready (Ray's backend: all at the end); order is restored by sorting.
        order = "list" if backend == "ray" else "generator_unordered"
        parallel = joblib.Parallel(n_jobs=jobs, return_as=order, batch_size="auto")
        yield from parallel(joblib.delayed(case.rows)(split) for split in splits)


@contextlib.contextmanager
def _registered(backend: str, scheduler: str | None) -> Iterator[None]:
    """Joblib's backend of this name for as long as the context lasts."""
    import joblib

    if backend == "loky":
        with joblib.parallel_config(backend="loky", inner_max_num_threads=1):
            yield
    elif backend == "dask":
        with _dask_client(scheduler), joblib.parallel_config(backend="dask"):
            yield
    else:
        try:
            from ray.util.joblib import register_ray
        except ImportError:
            raise InputError("backend ray: found no ray, expected it (pip install ray)") from None
        register_ray()
        with joblib.parallel_config(backend="ray"):
            yield


@contextlib.contextmanager
def _dask_client(scheduler: str | None) -> Iterator[None]:
    """A client of a Dask cluster: the one at an address, the current one, or one of this machine."""
    try:
        from distributed import Client, get_client
    except ImportError:
        raise InputError("backend dask: found no distributed, expected it (pip install distributed)") from None
    try:
        current = get_client() if scheduler is None else None
    except ValueError:  # there is none
        current = None
    if current is not None:
        yield
        return
    if scheduler is not None:
        _check_answers(scheduler)
    # Port 0: any free one for the dashboard, which nobody asked for.
    client = Client(scheduler) if scheduler else Client(processes=True, dashboard_address=":0")
    with client:
        yield


def _check_answers(scheduler: str) -> None:
    """Raise at once for an address where nothing listens (distributed itself tries for half a minute)."""
    import socket
    from urllib.parse import urlsplit

    address = scheduler if "://" in scheduler else f"tcp://{scheduler}"
    try:
        where = urlsplit(address)
        socket.create_connection((where.hostname, where.port or 8786), timeout=10).close()
    except (OSError, ValueError) as error:
        raise InputError(
            f"scheduler: found nothing that answers at {scheduler!r}, expected a Dask scheduler"
        ) from error
