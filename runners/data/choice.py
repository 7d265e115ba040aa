"""What a run reads, as the user says it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from polygon.domain.errors import require, require_number

TOKEN_TYPES = ("uint8", "uint16", "uint32", "int32", "int64")
"""What raw files of tokens may hold; little-endian."""
PACKINGS = ("stream", "documents")


def tokenizer_of(weights: Path | None) -> Path | None:
    """The tokenizer that lies in a folder of Hugging Face; None: there is none."""
    file = None if weights is None else weights / "tokenizer.json"
    return file if file is not None and file.is_file() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataChoice:
    """Files to train and validate on, and how they are read."""

    paths: tuple[Path, ...] = ()
    """Files or folders; none: a small set that needs no file."""
    weights: tuple[float, ...] = ()
    """Parts of the samples that come from each path; none: by their sizes."""
    token_type: str | None = None
    """Of raw files that do not say it."""
    tokenizer: Path | None = None
    pretrained: bool = False
    """Whether the model begins with weights: then text needs a tokenizer, unless these know bytes alone."""
    column: str | None = None
    """Of data sets."""
    packing: str = "stream"
    """`stream`: windows of all tokens in turn; `documents`: whole documents, as many as fit."""
    cache: Path | None = None
    """Where prepared data is kept."""
    validate: bool = False
    """Whether there is validation."""
    validation: Path | None = None
    """What to validate on; None: a part of the data that training then does not see."""
    validation_fraction: float = 0.01
    validation_samples: int | None = None
    """At most."""

    def __post_init__(self) -> None:
        if self.weights:
            expected = f"{len(self.paths)}, one for each --data"
            require(len(self.weights) == len(self.paths), "--data-weights", len(self.weights), expected)
            for weight in self.weights:
                require_number(weight, "--data-weights", above=0)
        require(self.token_type in (None, *TOKEN_TYPES), "--token-type", self.token_type, " or ".join(TOKEN_TYPES))
        require(self.packing in PACKINGS, "--packing", self.packing, " or ".join(PACKINGS))
        require_number(self.validation_fraction, "--validation-fraction", above=0)
        most = self.validation_samples
        require(most is None or most >= 1, "--validation-samples", most, "a whole number >= 1")
