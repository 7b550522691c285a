"""More random programs: the actions of :mod:`strangers.programs`, and what else scripts do."""

from __future__ import annotations

import copy
import io
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.hooks import RemovableHandle

from strangers.idioms import back, data, loss_of, pattern
from strangers.loops import Idiom, Kit
from strangers.programs import ACTIONS, Run

MORE = (
    "zero_by_hand",
    "clip_by_foreach",
    "clip_through_data",
    "replace_gradients_in_fp32",
    "multiply_gradients_at_once",
    "zero_rows_of_a_gradient",
    "keep_gradients_over_a_clear",
    "assign_data",
    "write_a_row",
    "write_as_a_vector",
    "write_by_lerp",
    "through_a_file",
    "back_to_a_copy",
    "mean_with_a_copy",
    "look_at_a_copy",
    "evaluate_in_inference_mode",
    "scheduler",
    "edit_learning_rate",
    "edit_weight_decay",
    "forget_momentum",
    "attack_the_inputs",
    "gradient_penalty",
    "hook_a_mask",
    "remove_the_hook",
    "step_inside_the_context",
)


def program(seed: int) -> Idiom:
    """Twelve to 28 actions, the same ones for the same seed."""
    generator = random.Random(10_000 + seed)
    actions = [generator.choice((*ACTIONS, *MORE)) for _ in range(generator.randint(12, 28))]

    def run(kit: Kit) -> None:
        _WiderRun(kit).all(["step", *actions, "step"])

    run.__doc__ = " ".join(actions)
    return run


class _WiderRun(Run):
    _hook: RemovableHandle | None = None

    def _random(self, like: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(31 * self.number + like.numel())
        return torch.randn(like.shape, generator=generator)

    def _zero_by_hand(self) -> None:
        for p in self.model.parameters():
            p.grad = None

    def _clip_by_foreach(self) -> None:
        if self._gradients():
            norm = nn.utils.get_total_norm(self._gradients())
            nn.utils.clip_grads_with_norm_(self.model.parameters(), 0.3, norm)

    def _clip_through_data(self) -> None:
        for gradient in self._gradients():
            gradient.data.clamp_(-0.03, 0.03)

    def _replace_gradients_in_fp32(self) -> None:
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad = p.grad.float() + 0.02 * self._random(p)

    def _multiply_gradients_at_once(self) -> None:
        if self._gradients():
            torch._foreach_mul_(self._gradients(), 0.6)

    def _zero_rows_of_a_gradient(self) -> None:
        if self.model[0].weight.grad is not None:
            self.model[0].weight.grad[2:4] = 0

    def _keep_gradients_over_a_clear(self) -> None:
        kept = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        self.model.zero_grad()
        back(self.loop, self._batch())
        for p, gradient in zip(self.model.parameters(), kept, strict=True):
            if gradient is not None and p.grad is not None:
                p.grad = 0.5 * p.grad + 0.5 * gradient

    def _assign_data(self) -> None:
        for p in self.model.parameters():
            p.data = p.data.clamp(-0.4, 0.4)

    def _write_a_row(self) -> None:
        with torch.no_grad():
            self.model[0].weight[3] = 0
            self.model[0].bias[3] = 0.1

    def _write_as_a_vector(self) -> None:
        vector = nn.utils.parameters_to_vector(self.model.parameters()).detach()
        nn.utils.vector_to_parameters(0.95 * vector, self.model.parameters())

    def _write_by_lerp(self) -> None:
        weight = self.model[0].weight
        with torch.no_grad():
            weight.lerp_(torch.full_like(weight, 0.1), 0.1)

    def _through_a_file(self) -> None:
        file = io.BytesIO()
        torch.save(self.model.state_dict(), file)
        file.seek(0)
        self.model.load_state_dict(torch.load(file, weights_only=True))

    def _back_to_a_copy(self) -> None:
        kept = copy.deepcopy(self.model)
        self._step()
        self.model.load_state_dict(kept.state_dict())

    def _mean_with_a_copy(self) -> None:
        kept = copy.deepcopy(self.model)
        self._step()
        with torch.no_grad():
            for p, q in zip(self.model.parameters(), kept.parameters(), strict=True):
                p.copy_(0.5 * p + 0.5 * q)

    def _look_at_a_copy(self) -> None:
        with torch.no_grad():
            self.kit.seen.append(float(loss_of(copy.deepcopy(self.model), 3)))

    def _evaluate_in_inference_mode(self) -> None:
        with torch.inference_mode(), self.loop.autocast():
            self.kit.seen.append(float(loss_of(self.model, 3)))

    def _scheduler(self) -> None:
        optimizer = self.loop.optimizers[0]
        for group in optimizer.param_groups:
            group.pop("initial_lr", None)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        self._step()
        schedule.step()

    def _edit_learning_rate(self) -> None:
        self.loop.optimizers[0].param_groups[0]["lr"] *= 0.7

    def _edit_weight_decay(self) -> None:
        self.loop.optimizers[0].param_groups[0]["weight_decay"] = 0.02

    def _forget_momentum(self) -> None:
        self.loop.optimizers[0].state.clear()

    def _attack_the_inputs(self) -> None:
        x, y = data(self._batch())
        x.requires_grad_(True)
        with self.loop.autocast():
            loss = F.mse_loss(self.model(x), y)
        self.loop.backward(loss)
        self.kit.seen.append(float(x.grad.norm()))

    def _gradient_penalty(self) -> None:
        x, y = data(self._batch())
        x.requires_grad_(True)
        with self.loop.autocast():
            out = self.model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = F.mse_loss(out, y) + 0.01 * slope.square().mean()
        self.loop.backward(loss)

    def _hook_a_mask(self) -> None:
        if self._hook is None:
            weight = self.model[2].weight
            mask = pattern(torch.empty(weight.shape))
            self._hook = weight.register_hook(lambda gradient: gradient * mask)

    def _remove_the_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _save_and_load(self) -> None:
        self._hook = None  # of the model that goes
        super()._save_and_load()

    def _step_inside_the_context(self) -> None:
        with self.loop.autocast():
            loss = loss_of(self.model, self._batch())
            self.loop.backward(loss)
            self.loop.step()
