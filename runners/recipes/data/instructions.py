"""Questions with worked answers, as MetaMathQA has them, for language models: chats, tokenized once, read by all ranks.

An example is a pair of ``query`` and ``response``; it becomes one chat of one sample, cut or filled to the sequence's
length. Only the answer's tokens are targets; a chat whose question alone fills the sequence is left out. Tokens are
filled up at the end, where causal attention does not see them.

Prepared data is a folder of the cache with flat arrays (`tokens.npy`, `starts.npy`, `answers.npy`) that ranks map into
memory; its name is a digest of examples, tokenizer and template, so that a change of any of them prepares anew.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polygon.domain.errors import InputError, require
from polygon.domain.model import Model
from runners.data.prepared import cache_folder, one_at_a_time, write_whole
from runners.data.samples import IGNORED, Shuffled
from runners.data.token_rows import files_of, require_unicode, rows_of
from runners.recipes.data.questions import made_up
from runners.recipes.data.tokenizing import Tokenizing, tokenizing_for
from runners.recipes.models import beside
from runners.recipes.recipe_schema import DataPart

MADE_UP = 2000
"""Examples of the generated set, unless the recipe says how many."""
COLUMNS = (("query", "response"), ("instruction", "output"), ("question", "answer"))
"""Names of question and answer that are understood (MetaMathQA's first)."""
CONTEXT = "input"
"""What an instruction is about, where it has that apart (Alpaca's): it follows after an empty line."""


@dataclass(kw_only=True)
class InstructionSamples(Shuffled):
    """Chats; targets are the next tokens of the answers.

    Parameters
    ----------
    tokens : ndarray of int, one dimension
        All chats one after the other.
    starts : ndarray of int, shape (chats + 1,)
        Where each begins, and the end.
    answers : ndarray of int, shape (chats,)
        Place of the first token of the answer in each.
    seq_len : int
    """

    tokens: np.ndarray
    starts: np.ndarray
    answers: np.ndarray
    seq_len: int

    def __post_init__(self) -> None:
        first, last = np.maximum(self.answers, 1) - 1, np.minimum(np.diff(self.starts) - 1, self.seq_len)
        self._chats = np.flatnonzero(first < last)
        super().__post_init__()

    @property
    def items(self) -> int:
        return len(self._chats)

    @property
    def left_out(self) -> int:
        """Chats of which nothing is to be learned: a step of such alone would show a loss of 0."""
        return len(self.answers) - self.items

    def item(self, number: int) -> int:
        return int(self._chats[super().item(number)])

    def _learned(self, chat: int) -> tuple[int, int]:
        """First and past-last position whose next token is to be learned."""
        length = int(self.starts[chat + 1] - self.starts[chat])
        return max(0, int(self.answers[chat]) - 1), min(length - 1, self.seq_len)

    def targets(self, numbers: range) -> int:
        """Tokens of these samples that are to be learned."""
        borders = [self._learned(self.item(number)) for number in numbers]
        return sum(max(0, end - begin) for begin, end in borders)

    def batch(self, numbers: range) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of these samples, shape (samples, seq_len) each."""
        inputs = np.zeros((len(numbers), self.seq_len), dtype=np.int64)
        targets = np.full((len(numbers), self.seq_len), IGNORED, dtype=np.int64)
        for row, number in enumerate(numbers):
            chat = self.item(number)
            start = int(self.starts[chat])
            here = np.asarray(self.tokens[start : min(int(self.starts[chat + 1]), start + self.seq_len + 1)])
            inputs[row, : len(here[: self.seq_len])] = here[: self.seq_len]
            begin, end = self._learned(chat)
            targets[row, begin:end] = here[begin + 1 : end + 1]
        return torch.from_numpy(inputs), torch.from_numpy(targets)


def make_samples(part: DataPart, model: Model, seq_len: int, seed: int, folder: Path) -> InstructionSamples:
    """Samples of a recipe, prepared by whichever rank comes first.

    Raises
    ------
    InputError
        Examples that cannot be read, or a tokenizer with more tokens than the model.
    """
    if model.family == "vit":
        raise InputError(f"data.kind: found 'instructions' with {model.name}, expected a language model")
    examples = read_examples(part, folder)
    cache = cache_folder("data.cache", part.cache)
    digest = hashlib.sha256(json.dumps(examples).encode()).hexdigest()
    with one_at_a_time(cache / "lock"):
        tokenizing = tokenizing_for(part, folder, cache, digest, examples, model.vocab_size)
        place = cache / f"chats-{hashlib.sha256(f'{digest} {tokenizing.digest}'.encode()).hexdigest()[:16]}"
        if not place.exists() or _damaged(place):
            shutil.rmtree(place, ignore_errors=True)
            write_whole(place, lambda into: prepare(examples, tokenizing, into))
    arrays = _arrays(place)
    largest = int(arrays.pop("largest"))
    require(largest < model.vocab_size, "data.tokenizer: largest token", largest, f"less than {model.vocab_size}")
    shortest = int(arrays["answers"].min())
    require(shortest <= seq_len, "batch.seq_len", seq_len, f"at least {shortest}, the shortest question")
    tokens, starts, answers = (arrays[name] for name in ("tokens", "starts", "answers"))
    return InstructionSamples(tokens=tokens, starts=starts, answers=answers, seq_len=seq_len, seed=seed)


def _arrays(place: Path) -> dict[str, np.ndarray]:
    return {name: np.load(place / f"{name}.npy", mmap_mode="r") for name in ("tokens", "starts", "answers", "largest")}


def _damaged(place: Path) -> bool:
    """Whether arrays are missing or cut, as a full disk or a copy that was broken off leaves them."""
    try:
        arrays = _arrays(place)
    except (OSError, ValueError, EOFError):
        return True
    return len(arrays["tokens"]) != arrays["starts"][-1] or len(arrays["answers"]) + 1 != len(arrays["starts"])


def read_examples(part: DataPart, folder: Path) -> list[tuple[str, str]]:
    """Questions and answers: of a file or folder (JSON, JSON lines, Parquet), a data set of Hugging Face's hub or its
    cache (`meta-math/MetaMathQA`), or made up."""
    if part.path is None:
        return made_up(part.samples or MADE_UP)
    path = beside(folder, part.path)
    here = path.exists()
    rows = (row for file in files_of(path) for row in rows_of(file)) if here else _rows_of_hub(part.path)
    examples: list[tuple[str, str]] = []
    for number, row in enumerate(rows):
        if part.samples is not None and number >= part.samples:
            break
        names = next((pair for pair in COLUMNS if isinstance(row, dict) and set(pair) <= set(row)), None)
        if names is None:
            found = sorted(row) if isinstance(row, dict) else type(row).__name__
            raise InputError(f"{part.path}: example {number}: found {found}, expected query and response")
        question, answer = (_text(part.path, number, row, name) for name in names)
        if names[0] == "instruction" and row.get(CONTEXT):
            question += f"\n\n{_text(part.path, number, row, CONTEXT)}"
        examples.append((question, answer))
    require(len(examples) > 0, str(part.path), len(examples), "at least one example")
    return examples


def _text(path: str, number: int, row: dict[str, Any], name: str) -> str:
    """A field of an example as text; numbers are as they are written."""
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise InputError(f"{path}: example {number}: {name}: found {value!r}, expected a text")
    text = str(value)
    require_unicode(text, f"{path}: example {number}: {name}")
    return text


def _rows_of_hub(name: str) -> Iterator[Any]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise InputError(
            f"data.path: found {name!r}, expected a file or folder (a data set of the hub needs: pip install datasets)"
        ) from None
    try:
        yield from load_dataset(name, split="train")
    except Exception as error:  # noqa: BLE001 - whatever the library meets on its way is the user's to know
        raise InputError(f"data.path: {name}: {str(error).splitlines()[0]}") from None


def prepare(examples: Sequence[tuple[str, str]], tokenizing: Tokenizing, into: Path) -> None:
    """Tokenize all chats and write them as arrays."""
    pieces, lengths, answers, largest = [], [0], [], 0
    kind = np.uint16 if tokenizing.size <= 2**16 else np.uint32
    for question, answer in tokenizing.encode_all(examples):
        chat = np.array([*question, *answer], dtype=kind)
        pieces.append(chat)
        lengths.append(len(chat))
        answers.append(len(question))
        largest = max(largest, int(chat.max(initial=0)))
    np.save(into / "tokens.npy", np.concatenate(pieces))
    np.save(into / "starts.npy", np.cumsum(lengths, dtype=np.int64))
    np.save(into / "answers.npy", np.array(answers, dtype=np.int32))
    np.save(into / "largest.npy", np.array(largest))
