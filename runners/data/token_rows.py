"""Rows of data sets in files: JSON, JSON lines (also .gz), Parquet and Arrow, a file or a folder; one after the other.

A folder may be one of Hugging Face's: as `save_to_disk` writes it (`data-*.arrow`, or a folder for every part), or as
on the hub (`train-*.parquet`). Where files or folders are named for a part, only those of the wanted one are read.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polygon.domain.errors import InputError, require

NAMES_OF = {"train": ("train",), "test": ("test", "validation", "val")}
"""What sets call their parts."""
SUFFIXES = (".json", ".jsonl", ".parquet", ".arrow", ".jsonl.gz", ".json.gz")
NOT_DATA = ("dataset_infos.json", "dataset_info.json", "state.json", "dataset_dict.json")


def is_table(path: Path) -> bool:
    """Whether a file is read here."""
    return path.name.endswith(SUFFIXES) and path.name not in NOT_DATA and not path.name.startswith(("cache-", "."))


def files_of(path: Path, part: str = "train") -> list[Path]:
    """The files with the rows of a part of a set, in the order in which they are read.

    Raises
    ------
    InputError
        There are none.
    """
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob("*") if file.is_file() and is_table(file))
    named = {name: [file for file in found if _is_named(file.relative_to(path), NAMES_OF[name])] for name in NAMES_OF}
    if any(named.values()):
        found = named[part]
    require(bool(found), f"{path}: part {part}", None, f"files {', '.join('*' + suffix for suffix in SUFFIXES)}")
    return found


def _is_named(file: Path, names: Sequence[str]) -> bool:
    """Whether a file, or a folder in which it lies, is named for a part."""
    words = [*file.parts[:-1], file.name.split(".")[0]]
    return any(word == name or word.startswith((f"{name}-", f"{name}_")) for word in words for name in names)


def rows_of(path: Path) -> Iterator[Any]:
    """Rows of one file as they come; raises `InputError` where it cannot be read."""
    try:
        if path.suffix in (".parquet", ".arrow"):
            for batch in _arrow_batches(path):
                yield from batch.to_pylist()
        elif path.name.endswith((".jsonl", ".jsonl.gz")):
            yield from _json_lines(path)
        else:
            with _opened(path) as file:
                content = json.load(file)
            require(isinstance(content, list), str(path), type(content).__name__, "a list of examples")
            yield from content
    except (OSError, ValueError, EOFError, RecursionError) as error:  # of text, JSON and Arrow
        raise InputError(f"{path}: {error}, expected a readable file of examples") from None


def require_unicode(text: str, where: str) -> None:
    """Raise `InputError` for half a character beyond 16 bits, which JSON can say (`\\ud83d` alone) and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise InputError(f"{where}: found {half!r}, half a character, expected text that is Unicode") from None


def columns_of(path: Path) -> list[str]:
    """Names of the columns (of JSON, of the first row)."""
    if path.suffix in (".parquet", ".arrow"):
        try:
            return next((list(map(str, batch.schema.names)) for batch in _arrow_batches(path)), [])
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: {error}, expected a readable file of examples") from None
    first: Any = next(rows_of(path), {})
    require(isinstance(first, dict), f"{path}: example 0", type(first).__name__, "an object with columns")
    return list(first)


def column_of(path: Path, name: str) -> Iterator[str | np.ndarray]:
    """A column's values, texts or arrays of token numbers, of one file as they come."""
    if path.suffix in (".parquet", ".arrow"):
        try:
            for batch in _arrow_batches(path):
                yield from _values(path, batch.column(name), name)
        except (OSError, ValueError, KeyError) as error:
            raise InputError(f"{path}: {error}, expected a readable file with the column {name!r}") from None
        return
    for number, row in enumerate(rows_of(path)):
        value = row.get(name) if isinstance(row, dict) else None
        if value is None and isinstance(row, dict) and name in row:
            continue  # as of Parquet
        if isinstance(value, str):
            require_unicode(value, f"{path}: example {number}: {name}")
            yield value
        elif isinstance(value, list) and all(type(token) is int and abs(token) < 2**63 for token in value):
            yield np.array(value, dtype=np.int64)
        else:
            raise InputError(f"{path}: example {number}: found no {name!r}, expected a text or a list of tokens there")


def _values(path: Path, column: Any, name: str) -> Iterator[str | np.ndarray]:
    import pyarrow as pa

    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        for text in column.to_pylist():
            if text is not None:
                yield text
        return
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not listed or not pa.types.is_integer(kind.value_type):
        raise InputError(f"{path}: column {name!r}: found {kind}, expected texts or lists of whole numbers")
    for row in column:
        if row.is_valid:
            if row.values.null_count:
                raise InputError(f"{path}: column {name!r}: found a list with none in it, expected whole numbers")
            yield row.values.to_numpy(zero_copy_only=False)


def _arrow_batches(path: Path) -> Iterator[Any]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise InputError(f"{path}: found no pyarrow, expected it installed (pip install pyarrow)") from None
    if path.suffix == ".parquet":
        with parquet.ParquetFile(path) as file:
            yield from file.iter_batches()
        return
    with pa.memory_map(str(path)) as source:
        try:
            reader = pa.ipc.open_file(source)
        except pa.ArrowInvalid:  # what `datasets` writes is a stream
            source.seek(0)
            yield from pa.ipc.open_stream(source)
            return
        yield from (reader.get_batch(k) for k in range(reader.num_record_batches))


def _opened(path: Path) -> Any:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def _json_lines(path: Path) -> Iterator[Any]:
    with _opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise InputError(f"{path}, line {number}: {error}, expected JSON") from None
