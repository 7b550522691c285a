"""Random training programs: ordinary actions in a seeded order, for torch and every policy."""

from __future__ import annotations

import copy
import math
import random

import torch
from torch import nn

from strangers.idioms import back, data, loss_of, mlp, pattern
from strangers.loops import Idiom, Kit, Loop

ACTIONS = (
    "accumulate",
    "two_losses",
    "zero_by_optimizer",
    "zero_by_model",
    "zero_to_zeros",
    "discard",
    "clip_norm",
    "clip_value",
    "mask_gradients",
    "scale_gradients",
    "noise_on_gradients",
    "drop_one_gradient",
    "clamp_weights",
    "mask_weights",
    "write_a_layer",
    "start_a_layer_anew",
    "skip_a_nan_batch",
    "freeze",
    "unfreeze",
    "add_a_group",
    "save_and_load",
    "evaluate",
    "step",
    "step",
    "step",
    "step_with_max_norm",
)
"""Steps come more often, so that programs train."""


def program(seed: int) -> Idiom:
    """Twelve to 25 actions, the same ones for the same seed."""
    generator = random.Random(seed)
    actions = [generator.choice(ACTIONS) for _ in range(generator.randint(12, 25))]

    def run(kit: Kit) -> None:
        Run(kit).all(["step", *actions, "step"])

    run.__doc__ = " ".join(actions)
    return run


class Run:
    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.number = 0
        self.model = nn.Sequential(*mlp(), nn.Tanh(), nn.Linear(2, 2))
        self.grown = False
        self.loop = self._take()

    def _take(self) -> Loop:
        held = [*self.model[:3].parameters()]
        if self.grown:
            held += self.model[4].parameters()
        return self.kit.take(self.model, self.kit.sgd(held, lr=0.05))

    def all(self, actions: list[str]) -> None:
        for action in actions:
            getattr(self, f"_{action}")()

    def _batch(self) -> int:
        self.number += 1
        return self.number

    def _gradients(self) -> list[torch.Tensor]:
        held = (p for g in self.loop.optimizers[0].param_groups for p in g["params"])
        return [p.grad for p in held if p.grad is not None]

    def _accumulate(self) -> None:
        back(self.loop, self._batch(), 0.5)

    def _two_losses(self) -> None:
        x, y = data(self._batch())
        with self.loop.autocast():
            out = self.model(x)
            first, second = nn.functional.mse_loss(out, y), 0.1 * out.square().mean()
        self.loop.backward(first, retain_graph=True)
        self.loop.backward(second)

    def _zero_by_optimizer(self) -> None:
        self.loop.optimizers[0].zero_grad()

    def _zero_by_model(self) -> None:
        self.model.zero_grad()

    def _zero_to_zeros(self) -> None:
        self.model.zero_grad(set_to_none=False)

    def _discard(self) -> None:
        self.loop.discard()

    def _clip_norm(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)

    def _clip_value(self) -> None:
        if self._gradients():
            nn.utils.clip_grad_value_(self.model.parameters(), 0.05)

    def _mask_gradients(self) -> None:
        for gradient in self._gradients():
            gradient.mul_(pattern(gradient))

    def _scale_gradients(self) -> None:
        for gradient in self._gradients():
            gradient.mul_(0.5)

    def _noise_on_gradients(self) -> None:
        generator = torch.Generator().manual_seed(self.number)
        for gradient in self._gradients():
            gradient.add_(0.02 * torch.randn(gradient.shape, generator=generator))

    def _drop_one_gradient(self) -> None:
        self.model[0].bias.grad = None

    def _clamp_weights(self) -> None:
        for p in self.model.parameters():
            p.data.clamp_(-0.3, 0.3)

    def _mask_weights(self) -> None:
        with torch.no_grad():
            self.model[0].weight.mul_(pattern(self.model[0].weight))

    def _write_a_layer(self) -> None:
        generator = torch.Generator().manual_seed(self.number + 9)
        with torch.no_grad():
            self.model[2].weight.copy_(0.3 * torch.randn(2, 16, generator=generator))

    def _start_a_layer_anew(self) -> None:
        torch.manual_seed(self.number)
        self.model[0].reset_parameters()

    def _skip_a_nan_batch(self) -> None:
        held = self._gradients()
        if not held:  # in a script it is the first of a step
            loss = back(self.loop, self._batch(), math.nan)
            if not loss.isfinite():
                self.loop.optimizers[0].zero_grad()

    def _freeze(self) -> None:
        self.model[0].requires_grad_(False)
        self.model[0].zero_grad()

    def _unfreeze(self) -> None:
        self.model[0].requires_grad_(True)

    def _add_a_group(self) -> None:
        if not self.grown:
            self.grown = True
            self.model[4].zero_grad()  # of backwards before anybody trained it
            group = {"params": [*self.model[4].parameters()], "lr": 0.1}
            self.loop.optimizers[0].add_param_group(group)

    def _save_and_load(self) -> None:
        optimizer = self.loop.optimizers[0]
        saved = copy.deepcopy((self.model.state_dict(), optimizer.state_dict(), self.loop.state()))
        frozen = not self.model[0].weight.requires_grad
        groups = len(optimizer.param_groups)
        self.model = nn.Sequential(*mlp(3), nn.Tanh(), nn.Linear(2, 2))
        self.kit.trained.pop()
        self.loop = _grown_loop(self, groups)
        self.model.load_state_dict(saved[0])
        self.loop.optimizers[0].load_state_dict(saved[1])
        self.loop.load(saved[2])
        self.model[0].requires_grad_(not frozen)

    def _evaluate(self) -> None:
        with torch.no_grad(), self.loop.autocast():
            loss_of(self.model, 0)

    def _something_to_step_with(self) -> None:
        if not any(bool(gradient.any()) for gradient in self._gradients()):
            back(self.loop, self._batch())

    def _step(self) -> None:
        self._something_to_step_with()
        self.loop.step()

    def _step_with_max_norm(self) -> None:
        self._something_to_step_with()
        self.loop.step(max_norm=0.2)


def _grown_loop(run: Run, groups: int) -> Loop:
    """A fresh loop with as many groups as the one that was saved."""
    start = run.kit.start
    held: list[dict[str, object]] = [{"params": [*run.model[:3].parameters()]}]
    if groups == 2:
        held.append({"params": [*run.model[4].parameters()], "lr": 0.1})
    loop = run.kit.take(run.model, run.kit.sgd(held, lr=0.05))
    start.pop()
    return loop
