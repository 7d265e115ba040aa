"""Settings for all tests: no law depends on the speed of the machine, and none leaves its signal handlers behind."""

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("polygon", deadline=None)
settings.load_profile("polygon")


@pytest.fixture(autouse=True)
def signal_handlers_put_back() -> Iterator[None]:
    """Whoever handles signals puts back what was there."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    after = [signal.getsignal(number) for number in numbers]
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    assert after == before
