"""Efficiency of products on architectures that no training run was fitted to."""

from __future__ import annotations

import pytest

from polygon.cost.kernels import architecture_of, attention_s, efficiency_of, silicon
from polygon.formats.catalogue import device


def test_coefficients_carried_over_are_the_ones_in_use():
    """Fitted architectures reach much the same share of what products were measured at; the others are given it."""
    from benchmarks.matmul_ceilings import carried, goals

    for kind, shares in goals().items():
        assert max(shares.values()) / min(shares.values()) < 1.12, kind
    found = carried()
    assert {"t4", "v100-16gb", "b200", "gb200", "gb300", "rtx-4090", "mi300x"} <= set(found)
    for name, value in found.items():
        assert efficiency_of(device(name)).gemm == pytest.approx(value.gemm, abs=0.002), name


def test_a_power_limit_counts():
    """T4 (70 W) and L4 (72 W) reach about half of their data sheets, cards without such a limit most of them."""
    shares = {name: efficiency_of(device(name)).gemm for name in ("t4", "l4", "v100-16gb", "rtx-4090")}
    assert shares["t4"] < shares["l4"] < shares["v100-16gb"] < shares["rtx-4090"]
    assert efficiency_of(device("t4")).vector_gemm < 0.5


def test_blackwell_boards_differ():
    """B200, GB200, B300 and GB300 share an architecture, not what they reach."""
    boards = [efficiency_of(device(name)) for name in ("b200", "gb200", "b300", "gb300")]
    assert len({(board.gemm, board.flash_forward) for board in boards}) == 4
    assert all(board.source == "spec" for board in boards)


def test_attention_is_slower_on_short_sequences_where_that_was_measured():
    """B200 at 1024 tokens: 23 % of the peak forward, half of what it does at 8192 (511 and 1110 TFLOP/s)."""
    chip, rates = silicon(device("b200"), "bf16"), {}
    for seq_len, measured in ((1024, 511e12), (4096, 957e12), (16384, 1202e12)):
        forward_s, _ = attention_s(
            chip, "flash", tokens=16384, seq_len=seq_len, keys=seq_len / 2, heads=8, head_dim=128, value_dim=128
        )
        rates[seq_len] = 2.0 * 16384 * seq_len * 8 * 128 / forward_s
        assert rates[seq_len] == pytest.approx(measured, rel=0.05)


def test_workstation_boards_are_not_taken_for_data_center_ones():
    """GB202 (RTX Blackwell) has neither the memory nor the multiprocessors of B200; MI250 and MI300 differ as well."""
    names = {name: architecture_of(device(name)) for name in ("b200", "rtx-5090", "mi250x", "mi300x")}
    assert names == {"b200": "blackwell", "rtx-5090": "rtx blackwell", "mi250x": "cdna2", "mi300x": "cdna"}
