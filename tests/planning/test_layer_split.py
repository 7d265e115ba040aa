"""Where layers are cut: what a part of them takes under a memory option."""

import numpy as np
import pytest

from polygon.cost.convergence import allowed
from polygon.cost.tables import CostTables
from polygon.planning.layer_split import passing_s
from polygon.planning.problem_arrays import Setting, build_bank, worker_classes
from tests.small_problems import routed_problem


@pytest.mark.parametrize("mode", [1, 2])
def test_layers_take_what_each_of_them_takes_by_itself(mode):
    """Forward and backward of any run of layers: the first so many blocks as if all were recomputed, others as if none.

    The layer before the first block (the embedding) is recomputed by nobody.
    """
    problem = routed_problem(2)[0]
    tables = CostTables(problem)
    bank = build_bank(tables, worker_classes(tables, 1), Setting(2), allowed(problem))
    # A forward that recomputation makes longer, too: of what is only there while gradients are wanted, say.
    bank.forward_s[:, mode] *= 1.25
    layers = bank.parameters.shape[1] - 1
    for c in range(bank.parameters.shape[0]):
        each = {way: np.diff([bank.forward_s[c, way], bank.backward_s[c, way]]) for way in (0, mode)}
        for first, last in ((0, layers), (0, 3), (1, 2), (2, 5), (3, layers)):
            for blocks in range(last - first + 1):
                again = [max(first, 1) <= i < max(first, 1) + blocks for i in range(first, last)]
                ways = [mode if recomputed else 0 for recomputed in again]
                expected = np.sum([each[way][:, i] for way, i in zip(ways, range(first, last), strict=True)], axis=0)
                assert passing_s(bank, c, mode, blocks, first, last) == pytest.approx(expected)
