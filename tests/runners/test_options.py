"""Options that do not go together, or have no meaning, are refused in a line that names the switch."""

from __future__ import annotations

import pytest

from polygon.domain.errors import InputError
from runners.engine.options import Options


@pytest.mark.parametrize("asked", [{"resume": True}, {"checkpoint_every": 5}, {"resume": True, "checkpoint_every": 5}])
def test_checkpoints_need_a_folder(asked, tmp_path):
    """To go on from one, to write any, or both."""
    with pytest.raises(InputError, match="--checkpoint-dir: found nothing"):
        Options(**asked)
    assert Options(**asked, checkpoint_dir=tmp_path).checkpoint_every == asked.get("checkpoint_every", 0)


@pytest.mark.parametrize(
    ("switch", "fine", "wrong"),
    [
        ("--steps", 1, 0),
        ("--keep", 1, 0),
        ("--checkpoint-every", 0, -1),
        ("--validate-every", 0, -1),
        ("--loss-chunk", 0, -1),
        ("--synchronous-steps", 0, -1),
        ("--weight-decay", 0.0, -0.1),
        ("--average", 0.0, 1.0),
        ("--dead-after", 1e-3, 0.0),
        ("--timeout", 1e-3, 0.0),
        ("--clip-norm", 1e-3, 0.0),
    ],
)
def test_numbers_have_limits(switch, fine, wrong):
    """The least that is taken, and what is below it."""
    names = {"--keep": "checkpoints_kept", "--timeout": "timeout_s", "--dead-after": "dead_after_s"}
    name = names.get(switch, switch.removeprefix("--").replace("-", "_"))
    assert getattr(Options(**{name: fine}), name) == fine
    with pytest.raises(InputError, match=f"{switch}: found {wrong}"):
        Options(**{name: wrong})


@pytest.mark.parametrize("wrong", [-1.0, 0.0, float("nan"), float("inf")])
def test_no_clipping_has_a_word_in_the_message(wrong):
    """The switch takes 0, which makes None of it: a message that asks for more than 0 alone would hide it."""
    with pytest.raises(InputError, match=f"--clip-norm: found {wrong}, expected a number > 0, or 0: not clipped"):
        Options(clip_norm=wrong)
