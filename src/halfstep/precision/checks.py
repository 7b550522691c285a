"""What is checked before a step is ever taken: model, optimizer and policy go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from halfstep.errors import PrecisionError
from halfstep.precision.cast import CastInputs
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


def check_parameters(policy: PrecisionPolicy, model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse, before anything is changed, what would fail or lie later."""
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, CastInputs) and hook.policy.has_masters:
            raise PrecisionError(
                f"the model is under a Precision of policy {hook.policy} already, which holds its "
                "fp32 masters; keep that one, or make the model anew"
            )
    names = {parameter: name for name, parameter in model.named_parameters()}
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    strangers = [i for i, p in enumerate(owned) if p not in names]
    if strangers:
        raise PrecisionError(
            f"the optimizer holds {len(strangers)} tensors that are not parameters of the model "
            f"(first: number {strangers[0]}); make it from this model's parameters, after the "
            "model is on its device"
        )
    if policy.param_dtype != torch.float32 and optimizer.state:
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
    else:
        _check_cast(policy, model)
    if policy.is_pure:
        for group in optimizer.param_groups:
            eps = group.get("eps")
            if eps and not torch.tensor(eps, dtype=policy.master_dtype).item():
                raise PrecisionError(
                    f"the optimizer's eps={eps:g} is 0 in {dtype_name(policy.master_dtype)}, so it "
                    "would divide by 0; use eps >= 1e-4, or policy "
                    f"{dtype_name(policy.param_dtype)}-master"
                )


def check_max_norm(max_norm: float | None) -> None:
    """Refuse a clipping norm that clips nothing or turns updates round."""
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm={max_norm}; allowed: a number above 0, or None for no clipping")


@torch.no_grad()
def _check_cast(policy: PrecisionPolicy, model: nn.Module) -> None:
    """Refuse weights and modules that 16-bit parameters would break."""
    dtype = policy.param_dtype
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            lost = parameter.to(dtype).isinf() & parameter.isfinite()
            if bool(lost.any()):
                worst = float(parameter.abs().max())
                raise PrecisionError(
                    f"{name} holds {worst:g}, which {dtype_name(dtype)} cannot (largest "
                    f"{torch.finfo(dtype).max:g}); use a *-mixed policy"
                )
    for name, module in model.named_modules():
        if isinstance(module, _NormBase) and module.running_mean is not None:
            raise PrecisionError(
                f"{name or 'the model'} is a {type(module).__name__} with running statistics in "
                f"fp32, whose kernels take no {dtype_name(dtype)} weights; use a *-mixed policy"
            )


def check_state(
    state: Mapping[str, Any], policy: PrecisionPolicy, masters: Mapping[str, Tensor]
) -> None:
    """Refuse a saved precision state that is of another policy or model, or damaged."""
    expected = {"policy", "loss_scale", "skipped_total", "skipped_in_a_row", "masters"}
    if set(state) != expected:
        raise PrecisionError(
            f"the saved precision state has keys {sorted(state)}, expected {sorted(expected)}"
        )
    if state["policy"] != str(policy):
        raise PrecisionError(
            f"the saved precision state is of policy {state['policy']!r}, this run uses "
            f"{str(policy)!r}; resume with --precision {state['policy']}"
        )
    for key in ("skipped_total", "skipped_in_a_row"):
        count = state[key]
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise PrecisionError(f"the saved precision state has {key}={count!r}: no count")
    for key in ("loss_scale", "masters"):
        if not isinstance(state[key], Mapping):
            raise PrecisionError(f"the saved precision state has {key}={state[key]!r}: no table")
    saved = {name: _kind(tensor) for name, tensor in state["masters"].items()}
    if saved != {name: _kind(master) for name, master in masters.items()}:
        odd = sorted(set(saved) ^ set(masters)) or ["shapes or dtypes differ"]
        raise PrecisionError(f"saved master weights are of another model: {', '.join(odd[:5])}")


def _kind(value: object) -> object:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else type(value)
