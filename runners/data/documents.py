"""Documents of data sets and text files as tokens: written once, as a pair of Megatron's files, read by all ranks.

A column of token numbers is taken as it is. Text goes through the tokenizer that the user names, with its mark for the
end of a document behind each; without one it is read byte by byte.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from polygon.domain.errors import InputError, one_of, require
from runners.data.prepared import cache_folder, one_at_a_time, state_of, write_whole
from runners.data.token_files import Corpus, TokenWriter, open_tokens
from runners.data.token_rows import column_of, columns_of, files_of, is_table

BYTE_VOCABULARY = 256
TOKEN_COLUMNS = ("input_ids", "tokens", "token_ids")
TEXT_COLUMNS = ("text", "content")
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
"""What tokenizers call the end of a document; the first that one has is used."""
TOGETHER = 256
"""Documents that are tokenized together."""
STRETCH = 1 << 20
"""Characters of a text file that are tokenized at once, up to the end of a line."""
SAY_EVERY_S = 10.0
FORMAT = "1"
"""Changes when the same data is written otherwise, so that what older programs prepared is not used."""


def open_documents(
    path: Path,
    vocab_size: int,
    tokenizer: Path | None,
    column: str | None,
    cache: Path | None,
    part: str = "train",
    *,
    pretrained: bool = False,
) -> Corpus:
    """The tokens of a data set or text; whoever comes first prepares them, the others wait.

    Parameters
    ----------
    path : Path
        File or folder.
    vocab_size : int
        Tokens that the model knows.
    tokenizer : Path, optional
        `tokenizer.json`, or a folder of Hugging Face with one.
    column : str, optional
        Of the table; None: the first of `TOKEN_COLUMNS` and `TEXT_COLUMNS` that is there.
    cache : Path, optional
        Where prepared data is kept.
    part : str
        Of a set with several, `train` or `test`.
    pretrained : bool
        See `require_bytes`.

    Raises
    ------
    InputError
        What cannot be read or written, or tokens that the model does not know.
    """
    folder = cache_folder("--data-cache", cache)
    encoder = None if tokenizer is None else tokenizer_file(tokenizer)
    says: tuple[object, ...] = FORMAT, str(path.resolve()), state_of(path), column, part, vocab_size <= 2**16
    # What was read by bytes for another model is not used.
    says = (*says, "no text" if encoder is None and pretrained else _content(encoder))
    place = folder / f"tokens-{hashlib.sha256(repr(says).encode()).hexdigest()[:16]}"
    encode = partial(_encoder_of, encoder, vocab_size, pretrained=pretrained)
    try:
        with one_at_a_time(folder / "lock"):
            if not place.exists():
                write_whole(place, lambda into: _write(path, column, part, into, vocab_size, encode))
    except OSError as error:
        raise InputError(f"--data-cache {place}: {error.strerror}, expected a folder that can be written") from None
    found = open_tokens(place / "tokens")
    return Corpus(str(path), found.tokens, found.documents)


def _content(path: Path | None) -> str:
    return "" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()


def tokenizer_file(path: Path) -> Path:
    """The `tokenizer.json` that a path stands for; raises `InputError` where there is none."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"tokenizer: found no {file}, expected a folder of Hugging Face or a tokenizer.json")
    return file


def require_tokenizers() -> None:
    """Raise `InputError` where Hugging Face's library is not installed."""
    if find_spec("tokenizers") is None:
        raise InputError("tokenizer: found no tokenizers, expected it installed (pip install tokenizers)")


def load_tokenizer(file: Path) -> Any:
    """A `tokenizers.Tokenizer`; raises `InputError` where it cannot be had."""
    require_tokenizers()
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the library raises nothing more particular
        raise InputError(f"{file}: {error}, expected the tokenizer.json of Hugging Face") from None


def _rows(path: Path, column: str | None, part: str, encode: _Encode) -> Iterator[np.ndarray]:
    """Tokens of every document of a data set."""
    files = files_of(path, part)
    # The first part of a set may be empty.
    name = _column(next((file for file in files if columns_of(file)), files[0]), column)
    yield from _as_tokens((value for file in files for value in column_of(file, name)), encode)


def _as_tokens(values: Iterable[str | np.ndarray], encode: _Encode) -> Iterator[np.ndarray]:
    """Token columns as they are, texts encoded some at a time."""
    rest = iter(values)
    while some := list(islice(rest, TOGETHER)):
        texts = [value for value in some if isinstance(value, str)]
        require(len(texts) in (0, len(some)), "--data-column", "texts and lists of tokens", "one of them in all rows")
        yield from encode(texts, True) if texts else (np.asarray(tokens) for tokens in some)


_Encode = Callable[[list[str], bool], Iterator[np.ndarray]]
"""Tokens of texts, with or without the mark of a document's end."""


