"""Laws of running plans on devices that work later than they are told to, on a stand-in (`tests/comm/stand_in.py`).

`python -m benchmarks.communication_order` runs all kinds of plans many times.
"""

import pytest

from polygon.domain.errors import InputError
from runners.engine.device import local_number
from tests.comm.stand_in import HangError, watched_ranks
from tests.real_ranks import run_ranks
from tests.runners.stand_in_plans import OPTIONS, losses_on_cores, losses_on_stand_in, made, reference_of

FEW = ["interleaved, two wide, ZeRO-2, in 16 bits", "ZeRO-3, uneven shares", "sums in two levels", "uneven, four ranks"]
MANY_READS = 2 * OPTIONS.steps + 1
"""Once a step for what ranks agree on, and no more often however many micro-batches and layers there are."""


@pytest.mark.parametrize("name", FEW)
def test_late_devices_change_no_loss(name):
    """One process's losses to 1e-5, whatever is late; the host waits for its main stream a few times a step."""
    problem, plan = made(name)
    expected = run_ranks(losses_on_cores, *reference_of(name), OPTIONS)[0]
    found, board = watched_ranks(losses_on_stand_in, plan.world_size, problem, plan, OPTIONS, 1, {})
    for losses in found:
        assert losses == pytest.approx(expected, rel=1e-5)
    assert 0 < max(board.host_waits) <= MANY_READS


@pytest.mark.parametrize("name", ["ZeRO-2", "sums in two levels"])
def test_one_stream_for_all_threads_hangs(name):
    """As the runtime was before its threads had streams of their own: ranks wait for one another's later work."""
    problem, plan = made(name)
    with pytest.raises(HangError) as hang:
        watched_ranks(losses_on_stand_in, plan.world_size, problem, plan, OPTIONS, 1, {"one_stream": True})
    assert all(any(text.startswith("main: waits for") for text in texts) for texts in hang.value.args[0].values())


def test_local_rank_of_torchrun_goes_before_the_plan_s():
    """The machine's numbering is torchrun's business; what is no number is said."""
    assert local_number(3, None) == 3
    assert local_number(3, "1") == 1
    with pytest.raises(InputError, match="LOCAL_RANK: found 'x', expected a whole number"):
        local_number(3, "x")
