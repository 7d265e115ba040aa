"""Files of token numbers, mapped into memory: Megatron's `.bin` with `.idx`, raw numbers, llm.c's shards, `.npy`.

What the numbers are is said by the file or by the user and never guessed: `.idx`, the header of llm.c's shards, a
sidecar `tokens.bin.json` (``{"token_type": "uint16"}``) or `--token-type`.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from polygon.domain.errors import InputError, Phrase, require
from runners.data.choice import TOKEN_TYPES
from runners.data.samples import Tokens

RAW_SUFFIXES = (".bin", ".u16", ".u32", ".tokens")
INDEX_MAGIC, OLD_INDEX_MAGIC = b"MMIDIDX\x00\x00", b"TNTIDX\x00\x00"
INDEX_HEAD = struct.Struct("<9sQBQQ")
"""Magic, version, type of the tokens, sequences, and documents + 1 (Megatron-LM, indexed_dataset.py)."""
INDEX_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
SHARD_HEAD = 256
"""Numbers of 32 bits in front of the tokens of a shard of llm.c (dev/data/data_common.py)."""
SHARD_TYPES = {20240520: "uint16", 20240801: "uint32"}
"""By the shard's first number."""


@dataclass(frozen=True)
class Corpus:
    """Tokens, and where documents begin where that is known."""

    name: str
    tokens: Tokens
    documents: Callable[[], np.ndarray] | None = None
    """First token of every document, and the end of the last; only read where it is needed."""


class Joined:
    """Several sequences of tokens one after the other."""

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self._parts = [part for part in parts if len(part)]
        self._ends = np.cumsum([len(part) for part in self._parts])

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._parts else 0

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(len(self))
        found = []
        k = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            here = self._parts[k]
            before = int(self._ends[k]) - len(here)
            found.append(here[start - before : stop - before])
            start, k = int(self._ends[k]), k + 1
        return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


def is_token_file(path: Path, token_type: str | None) -> bool:
    """Whether a path is read here: by its suffix, by what lies beside it, or since the user says of what type it is."""
    return path.suffix in (".npy", ".idx", *RAW_SUFFIXES) or _index_of(path) is not None or token_type is not None


def open_tokens(path: Path, token_type: str | None = None) -> Corpus:
    """Map a file of tokens into memory; only its head is read.

    Parameters
    ----------
    path : Path
        The file; of Megatron's pairs either file, or their name without suffix.
    token_type : str, optional
        One of `TOKEN_TYPES`, for files that do not say it.

    Raises
    ------
    InputError
        The file cannot be read, is cut, or does not say what its tokens are.
    """
    try:
        index = _index_of(path)
        if index is not None:
            return _open_megatron(index, token_type)
        if path.suffix == ".npy":
            return _open_npy(path, token_type)
        return _open_raw(path, token_type)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}, expected a readable file of tokens") from None


def _index_of(path: Path) -> Path | None:
    """The index of a pair of Megatron, if this is one."""
    if path.suffix == ".idx":
        return path
    index = path.with_suffix(".idx") if path.suffix == ".bin" else path.with_name(f"{path.name}.idx")
    return index if index.is_file() else None


def _open_npy(path: Path, token_type: str | None) -> Corpus:
    try:
        tokens = np.load(path, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise InputError(f"{path}: {error}, expected a .npy of token numbers") from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InputError(f"{path}: found {tokens.dtype} of shape {tokens.shape}, expected one row of whole numbers")
    _check_type(path, token_type, str(tokens.dtype))
    return Corpus(str(path), _scattered(tokens))


def _check_type(path: Path, wanted: str | None, found: str) -> None:
    """What the user says must not contradict the file."""
    require(wanted in (None, found), f"{path}: --token-type", wanted, f"{found}, which the file says (or no option)")


def _open_raw(path: Path, token_type: str | None) -> Corpus:
    found, offset = _shard_type(path), 4 * SHARD_HEAD
    if found is None:
        found, offset = _sidecar_type(path), 0
    if found is not None:
        _check_type(path, token_type, found)
    elif token_type is None:
        raise InputError(
            f"{path}: found numbers of an unknown type, expected --token-type (uint16 of nanoGPT, say; one of "
            f"{', '.join(TOKEN_TYPES)}), {path.name}.json with a token_type, or Megatron's {path.stem}.idx beside it"
        )
    return Corpus(str(path), _mapped(path, found or str(token_type), offset))


def _mapped(path: Path, token_type: str, offset: int = 0) -> np.ndarray:
    kind = np.dtype(token_type).newbyteorder("<")
    size = path.stat().st_size - offset
    expected = f"a multiple of {kind.itemsize} (tokens of {token_type})"
    require(size % kind.itemsize == 0, f"{path}: bytes", size, expected)
    return _scattered(np.memmap(path, dtype=kind, mode="r", offset=offset)) if size else np.zeros(0, dtype=kind)


def _scattered(tokens: np.ndarray) -> np.ndarray:
    """Tell the system that a mapped file is read here and there.

    Else it reads megabytes ahead of every sample: 11 ms instead of 0.1 for one of 32 tokens in 20 GB on a busy machine.
    """
    mapped = getattr(tokens, "_mmap", None)
    if mapped is not None and hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)
    return tokens


