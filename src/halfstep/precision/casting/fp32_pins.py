"""Pins how fp32 products round their operands, for as long as one runs and no longer.

Process-wide switches of torch let fp32 products round their operands to tf32 or bf16 (and cuDNN
convolutions use tf32 unless told not to), so "fp32" alone does not say what runs. Where the
switches agree with the policy, nothing is touched. Where they contradict it, they are set for a
single product or backward and then restored: as all threads share them, the shorter the better.
Threads that want the same value share it; if they want different values, one waits.
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
"""The settings of a switch that mean this rounding of the operands of fp32 products."""


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
    """One switch: the value it is held at, the threads that hold it, and the value to restore."""

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
            self.threads += Counter()  # drops threads whose count is 0
            level = self.levels[-1]
            level.count -= 1
            if level.count == 0:
                self.levels.pop()
                _set(*self.switch, level.before)
            self.changed.notify_all()


def _own_setting(switch: Switch) -> str:
    """What a switch itself was set to: ``"none"`` where it inherits its parent's setting.

    The settings form a tree, and reading one gives the effective value. If the parent's differs,
    the switch was set itself; if not, the parent is changed for a moment to see whether it follows.
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