def _encoder_of(file: Path | None, vocab_size: int, *, pretrained: bool) -> _Encode:
    return _byte_encoder(vocab_size, pretrained=pretrained) if file is None else _encoder(file, vocab_size)


def _byte_encoder(vocab_size: int, *, pretrained: bool) -> _Encode:
    def encode(texts: list[str], end: bool) -> Iterator[np.ndarray]:
        require_bytes(vocab_size, pretrained=pretrained)
        yield from (np.frombuffer(text.encode(), dtype=np.uint8) for text in texts)

    return encode


def require_bytes(vocab_size: int, *, pretrained: bool = False) -> None:
    """Raise `InputError` for a model that cannot take text byte by byte, or was `pretrained` on other tokens."""
    if pretrained and vocab_size != BYTE_VOCABULARY:
        expected = f"that of the weights, which know {vocab_size} tokens, to read text"
        raise InputError(f"--tokenizer: found none, expected {expected}")
    require(
        vocab_size >= BYTE_VOCABULARY,
        "model.vocab_size",
        vocab_size,
        f"at least {BYTE_VOCABULARY} (text without --tokenizer is read byte by byte)",
    )


def _encoder(file: Path, vocab_size: int) -> _Encode:
    tokenizer = load_tokenizer(file)
    size = tokenizer.get_vocab_size()
    require(size <= vocab_size, f"{file}: tokens", size, f"at most {vocab_size}, the model's vocabulary")
    mark = next((found for name in ENDS if (found := tokenizer.token_to_id(name)) is not None), None)

    def encode(texts: list[str], end: bool) -> Iterator[np.ndarray]:
        for found in tokenizer.encode_batch(texts, add_special_tokens=False):
            yield np.array(found.ids + ([mark] if end and mark is not None else []), dtype=np.int64)

    return encode


def _column(file: Path, wanted: str | None) -> str:
    """The column that is read."""
    found = columns_of(file)
    if wanted is not None and wanted not in found:
        raise InputError(f"--data-column: found {wanted!r}, expected {one_of(wanted, found)} ({file})")
    known = (*TOKEN_COLUMNS, *TEXT_COLUMNS)
    name = wanted or next((name for name in known if name in found), None)
    if name is None:
        raise InputError(f"{file}: found columns {found}, expected one of {', '.join(known)} (or --data-column)")
    return name


def _stretches(path: Path) -> Iterator[str]:
    """A text file in parts that end with a line."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            while text := file.read(STRETCH):
                yield text + file.readline()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: {error}, expected text in UTF-8") from None


def text_files(folder: Path) -> list[Path]:
    """The texts of a folder that holds no tables, in the order in which they are read; none of anything else."""
    if not folder.is_dir() or any(is_table(file) for file in folder.rglob("*") if file.is_file()):
        return []
    return sorted(file for file in folder.rglob("*.txt") if file.is_file())


def _document_a_file(files: Sequence[Path], encode: _Encode) -> Iterator[tuple[np.ndarray, bool]]:
    """Tokens of texts a stretch at a time, and whether it goes on the document before; marked where a file ends."""
    for file in files:
        goes_on, before = False, None
        for stretch in _stretches(file):
            if before is not None:
                yield from ((tokens, goes_on) for tokens in encode([before], False))
                goes_on = True
            before = stretch
        if before is not None:
            yield from ((tokens, goes_on) for tokens in encode([before], True))


def _write(
    path: Path, column: str | None, part: str, into: Path, vocab_size: int, encoder: Callable[[], _Encode]
) -> None:
    """Write all documents; a text file is one. A line on stderr every now and then."""
    encode = encoder()
    documents: Iterator[tuple[np.ndarray, bool]]
    if texts := text_files(path):
        documents = _document_a_file(texts, encode)
    elif path.is_dir() or is_table(path):
        documents = ((tokens, False) for tokens in _rows(path, column, part, encode))
    else:
        documents = ((tokens, True) for stretch in _stretches(path) for tokens in encode([stretch], False))
    said_s = time.monotonic()
    with TokenWriter(into / "tokens", vocab_size - 1) as writer:
        for number, (tokens, goes_on) in enumerate(documents):
            least, most = (int(tokens.min()), int(tokens.max())) if len(tokens) else (0, 0)
            worst, allowed = least if least < 0 else most, f"0..{vocab_size - 1}, those of the model"
            require(0 <= worst < vocab_size, f"{path}: document {number}: token", worst, allowed)
            writer.add(tokens, goes_on=goes_on)
            if time.monotonic() - said_s > SAY_EVERY_S:
                said_s = time.monotonic()
                text = f"{path}: {number + 1:,} documents, {writer.tokens:,} tokens prepared"
                print(text, file=sys.stderr, flush=True)  # noqa: T201
        require(writer.tokens > 0, f"{path}: tokens", None, "at least one document")
