"""Efficiency of products on architectures that no training run was fitted to."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from polygon.catalogue import device
from polygon.cost.kernels import EFFICIENCY, architecture_of

FILE = Path(__file__).parents[2] / "benchmarks" / "matmul_ceilings.py"


def test_coefficients_carried_over_are_the_ones_in_use():
    """Fitted architectures reach one share of the best product measured; the others are given the same."""
    spec = importlib.util.spec_from_file_location("matmul_ceilings", FILE)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    shares, others = benchmark.carried()
    assert shares["ampere"] == pytest.approx(shares["hopper"], rel=0.02)
    assert set(others) == {"blackwell", "cdna", "cdna2"}
    for name, value in others.items():
        assert EFFICIENCY[name].gemm == pytest.approx(value, abs=0.002), name


def test_workstation_boards_are_not_taken_for_data_center_ones():
    """GB202 (RTX Blackwell) has neither the memory nor the multiprocessors of B200; MI250 and MI300 differ as well."""
    names = {name: architecture_of(device(name)) for name in ("b200", "rtx-5090", "mi250x", "mi300x")}
    assert names == {"b200": "blackwell", "rtx-5090": "rtx blackwell", "mi250x": "cdna2", "mi300x": "cdna"}
