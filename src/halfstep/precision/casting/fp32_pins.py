"""Pins how fp32 matmuls round their operands while a policy's context or backward is open.

Process-wide switches of torch let fp32 matmuls round their operands to tf32 or bf16 (and cuDNN
convolutions use tf32 unless told not to), so "fp32" alone does not say what runs. Where the
switches agree with the policy, nothing is touched. Where they contradict it, they are set while
the context is open and then restored. Nothing is intercepted for that, so ``torch.compile`` sees
the model as it is. All threads share the switches: they may hold the same value side by side,
and a thread that needs another value meanwhile is refused.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Self

import torch

from halfstep.errors import PrecisionError

Switch = tuple[str, str]
SWITCHES: dict[str, tuple[Switch, ...]] = {
    "cpu": (("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn")),
    "cuda": (("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn")),
}
setting_of = torch._C._get_fp32_precision_getter
_set = torch._C._set_fp32_precision_setter
MEANS = {"ieee": ("ieee", "none"), "tf32": ("tf32",)}
"""The settings of a switch that mean this rounding of the operands of fp32 matmuls."""
held_switches: dict[Switch, _Held] = {}


class Pins:
    """Holds switches at a value; each instance is entered once.

    Args:
        switches: Pairs of backend and kind of operation.
        value: ``"ieee"`` or ``"tf32"``.
    """

    def __init__(self, switches: tuple[Switch, ...], value: str) -> None:
        self.switches = switches
        self.value = value
        self._thread = 0

    def __enter__(self) -> Self:
        me = threading.get_ident()
        with _lock:
            for switch in self.switches:
                for other in held_switches[switch].pins if switch in held_switches else ():
                    if other.value != self.value and other._thread != me:
                        raise PrecisionError(
                            f"fp32 matmuls cannot round by {self.value} here: another thread runs "
                            f"a policy that rounds them by {other.value}, and torch has one switch "
                            "for all threads. Run the two policies one after the other."
                        )
            self._thread = me
            for switch in self.switches:
                if switch not in held_switches:
                    held_switches[switch] = _Held(_own_setting(switch), [])
                held_switches[switch].pins.append(self)
                _set(*switch, self.value)
        return self

    def __exit__(self, *error: object) -> None:
        with _lock:
            for switch in self.switches:
                held = held_switches[switch]
                held.pins.remove(self)  # not always the last: a generator may leave late
                _set(*switch, held.pins[-1].value if held.pins else held.before)
                if not held.pins:
                    del held_switches[switch]


@dataclass
class _Held:
    """A switch that is held: what to restore, and by whom; the last one's value is in force."""

    before: str
    pins: list[Pins]


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


_lock = threading.Lock()
