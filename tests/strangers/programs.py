"""Random training programs: ordinary actions in a seeded order, for torch and every policy."""

from __future__ import annotations

import copy
import io
import math
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.hooks import RemovableHandle

from strangers.idioms import back, data, loss_of, mlp, pattern
from strangers.loops import Idiom, Kit, Loop


class Run:
    """A training run; its public methods are the actions of programs."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.number = 0
        self.model = nn.Sequential(*mlp(), nn.Tanh(), nn.Linear(2, 2))
        self.grown = False
        self._hook: RemovableHandle | None = None
        self.loop = self._take()

    def _take(self) -> Loop:
        held = [*self.model[:3].parameters()]
        if self.grown:
            held += self.model[4].parameters()
        return self.kit.take(self.model, self.kit.sgd(held, lr=0.05))

    def _batch(self) -> int:
        self.number += 1
        return self.number

    def _gradients(self) -> list[torch.Tensor]:
        held = (p for g in self.loop.optimizers[0].param_groups for p in g["params"])
        return [p.grad for p in held if p.grad is not None]

    def accumulate(self) -> None:
        back(self.loop, self._batch(), 0.5)

    def two_losses(self) -> None:
        x, y = data(self._batch())
        with self.loop.autocast():
            out = self.model(x)
            first, second = F.mse_loss(out, y), 0.1 * out.square().mean()
        self.loop.backward(first, retain_graph=True)
        self.loop.backward(second)

    def zero_by_optimizer(self) -> None:
        self.loop.optimizers[0].zero_grad()

    def zero_by_model(self) -> None:
        self.model.zero_grad()

    def zero_to_zeros(self) -> None:
        self.model.zero_grad(set_to_none=False)

    def discard(self) -> None:
        self.loop.discard()

    def clip_norm(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)

    def mask_gradients(self) -> None:
        for gradient in self._gradients():
            gradient.mul_(pattern(gradient))

    def noise_on_gradients(self) -> None:
        generator = torch.Generator().manual_seed(self.number)
        for gradient in self._gradients():
            gradient.add_(0.02 * torch.randn(gradient.shape, generator=generator))

    def drop_one_gradient(self) -> None:
        self.model[0].bias.grad = None

    def clamp_weights(self) -> None:
        for p in self.model.parameters():
            p.data.clamp_(-0.3, 0.3)

    def mask_weights(self) -> None:
        with torch.no_grad():
            self.model[0].weight.mul_(pattern(self.model[0].weight))

    def start_a_layer_anew(self) -> None:
        fresh = mlp(self.number)[0]  # drawn in fp32: in 16 bits torch draws other numbers
        with torch.no_grad():
            for p, q in zip(self.model[0].parameters(), fresh.parameters(), strict=True):
                p.copy_(q)

    def skip_a_nan_batch(self) -> None:
        held = self._gradients()
        if not held:  # in a script it is the first of a step
            loss = back(self.loop, self._batch(), math.nan)
            if not loss.isfinite():
                self.model.zero_grad()  # of what no optimizer has too, which a norm would count

    def freeze(self) -> None:
        self.model[0].requires_grad_(False)
        self.model[0].zero_grad()

    def unfreeze(self) -> None:
        self.model[0].requires_grad_(True)

    def add_a_group(self) -> None:
        if not self.grown:
            self.grown = True
            self.model[4].zero_grad()  # of backwards before anybody trained it
            group = {"params": [*self.model[4].parameters()], "lr": 0.1}
            self.loop.optimizers[0].add_param_group(group)

    def save_and_load(self) -> None:
        self._hook = None  # of the model that goes
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

    def evaluate(self) -> None:
        with torch.no_grad(), self.loop.autocast():
            loss_of(self.model, 0)

    def _something_to_step_with(self) -> None:
        if not any(bool(gradient.any()) for gradient in self._gradients()):
            back(self.loop, self._batch())

    def step(self) -> None:
        self._something_to_step_with()
        self.loop.step()

    def step_with_max_norm(self) -> None:
        self._something_to_step_with()
        self.loop.step(max_norm=0.2)

    def _random(self, like: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(31 * self.number + like.numel())
        return torch.randn(like.shape, generator=generator)

    def zero_by_hand(self) -> None:
        for p in self.model.parameters():
            p.grad = None

    def clip_through_data(self) -> None:
        for gradient in self._gradients():
            gradient.data.clamp_(-0.03, 0.03)

    def replace_gradients_in_fp32(self) -> None:
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad = p.grad.float() + 0.02 * self._random(p)

    def multiply_gradients_at_once(self) -> None:
        if self._gradients():
            torch._foreach_mul_(self._gradients(), 0.6)

    def zero_rows_of_a_gradient(self) -> None:
        if self.model[0].weight.grad is not None:
            self.model[0].weight.grad[2:4] = 0

    def keep_gradients_over_a_clear(self) -> None:
        kept = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        self.model.zero_grad()
        back(self.loop, self._batch())
        for p, gradient in zip(self.model.parameters(), kept, strict=True):
            if gradient is not None and p.grad is not None:
                p.grad = 0.5 * p.grad + 0.5 * gradient

    def assign_data(self) -> None:
        for p in self.model.parameters():
            p.data = p.data.clamp(-0.4, 0.4)

    def write_a_row(self) -> None:
        with torch.no_grad():
            self.model[0].weight[3] = 0
            self.model[0].bias[3] = 0.1

    def write_as_a_vector(self) -> None:
        vector = nn.utils.parameters_to_vector(self.model.parameters()).detach()
        nn.utils.vector_to_parameters(0.95 * vector, self.model.parameters())

    def write_by_lerp(self) -> None:
        weight = self.model[0].weight
        with torch.no_grad():
            weight.lerp_(torch.full_like(weight, 0.1), 0.1)

    def through_a_file(self) -> None:
        file = io.BytesIO()
        torch.save(self.model.state_dict(), file)
        file.seek(0)
        self.model.load_state_dict(torch.load(file, weights_only=True))

    def back_to_a_copy(self) -> None:
        kept = copy.deepcopy(self.model)
        self.step()
        self.model.load_state_dict(kept.state_dict())

    def look_at_a_copy(self) -> None:
        with torch.no_grad():
            self.kit.seen.append(float(loss_of(copy.deepcopy(self.model), 3)))

    def evaluate_in_inference_mode(self) -> None:
        with torch.inference_mode(), self.loop.autocast():
            self.kit.seen.append(float(loss_of(self.model, 3)))

    def scheduler(self) -> None:
        optimizer = self.loop.optimizers[0]
        for group in optimizer.param_groups:
            group.pop("initial_lr", None)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        self.step()
        schedule.step()

    def edit_learning_rate(self) -> None:
        self.loop.optimizers[0].param_groups[0]["lr"] *= 0.7

    def forget_momentum(self) -> None:
        self.loop.optimizers[0].state.clear()

    def attack_the_inputs(self) -> None:
        x, y = data(self._batch())
        x.requires_grad_(True)
        with self.loop.autocast():
            loss = F.mse_loss(self.model(x), y)
        self.loop.backward(loss)
        self.kit.seen.append(float(x.grad.norm()))

    def gradient_penalty(self) -> None:
        x, y = data(self._batch())
        x.requires_grad_(True)
        with self.loop.autocast():
            out = self.model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = F.mse_loss(out, y) + 0.01 * slope.square().mean()
        self.loop.backward(loss)

    def hook_a_mask(self) -> None:
        if self._hook is None:
            weight = self.model[2].weight
            mask = pattern(torch.empty(weight.shape))
            self._hook = weight.register_hook(lambda gradient: gradient * mask)

    def remove_the_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def step_inside_the_context(self) -> None:
        with self.loop.autocast():
            loss = loss_of(self.model, self._batch())
            self.loop.backward(loss)
            self.loop.step()


def _grown_loop(run: Run, groups: int) -> Loop:
    """A fresh loop with as many groups as the one that was saved."""
    start = run.kit.start
    held: list[dict[str, object]] = [{"params": [*run.model[:3].parameters()]}]
    if groups == 2:
        held.append({"params": [*run.model[4].parameters()], "lr": 0.1})
    loop = run.kit.take(run.model, run.kit.sgd(held, lr=0.05))
    start.pop()
    return loop


ACTIONS = [name for name in vars(Run) if not name.startswith("_") and name != "step"]


def program(seed: int) -> Idiom:
    """Twelve to 28 actions, a third of them steps; the same ones for the same seed."""
    generator = random.Random(seed)
    actions = [
        "step" if generator.random() < 1 / 3 else generator.choice(ACTIONS)
        for _ in range(generator.randint(12, 28))
    ]

    def run(kit: Kit) -> None:
        started = Run(kit)
        for action in ("step", *actions, "step"):
            getattr(started, action)()

    run.__doc__ = " ".join(actions)
    return run
