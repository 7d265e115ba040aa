"""Figures of a run for TensorBoard and Weights & Biases, where they are installed; the JSONL logs need neither.

    with open_trackers(["tensorboard", "wandb"], directory, "my-run", settings) as trackers:
        trackers.scalars(step, {"loss": loss, "tokens_per_s": rate})

TensorBoard's files lie in ``directory/tensorboard``, those of W&B in ``directory/wandb``. ``WANDB_MODE=offline`` keeps
W&B's run on this machine (``wandb sync`` uploads it later), and so does a machine without an account: nothing ever asks
for one. W&B's other environment variables work too.
"""

from __future__ import annotations

import netrc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from polygon.domain.errors import InputError

PROJECT = "polygon"
"""Name of the project in W&B, unless WANDB_PROJECT names another."""


NO_ACCOUNT = (
    "--track: found wandb online without an account, expected WANDB_API_KEY, or offline (wandb sync uploads such a run "
    "later)"
)


class Tracker(Protocol):
    """Takes numbers by name, step after step."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Note the numbers of a step; steps come in ascending order."""

    def close(self) -> None:
        """Write what is still held back."""


class TensorBoard:
    """An event file; `tensorboard --logdir DIR` shows it."""

    def __init__(self, directory: Path, run: str, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory / "tensorboard"))
        self._writer.add_text("run", run)
        self._writer.add_text("settings", "\n".join(f"    {key}: {value}" for key, value in settings.items()))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def _has_account(settings: Any) -> bool:
    """Whether W&B's settings, its environment variables or a netrc file have a key for its server.

    W&B's own question (`wandb.login`) goes to the server, or to whoever sits at the terminal.
    """
    if settings.api_key or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    named = os.environ.get("NETRC")
    places = [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]
    try:
        known = [netrc.netrc(place) for place in places if place.is_file()]
    except (netrc.NetrcParseError, OSError):
        return False
    host = urlsplit(settings.base_url).hostname or ""
    return any(file.authenticators(host) is not None for file in known)


class WeightsAndBiases:
    """A run of Weights & Biases; without an account it stays on this machine."""

    def __init__(self, directory: Path, run: str, settings: Mapping[str, Any]) -> None:
        import wandb

        directory.mkdir(parents=True, exist_ok=True)
        found = wandb.setup().settings
        mode: Literal["offline"] | None = None
        if found.mode == "online" and not _has_account(found):
            if os.environ.get("WANDB_MODE") == "online":
                raise InputError(NO_ACCOUNT)
            mode = "offline"
            print(f"wandb: no account here, the run stays in {directory}/wandb", file=sys.stderr)  # noqa: T201
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                dir=directory,
                name=run,
                config=dict(settings),
                mode=mode,
            )
        except wandb.Error as error:
            reason = str(error).splitlines()[0]
            raise InputError(
                f"--track: found wandb, expected one that starts ({reason}); WANDB_MODE=offline needs no account"
            ) from error

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


_MAKERS: dict[str, Callable[[Path, str, Mapping[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}
TRACKERS = tuple(_MAKERS)
"""What `open_trackers` knows."""


def check_trackers(names: Sequence[str], mode: str | None = None) -> None:
    """Raise `InputError` before ranks start for what would end the one that opens trackers, as far as is known here.

    Parameters
    ----------
    mode : str, optional
        What WANDB_MODE will be.
    """
    for name in names:
        if find_spec(name) is None:
            raise _not_installed(name)
    if "wandb" in names and (mode or os.environ.get("WANDB_MODE")) == "online":
        import wandb

        try:
            known = _has_account(wandb.setup().settings)
        finally:
            wandb.teardown()  # ranks are forked: none must find its process and threads
        if not known:
            raise InputError(NO_ACCOUNT)


def _not_installed(name: str, why: str = "") -> InputError:
    return InputError(f"--track: found {name}, expected it to be installed (pip install {name}){why}")


class Trackers:
    """Several trackers as one; none at all is fine."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        """Note the numbers of a step; what is None is left out."""
        known = {name: float(value) for name, value in values.items() if value is not None}
        for tracker in self._trackers:
            tracker.scalars(step, known)


@contextmanager
def open_trackers(names: Sequence[str], directory: Path, run: str, settings: Mapping[str, Any]) -> Iterator[Trackers]:
    """Open the named trackers and close them at the end.

    Parameters
    ----------
    names : sequence of str
        Of `TRACKERS`.
    directory : Path
        Where their files go.
    run : str
        What the run is called.
    settings : mapping
        Shown beside the run.

    Raises
    ------
    InputError
        A name is not known, its package is not installed, or it cannot start.
    """
    with ExitStack() as stack:
        trackers = []
        for name in names:
            if name not in _MAKERS:
                raise InputError(f"--track: found {name!r}, expected {' or '.join(TRACKERS)}")
            try:
                tracker = _MAKERS[name](directory, run, settings)
            except ImportError as error:
                raise _not_installed(name, f": {error}") from error
            stack.callback(tracker.close)
            trackers.append(tracker)
        yield Trackers(trackers)
