"""What is checked before a step is ever taken: model, optimizer and policy go together."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.errors import PrecisionError
from halfstep.precision.policy import PrecisionPolicy, dtype_name


def some(names: tuple[str, ...], limit: int = 3) -> str:
    """The first names and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def one_device(model: nn.Module) -> torch.device:
    """The device of all parameters; PrecisionError if there are none or several."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "none: it has no parameters"
        raise PrecisionError(f"the model's parameters must be on one device, found {found}")
    return devices.pop()


def check_parameters(
    policy: PrecisionPolicy, names: dict[nn.Parameter, str], optimizer: Optimizer
) -> None:
    """Refuse, before anything is changed, what would fail or lie later."""
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    strangers = [i for i, p in enumerate(owned) if p not in names]
    if strangers:
        raise PrecisionError(
            f"the optimizer holds {len(strangers)} tensors that are not parameters of the model "
            f"(first: number {strangers[0]}); make it from this model's parameters, after the "
            "model is on its device"
        )
    if policy.has_masters and optimizer.state:
        raise PrecisionError(
            f"the optimizer has stepped already; make Precision({str(policy)!r}, ...) before its "
            "first step, or load its state afterwards"
        )
    if policy.param_dtype == torch.float32:
        low = {p: n for p, n in names.items() if p.requires_grad and p.dtype != torch.float32}
        if low:
            found = sorted({dtype_name(p.dtype) for p in low})
            raise PrecisionError(
                f"policy {policy} keeps trainable weights in fp32, but {len(low)} of "
                f"{len(names)} parameters are {', '.join(found)}: {some(tuple(low.values()))}; "
                f"convert them with model.float() ({sum(p.numel() for p in low) * 4} bytes), or "
                "use a *-master policy"
            )
    if policy.is_pure:
        for group in optimizer.param_groups:
            eps = group.get("eps")
            if eps and not torch.tensor(eps, dtype=policy.master_dtype).item():
                raise PrecisionError(
                    f"the optimizer's eps={eps:g} is 0 in {dtype_name(policy.master_dtype)}, so it "
                    "would divide by 0; use eps >= 1e-4, or policy "
                    f"{dtype_name(policy.param_dtype)}-master"
                )
