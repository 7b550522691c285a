"""Random training programs: a model, an optimizer and ordinary actions in a seeded order.

Each is run in plain fp32 torch, under a policy, and as that policy's definition has it, by hand in
plain torch, whose distance from fp32 is what rounding does to this very program. To see one::

    PYTHONPATH=tests python -m strangers.programs SEED COUNT [POLICY ...]
"""

from __future__ import annotations

import copy
import io
import json
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

import halfstep
from strangers.idioms import back, data, loss_of, mlp, pattern
from strangers.loops import POLICIES, Idiom, Kit, Loop, distance, run, verdict

MARGIN = 4.0
"""How much farther than the run by hand: of two runs with other roundings one may have luck."""


def signs(x: Tensor) -> Tensor:
    """Eight kinds of tokens, the same ones whatever format ``x`` was rounded to."""
    return torch.stack([(x.roll(n, 1) > 0).long() << n for n in range(3)]).sum(0)


class Lstm(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(len(x), 4, 2))[0][:, -1]


class Convolution(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, None]).flatten(1)


class Bag(nn.EmbeddingBag):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(signs(x))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Gpt(nn.Module):
    """One block, and a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(8, 8), nn.Parameter(0.1 * torch.randn(8, 8))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8)
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(signs(x)) + self.places
        q, k, v = self.qkv(self.norms[0](h)).view(len(x), 8, 3, 2, 4).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(seen.transpose(1, 2).flatten(2))
        h = h + self.narrow(F.gelu(self.wide(self.norms[1](h)), approximate="tanh"))
        return F.linear(self.norms[2](h), self.words.weight).mean(1)


# No bias has a gradient that would be 0 but for rounding, as one before a BatchNorm has, or one of
# attention's keys: Adam would make steps of it.
BEGINNINGS: dict[str, Callable[[], list[nn.Module]]] = {
    "mlp": lambda: [nn.Linear(8, 16), nn.Tanh()],
    "convolution": lambda: [Convolution(1, 4, 3, padding=1), nn.ReLU(), nn.Linear(32, 16)],
    "lstm": lambda: [Lstm(2, 16, batch_first=True)],
    "gpt": lambda: [Gpt(), nn.Linear(8, 16), nn.Tanh()],
    "tied": lambda: [Tied(), nn.Linear(8, 16), nn.Tanh()],
    "bag": lambda: [Bag(8, 16)],
    "norms": lambda: [nn.Linear(8, 16), nn.LayerNorm(16), nn.SiLU(), nn.GroupNorm(4, 16)],
    "batch_norm": lambda: [
        nn.Linear(8, 16, bias=False),
        nn.BatchNorm1d(16),
        nn.SiLU(),
        nn.RMSNorm(16),
    ],
}
SGD, ADAMW = halfstep.optim.SGD, halfstep.optim.AdamW
T = torch.optim


class Lion(Optimizer):
    """Somebody's own, by the formula of its paper, in the dtype of its parameters."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            (one, two), lr, decay = group["betas"], group["lr"], group["weight_decay"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - lr * decay).sub_(lr * (one * m + (1 - one) * p.grad).sign())
                m.mul_(two).add_((1 - two) * p.grad)


OPTIMIZERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "sgd": (T.SGD, SGD, {"lr": 0.05, "momentum": 0.9}),
    "nesterov": (T.SGD, SGD, {"lr": 0.02, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1}),
    "adamw": (T.AdamW, ADAMW, {"lr": 0.01, "eps": 1e-3}),
    "decayed": (T.AdamW, ADAMW, {"lr": 0.01, "eps": 1e-3, "betas": (0.8, 0.9), "weight_decay": 1}),
    "lion": (Lion, halfstep.optim.Lion, {"lr": 2e-3, "betas": (0.8, 0.9)}),
    "foreach": (T.AdamW, None, {"lr": 0.01, "eps": 1e-3, "foreach": True, "amsgrad": True}),
    "fused": (T.Adam, None, {"lr": 0.01, "eps": 1e-3, "fused": True, "weight_decay": 0.01}),
    "rmsprop": (T.RMSprop, None, {"lr": 0.01, "eps": 1e-2, "momentum": 0.5}),
    "adamax": (T.Adamax, None, {"lr": 0.01, "eps": 1e-3}),
    "nadam": (T.NAdam, None, {"lr": 0.01, "eps": 1e-3}),
}
"""Of torch, of halfstep for policies that need one, and the options of both."""


