"""How much is tried: a few cases with every change, ten times as many at night (`make nightly`).

Which it is, hypothesis' profile says: `pytest --hypothesis-profile=nightly`. It also draws other cases every time;
the usual one draws the same, so that who changes nothing sees no new failure.
"""

from typing import Any

from hypothesis import settings

NIGHTLY = settings.get_current_profile_name() == "nightly"


def cases(usual: int) -> int:
    """How many cases of a law to draw."""
    return 10 * usual if NIGHTLY else usual


def at_night(*values: Any) -> tuple[Any, ...]:
    """Cases that are tried at night alone."""
    return values if NIGHTLY else ()
