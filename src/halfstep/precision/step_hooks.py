"""A user's hooks of an optimizer's step, where masters stand in the weights' places."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfstep.precision.optimizer_masters import Gradients


class Rounded(Protocol):
    """Masters, and the weights that are rounded from them."""

    def push_(self, targets: Gradients) -> None:
        """Round the masters that got a gradient into their weights."""

    def rounded(self) -> list[tuple[Tensor, Tensor]]:
        """Each master, and its weight."""


class StepHooks:
    """Hooks of an optimizer's steps see weights, and write them, in their turn.

    A user's hook after the step, such as an average, looks at the model, whose weights are
    therefore rounded before it; and what hooks write there is taken over when they have run.
    Nothing of this costs anything where nobody has hooked the optimizer.
    """

    def __init__(self) -> None:
        self._gradients: Gradients | None = None  # of a step that is under way
        self._seen: list[Tensor] = []  # weights before a user's hooks
        self._first: list[tuple[Any, int]] = []  # hooks before the step, and ours among them

    def surround(
        self, optimizer: Optimizer, masters: weakref.ref[Rounded]
    ) -> list[RemovableHandle]:
        """Put our hooks around the user's: before the step the last, after it the first."""

        def before(*_: Any) -> None:
            self.take_(masters())

        def after(*_: Any) -> None:
            held = masters()
            if held is not None and self._gradients is not None and _has_users(hooks_after):
                held.push_(self._gradients)
                self._look(held)

        handles = [
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(after),
        ]
        hooks_before: Any = handles[0].hooks_dict_ref()
        hooks_after: Any = handles[1].hooks_dict_ref()
        self._first.append((hooks_before, handles[0].id))
        hooks_after.move_to_end(handles[1].id, last=False)
        return handles

    @contextmanager
    def stepping(self, masters: Rounded, gradients: Gradients) -> Iterator[None]:
        """The context of a step with these gradients."""
        for hooks, number in self._first:
            if _has_users(hooks):
                hooks.move_to_end(number)
                self._look(masters)
        self._gradients = gradients
        try:
            yield
            self.take_(masters)
        finally:
            self._gradients, self._seen = None, []

    def _look(self, masters: Rounded) -> None:
        self._seen = [visible.clone() for _, visible in masters.rounded()]

    @torch.no_grad()
    def take_(self, masters: Rounded | None) -> None:
        """Let masters take over what hooks have written into weights since we looked."""
        if masters is None or not self._seen:
            return
        for (master, visible), before in zip(masters.rounded(), self._seen, strict=True):
            written = visible.view(torch.int16) != before.view(torch.int16)
            if bool(written.any()):
                master.copy_(torch.where(written, visible.float(), master))
        self._seen = []


def _has_users(hooks: Mapping[int, Any]) -> bool:
    """Whether there are hooks that are not halfstep's own."""
    return any(
        not str(getattr(hook, "__module__", "")).startswith("halfstep.") for hook in hooks.values()
    )