class Run:
    """A training run; its public methods are the actions of programs."""

    def __init__(self, kit: Kit, kind: str, optimizer: str) -> None:
        self.kit, self.kind, self.optimizer = kit, kind, optimizer
        self.number = 0
        self.grown = False
        self._start()
        self.loop = self._take()

    def _start(self) -> None:
        torch.manual_seed(0)
        layers = [*BEGINNINGS[self.kind](), nn.Linear(16, 2), nn.Tanh(), nn.Linear(2, 2)]
        self.model = nn.Sequential(*layers)
        self.late = layers[-1]
        self.weight = next(self.model.parameters())
        self.bias = next(p for p in self.model.parameters() if p.ndim == 1)
        self.head = layers[-3].weight
        self._hook: RemovableHandle | None = None

    def _take(self, groups: int = 1) -> Loop:
        theirs, ours, options = OPTIMIZERS[self.optimizer]
        kind = ours if self.kit.own() else theirs
        held = [{"params": [*self.model[:-2].parameters()]}]
        if groups == 2:
            held.append({"params": [*self.late.parameters()], "lr": 0.01})
        made: Optimizer = kind(held, **options)
        return self.kit.take(self.model, made, average=0.7)

    def _batch(self) -> int:
        self.number += 1
        return self.number

    def _held(self) -> list[nn.Parameter]:
        return [p for g in self.loop.optimizers[0].param_groups for p in g["params"]]

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._held() if p.grad is not None]

    def _random(self, like: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(31 * self.number + like.numel())
        return torch.randn(like.shape, generator=generator)

    def _need_gradients(self) -> None:
        if not any(bool(gradient.any()) for gradient in self._gradients()):
            back(self.loop, self._batch())

    def step(self) -> None:
        self._need_gradients()
        self.loop.step()

    # --- losses

    def accumulate(self) -> None:
        back(self.loop, self._batch(), 0.5)

    def accumulate_four(self) -> None:
        for weight in (8.0, 0.25, 1e-3, 0.5):
            back(self.loop, self._batch(), weight)

    def two_losses(self) -> None:
        x, y = data(self._batch())
        with self.loop.autocast():
            out = self.model(x)
            first, second = F.mse_loss(out, y), 0.1 * out.square().mean()
        self.loop.backward(first, retain_graph=True)
        self.loop.backward(second)

    def two_forwards(self) -> None:
        (x, y), (other, _) = data(self._batch()), data(self._batch())
        with self.loop.autocast():
            loss = F.mse_loss(self.model(x) - 0.5 * self.model(other), y)
        self.loop.backward(loss)

    def checkpointed(self) -> None:
        x, y = data(self._batch())
        with self.loop.autocast():
            loss = F.mse_loss(checkpoint(self.model, x, use_reentrant=False), y)
        self.loop.backward(loss)

    def three_samples(self) -> None:
        x, y = data(self._batch())
        with self.loop.autocast():
            loss = F.mse_loss(self.model(x[:3]), y[:3])
        self.loop.backward(loss)

    def functional(self) -> None:
        x, y = data(self._batch())
        with self.loop.autocast():
            held = dict(self.model.named_parameters())
            loss = F.mse_loss(torch.func.functional_call(self.model, held, (x,)), y)
        self.loop.backward(loss)

    def attack_the_inputs(self) -> None:
        x, y = data(self._batch())
        x.requires_grad_(True)
        with self.loop.autocast():
            loss = F.mse_loss(self.model(x), y)
        self.loop.backward(loss)
        self.kit.seen.append(0.0 if x.grad is None else float(x.grad.norm()))

    def gradient_penalty(self) -> None:
        if self.kind not in ("mlp", "tied"):
            return  # a second derivative through each of the others is a test of its own
        x, y = data(self._batch())
        x.requires_grad_(True)
        with self.loop.autocast():
            out = self.model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = F.mse_loss(out, y) + 0.01 * slope.square().mean()
        self.loop.backward(loss)

    def step_inside_the_context(self) -> None:
        with self.loop.autocast():
            loss = loss_of(self.model, self._batch())
            self.loop.backward(loss)
            self.loop.step()

    # --- gradients

    def zero_by_optimizer(self) -> None:
        self.loop.optimizers[0].zero_grad()

    def zero_by_model(self) -> None:
        self.model.zero_grad()

    def zero_to_zeros(self) -> None:
        self.model.zero_grad(set_to_none=False)

    def zero_by_hand(self) -> None:
        for p in self.model.parameters():
            p.grad = None

    def discard(self) -> None:
        self.loop.discard()

    def clip_norm(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)

    def clip_value(self) -> None:
        if self._gradients():  # torch's own raises where there are none
            nn.utils.clip_grad_value_(self._held(), 0.03)

    def clip_through_data(self) -> None:
        for gradient in self._gradients():
            gradient.data.clamp_(-0.03, 0.03)

    def mask_gradients(self) -> None:
        for gradient in self._gradients():
            gradient.mul_(pattern(gradient))

    def noise_on_gradients(self) -> None:
        for gradient in self._gradients():
            gradient.add_(0.02 * self._random(gradient))

    def drop_one_gradient(self) -> None:
        self.bias.grad = None

    def replace_gradients_in_fp32(self) -> None:
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad = p.grad.float() + 0.02 * self._random(p)

    def multiply_gradients_at_once(self) -> None:
        if self._gradients():
            torch._foreach_mul_(self._gradients(), 0.6)

    def zero_rows_of_a_gradient(self) -> None:
        if self.weight.grad is not None:
            self.weight.grad[2:4] = 0

    def keep_gradients_over_a_clear(self) -> None:
        kept = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        self.model.zero_grad()
        back(self.loop, self._batch())
        for p, gradient in zip(self.model.parameters(), kept, strict=True):
            if gradient is not None and p.grad is not None:
                p.grad = 0.5 * p.grad + 0.5 * gradient

    def hook_a_mask(self) -> None:
        if self._hook is None:
            mask = pattern(torch.empty(self.head.shape))
            self._hook = self.head.register_hook(lambda gradient: gradient * mask)

    def remove_the_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    # --- steps

    def step_with_max_norm(self) -> None:
        self._need_gradients()
        self.loop.step(max_norm=0.2)

    def skip_a_nan_batch(self) -> None:
        if not self._gradients():  # in a script it is the first of a step
            loss = back(self.loop, self._batch(), math.nan)
            if not loss.isfinite():
                self.model.zero_grad()  # of what no optimizer has too, which a norm would count

    def skip_an_overflow(self) -> None:
        """An infinite gradient: nothing may move, and the next step is as if it had not been."""
        self._need_gradients()
        self._gradients()[-1].view(-1)[-1] = math.inf
        self.loop.skipped_step()

    def scheduler(self) -> None:
        optimizer = self.loop.optimizers[0]
        for group in optimizer.param_groups:
            group.pop("initial_lr", None)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        self.step()
        schedule.step()

    def edit_options(self) -> None:
        self.loop.optimizers[0].param_groups[0]["lr"] *= 0.7
        self.loop.optimizers[0].param_groups[0]["weight_decay"] = 0.05

    def forget_momentum(self) -> None:
        self.loop.optimizers[0].state.clear()

    def back_to_an_optimizer_state(self) -> None:
        optimizer = self.loop.optimizers[0]
        kept = copy.deepcopy(optimizer.state_dict())
        self.step()
        optimizer.load_state_dict(kept)

    # --- weights

    def clamp_weights(self) -> None:
        for p in self.model.parameters():
            p.data.clamp_(-0.5, 0.5)

    def mask_weights(self) -> None:
        with torch.no_grad():
            self.head.mul_(pattern(self.head))

    def start_a_layer_anew(self) -> None:
        fresh = mlp(self.number)[2]  # drawn in fp32: in 16 bits torch draws other numbers
        with torch.no_grad():
            self.head.copy_(fresh.weight)

    def assign_data(self) -> None:
        for p in self.model.parameters():
            p.data = p.data.clamp(-0.4, 0.4)

    def write_a_row(self) -> None:
        with torch.no_grad():
            self.weight[3] = 0
            self.bias[-1] = 0.1

    def write_as_a_vector(self) -> None:
        vector = nn.utils.parameters_to_vector(self.late.parameters()).detach()
        nn.utils.vector_to_parameters(0.95 * vector, self.late.parameters())

    def write_all_at_once(self) -> None:
        with torch.no_grad():
            torch._foreach_mul_([*self.model.parameters()], 0.95)

    def write_by_lerp(self) -> None:
        with torch.no_grad():
            self.weight.lerp_(torch.full_like(self.weight, 0.1), 0.1)

    def freeze(self) -> None:
        self.model[0].requires_grad_(False)
        self.model[0].zero_grad()

    def unfreeze(self) -> None:
        self.model[0].requires_grad_(True)

    def add_a_group(self) -> None:
        if not self.grown:
            self.grown = True
            self.late.zero_grad()  # of backwards before anybody trained it
            group = {"params": [*self.late.parameters()], "lr": 0.01}
            self.loop.optimizers[0].add_param_group(group)

    # --- copies and files

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
        with torch.no_grad(), torch.autocast("cpu", enabled=False):  # one may be around the loop
            self.kit.seen.append(float(loss_of(copy.deepcopy(self.model).eval(), 3)))

    def evaluate(self) -> None:
        self.model.eval()
        with torch.inference_mode(), self.loop.autocast():
            self.kit.seen.append(float(loss_of(self.model, 3)))
        self.model.train()

    def evaluate_the_average(self) -> None:
        with self.loop.averaged():
            self.evaluate()

    def save_and_load(self) -> None:
        optimizer = self.loop.optimizers[0]
        saved = copy.deepcopy((self.model.state_dict(), optimizer.state_dict(), self.loop.state()))
        frozen, groups = not self.weight.requires_grad, len(optimizer.param_groups)
        hooked = self._hook is not None
        self._start()
        self.kit.trained.pop()
        start = self.kit.start.pop()
        self.loop = self._take(groups)
        self.kit.start[-1] = start
        self.model.load_state_dict(saved[0])
        self.loop.optimizers[0].load_state_dict(saved[1])
        self.loop.load(saved[2])
        self.model[0].requires_grad_(not frozen)
        if hooked:
            self.hook_a_mask()


ACTIONS = [name for name in vars(Run) if not name.startswith("_") and name != "step"]


def program(seed: int) -> Idiom:
    """A model, an optimizer and twelve to 28 actions, a third of them steps, drawn from a seed."""
    generator = random.Random(seed)
    kind, optimizer = generator.choice([*BEGINNINGS]), generator.choice([*OPTIMIZERS])
    actions = [
        "step" if generator.random() < 1 / 3 else generator.choice(ACTIONS)
        for _ in range(generator.randint(12, 28))
    ]

    if outer := "save_and_load" not in actions and generator.random() < 0.3:
        actions = ["in_one_context", *actions]

    def train(kit: Kit) -> None:
        started = Run(kit, kind, optimizer)
        with started.loop.around() if outer else nullcontext():
            for action in ("step", *actions[outer:], "step"):
                getattr(started, action)()

    train.__doc__ = " ".join((kind, optimizer, *actions))
    return train


def cells(seed: int, policies: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Each policy that has such an optimizer, and the verdict on it."""
    idiom = program(seed)
    kind, optimizer = idiom.__doc__.split()[:2]
    plain = run(idiom, None)
    for name in policies:
        policy = halfstep.parse_policy(name)
        if policy.needs_own_optimizer and OPTIMIZERS[optimizer][1] is None:
            continue
        low = policy.param_dtype != torch.float32
        full = f"{name},keep_fp32=type:BatchNorm1d" if low and kind == "batch_norm" else name
        hand = run(idiom, full, by_hand=True)
        margin = MARGIN if low else MARGIN / 2  # with fp32 weights most end with the same bits
        yield name, *verdict(idiom, full, hand, margin * distance(hand, plain) + 1e-5)


def main(first: int, count: int, *policies: str) -> None:
    """Print each program of these seeds before it is run, and what was found, as JSON lines."""
    warnings.simplefilter("ignore")
    for seed in range(first, first + count):
        print(json.dumps([seed, "began", "", program(seed).__doc__]), flush=True)
        for found in cells(seed, policies or POLICIES):
            print(json.dumps([seed, *found]))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
