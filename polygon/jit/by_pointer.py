"""Named tuples that kernels get as one pointer.

numba passes a named tuple as all that its arrays are made of: a function that takes two of them has hundreds of
arguments, at every call, which took half of the time of the search and most of that of compiling. Here the words of a
tuple lie in a block of memory, made once, and a kernel reads the few that it needs from there.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import typeof
from numba.core import cgutils, types
from numba.core.imputils import lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.core.typing.typeof import typeof_impl
from numba.extending import NativeValue, models, register_model, unbox

Named = TypeVar("Named", bound=NamedTuple)
Arguments = ParamSpec("Arguments")
WORD = 8
"""Bytes of a word: a number, an address, or one of the things that an array is made of."""
_LAYOUT = Path(__file__).read_bytes()
"""What a kept kernel was compiled with: a part of the types' names, so that one of another layout is not taken."""


class PointedType(types.Type):
    """What numba knows of such a block: names and types of the fields, which follow one another."""

    def __init__(self, name: str, fields: tuple[tuple[str, Any], ...]) -> None:
        self.fields = dict(fields)
        self.places: dict[str, int] = {}
        place = 0
        for field, kind in fields:
            self.places[field] = place
            place += WORD * _words(kind)
        digest = hashlib.blake2b(_LAYOUT + str(fields).encode(), digest_size=8).hexdigest()
        super().__init__(name=f"Pointed({name}, {digest})")


class Pointed:
    """A named tuple whose words lie in memory for kernels; it reads as the tuple does."""

    __slots__ = ("_numba_type_", "_of", "_words", "address")

    def __init__(self, of: Any) -> None:
        parts = [pointed(value) if hasattr(value, "_fields") else value for value in of]
        self._of = type(of)(*parts)
        named: Any = type(of)
        self._numba_type_ = _type_of(named, tuple(map(_kind_of, parts)))
        words: list[int] = []
        for part in parts:
            _write(part, words)
        self._words = np.array(words, dtype=np.int64)
        self.address = _address(self._words)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def _replace(self, **changes: Any) -> Pointed:
        of, kind = self._of._replace(**changes), self._numba_type_
        if any(hasattr(value, "_fields") or _kind_of(value) != kind.fields[name] for name, value in changes.items()):
            return Pointed(of)
        other = object.__new__(Pointed)  # of what stays the words are copied
        other._of, other._numba_type_, other._words = of, kind, self._words.copy()
        for name, value in changes.items():
            words: list[int] = []
            _write(value, words)
            first = kind.places[name] // WORD
            other._words[first : first + len(words)] = words
        other.address = _address(other._words)
        return other

    def __iter__(self) -> Any:
        return iter(self._of)

    def __reduce__(self) -> tuple[Any, ...]:
        return pointed, (self._of,)


def pointed(of: Named) -> Named:
    """A named tuple of arrays, numbers, pairs of these and such tuples, to hand to kernels by its address.

    Arrays may be written to; they are the tuple's own. One that is pointed to already stays as it is.

    Raises
    ------
    TypeError
        For a field of another kind.
    """
    return of if isinstance(of, Pointed) else cast(Named, Pointed(of))


def gives_pointed(make: Callable[Arguments, Named]) -> Callable[Arguments, Named]:
    """A function that makes a named tuple, whose results are `pointed`."""

    @functools.wraps(make)
    def made(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Named:
        return pointed(make(*args, **kwargs))

    return made


@cache
def _type_of(of: Any, kinds: tuple[Any, ...]) -> PointedType:
    return PointedType(f"{of.__module__}.{of.__qualname__}", tuple(zip(of._fields, kinds, strict=True)))


_kinds: dict[Any, Any] = {}


def _kind_of(value: Any) -> Any:
    """The numba type of a field. numba takes microseconds for each, and there are dozens."""
    if isinstance(value, Pointed):
        return value._numba_type_
    if isinstance(value, np.ndarray):
        key: Any = value.dtype, value.ndim, value.flags.c_contiguous, value.flags.f_contiguous, value.flags.writeable
    elif isinstance(value, tuple):
        key = tuple(type(part) for part in value)
    else:
        key = type(value)
    if key not in _kinds:
        _kinds[key] = typeof(value)
    return _kinds[key]


def _words(kind: Any) -> int:
    if isinstance(kind, types.Array):
        return 5 + 2 * int(kind.ndim)
    return len(kind) if isinstance(kind, types.BaseTuple) else 1


def _write(value: Any, words: list[int]) -> None:
    """Append the words of a field, as numba lays them out."""
    if isinstance(value, Pointed):
        words.append(value.address)
    elif isinstance(value, np.ndarray):
        words += (0, 0, value.size, value.itemsize, _address(value), *value.shape, *value.strides)
    elif isinstance(value, tuple):
        for part in value:
            _write(part, words)
    elif isinstance(value, float):
        words.append(struct.unpack("q", struct.pack("d", value))[0])
    elif isinstance(value, bool | int | np.integer | np.bool_):
        words.append(int(value))
    else:
        raise TypeError(f"a kernel cannot read {type(value).__name__} by a pointer")


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


@typeof_impl.register(Pointed)
def _typeof(value: Pointed, _: Any) -> PointedType:
    return value._numba_type_


@register_model(PointedType)
class _PointedModel(models.OpaqueModel):
    """An address."""


@unbox(PointedType)  # type: ignore[untyped-decorator]
def _unbox(_: PointedType, value: Any, c: Any) -> NativeValue:
    number = c.pyapi.object_getattr_string(value, "address")
    address = c.pyapi.long_as_voidptr(number)
    c.pyapi.decref(number)
    return NativeValue(address)


@infer_getattr
class _Fields(AttributeTemplate):
    key = PointedType

    def generic_resolve(self, kind: PointedType, name: str) -> Any:  # type: ignore[override]
        """The type of a field."""
        return kind.fields.get(name)


@lower_getattr_generic(PointedType)  # type: ignore[untyped-decorator]
def _read(context: Any, builder: Any, kind: PointedType, address: Any, name: str) -> Any:
    """Read a field. Nobody writes to the block, so that what was read once need not be read again."""
    field, place = kind.fields[name], kind.places[name]

    def read(as_type: Any) -> Any:
        nonlocal place
        value = ir.Constant(as_type, ir.Undefined)
        if isinstance(as_type, ir.ArrayType):
            for i in range(as_type.count):
                value = builder.insert_value(value, read(as_type.element), i)
            return value
        if isinstance(as_type, ir.LiteralStructType):
            for i, part in enumerate(as_type.elements):
                value = builder.insert_value(value, read(part), i)
            return value
        value = builder.load(cgutils.pointer_add(builder, address, place, as_type.as_pointer()))
        value.set_metadata("invariant.load", builder.module.add_metadata([]))
        place += WORD
        return value

    if isinstance(field, types.Boolean):
        return builder.trunc(read(ir.IntType(WORD * 8)), context.get_value_type(field))
    return read(context.get_value_type(field))
