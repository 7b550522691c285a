"""Small models, optimizers and bit-exact snapshots for tests of the training step."""

import copy
import io
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

CPU_POLICIES = (
    "fp32",
    "bf16-mixed",
    "fp16-mixed",
    "bf16-master",
    "fp16-master",
    "bf16-pure",
    "fp16-pure",
)
"""Every policy that a CPU can honour."""
DYNAMIC = tuple(name for name in CPU_POLICIES if name.startswith("fp16"))
UNSCALED = tuple(name for name in CPU_POLICIES if not name.startswith("fp16"))
MASTERS = ("bf16-master", "fp16-master")
PURE = ("bf16-pure", "fp16-pure")
STORED = {
    "fp32": torch.float32,
    "bf16-mixed": torch.float32,
    "fp16-mixed": torch.float32,
    "bf16-master": torch.bfloat16,
    "fp16-master": torch.float16,
    "bf16-pure": torch.bfloat16,
    "fp16-pure": torch.float16,
}
"""What the module stores under each policy (design, section 2)."""

_FIELDS = {
    "fp16-mixed": "compute=fp16",
    "fp16-master": "params=fp16",
    "fp16-pure": "params=fp16,master=fp16",
}


def scaled(name: str, **options: float) -> str:
    """A policy's spelling with loss-scale options, which policies without a scale ignore here.

    The default first scale, 2^16, is beyond fp16: any gradient of 1 or more overflows with it.
    """
    numbers = {"init_scale": 2**8, **options}
    if name not in _FIELDS:
        return name
    return ",".join([_FIELDS[name], *(f"{key}={value}" for key, value in numbers.items())])


class SignMomentum(Optimizer):
    """A stranger's optimizer: ``step()`` takes no closure, state is made late, steps are an int."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["steps"] = 0
                    state["velocity"] = torch.zeros_like(parameter)
                state["steps"] += 1
                state["velocity"].mul_(0.9).add_(parameter.grad, alpha=0.1)
                parameter.sub_(group["lr"] * state["velocity"].sign())


OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    # eps 1e-3 is a number in fp16 too, so that the same optimizer serves every policy
    "adamw-loop": lambda ps: torch.optim.AdamW(ps, lr=0.02, eps=1e-3, foreach=False, fused=False),
    "adamw-foreach": lambda ps: torch.optim.AdamW(ps, lr=0.02, eps=1e-3, foreach=True),
    "adamw-fused": lambda ps: torch.optim.AdamW(ps, lr=0.02, eps=1e-3, fused=True),
    "stranger": lambda ps: SignMomentum(ps, lr=0.0625),
}


def mlp(seed: int = 0) -> nn.Sequential:
    """4 -> 8 -> 2 with a smooth nonlinearity; four parameters, all with gradients."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batches(count: int, seed: int = 1, rows: int = 6) -> list[tuple[Tensor, Tensor]]:
    """Inputs [rows, 4] and targets [rows, 2], fp32."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(rows, 4, generator=generator),
            torch.randn(rows, 2, generator=generator),
        )
        for _ in range(count)
    ]


def mse(output: Tensor, target: Tensor) -> Tensor:
    """Mean square error in fp32, whatever the output's dtype."""
    return (output.float() - target).square().mean()


def loss_of(model: nn.Module, precision: Any, batch: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """The model's loss of a batch, by default the first, inside the context of its precision."""
    x, y = batches(1)[0] if batch is None else batch
    with precision.autocast():
        return mse(model(x), y)


def through_a_file(value: Any) -> Any:
    """What is saved and loaded again, where nothing of halfstep's needs unpickling."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def snapshot(model: nn.Module, optimizer: Optimizer, precision: Any) -> dict[str, Any]:
    """A deep copy of everything a skipped step must not touch."""
    return copy.deepcopy(
        {
            "weights": model.state_dict(),
            "masters": {n: p.detach() for n, p in precision.named_parameters().items()},
            "moments": optimizer.state_dict()["state"],
        }
    )


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """Where two nested values differ, tensors compared by their bits."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        same = (
            left.dtype == right.dtype
            and left.shape == right.shape
            and torch.equal(
                left.contiguous().reshape(-1).view(torch.uint8),
                right.contiguous().reshape(-1).view(torch.uint8),
            )
        )
        return [] if same else [path]
    if isinstance(left, dict) and isinstance(right, dict):
        if list(left) != list(right):
            return [f"{path}: keys {list(left)} and {list(right)}"]
        return [d for key in left for d in differences(left[key], right[key], f"{path}/{key}")]
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        if len(left) != len(right):
            return [f"{path}: lengths"]
        pairs = enumerate(zip(left, right, strict=True))
        return [d for i, (a, b) in pairs for d in differences(a, b, f"{path}/{i}")]
    return [] if type(left) is type(right) and left == right else [f"{path}: {left} {right}"]
