"""A signal that comes twice is one request; a second request acts at once."""

from __future__ import annotations

import signal

import pytest

from halfstep.trainer import loop as interrupt
from halfstep.trainer.loop import Interrupt

BOTH = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])


class Second(Exception):
    """What the handlers of the test raise."""


@pytest.fixture(autouse=True)
def handlers():
    """Handlers that raise, and the real ones back at the end."""

    def act(number, frame):
        raise Second(number)

    old = {n: signal.signal(n, act) for n in (signal.SIGTERM, signal.SIGINT)}
    yield act
    for number, handler in old.items():
        signal.signal(number, handler)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that only the test lets pass."""
    now = [100.0]
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: now[0])
    return now


@BOTH
def test_a_repeated_signal_is_one_request_and_a_later_one_acts(number, clock, handlers):
    with Interrupt() as asked:
        assert asked.requested == ""
        signal.raise_signal(number)
        assert asked.requested == number.name
        clock[0] += 0.9
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(number)
        assert asked.requested == number.name
        clock[0] += 0.2
        with pytest.raises(Second):
            signal.raise_signal(number)
    assert signal.getsignal(number) is handlers


@BOTH
def test_the_block_may_end_between_a_signal_and_its_repetition(number, clock, handlers):
    with Interrupt():
        signal.raise_signal(number)
    clock[0] += 0.5
    signal.raise_signal(number)  # does not act
    clock[0] += 0.6
    with pytest.raises(Second):
        signal.raise_signal(number)
    assert signal.getsignal(signal.SIGTERM) is handlers
    assert signal.getsignal(signal.SIGINT) is handlers
