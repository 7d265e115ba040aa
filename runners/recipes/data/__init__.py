"""What a recipe's data may be: by kind, the module whose `make_samples` reads it.

``make_samples(part, model, seq_len, seed, folder)`` takes the recipe's `DataPart`, the model, tokens per sequence, the
seed of the order and the recipe's folder, and returns `runners.data.samples.Samples`: inputs and targets by global
sample number, the same on every rank. Preparing (tokenizing, decoding) happens there too, once, in a cache that all
ranks read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from polygon.domain.errors import InputError
from polygon.domain.model import Model
from runners.data.choice import tokenizer_of
from runners.recipes.models import beside
from runners.recipes.recipe_schema import DATA_KINDS, DataPart, Recipe

if TYPE_CHECKING:
    from runners.data.samples import Samples, Shuffled


OF_THE_HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""A name of Hugging Face's hub, which instructions may come from; a file of examples has an ending of `FILES`."""
FILES = (".json", ".jsonl", ".parquet", ".txt", ".csv")


def check_paths(recipe: Recipe, folder: Path) -> None:
    """Raise `InputError` for a file or folder that a recipe names and that is not there; nothing is read."""
    data, own = recipe.data, recipe.validation
    named = {"data.path": data.path, "validation.path": None if own is None else own.path}
    named |= {"data.tokenizer": data.tokenizer, "model.weights": recipe.model.weights}
    for key, name in named.items():
        if name is None or beside(folder, name).exists():
            continue
        asks = data.kind == "instructions" and key.endswith("path")
        if not asks or not OF_THE_HUB.fullmatch(name) or name.endswith(FILES):
            hub = " (or a data set of the hub, as meta-math/MetaMathQA)" if asks else ""
            raise InputError(f"{key}: found no {beside(folder, name)}, expected a file or folder{hub}")


def make_samples(part: DataPart, model: Model, seq_len: int, seed: int, folder: Path) -> Samples:
    """Samples of a recipe; raises `InputError` where the data cannot be read or does not fit the model."""
    module = import_module(f"{__name__}.{DATA_KINDS[part.kind]}")
    return module.make_samples(part, model, seq_len, seed, folder)


def training_and_validation(
    recipe: Recipe, model: Model, seq_len: int, folder: Path, say: Callable[[str], None] | None = None
) -> tuple[Samples, Shuffled | None]:
    """Samples to train on, and those to validate on where the recipe asks for it; no sample is among both.

    `say` is told of what is left out of either.

    Raises
    ------
    InputError
        As `make_samples`; or a set of its own that would need a tokenizer of its own.
    """
    from runners.data.samples import Shuffled, hold_out

    data = recipe.data
    if data.tokenizer is None and recipe.model.weights is not None:
        own = tokenizer_of(beside(folder, recipe.model.weights))
        data = data if own is None else data.model_copy(update={"tokenizer": str(own.absolute())})

    def made(part: DataPart) -> Samples:
        found = make_samples(part, model, seq_len, recipe.seed, folder)
        left_out = getattr(found, "left_out", 0)
        if left_out and say is not None:
            why = f"whose question alone fills batch.seq_len = {seq_len} tokens"
            say(f"{part.path or 'data'}: left out {left_out} chats {why}")
        return found

    samples = made(data)
    part = recipe.validation
    if part is None:
        return samples, None
    if part.path is None and part.part is None:
        assert isinstance(samples, Shuffled)
        return hold_out(samples, part.fraction, part.samples)
    if data.kind == "instructions" and data.tokenizer is None:
        raise InputError("data.tokenizer: found none, expected one for both (validation has a path of its own)")
    change = {"path": part.path or data.path, "samples": part.samples, "part": part.part or "train"}
    held = made(data.model_copy(update=change))
    assert isinstance(held, Shuffled)
    return samples, held
