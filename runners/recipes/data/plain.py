"""Data without preparation: text by bytes, token or image arrays from a file, or what Python packages bring along."""

from __future__ import annotations

from pathlib import Path

from polygon.domain.errors import require
from polygon.domain.model import Model
from runners.engine.data import Samples, samples_for
from runners.recipes.models import beside
from runners.recipes.schema import DataPart


def make_samples(part: DataPart, model: Model, seq_len: int, seed: int, folder: Path) -> Samples:
    """English prose or handwritten digits, or the given file (see `runners.engine.data.samples_for`)."""
    kind = "digits" if model.family == "vit" else "english"
    require(part.kind == kind, f"data.kind with {model.name}", part.kind, f"{kind} (or another of its family)")
    return samples_for(model, seq_len, seed, None if part.path is None else beside(folder, part.path))
