"""What a run reads: from the user's choice to samples, for training and for validation."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar
from zipfile import BadZipFile

import numpy as np

from polygon.domain.errors import InputError, require
from polygon.domain.model import Model
from runners.data.choice import DataChoice
from runners.data.documents import open_documents, require_bytes, text_files
from runners.data.mixture import Mixture, Together
from runners.data.packing import PackedSamples
from runners.data.samples import ImageSamples, Samples, Shuffled, TextSamples, TokenSamples, hold_out, require_classes
from runners.data.token_files import Corpus, is_token_file, joined, open_tokens
from runners.data.token_rows import files_of, is_table

S = TypeVar("S", bound=Shuffled)
TEXT_SUFFIXES = (".txt", ".text", ".md")
"""Never raw tokens, whatever --token-type says of the other files of a mixture."""
HEAD_BYTES = 1 << 16
"""Of a file that are looked at to know that it is text."""


def english_text() -> bytes:
    """English prose that every Python brings along: the reference topics of its `help` (about 700 kB)."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[key] for key in sorted(topics)).encode()


def samples_for(model: Model, seq_len: int, seed: int, data: DataChoice | None = None) -> Samples:
    """Samples to train a model on; those of `training_and_held_out`, with nothing held out."""
    return training_and_held_out(model, seq_len, seed, replace(data or DataChoice(), validate=False))[0]


def training_and_held_out(model: Model, seq_len: int, seed: int, data: DataChoice) -> tuple[Samples, Shuffled | None]:
    """Samples to train a model on, and where `data.validate` says so those to validate on; none is among both.

    Without a file, a language model reads `english_text`, an image model of the right size scikit-learn's digits.

    Raises
    ------
    InputError
        The data cannot be read, says not what it is, or does not fit the model.
    """
    if model.family == "vit":
        require(len(data.paths) <= 1, "--data", len(data.paths), "one .npz of images and classes")
        images = _image_samples(model, seed, data.paths[0]) if data.paths else _digits(model, seed)
        return _held_out(images, data) if data.validate else (images, None)
    parts: Sequence[TokenSamples] = [_text(model, seq_len, seed, corpus, data) for corpus in _corpora(model, data)]
    held: list[TokenSamples] = []
    if data.validate and data.validation is not None:
        held = [_text(model, seq_len, seed, open_corpus(data.validation, model, data, "test"), data)]
    elif data.validate:
        parts, held = map(list, zip(*(_held_out(part, data) for part in parts), strict=True))
    validation = held[0] if len(held) == 1 else Together(seed=seed, parts=held) if held else None
    if len(parts) == 1:
        return parts[0], validation
    # Without weights every sample of all sets is seen as often.
    return Mixture(parts, data.weights or [len(part) for part in parts], seed), validation


def _held_out(samples: S, data: DataChoice) -> tuple[S, S]:
    return hold_out(samples, data.validation_fraction, data.validation_samples, "--validation-fraction")


def _corpora(model: Model, data: DataChoice) -> list[Corpus]:
    if data.paths:
        return [open_corpus(path, model, data, "train") for path in data.paths]
    require_bytes(model.vocab_size)
    return [Corpus("English prose", np.frombuffer(english_text(), dtype=np.uint8))]


def open_corpus(path: Path, model: Model, data: DataChoice, part: str) -> Corpus:
    """Tokens of a file or folder of any kind that is understood."""
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix == ".bin" and file.is_file())
        if files:
            return joined(str(path), [open_tokens(file, data.token_type) for file in files])
        if not text_files(path):
            files_of(path, part)
        return _documents(path, model, data, part)
    if is_table(path):
        if not path.is_file():
            raise InputError(f"--data {path}: found no such file, expected a readable file or folder")
        return _documents(path, model, data, part)
    if path.suffix not in TEXT_SUFFIXES and is_token_file(path, data.token_type):
        return open_tokens(path, data.token_type)
    _require_text(path)
    if data.tokenizer is not None:
        return _documents(path, model, data, part)
    require_bytes(model.vocab_size, pretrained=data.pretrained)
    return open_tokens(path, "uint8")


def _documents(path: Path, model: Model, data: DataChoice, part: str) -> Corpus:
    known = data.tokenizer, data.column, data.cache
    return open_documents(path, model.vocab_size, *known, part, pretrained=data.pretrained)


def _require_text(path: Path) -> None:
    """Raise `InputError` for a file that is not there, empty, or of another kind than text."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise InputError(f"--data {path}: {error.strerror}, expected a readable file or folder") from None
    require(bool(head), f"--data {path}", None, "some text")
    try:
        # The head may end within a character.
        known = "\0" not in codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        known = False
    if not known:
        raise InputError(
            f"--data {path}: found bytes that are no text, expected text, tokens (.bin, .npy; or --token-type) or a "
            "data set (.jsonl, .parquet, .arrow, a folder)"
        )


def _text(model: Model, seq_len: int, seed: int, corpus: Corpus, data: DataChoice) -> TokenSamples:
    if data.packing == "stream":
        return TextSamples(
            tokens=corpus.tokens, seq_len=seq_len, seed=seed, vocab_size=model.vocab_size, name=corpus.name
        )
    if corpus.documents is None:
        raise InputError(
            f"{corpus.name}: found tokens without borders of documents, expected Megatron's .idx or a data set of "
            "documents (with --packing documents)"
        )
    packed = PackedSamples(
        tokens=corpus.tokens, seq_len=seq_len, seed=seed, vocab_size=model.vocab_size, name=corpus.name,
        documents=corpus.documents(),
    )  # fmt: skip
    require(packed.items >= 1, f"{corpus.name}: documents", 0, "at least one of two tokens")
    return packed


def _digits(model: Model, seed: int) -> ImageSamples:
    """Handwritten digits (1797 of 8 x 8 pixels) that scikit-learn brings along."""
    shape = (model.channels, model.image_size, model.image_size)
    if shape != (1, 8, 8) or model.vocab_size < 10 or find_spec("sklearn") is None:
        raise InputError(
            "--data: found none, expected an .npz with images and classes (without it, scikit-learn's digits serve "
            f"models of 1 x 8 x 8 pixels; this one takes {' x '.join(map(str, shape))})"
        )
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images[:, None].astype(np.float32) - 8) / 8
    return ImageSamples(images=images, classes=digits.target, seed=seed)


def _image_samples(model: Model, seed: int, path: Path) -> ImageSamples:
    try:
        with np.load(path) as file:
            for key in ("images", "classes"):
                require(key in file, str(path), sorted(file), "the arrays images and classes")
            images, classes = file["images"].astype(np.float32), file["classes"]
    except (OSError, ValueError, BadZipFile, AttributeError) as error:
        raise InputError(f"{path}: found {error}, expected an .npz with images and classes") from error
    shape = (model.channels, model.image_size, model.image_size)
    require(images.shape[1:] == shape, f"{path}: images", images.shape[1:], f"shape {shape}")
    require_classes(classes, model.vocab_size, f"{path}: classes")
    require(len(images) == len(classes) > 0, f"{path}: classes", len(classes), f"{len(images)}, one for each image")
    return ImageSamples(images=images, classes=classes, seed=seed)
