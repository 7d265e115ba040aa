"""One table of optimizers: a row more is read, priced, offered and refused like the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polygon.commands import cli
from polygon.cost.compute import update_s
from polygon.cost.kernels import EFFICIENCY, LAUNCH_S
from polygon.cost.memory import outside_bytes, state_bytes
from polygon.domain.errors import InputError
from polygon.domain.model import Batch
from polygon.domain.optimizer import OPTIMIZERS
from polygon.formats import catalogue
from polygon.web.search_routes import known

A100 = catalogue.devices()["a100-80gb"]
UPDATES = ("fused", "apart", "operations")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_kept_is_read_and_written(name):
    """A step passes over the master weight twice and over every moment twice; without fusion over more."""
    optimizer = OPTIMIZERS[name]
    assert optimizer.update_bytes >= 2 * 4 + 2 * optimizer.moment_bytes
    assert optimizer.unfused_bytes > optimizer.update_bytes
    assert optimizer.outside_moment_bytes >= optimizer.moment_bytes
    assert optimizer.label.lower() == name


def test_a_row_more_is_an_optimizer_everywhere(monkeypatch):
    """Nothing else names them: the batch, time, memory, the command's help and the page read this table."""
    row = replace(OPTIMIZERS["sgd"], label="Lion", update_bytes=160)
    monkeypatch.setitem(OPTIMIZERS, "lion", row)
    lion, sgd = (Batch(global_batch=8, seq_len=128, optimizer=name) for name in ("lion", "sgd"))
    assert state_bytes(lion) == state_bytes(sgd)
    assert outside_bytes(lion) == 0
    assert update_s(1e9, A100, lion) > 3 * update_s(1e9, A100, sgd)
    assert {"name": "lion", "label": "Lion"} in known()["optimizers"]
    help_text = cli.problem_options().format_help()
    assert "adafactor, lion" in " ".join(help_text.split())


def test_an_unknown_one_is_told_the_nearest():
    """In one line, with all there are."""
    with pytest.raises(InputError, match=r"batch.optimizer: found .?adam.?, expected .*adamw.*muon"):
        Batch(global_batch=8, seq_len=128, optimizer="adam")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_as_narrow_as_the_weights_is_half_of_a_wide_one_without_the_copy(name):
    """AdamW in bf16: 2 + 2 bytes of moments beside a weight of 2, for 4 + 4 + 4 of a copy and both moments; an update
    out of many operations moves half, one in one kernel no 16-bit copy."""
    wide = Batch(global_batch=8, seq_len=128, gradient_precision="bf16", optimizer=name)
    narrow = replace(wide, state_precision="bf16")
    weight, gradient, kept = state_bytes(wide)
    assert state_bytes(narrow) == (weight, gradient, (kept - 4) / 2)
    assert outside_bytes(narrow) == outside_bytes(wide) / 2
    launches_s = 2 * LAUNCH_S
    seconds = {way: [update_s(1e9, A100, batch, way=way) - launches_s for batch in (wide, narrow)] for way in UPDATES}
    assert seconds["operations"][1] == pytest.approx(seconds["operations"][0] / 2)
    moved = (seconds["fused"][0] - seconds["fused"][1]) * A100.memory_bytes_per_s * EFFICIENCY["ampere"].memory
    assert moved == pytest.approx(1e9 * (OPTIMIZERS[name].update_bytes / 2 + 2))
    assert seconds["fused"][1] < seconds["apart"][1] < seconds["operations"][1]


@pytest.mark.parametrize(("precision", "kept"), [("fp32", "bf16"), ("fp16", "bf16"), ("bf16", "fp16")])
def test_a_state_is_as_narrow_as_the_weights_or_in_32_bits(precision, kept):
    """fp16 updates are lost without a wider copy; and nothing narrower than the weights makes sense of them."""
    with pytest.raises(InputError, match=rf"batch\.state_precision: found .?{kept}.?, expected fp32"):
        Batch(global_batch=8, seq_len=128, precision=precision, state_precision=kept)
