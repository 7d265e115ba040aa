"""Many things computed at once: in processes here, or on a Dask or Ray cluster, through joblib's backends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeVar

from polygon.domain.errors import InputError

BACKENDS = ("processes", "dask", "ray", "serial")

Item = TypeVar("Item")
Found = TypeVar("Found")


def spread(
    work: Callable[[Item], Found],
    items: Sequence[Item],
    *,
    jobs: int = -1,
    backend: str = "processes",
    scheduler: str | None = None,
    lot: int | None = None,
) -> Generator[Found, None, None]:
    """What `work` makes of every item, as it is ready, in any order.

    Parameters
    ----------
    work : callable
        A function that can travel: of a module that the other processes can import, or one of a value that can be
        pickled.
    jobs : int
        Processes; -1: one a core (a cluster decides for itself).
    backend : str
        `processes` (of this machine), `dask` (a distributed cluster: `scheduler` is its address; none: the client that
        already exists, or one of this machine), `ray` (needs ray; the cluster at RAY_ADDRESS or one of this machine),
        `serial`.
    lot : int, optional
        Ray gives results by the lot, this many items; all at the end without it.

    Raises
    ------
    InputError
        For a backend whose package is missing, or a scheduler that does not answer or is not asked.
    """
    if backend not in BACKENDS:
        raise InputError(f"backend: found {backend!r}, expected {' or '.join(BACKENDS)}")
    if scheduler is not None and backend != "dask":
        raise InputError(f"scheduler: found {scheduler!r} with backend {backend}, expected it with backend dask alone")
    if backend == "serial" or (backend == "processes" and jobs == 1):
        yield from map(work, items)
        return
    import joblib

    one_by_one = backend != "ray"
    size = len(items) if one_by_one or lot is None else lot
    with (
        _registered(backend, scheduler),
        joblib.Parallel(n_jobs=jobs, return_as="generator_unordered" if one_by_one else "list") as parallel,
    ):
        for at in range(0, len(items), max(1, size)):
            yield from parallel(joblib.delayed(work)(item) for item in items[at : at + size])


@contextlib.contextmanager
def _registered(backend: str, scheduler: str | None) -> Iterator[None]:
    """Joblib's backend of this name for as long as the context lasts."""
    import joblib

    if backend == "processes":
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
