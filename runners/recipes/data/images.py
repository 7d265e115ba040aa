"""Image sets of local folders or Hugging Face's cache, decoded once to the model's size and memory-mapped.

What a folder may hold: CIFAR-100 as Python pickles (`train`, `meta`) or binary (`train.bin`); a folder of images per
class (Food-101: below `images`, with `meta/train.txt` or `train.json`, where they are, naming the training images);
`train*.parquet` as on Hugging Face's hub (columns `img` or `image` with encoded bytes, and a label). Without a path
the hub's cache is searched (`HF_HOME`). Images are resized to the model's side, shorter side first, and cropped to the
middle; values go to -1..1.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from polygon.domain.errors import InputError, require
from polygon.domain.model import Model
from runners.data.prepared import cache_folder, state_of
from runners.data.token_rows import NAMES_OF
from runners.recipes.models import beside
from runners.recipes.recipe_schema import DataPart

if TYPE_CHECKING:
    from PIL.Image import Image

    from runners.data.samples import ImageSamples

HUB = {"cifar100": "datasets--uoft-cs--cifar100", "food101": "datasets--ethz--food101"}
"""Folder of a set in the hub's cache."""
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
CIFAR_SIDE = 32


def make_samples(part: DataPart, model: Model, seq_len: int, seed: int, folder: Path) -> ImageSamples:
    """The training images of a set, or those of the named part, for a model; mapped into memory.

    Raises
    ------
    InputError
        No such folder, nothing in it that can be read, or classes that the model does not have.
    """
    require(model.family == "vit", "data.kind", part.kind, "text for a language model")
    source = beside(folder, part.path) if part.path is not None else _in_hub_cache(part.kind)
    require(source.is_dir(), "data.path", str(source), "a folder of images")
    images, classes = decoded(source, model, cache_folder("data.cache", part.cache), part.part)
    if part.samples is not None:
        images, classes = images[: part.samples], classes[: part.samples]
    from runners.data.samples import ImageSamples, require_classes

    require_classes(classes, model.vocab_size, f"{source}: classes")
    return ImageSamples(images=images, classes=classes, seed=seed)


def _in_hub_cache(kind: str) -> Path:
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    snapshots = sorted((home / "hub" / HUB[kind] / "snapshots").glob("*")) if kind in HUB else []
    if not snapshots:
        where = f"{HUB[kind]} in {home}/hub" if kind in HUB else "one"
        raise InputError(f"data.path: found none, expected a folder (or {where})")
    return snapshots[-1]


