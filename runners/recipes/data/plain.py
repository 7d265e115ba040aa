"""Data without preparation: text by bytes, token or image arrays from a file, or what Python packages bring along."""

from __future__ import annotations

from pathlib import Path

from polygon.domain.errors import require
from polygon.domain.model import Model
from runners.data.choice import DataChoice
from runners.data.samples import Samples
from runners.data.sources import samples_for
from runners.recipes.models import beside
from runners.recipes.recipe_schema import DataPart


def make_samples(part: DataPart, model: Model, seq_len: int, seed: int, folder: Path) -> Samples:
    """English prose or handwritten digits, or the given file (see `runners.data.sources.samples_for`)."""
    kind = "digits" if model.family == "vit" else "english"
    require(part.kind == kind, f"data.kind with {model.name}", part.kind, f"{kind} (or another of its family)")
    data = DataChoice(
        paths=() if part.path is None else (beside(folder, part.path),),
        token_type=part.token_type,
        tokenizer=None if part.tokenizer is None else beside(folder, part.tokenizer),
        cache=None if part.cache is None else Path(part.cache),
    )
    return samples_for(model, seq_len, seed, data)
