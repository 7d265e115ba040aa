"""The model of a recipe: one of the catalogue or of a file, with some sizes changed."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from polygon.domain.errors import InputError, located, one_of
from polygon.domain.model import Batch, Model
from polygon.formats.files import read_model
from runners.engine.runnable import require_plain
from runners.recipes.recipe_schema import ModelPart, Recipe


def beside(folder: Path, name: str) -> Path:
    """A path as a recipe in `folder` says it."""
    return folder / Path(name).expanduser()


def model_of(part: ModelPart, folder: Path) -> Model:
    """The model that a recipe in `folder` asks for.

    A changed `hidden_size` or `heads` changes `head_dim` with it, unless that is set as well.

    Raises
    ------
    InputError
        Unknown model or field, or sizes that do not go together.
    """
    is_file = "/" in part.source or part.source.endswith((".json", ".yaml", ".yml"))
    model = read_model(beside(folder, part.source) if is_file else part.source)
    known = {field.name: field for field in fields(Model)}
    change = dict(part.change)
    for key, value in change.items():
        if key not in known:
            raise InputError(f"model.change: found unknown field {key!r}, expected {one_of(key, known)}")
        expected = type(getattr(model, key))
        if type(value) is not expected:
            raise InputError(f"model.change.{key}: found {value!r}, expected {expected.__name__}")
    if "head_dim" not in change and {"hidden_size", "heads"} & set(change):
        heads, width = change.get("heads", model.heads), change.get("hidden_size", model.hidden_size)
        change["head_dim"] = max(1, width // max(1, heads))
    with located("model.change: "):
        return replace(model, **change)


def batch_of(recipe: Recipe, model: Model) -> Batch:
    """The batch that a recipe asks for."""
    seq_len = recipe.batch.seq_len
    if model.family == "vit":
        seq_len = seq_len or model.tokens_per_image
    elif seq_len is None:
        raise InputError("batch.seq_len: found nothing, expected the tokens of a sequence")
    require_plain(model, seq_len)
    return Batch(
        global_batch=recipe.batch.global_batch,
        seq_len=seq_len,
        precision=recipe.memory.precision,
        gradient_precision=recipe.memory.gradient_precision,
        optimizer=recipe.optimizer.name,
    )