def decoded(source: Path, model: Model, cache: Path, part: str = "train") -> tuple[np.ndarray, np.ndarray]:
    """Images (memory-mapped) and classes of a part of a set; the first caller decodes, the others wait for it."""
    shape = f"{model.channels}x{model.image_size}" + ("" if part == "train" else f" {part}")
    key = hashlib.sha256(f"{source.resolve()} {state_of(source)} {shape}".encode()).hexdigest()[:16]
    target = cache / f"images-{key}"
    try:
        target.mkdir(parents=True, exist_ok=True)
        with (target / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = _arrays(target, model)
            if found is None:
                _decode(_read(source, part), model, target)
                found = _arrays(target, model)
            assert found is not None
            return found
    except OSError as error:
        raise InputError(f"data.cache: {target}: {error.strerror}, expected a folder that can be written") from None


def _arrays(target: Path, model: Model) -> tuple[np.ndarray, np.ndarray] | None:
    """What was decoded; None: nothing yet, or cut by a full disk or by a copy that was broken off."""
    try:
        images, classes = np.load(target / "images.npy", mmap_mode="r"), np.load(target / "classes.npy")
    except (OSError, ValueError, EOFError):
        return None
    shape = (len(classes), model.channels, model.image_size, model.image_size)
    whole = images.shape == shape and images.dtype == np.uint8 and classes.dtype == np.int32
    return (images, classes) if whole else None


def _decode(rows: _Rows, model: Model, target: Path) -> None:
    shape = (len(rows), model.channels, model.image_size, model.image_size)
    # New files take the place of old ones: another run may have those mapped.
    images = np.lib.format.open_memmap(target / "images.partial.npy", mode="w+", dtype=np.uint8, shape=shape)
    classes = np.zeros(len(rows), dtype=np.int32)
    for number in range(len(rows)):
        image, classes[number] = rows.image(number), rows.classes[number]
        images[number] = _fitted(image, model)
    images.flush()
    (target / "images.partial.npy").rename(target / "images.npy")
    # The classes come last: where they are, the images are whole.
    np.save(target / "classes.partial.npy", classes)
    (target / "classes.partial.npy").rename(target / "classes.npy")


def _fitted(image: Image, model: Model) -> np.ndarray:
    """Pixels (channels, side, side): resized so that the shorter side fits, the middle of the longer one."""
    from PIL.Image import Resampling

    side = model.image_size
    image = image.convert("L" if model.channels == 1 else "RGB")
    scale = side / min(image.size)
    size = (max(side, round(image.width * scale)), max(side, round(image.height * scale)))
    if size != image.size:
        image = image.resize(size, Resampling.BICUBIC)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    pixels = np.asarray(image.crop((left, top, left + side, top + side)))
    return pixels[None] if model.channels == 1 else pixels.transpose(2, 0, 1)


class _Rows(ABC):
    """Images of a set, one at a time."""

    def __init__(self, classes: np.ndarray) -> None:
        self.classes = np.asarray(classes)

    def __len__(self) -> int:
        return len(self.classes)

    @abstractmethod
    def image(self, number: int) -> Image:
        """The image of that number."""


class _Pixels(_Rows):
    """CIFAR's rows of 3 x 32 x 32 bytes."""

    def __init__(self, pixels: np.ndarray, classes: np.ndarray) -> None:
        super().__init__(classes)
        self._pixels = np.asarray(pixels, dtype=np.uint8).reshape(-1, 3, CIFAR_SIDE, CIFAR_SIDE)

    def image(self, number: int) -> Image:
        from PIL.Image import fromarray

        return fromarray(np.ascontiguousarray(self._pixels[number].transpose(1, 2, 0)))


def _opened(file: Path | io.BytesIO, where: str) -> Image:
    """The decoded image of a file; InputError says where it is."""
    from PIL import UnidentifiedImageError
    from PIL.Image import open as open_image

    try:
        with open_image(file) as image:
            return image.convert("RGB")
    except (UnidentifiedImageError, OSError) as error:
        raise InputError(f"{where}: found no image that can be read: {error}") from None


class _Files(_Rows):
    """Image files."""

    def __init__(self, paths: list[Path], classes: list[int]) -> None:
        super().__init__(np.array(classes))
        self._paths = paths

    def image(self, number: int) -> Image:
        return _opened(self._paths[number], str(self._paths[number]))


class _Encoded(_Rows):
    """Encoded images in memory, and of which file and row each is."""

    def __init__(self, images: list[bytes], places: list[str], classes: np.ndarray) -> None:
        super().__init__(classes)
        self._images, self._places = images, places

    def image(self, number: int) -> Image:
        return _opened(io.BytesIO(self._images[number]), self._places[number])


def _read(source: Path, part: str) -> _Rows:
    """Whatever format the folder has."""
    for inside in (source, source / "cifar-100-python", source / "cifar-100-binary"):
        if (inside / part).is_file():
            return _cifar_pickle(inside / part)
        if (inside / f"{part}.bin").is_file():
            return _cifar_binary(inside / f"{part}.bin")
    tables = sorted(path for name in NAMES_OF[part] for path in source.rglob(f"{name}*.parquet"))
    rows = _parquet(tables) if tables else _image_folder(source, part)
    what = "" if part == "train" else f" of the part {part!r}"
    require(
        len(rows) > 0, "data.path", str(source), f"CIFAR's files, parquet files, or a folder of images per class{what}"
    )
    return rows


class _PlainUnpickler(pickle.Unpickler):
    """Reads arrays and plain values only: a pickle may otherwise run any program."""

    ALLOWED = frozenset({("numpy", "ndarray"), ("numpy", "dtype")})

    def find_class(self, module: str, name: str) -> Any:
        rebuild = name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray")
        if rebuild or (module, name) in self.ALLOWED or (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a data set")


def _cifar_pickle(path: Path) -> _Rows:
    try:
        with path.open("rb") as file:
            data = _PlainUnpickler(file, encoding="bytes").load()
        return _Pixels(data[b"data"], np.array(data[b"fine_labels"]))
    except (pickle.UnpicklingError, KeyError, TypeError, EOFError, ValueError) as error:
        raise InputError(f"{path}: found {error}, expected CIFAR-100's pickle (data, fine_labels)") from None


def _cifar_binary(path: Path) -> _Rows:
    row = 2 + 3 * CIFAR_SIDE**2
    raw = np.fromfile(path, dtype=np.uint8)
    require(len(raw) > 0 and len(raw) % row == 0, f"{path}: size", len(raw), f"a multiple of {row} (CIFAR-100's rows)")
    rows = raw.reshape(-1, row)
    return _Pixels(rows[:, 2:], rows[:, 1].astype(np.int64))


def _named_images(source: Path, part: str) -> Iterator[str] | None:
    """Food-101's list of the images of a part, as class/name."""
    if (source / "meta" / f"{part}.txt").is_file():
        return iter((source / "meta" / f"{part}.txt").read_text().split())
    if (source / "meta" / f"{part}.json").is_file():
        try:
            by_class = json.loads((source / "meta" / f"{part}.json").read_text())
        except ValueError as error:
            raise InputError(f"{source}/meta/{part}.json: {error}, expected JSON") from None
        return (name for names in by_class.values() for name in names)
    return None


def _image_folder(source: Path, part: str) -> _Rows:
    wanted = _named_images(source, part)
    names_of = NAMES_OF[part] if wanted is None else ()
    top = next((source / name for name in (*names_of, "images") if (source / name).is_dir()), source)
    if part != "train" and wanted is None and top.name not in names_of:
        return _Files([], [])
    names = sorted(path.name for path in top.iterdir() if path.is_dir())
    number = {name: index for index, name in enumerate(names)}
    if wanted is None:
        paths = [p for name in names for p in sorted((top / name).iterdir()) if p.suffix.lower() in SUFFIXES]
    else:
        paths = []
        for item in wanted:
            found = next((p for s in SUFFIXES if (p := top / f"{item}{s}").is_file()), None)
            if found is None:
                raise InputError(f"{source}/meta: found {item}, expected an image of that name in {top}")
            paths.append(found)
    return _Files(paths, [number[path.parent.name] for path in paths])


def _parquet(tables: list[Path]) -> _Rows:
    try:
        from pyarrow import parquet, types
    except ImportError:
        raise InputError(f"{tables[0]}: found no pyarrow, expected it to read parquet (pip install pyarrow)") from None
    images: list[bytes] = []
    places: list[str] = []
    classes: list[int] = []
    for path in tables:
        try:
            table = parquet.read_table(path)
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: {error}, expected a readable Parquet file") from None
        image = next((name for name in ("image", "img") if name in table.column_names), None)
        label = next((name for name in ("label", "fine_label", "labels") if name in table.column_names), None)
        if image is None or label is None:
            raise InputError(
                f"{path}: found columns {table.column_names}, expected image or img, and label or fine_label"
            )
        column = table[label]
        if not types.is_integer(column.type) or column.null_count:
            found = f"{column.type}, {column.null_count:,} without one"
            raise InputError(f"{path}: {label}: found {found}, expected a whole number for every image")
        for number, row in enumerate(table[image].to_pylist()):
            encoded = row.get("bytes") if isinstance(row, dict) else row
            where = f"{path}: {image} {number}"
            if not isinstance(encoded, bytes):
                raise InputError(f"{where}: found none, expected the bytes of an image file, as Hugging Face has them")
            images.append(encoded)
            places.append(where)
        classes += column.to_pylist()
    return _Encoded(images, places, np.array(classes, dtype=np.int64))
