"""What a recipe's data may be: by kind, the module whose `make_samples` reads it.

``make_samples(part, model, seq_len, seed, folder)`` takes the recipe's `DataPart`, the model, tokens per sequence, the
seed of the order and the recipe's folder, and returns `runners.engine.data.Samples`: inputs and targets by global
sample number, the same on every rank. Preparing (tokenizing, decoding) happens there too, once, in a cache that all
ranks read.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from polygon.domain.model import Model
from runners.recipes.schema import DATA_KINDS, DataPart

if TYPE_CHECKING:
    from runners.engine.data import Samples


def make_samples(part: DataPart, model: Model, seq_len: int, seed: int, folder: Path) -> Samples:
    """Samples of a recipe; raises `InputError` where the data cannot be read or does not fit the model."""
    module = import_module(f"{__name__}.{DATA_KINDS[part.kind]}")
    return module.make_samples(part, model, seq_len, seed, folder)