def _shard_type(path: Path) -> str | None:
    """What a shard of llm.c says of its tokens; None: it is none."""
    with path.open("rb") as file:
        start = file.read(4 * SHARD_HEAD)
    if len(start) < 4 * SHARD_HEAD:
        return None
    head = np.frombuffer(start, dtype="<i4")
    found = SHARD_TYPES.get(int(head[0]))
    if found is None:
        return None
    expected = 4 * SHARD_HEAD + int(head[2]) * np.dtype(found).itemsize
    size = path.stat().st_size
    require(size == expected, f"{path}: bytes", size, f"{expected}, as its head says ({head[2]} tokens of {found})")
    return found


def _sidecar_type(path: Path) -> str | None:
    """What `tokens.bin.json` says; None: there is none."""
    sidecar = path.with_name(f"{path.name}.json")
    if not sidecar.is_file():
        return None
    try:
        found = json.loads(sidecar.read_text(encoding="utf-8"))
        token_type = found.get("token_type")
    except (ValueError, AttributeError) as error:
        raise InputError(f"{sidecar}: {error}, expected JSON as {{'token_type': 'uint16'}}") from None
    require(token_type in TOKEN_TYPES, f"{sidecar}: token_type", token_type, f"one of {', '.join(TOKEN_TYPES)}")
    return str(token_type)


def _open_megatron(index: Path, token_type: str | None) -> Corpus:
    """A pair of files: tokens of all sequences one after the other, and lengths, places and documents of these."""
    content = index.with_suffix(".bin")
    with index.open("rb") as file:
        head = file.read(INDEX_HEAD.size)
    found = Phrase(f"an index of Megatron's older kind ({OLD_INDEX_MAGIC[:6].decode()})")
    require(not head.startswith(OLD_INDEX_MAGIC), str(index), found, "one of kind mmap: prepare the data anew")
    whole = len(head) == INDEX_HEAD.size and head.startswith(INDEX_MAGIC)
    require(whole, str(index), Phrase(f"the head {head[:9]!r}"), f"an index of Megatron ({INDEX_MAGIC!r})")
    _, version, code, sequences, borders = INDEX_HEAD.unpack(head)
    kind = INDEX_TYPES.get(code, "")
    known = version == 1 and kind in TOKEN_TYPES
    require(known, f"{index}: version, type", (version, code), "1 and whole numbers")
    _check_type(content, token_type, kind)
    expected = INDEX_HEAD.size + 12 * sequences + 8 * borders
    size = index.stat().st_size
    require(size >= expected, f"{index}: bytes", size, f"{expected}, as its head says (it was cut)")
    tokens = _mapped(content, kind)
    if not sequences:
        return Corpus(str(content), tokens, lambda: np.zeros(1, dtype=np.int64))
    lengths_end = INDEX_HEAD.size + 4 * sequences
    lengths = np.memmap(index, dtype="<i4", mode="r", offset=INDEX_HEAD.size, shape=(sequences,))
    places = np.memmap(index, dtype="<i8", mode="r", offset=lengths_end, shape=(sequences + borders,))
    end = int(places[sequences - 1]) // tokens.dtype.itemsize + int(lengths[-1])
    require(len(tokens) == end, f"{content}: tokens", len(tokens), f"{end}, as {index.name} says")

    def documents() -> np.ndarray:
        firsts = np.append(places[:sequences] // tokens.dtype.itemsize, end)
        return firsts[places[sequences:]]

    return Corpus(str(content), tokens, documents)


class TokenWriter:
    """Writes documents as one of Megatron's pairs, bit by bit; the index when it is left without an error.

    Parameters
    ----------
    prefix : Path
        Name of the files without suffix.
    largest : int
        Largest token that there may be; it decides the type.
    """

    def __init__(self, prefix: Path, largest: int) -> None:
        self._prefix = prefix
        self._code = 8 if largest < 2**16 else 4
        self._type = np.dtype(INDEX_TYPES[self._code]).newbyteorder("<")
        self._file = prefix.with_suffix(".bin").open("wb")
        self.lengths: list[int] = []
        self.tokens = 0

    def add(self, document: np.ndarray, *, goes_on: bool = False) -> None:
        """Append a document (an empty one is left out), or more of the one before as long as the index can say it."""
        if len(document):
            self._file.write(np.ascontiguousarray(document, dtype=self._type).tobytes())
            self.tokens += len(document)
            if goes_on and self.lengths and self.lengths[-1] + len(document) < 2**31:
                self.lengths[-1] += len(document)
            else:
                self.lengths.append(len(document))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._file.close()
        if kind is None:
            self._write_index()

    def _write_index(self) -> None:
        lengths = np.array(self.lengths, dtype="<i4")
        places = np.append(0, np.cumsum(lengths, dtype="<i8")[:-1])[: len(lengths)] * self._type.itemsize
        with self._prefix.with_suffix(".idx").open("wb") as file:
            file.write(INDEX_HEAD.pack(INDEX_MAGIC, 1, self._code, len(lengths), len(lengths) + 1))
            for part in (lengths, places.astype("<i8"), np.arange(len(lengths) + 1, dtype="<i8")):
                file.write(part.tobytes())


def joined(name: str, parts: Sequence[Corpus]) -> Corpus:
    """Several files one after the other; documents where all of them know theirs."""
    ends = np.cumsum([0, *(len(part.tokens) for part in parts)])
    known = [part.documents for part in parts if part.documents is not None]

    def documents() -> np.ndarray:
        firsts = [read()[:-1] + start for read, start in zip(known, ends[:-1], strict=True)]
        return np.append(np.concatenate(firsts), ends[-1])

    tokens = Joined([np.asarray(part.tokens) for part in parts])
    return Corpus(name, tokens, documents if len(known) == len(parts) else None)
