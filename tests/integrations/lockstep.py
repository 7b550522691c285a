"""Random programs of calls, run on two loss scalers side by side, compared after every call.

A program is a seed. Both sides run it on models and optimizers of their own, made alike; what a
call returned or raised, its warnings, the scaler's numbers, and every gradient, weight and
optimizer moment (bit for bit) must be the same.
"""

from __future__ import annotations

import copy
import math
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

LENGTH = 25
EXTREMES = [2.0**-149, 2.0**-130, 2.0**-128, 2.0**-20, 0.5, 3.0, 65536.0, 2.0**127]


class Plain(torch.optim.Optimizer):
    """A third-party optimizer that takes no closure."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])
        return 7.0


class TakesScaler(Plain):
    """The deprecated contract: ``step`` gets the scaler and unscales by itself."""

    _step_supports_amp_scaling = True

    def step(self, grad_scaler=None):
        if grad_scaler is not None:
            grad_scaler.unscale_(self)
            if sum(flag.item() for flag in grad_scaler._found_inf_per_device(self).values()):
                return None
        return super().step()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3, sparse=True)
        self.linear = nn.Linear(3, 3)
        self.low = nn.Parameter(torch.randn(3).half())
        self.scale = nn.Parameter(torch.randn(3))


class Side:
    """One scaler with its own model and optimizers; its public methods are a program's calls."""

    def __init__(self, scaler_class: type, options: dict[str, Any], seed: int) -> None:
        torch.manual_seed(seed)
        net = self.net = Net()
        linear, optim = [*net.linear.parameters()], torch.optim
        self.optimizers = [
            optim.SGD(linear, lr=0.1, momentum=0.9),
            optim.AdamW([*linear, net.scale], lr=0.1, fused=True),
            optim.Adam([net.scale, *linear], lr=0.1, foreach=True),
            optim.SGD([net.embedding.weight], lr=0.1),
            Plain(linear),
            TakesScaler([net.scale]),
            optim.SGD([net.scale, net.low], lr=0.1),  # fp16, which is refused
        ]
        self.new_scaler = partial(scaler_class, **options)
        self.scaler = self.new_scaler()
        self.scaled: list[Tensor] = []
        self.saved: dict[str, Any] | None = None

    def scale(self, parts: int, shape: int) -> Any:
        loss = (self.net.linear(torch.tensor([[1.0, -2.0, 3.0]])) * self.net.scale).square().mean()
        if parts & 1:
            loss = loss + self.net.embedding(torch.tensor([1, 1, 4])).sum()
        if parts & 2:
            loss = loss + (self.net.low * 2).sum()
        made = self.scaler.scale([loss, [loss], (loss * 2, loss), iter([loss, loss]), 3.0][shape])
        self.scaled = [made] if isinstance(made, Tensor) else [*made]
        return self.scaled

    def backward(self) -> None:
        for tensor in self.scaled:
            tensor.sum().backward(retain_graph=True)
        self.scaled = []

    def poison(self, which: int, value: float) -> None:
        gradient = [*self.net.parameters()][which].grad
        if gradient is not None:
            (gradient._values() if gradient.is_sparse else gradient).view(-1)[0] = value

    def unscale_(self, which: int) -> None:
        self.scaler.unscale_(self.optimizers[which])

    def clip(self, which: int) -> Tensor:
        owned = [p for group in self.optimizers[which].param_groups for p in group["params"]]
        dense = [p for p in owned if p.grad is None or not p.grad.is_sparse]
        return nn.utils.clip_grad_norm_(dense, 0.5)

    def step(self, which: int, closure: bool = False) -> Any:
        given = [lambda: torch.tensor(1.5)] if closure else []
        return self.scaler.step(self.optimizers[which], *given)

    def update(self, *scale: Any) -> None:
        self.scaler.update(*scale)

    def zero_grad(self, to_none: bool) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=to_none)

    def save(self) -> dict[str, Any]:
        self.saved = self.scaler.state_dict()
        return self.saved

    def load(self, *state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(*state or [self.saved or self.scaler.state_dict()])

    def restart(self) -> None:
        self.scaler = self.new_scaler()
        self.load()

    def copied(self, pickled: bool) -> None:
        make = copy.deepcopy if not pickled else lambda scaler: pickle.loads(pickle.dumps(scaler))
        self.scaler = make(self.scaler)

    def observe(self) -> dict[str, Any]:
        """Everything there is to see, in a comparable form."""
        scaler = self.scaler
        seen = {
            "state": scaler.state_dict(),
            "scale": scaler.get_scale(),
            "on": scaler.is_enabled(),
        }
        seen["tracker"] = scaler._get_growth_tracker()
        if scaler.is_enabled():
            order = {id(optimizer): i for i, optimizer in enumerate(self.optimizers)}
            for key, state in scaler._per_optimizer_states.items():
                found = len(state["found_inf_per_device"])
                seen[f"stage {order[key]}"] = state["stage"].name, found
        for name, p in self.net.named_parameters():
            seen[name], seen[f"{name}.grad"] = comparable(p), comparable(p.grad)
        for i, optimizer in enumerate(self.optimizers):
            seen[f"moments {i}"] = comparable([*optimizer.state.values()])
        return seen


def outcome(call: Callable[[], Any]) -> tuple[str, Any, list[str]]:
    """What a call returned or which type it raised, and the categories of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result: tuple[str, Any] = ("returned", comparable(call()))
        except Exception as error:
            # halfstep's PrecisionError IS a ValueError, with a text that helps: `except ValueError`
            # written for torch catches it. All other types must be the very same.
            kind = ValueError if isinstance(error, ValueError) else type(error)
            result = ("raised", kind.__name__)
    return (*result, [warning.category.__name__ for warning in caught])


def comparable(value: Any) -> Any:
    """Tensors by their bits, floats by their representation (NaN equals NaN), the rest as it is."""
    if isinstance(value, Tensor) and value.is_sparse:
        return value.is_coalesced(), comparable(value._indices()), comparable(value._values())
    if isinstance(value, Tensor):
        # A copy, since numpy() keeps torch from resizing memory, and torch 2.13 then crashes where
        # it adds up sparse gradients.
        data = value.detach().clone(memory_format=torch.contiguous_format).numpy().tobytes()
        return str(value.dtype), tuple(value.shape), value.requires_grad, data
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list | tuple):
        return type(value).__name__, [comparable(item) for item in value]
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items()}
    return value


def program(seed: int) -> tuple[dict[str, Any], list[tuple[str, tuple[Any, ...]]]]:
    """The scaler's options and the calls of one program."""
    rng = random.Random(seed)
    options = {
        "device": "cpu",
        "init_scale": rng.choice([*EXTREMES, 65536.0, 1024.0, 4.0, 1]),
        "growth_factor": rng.choice([2.0, 2.0, 1.5]),
        "backoff_factor": rng.choice([0.5, 0.5, 0.25, 2.0**-60]),
        "growth_interval": rng.choice([1, 2, 3, 2000]),
        "enabled": rng.random() > 0.06,
    }
    return options, [call for _ in range(LENGTH) for call in _calls(rng)][:LENGTH]


def _calls(rng: random.Random) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """A whole iteration, more or less in order, or something odd."""
    which = rng.randrange(6 if rng.random() < 0.9 else 7)
    if rng.random() < 0.65:
        for _ in range(rng.choice([1, 1, 1, 2])):
            yield "scale", (rng.randrange(4), rng.choice([0, 0, 0, 1, 2, 3]))
            yield "backward", ()
        if rng.random() < 0.3:
            yield "poison", (rng.randrange(5), rng.choice([math.inf, -math.inf, math.nan]))
        if rng.random() < 0.4:
            yield "unscale_", (which,)
            if rng.random() < 0.5:
                yield "clip", (which,)
        yield "step", (which,)
        if rng.random() < 0.25:
            yield "step", (rng.randrange(6),)
        if rng.random() < 0.9:
            yield "update", ()
        if rng.random() < 0.7:
            yield "zero_grad", (rng.random() < 0.7,)
        return
    scale = rng.choice([*EXTREMES, 8.0])
    yield rng.choice(
        [
            ("unscale_", (which,)),
            ("step", (which, rng.random() < 0.5)),
            ("update", (rng.choice([scale, torch.tensor(scale), torch.ones(2), 4]),)),
            ("scale", (0, 4)),
            ("save", ()),
            ("load", rng.choice([(), ({},), ({"scale": 8.0, "growth_factor": 2.0},)])),
            ("restart", ()),
            ("swap", ()),
            ("copied", (rng.random() < 0.5,)),
        ]
    )


def first_difference(reference: type, ours: type, seed: int) -> str | None:
    """Run one program on both; None if they agree to the end, else where they part."""
    options, calls = program(seed)
    sides = Side(reference, options, seed), Side(ours, options, seed)
    for number, (name, arguments) in enumerate(calls):
        if name == "swap":  # each goes on from the state that the other saved
            states = [side.saved or side.scaler.state_dict() for side in reversed(sides)]
            made = [partial(s.load, state) for s, state in zip(sides, states, strict=True)]
        else:
            made = [partial(getattr(side, name), *arguments) for side in sides]
        results = [
            (outcome(call), outcome(side.observe)) for call, side in zip(made, sides, strict=True)
        ]
        if results[0] != results[1]:
            return f"seed {seed}, call {number}, {name}{arguments}: {results[0]} and {results[1]}"
    return None
