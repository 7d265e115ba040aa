"""The file of `polygon bench-device`."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polygon.domain.bench import AttentionRow, BlockRow, CollectiveRow, DeviceBench, ProductRow, StreamRow
from polygon.domain.errors import InputError
from polygon.formats import files
from polygon.formats.bench_file import bench_data, bench_from_spec
from polygon.formats.schema import BenchSpec, check
from polygon.formats.serialization import format_json

SECONDS = st.floats(1e-9, 1e3)
SIZES = st.integers(1, 10**12)
PRECISIONS = st.sampled_from(["fp32", "tf32", "fp16", "bf16"])


def rows(kind: type, **fields) -> st.SearchStrategy:
    """Tuples of rows of one class."""
    return st.lists(st.builds(kind, **fields), max_size=3).map(tuple)


BENCHES = st.builds(
    DeviceBench,
    device=st.sampled_from(["t4", "a100-80gb", "our-own"]),
    measured_on=st.text(max_size=5),
    power_limit_w=st.none() | SECONDS,
    clock_mhz=st.none() | SECONDS,
    threads=st.none() | st.integers(1, 64),
    versions=st.lists(st.text(min_size=1, max_size=5), max_size=2).map(tuple),
    date=st.text(max_size=5),
    complete=st.booleans(),
    launch_s=st.none() | SECONDS,
    products=rows(ProductRow, precision=PRECISIONS, rows=SIZES, columns=SIZES, inner=SIZES, seconds=SECONDS),
    attention=rows(
        AttentionRow, precision=PRECISIONS, batch=SIZES, heads=SIZES, seq_len=SIZES, head_dim=SIZES, forward_s=SECONDS,
        backward_s=SECONDS,
    ),
    streams=rows(
        StreamRow, precision=PRECISIONS, operation=st.text(min_size=1, max_size=5), moved_bytes=SIZES, seconds=SECONDS
    ),
    blocks=rows(
        BlockRow, precision=PRECISIONS, hidden_size=SIZES, heads=SIZES, seq_len=SIZES, micro_batch_size=SIZES,
        forward_s=SECONDS, backward_s=SECONDS,
    ),
    collectives=rows(
        CollectiveRow, backend=st.sampled_from(["gloo", "nccl"]), members=st.integers(2, 16), n_bytes=SIZES,
        seconds=SECONDS,
    ),
)  # fmt: skip


@given(BENCHES)
def test_what_is_written_is_read_back(bench):
    """Through text, every number as it was."""
    data = json.loads(format_json(bench_data(bench)))
    assert bench_from_spec(check(BenchSpec, data)) == bench


ROW = {"precision": "bf16", "rows": 8, "columns": 8, "inner": 8, "seconds": 1e-6}
GOOD = {"format": "polygon-bench", "version": 1, "device": "NVIDIA A100-SXM4-80GB", "products": [ROW]}


def test_a_device_is_called_as_the_catalogue_calls_it(tmp_path):
    """What the driver calls it is one of the aliases; what nobody knows is the user's own."""
    for name, known in (("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("our-own", "our-own")):
        (tmp_path / "bench.json").write_text(json.dumps({**GOOD, "device": name}))
        assert files.read_bench(tmp_path / "bench.json").device == known


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "polygon-layer-profile"}, "format: found 'polygon-layer-profile', expected 'polygon-bench'"),
        ({"version": 2}, "version: found 2, expected 1"),
        ({"device": ""}, "device: found '', expected a text that is not empty"),
        ({"prodcuts": []}, "prodcuts: found unknown key 'prodcuts', expected 'products' (nearest)"),
        ({"products": [{**ROW, "seconds": 0.0}]}, "products[0].seconds: found 0.0, expected a number > 0"),
        ({"products": [ROW, {**ROW, "rows": "8"}]}, "products[1].rows: found '8', expected a whole number"),
        ({"products": [{**ROW, "precision": "int8"}]}, "products[0].precision: found 'int8', expected fp32 or"),
        ({"products": [{k: v for k, v in ROW.items() if k != "inner"}]}, "products[0].inner: found nothing"),
        ({"launch_s": -1.0}, "launch_s: found -1.0, expected a number > 0"),
        (
            {"collectives": [{"backend": "gloo", "members": 1, "n_bytes": 8, "seconds": 1.0}]},
            "collectives[0].members: found 1, expected a whole number >= 2",
        ),
    ],
)
def test_a_bad_file_is_refused_in_one_line_that_says_where(tmp_path, change, message):
    """File, place, what was found and what is allowed."""
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(InputError) as raised:
        files.read_bench(path)
    text = str(raised.value)
    assert text.startswith(f"{path}: {message}"), text
    assert "\n" not in text
