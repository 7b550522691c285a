"""One side of a comparison: a loss scaler, its model and optimizers, and all there is to see."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


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
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)


def make_optimizers(net: Net) -> list[torch.optim.Optimizer]:
    linear = list(net.linear.parameters())
    return [
        torch.optim.SGD(linear, lr=0.1, momentum=0.9),
        torch.optim.AdamW([*linear, net.scale], lr=0.1, fused=True),
        torch.optim.AdamW([net.scale], lr=0.1, foreach=True),
        torch.optim.Adam([net.scale, *linear], lr=0.1, foreach=False),
        torch.optim.SGD([net.embedding.weight], lr=0.1),
        torch.optim.SGD([net.scale, net.low], lr=0.1),
        torch.optim.SGD([net.frozen], lr=0.1),
        Plain(linear),
        TakesScaler([net.scale]),
    ]


class Side:
    """One scaler with its own model and optimizers; every method is a call of a program."""

    def __init__(self, scaler_class: type, options: dict[str, Any], seed: int) -> None:
        torch.manual_seed(seed)
        self.net = Net()
        self.optimizers = make_optimizers(self.net)
        self.new_scaler = partial(scaler_class, **options)
        self.scaler = self.new_scaler()
        self.scaled: Any = None
        self.saved: dict[str, Any] | None = None

    def loss(self, parts: int) -> Tensor:
        net, x = self.net, torch.tensor([[1.0, -2.0, 3.0]])
        loss = (net.linear(x) * net.scale).square().mean()
        if parts & 1:
            loss = loss + net.embedding(torch.tensor([1, 1, 4])).sum()
        if parts & 2:
            loss = loss + (net.low * 2).sum()
        return loss

    def scale(self, parts: int, shape: int) -> Any:
        loss = self.loss(parts)
        self.scaled = self.scaler.scale(
            [loss, [loss], (loss * 2, [loss]), iter([loss, loss]), loss.reshape(1)][shape]
        )
        if shape == 3:
            self.scaled = list(self.scaled)
        return self.scaled

    def scale_nonsense(self) -> Any:
        return self.scaler.scale(3.0)

    def backward(self) -> None:
        scaled, self.scaled = self.scaled, None
        for tensor in _tensors(scaled):
            tensor.sum().backward(retain_graph=True)

    def poison(self, which: int, value: float) -> None:
        """Put inf or NaN into the gradient of one parameter."""
        parameter = list(self.net.parameters())[which]
        if parameter.grad is not None:
            stored = parameter.grad._values() if parameter.grad.is_sparse else parameter.grad
            stored.view(-1)[0] = value

    def unscale_(self, which: int) -> None:
        self.scaler.unscale_(self.optimizers[which])

    def second_device(self, which: int, flag: float) -> None:
        """As if gradients on another device had been checked (and found wanting)."""
        found = self.scaler._found_inf_per_device(self.optimizers[which])
        if found:
            found[torch.device("meta")] = torch.tensor(flag)

    def clip(self, which: int) -> Tensor:
        owned = [p for group in self.optimizers[which].param_groups for p in group["params"]]
        owned = [p for p in owned if p.grad is None or not p.grad.is_sparse]
        return nn.utils.clip_grad_norm_(owned, 0.5)

    def step(self, which: int) -> Any:
        return self.scaler.step(self.optimizers[which])

    def step_with_closure(self, which: int, keyword: bool) -> Any:
        loss = torch.tensor(1.5)
        if keyword:
            return self.scaler.step(self.optimizers[which], closure=lambda: loss)
        return self.scaler.step(self.optimizers[which], lambda: loss)

    def update(self) -> None:
        self.scaler.update()

    def update_to(self, value: float, kind: int) -> None:
        self.scaler.update(
            [value, torch.tensor(value), torch.tensor([value]), torch.ones(2), 4,
             torch.tensor(value, requires_grad=True)][kind]
        )  # fmt: skip

    def get_scale(self) -> float:
        return self.scaler.get_scale()

    def is_enabled(self) -> bool:
        return self.scaler.is_enabled()

    def set_factors(self, growth: float, backoff: float, interval: int) -> Any:
        self.scaler.set_growth_factor(growth)
        self.scaler.set_backoff_factor(backoff)
        self.scaler.set_growth_interval(interval)
        return (
            self.scaler.get_growth_factor(),
            self.scaler.get_backoff_factor(),
            self.scaler.get_growth_interval(),
        )

    def zero_grad(self, to_none: bool) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=to_none)

    def save(self) -> dict[str, Any]:
        self.saved = self.scaler.state_dict()
        return self.saved

    def reload(self) -> None:
        self.scaler.load_state_dict(self.saved or self.scaler.state_dict())

    def restart(self) -> None:
        """As a resumed run: a new scaler, with the state that was saved."""
        self.scaler = self.new_scaler()
        self.reload()

    def load_nothing(self) -> None:
        self.scaler.load_state_dict({})

    def load_damaged(self) -> None:
        self.scaler.load_state_dict({"scale": 8.0, "growth_factor": 2.0})

    def deepcopy(self) -> None:
        self.scaler = copy.deepcopy(self.scaler)

    def pickle(self) -> None:
        self.scaler = pickle.loads(pickle.dumps(self.scaler))

    def observe(self) -> dict[str, Any]:
        """Everything there is to see, in a comparable form."""
        seen: dict[str, Any] = {"state": self.scaler.state_dict(), "scale": self.scaler.get_scale()}
        seen["tracker"] = self.scaler._get_growth_tracker()
        if self.scaler.is_enabled():
            states = self.scaler._per_optimizer_states
            order = {id(optimizer): i for i, optimizer in enumerate(self.optimizers)}
            seen["stages"] = {
                order[key]: (state["stage"].name, len(state["found_inf_per_device"]))
                for key, state in states.items()
            }
        for name, p in self.net.named_parameters():
            seen[name] = bits(p)
            seen[f"{name}.grad"] = None if p.grad is None else bits(p.grad)
        for i, optimizer in enumerate(self.optimizers):
            for j, state in enumerate(optimizer.state.values()):
                seen[f"moments {i} {j}"] = {key: bits(v) for key, v in state.items()}
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
    if isinstance(value, Tensor):
        return bits(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list | tuple):
        return type(value).__name__, [comparable(item) for item in value]
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items()}
    return value


def bits(tensor: Tensor) -> Any:
    if tensor.is_sparse:
        stored = (bits(tensor._indices()), bits(tensor._values()))
        return "sparse", tensor.is_coalesced(), tuple(tensor.shape), *stored
    # A copy, since numpy() keeps torch from resizing memory, and torch 2.13 then crashes where it
    # adds up sparse gradients.
    data = tensor.detach().clone(memory_format=torch.contiguous_format).numpy().tobytes()
    return str(tensor.dtype), tuple(tensor.shape), tensor.requires_grad, data


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value or () for tensor in _tensors(item)]
