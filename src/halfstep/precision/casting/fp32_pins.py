"""Pins how fp32 products round their operands, for as long as one runs and no longer.

torch lets fp32 products round to tf32 or bf16 by switches of the whole process (and cuDNN
convolutions use tf32 unless told not to), so that "fp32" alone does not say what runs. Where the
switches say what the policy means, nothing is touched. Where they contradict it they are set for
the time of a single product, or of a backward, and put back: they are no thread's own, so the less
time the better. While two threads want the same they share; while they want different things, one
waits.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any, Self

import torch

Switch = tuple[str, str]
SWITCHES: dict[str, tuple[Switch, ...]] = {
    "cpu": (("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn")),
    "cuda": (("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn")),
}
setting_of = torch._C._get_fp32_precision_getter
_set = torch._C._set_fp32_precision_setter
MEANS = {"ieee": ("ieee", "none"), "tf32": ("tf32",)}
"""The settings with which fp32 products round their operands so."""


class Pins:
    """Holds switches at a value; re-entrant, and shared between threads that want the same.

    Args:
        switches: Pairs of backend and kind of operation.
        value: ``"ieee"`` or ``"tf32"``.
    """

    def __init__(self, switches: tuple[Switch, ...], value: str) -> None:
        self.switches = switches
        self.value = value

    def __enter__(self) -> Self:
        taken: list[Switch] = []
        try:
            for switch in self.switches:
                _holders[switch].take(self.value)
                taken.append(switch)
        except BaseException:
            for switch in taken:
                _holders[switch].give_back()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        for switch in reversed(self.switches):
            _holders[switch].give_back()


@dataclass
class _Level:
    value: str
    before: str  # what to put back
    count: int = 1


class _Holder:
    """One switch: at which value it is held, by whom, and what it goes back to."""

    def __init__(self, switch: Switch) -> None:
        self.switch = switch
        self.levels: list[_Level] = []
        self.threads: Counter[int] = Counter()
        self.changed = threading.Condition(_lock)

    def take(self, value: str) -> None:
        me = threading.get_ident()
        with self.changed:
            while not self._may_take(value, me):
                self.changed.wait()
            if self.levels and self.levels[-1].value == value:
                self.levels[-1].count += 1
            else:
                before = self.levels[-1].value if self.levels else _own_setting(self.switch)
                self.levels.append(_Level(value, before))
                _set(*self.switch, value)
            self.threads[me] += 1

    def _may_take(self, value: str, me: int) -> bool:
        if not self.levels or set(self.threads) == {me}:
            return True
        return len(self.levels) == 1 and self.levels[0].value == value

    def give_back(self) -> None:
        me = threading.get_ident()
        with self.changed:
            self.threads[me] -= 1
            self.threads += Counter()  # drops those that hold nothing
            level = self.levels[-1]
            level.count -= 1
            if level.count == 0:
                self.levels.pop()
                _set(*self.switch, level.before)
            self.changed.notify_all()


def _own_setting(switch: Switch) -> str:
    """What a switch was set to itself: ``"none"`` where it follows the one above it.

    The settings form a tree, and reading one gives what holds. Where the one above differs, the
    switch was set itself; where it does not, the one above is moved to see who follows.
    """
    backend, _ = switch
    above = (backend, "all")
    holds, holds_above = setting_of(*switch), setting_of(*above)
    if holds != holds_above or holds == "none":
        return holds
    top: Switch = ("generic", "all")
    holds_on_top = setting_of(*top)
    other = "ieee" if holds == "tf32" else "tf32"
    own_above = holds_above
    if holds_on_top == holds_above:
        _set(*top, other)
        own_above = "none" if setting_of(*above) == other else holds_above
        _set(*top, holds_on_top)
    _set(*above, other)
    own = "none" if setting_of(*switch) == other else holds
    _set(*above, own_above)
    return own


_lock = threading.RLock()
_holders = {switch: _Holder(switch) for switches in SWITCHES.values() for switch in switches}
