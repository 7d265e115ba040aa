"""What `runners.bench_device` measured on one device: single operators in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from polygon.domain.cluster import PRECISIONS
from polygon.domain.errors import Phrase, require, require_number


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRow:
    """A (rows × inner) by (inner × columns) matrix product."""

    precision: str
    rows: int
    columns: int
    inner: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRow:
    """Causal attention as `torch.nn.functional.scaled_dot_product_attention` computes it."""

    precision: str
    batch: int
    heads: int
    seq_len: int
    head_dim: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRow:
    """One element-wise kernel or copy: bytes read and written, counted once each."""

    precision: str
    operation: str
    moved_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRow:
    """A transformer block (GPT's: a feed-forward part of two products, four times as wide) run operation by operation.

    One that is small enough takes as long as the host needs to launch it.
    """

    precision: str
    hidden_size: int
    heads: int
    seq_len: int
    micro_batch_size: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """An all-reduce among processes of this machine."""

    backend: str
    members: int
    n_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBench:
    """All of it, with the device type that it holds for."""

    device: str
    """As the catalogue has it, or as the cluster file calls it."""
    measured_on: str = ""
    """What the machine calls the device."""
    power_limit_w: float | None = None
    clock_mhz: float | None = None
    """Of the multiprocessors, under load."""
    threads: int | None = None
    """On a CPU."""
    versions: tuple[str, ...] = ()
    """Of libraries, as `torch 2.8.0`."""
    date: str = ""
    """As the user gave it."""
    complete: bool = True
    """Whether nothing was left out: neither for lack of time nor after an interruption."""
    launch_s: float | None = None
    """Seconds from one empty kernel to the next."""
    products: tuple[ProductRow, ...] = ()
    attention: tuple[AttentionRow, ...] = ()
    streams: tuple[StreamRow, ...] = ()
    blocks: tuple[BlockRow, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()

    def __post_init__(self) -> None:
        require(bool(self.device), "device", self.device, "a name")
        if self.launch_s is not None:
            require_number(self.launch_s, "launch_s", above=0)
        for name in ("products", "attention", "streams", "blocks", "collectives"):
            for i, row in enumerate(getattr(self, name)):
                _check_row(row, f"{name}[{i}]")

    @property
    def precisions(self) -> tuple[str, ...]:
        """Those with products."""
        return tuple(dict.fromkeys(row.precision for row in self.products))


def _check_row(row: ProductRow | AttentionRow | StreamRow | BlockRow | CollectiveRow, where: str) -> None:
    for name in row.__dataclass_fields__:
        value = getattr(row, name)
        if name == "precision":
            require(value in PRECISIONS, f"{where}.{name}", value, " or ".join(PRECISIONS))
        elif name == "members":
            require(isinstance(value, int) and value >= 2, f"{where}.{name}", value, "a whole number >= 2")
        elif isinstance(value, str):
            require(bool(value), f"{where}.{name}", Phrase("an empty text"), "a name")
        else:
            require_number(value, f"{where}.{name}", above=0)
