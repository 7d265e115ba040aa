"""What a device reaches of its data sheet, where that was measured on the device itself."""

from __future__ import annotations

from dataclasses import dataclass, fields

from polygon.domain.errors import require, require_number
from polygon.domain.message import Message

BASES = ("spec", "bench")
MOST = 4
"""Of a data sheet's rate; measured ones are at most twice as much, percentages are more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredEfficiency:
    """Coefficients of the operator costs that hold for one device type; None: as for its architecture.

    The names are those of `polygon.cost.kernels.Efficiency`, which says what each of them multiplies.
    """

    gemm: float | None = None
    """Of the peak with matrix units, by the inner loop of a product."""
    vector_gemm: float | None = None
    """Of the fp32 peak, by products without matrix units."""
    unaligned: float | None = None
    """What is left of the rate of a product when a dimension is no multiple of eight elements."""
    operands: float | None = None
    """Of the memory bandwidth, by operands and result of a product."""
    memory: float | None = None
    """Of the memory bandwidth, by element-wise kernels."""
    flash_forward: float | None = None
    """Of the 16-bit peak, by the vendor's attention over a sequence without end."""
    flash_backward: float | None = None
    flash_forward_tokens: float | None = None
    """Sequence length at which attention reaches half of that."""
    flash_backward_tokens: float | None = None
    launch_s: float | None = None
    """Seconds that a kernel costs beside its work."""
    host_forward_s: float | None = None
    """Seconds that the host needs to launch a block operation by operation."""
    host_backward_s: float | None = None
    relative_error: float | None = None
    """Half of a 90 % interval over the time of a layer."""
    basis: str = "spec"
    """`bench` where the numbers were fitted to a measurement of the device that is planned for, else `spec`."""
    source: str = ""

    def __post_init__(self) -> None:
        require(self.basis in BASES, "basis", self.basis, " or ".join(BASES))
        for name, value in self.given.items():
            where = f"efficiency.{name}"
            if name.endswith("_tokens"):
                require_number(value, where, at_least=0)
            else:
                require_number(value, where, above=0)

    def require_fractions(self) -> None:
        """Refuse percentages, and other multiples of a data sheet's rates that nobody has given for a fraction."""
        for name, value in self.given.items() if self.basis == "spec" else ():
            share = not name.endswith(("_s", "_tokens")) and name != "relative_error"
            require(not share or value <= MOST, f"efficiency.{name}", value, Message("expected.fraction", most=MOST))

    @property
    def given(self) -> dict[str, float]:
        """The coefficients that are given, by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if value is not None and name not in ("basis", "source")}
