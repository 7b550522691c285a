"""Learning-rate schedulers that hold still on skipped steps, where a trainer steps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class HeldScheduler:
    """A learning-rate scheduler that stands still on a skipped optimizer step."""

    def __init__(self, scheduler: Any, applied: Callable[[], bool]) -> None:
        self._scheduler = scheduler
        self._applied = applied

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The scheduler's own, for ``isinstance``."""
        return type(self._scheduler)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step, if the weights were updated."""
        if self._applied():
            self._scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """All else is the scheduler's."""
        if name == "_scheduler":  # while being copied
            raise AttributeError(name)
        return getattr(self._scheduler, name)


def hold_on_skip(configs: list[Any], applied: Callable[[], bool]) -> list[Any]:
    """Make the schedulers that Lightning steps with the optimizer hold still on skipped steps."""
    for config in configs:
        if config.interval == "step" and type(config.scheduler) is not HeldScheduler:
            config.scheduler = HeldScheduler(config.scheduler, applied)
    return configs
