"""Pictures: a matplotlib figure that needs no screen and no global state."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from polygon.domain.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width_inches: float, height_inches: float, wanted_by: str) -> Figure:
    """An empty figure whose parts make room for one another.

    Parameters
    ----------
    wanted_by : str
        Option or file that asks for it, for the message.

    Raises
    ------
    InputError
        matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(f"{wanted_by}: found no matplotlib, expected it (pip install matplotlib)") from None

    class Picture(Figure):
        """A figure that notebooks show by themselves: without pyplot they would print its name."""

        def _repr_png_(self) -> bytes:
            drawn = BytesIO()
            self.savefig(drawn, format="png")
            return drawn.getvalue()

    figure = Picture(figsize=(width_inches, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def check_picture(path: str) -> None:
    """Raise `InputError` where matplotlib is missing or would refuse a file name's ending: before the work for it."""
    kinds = new_figure(1, 1, path).canvas.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".").lower() not in kinds:
        raise InputError(f"{path}: found no ending of a picture, expected .png, .svg or .pdf")
