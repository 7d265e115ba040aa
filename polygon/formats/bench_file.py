"""The file of `polygon bench-device`: `polygon-bench`, version 1, with the names of `polygon.domain.bench`."""

from __future__ import annotations

import dataclasses
from typing import Any

from polygon.domain.bench import AttentionRow, BlockRow, CollectiveRow, DeviceBench, ProductRow, StreamRow
from polygon.formats import catalogue
from polygon.formats.schema import BenchSpec

ROWS: dict[str, type] = {
    "products": ProductRow,
    "attention": AttentionRow,
    "streams": StreamRow,
    "blocks": BlockRow,
    "collectives": CollectiveRow,
}
"""Class of the rows under each key."""


def bench_from_spec(spec: BenchSpec) -> DeviceBench:
    """What a file says, with the device as the catalogue calls it.

    Raises
    ------
    InputError
        For a number out of its range; the message says where.
    """
    data = spec.model_dump(exclude={"format", "version"})
    for key, kind in ROWS.items():
        data[key] = tuple(kind(**row) for row in data[key])
    return DeviceBench(**{**data, "device": catalogue.own_or_known(spec.device), "versions": tuple(spec.versions)})


def bench_data(bench: DeviceBench) -> dict[str, Any]:
    """Plain data that `bench_from_spec` reads back to an equal bench."""
    data = {key: value for key, value in dataclasses.asdict(bench).items() if value is not None}
    return {"format": "polygon-bench", "version": 1, **data}
