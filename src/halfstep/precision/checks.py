"""Checks before the first step that model, optimizer and policy are compatible."""

from __future__ import annotations

import gc
import inspect
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from halfstep.errors import PrecisionError
from halfstep.precision.border import require
from halfstep.precision.casting.autocast import ForwardWatch
from halfstep.precision.casting.cast import CastInputs, check_wrappers
from halfstep.precision.masters.local_part import fsdp_groups, is_sharded, local_part
from halfstep.precision.masters.stepping import (
    require_elementwise,
    require_own_optimizer,
    with_inner,
)
from halfstep.precision.policy.policy import DTYPES, LOW, PrecisionPolicy, dtype_name
from halfstep.precision.policy.rules import PlacedModel
from halfstep.precision.policy.spelling import parse_saved
from halfstep.precision.scaling.gradients import COUNTS


def some(names: tuple[str, ...], limit: int = 3) -> str:
    """The first few names, joined, and how many more there are."""
    first, more = ", ".join(names[:limit]), len(names) - limit
    return f"{first} and {more} more" if more > 0 else first


def check_arguments(model: object, optimizers: object, ema: Any) -> None:
    """Refuse arguments that are not a model and optimizers, before any of them is used."""
    allowed = "a torch.nn.Module: Precision(policy, model, optimizer)"
    module = require(model, nn.Module, "Precision(model)", allowed)
    if ema is not None:
        ema.require([name for name, p in module.named_parameters() if p.requires_grad])
    several = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
    allowed = "an Optimizer over its parameters, or several: Precision(policy, model, optimizer)"
    for given in several or [None]:
        one = require(given, Optimizer, "Precision(optimizer)", allowed)
        asked = inspect.signature(type(one).step).parameters  # Lightning patches its own
        needed = [k for k, p in asked.items() if p.default is p.empty and "VAR" not in p.kind.name]
        if needed[1:]:
            raise PrecisionError(
                f"{type(one).__name__}.step() needs {needed[1]}, as it runs the model itself, and "
                "Precision steps once after a backward; allowed: an optimizer whose step() needs "
                "no argument"
            )
        hooks, *inner = (vars(o).get("_optimizer_step_pre_hooks") for o in with_inner([one]))
        if hooks is None or any(hooks is others for others in inner):
            # of Accelerate, Lightning, Fabric and torchft: it would not see its steps
            raise PrecisionError(
                f"{type(one).__name__} has no hooks of its own, by which Precision sees its steps; "
                "give the optimizer that it was made from, without the framework's prepare or "
                "setup, or call Optimizer.__init__ in its __init__"
            )


def one_device(model: nn.Module) -> torch.device:
    """The device of all parameters; PrecisionError if there are none or several."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "none: it has no parameters"
        raise PrecisionError(f"the model's parameters must be on one device, found {found}")
    return devices.pop()


def check_parameters(placed: PlacedModel, optimizers: Sequence[Optimizer]) -> None:
    """Refuse, before anything is changed, what would later fail or train wrongly."""
    policy, model = placed.policy, placed.model
    if _owners(model):
        gc.collect()  # one that nothing holds but a cycle ends here
    owners = _owners(model)
    for owner in owners:
        if owner.policy.keeps_more_than_weights:
            raise PrecisionError(
                f"the model is trained by another Precision of policy {owner.policy}, and its "
                "weights alone are less than that one keeps. Call precision.close() on it first; "
                "`with halfstep.Precision(...) as precision:` does so by itself, after an error "
                "too. For several optimizers give one Precision a list of them"
            )
    check_wrappers(policy, model)
    require_elementwise(optimizers)
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, CastInputs) and hook.policy.keeps_more_than_weights:
            raise PrecisionError(
                f"the model's Precision of policy {hook.policy} is gone without close(), and with "
                "it what 16-bit weights cannot hold. Make the model anew, and write `with "
                "halfstep.Precision(...) as precision:` or precision.close() at its end"
            )
    names = {parameter: name for name, parameter in model.named_parameters()}
    _check_held(policy, names, optimizers)
    require_own_optimizer(policy, optimizers)
    _check_kinds(model)
    kept = placed.kept()
    if policy.param_dtype == torch.float32:
        _check_fp32_weights(policy, names, kept)
    else:
        check_cast(placed)
    if policy.is_pure:
        _check_groups(policy, names, optimizers, kept)
    for owner in owners:
        owner.close()  # as in a notebook, whose cell is run again


def _check_held(
    policy: PrecisionPolicy, names: Collection[Tensor], optimizers: Sequence[Optimizer]
) -> None:
    """Refuse optimizers over other tensors, or that share out the model's among ranks as ZeRO."""
    owned = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    if len(set(owned)) < len(owned):
        raise PrecisionError("a parameter is in two optimizers; give each parameter to one")
    for one in optimizers:
        held, *inner = (
            {p for group in o.param_groups for p in group["params"]} for o in with_inner([one])
        )
        owned += [p for some in inner for p in some]
        replaced = policy.has_masters or policy.update != "nearest" or any(map(is_sharded, held))
        if inner and replaced and set().union(*inner) < held:
            raise PrecisionError(
                f"{type(one).__name__} steps only a part of its {len(held)} parameters on this "
                "rank, and cannot do so with masters or shards in their place; use a *-mixed "
                "policy, or fully_shard in place of it"
            )
    strangers = [i for i, p in enumerate(owned) if p not in names]
    if strangers:
        raise PrecisionError(
            f"the optimizer holds {len(strangers)} tensors that are not parameters of the model "
            f"(first: number {strangers[0]}); make it from this model's parameters, after the "
            "model is on its device"
        )


def _owners(model: nn.Module) -> list[Any]:
    """The Precisions that train the model or a part of it."""
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    found = {id(hook): hook.owner() for hook in hooks if isinstance(hook, ForwardWatch)}
    return [owner for owner in {*found.values()} if owner is not None]


# Buffers that 16 bits break, by their names: a rotary angle computed from a rounded frequency is
# off by up to 8 radians at position 4095, and a running mean loses the updates it accumulates.
_BROKEN_IN_16_BITS = re.compile(
    r"running_(mean|var|std)|e_score_correction_bias|(router|expert|gate)_?bias|"
    r"inv_freq|freqs$|rope|rotary|(^|_)(cos|sin)($|_)"
)


def _check_kinds(model: nn.Module) -> None:
    """Refuse wide and complex weights, and sensitive buffers that 16 bits have broken already."""
    for name, parameter in model.named_parameters():
        wide = parameter.dtype == torch.float64 or parameter.is_complex()
        if parameter.requires_grad and wide:
            raise PrecisionError(
                f"{name} is {dtype_name(parameter.dtype)}, and policies cover real numbers of at "
                "most 32 bits: convert fp64 with model.float() before the optimizer is made; store "
                "complex numbers as real ones (torch.view_as_real)"
            )
    for name, buffer in model.named_buffers():
        if buffer.dtype in LOW and _BROKEN_IN_16_BITS.search(name.rpartition(".")[2].lower()):
            raise PrecisionError(
                f"buffer {name} is {dtype_name(buffer.dtype)} already, by model.to() or as it was "
                "loaded, and what that rounded is gone. Make or load the model in fp32 and let the "
                "policy cast it, which leaves buffers alone"
            )


def _check_fp32_weights(
    policy: PrecisionPolicy, names: Mapping[nn.Parameter, str], kept: Collection[str]
) -> None:
    low = {p: n for p, n in names.items() if p.requires_grad and p.dtype != torch.float32}
    if low:
        found = sorted({dtype_name(p.dtype) for p in low})
        raise PrecisionError(
            f"policy {policy} keeps trainable weights in fp32, but {len(low)} of "
            f"{len(names)} parameters are {', '.join(found)}: {some(tuple(low.values()))}; "
            "convert them with model.float() (or p.data = p.data.float() the trainable ones alone) "
            "before the model is sharded and the optimizer made, or use a *-master policy"
        )
    frozen = tuple(n for p, n in names.items() if n in kept and p.dtype != torch.float32)
    if frozen:
        raise PrecisionError(
            f"rules of policy {policy} keep {some(frozen)} in fp32, but the model has 16 bits; "
            "convert their modules with .float() first"
        )


def _check_groups(
    policy: PrecisionPolicy,
    names: Mapping[nn.Parameter, str],
    optimizers: Sequence[Optimizer],
    kept: Collection[str],
) -> None:
    """Refuse an ``eps`` too small beside 16-bit moments."""
    form, info = dtype_name(policy.master_dtype), torch.finfo(policy.master_dtype)
    for optimizer, group in ((o, group) for o in optimizers for group in o.param_groups):
        low = [p for p in group["params"] if names[p] not in kept]
        eps = group.get("eps")
        if not low or not isinstance(eps, int | float) or not eps:
            continue
        beta = float([0, group.get("alpha", 0), *group.get("betas", ())][-1])
        # (1 - beta) g^2 is rounded to 0 below half the least number
        least = math.sqrt(info.tiny * info.eps / 2 / (1 - beta))
        averages = beta and not isinstance(optimizer, torch.optim.Adamax)
        if not torch.tensor(eps, dtype=policy.master_dtype) or (averages and eps < info.tiny):
            raise PrecisionError(
                f"the optimizer's eps={eps:g} is too small for {form}, where the mean square of "
                f"gradients below {least:.2g} is 0 and a step divides by eps alone; use "
                f"eps >= {least:.2g}, or policy {form}-master"
            )


def no_loss(value: object) -> PrecisionError:
    """The error for a loss that cannot be back-propagated."""
    what = f"a {type(value).__name__}"
    if isinstance(value, Tensor):
        graph = "" if value.requires_grad else ", without a graph"
        what = f"a tensor of shape {tuple(value.shape)}{graph}"
    return PrecisionError(
        f"backward() got {what}; allowed: a scalar tensor, as loss.mean() and not loss.item(), "
        "computed from trainable parameters. Were they frozen or detached?"
    )


def as_inputs(value: object) -> tuple[Tensor, ...]:
    """The ``inputs`` of a backward as a tuple."""
    value = [value] if isinstance(value, Tensor) else value
    where, allowed = "backward(inputs)", "a leaf tensor, or a list of some"
    tensors = tuple(require(value, (list, tuple), where, allowed))
    if not all(require(tensor, Tensor, where, allowed).is_leaf for tensor in tensors):
        raise PrecisionError(f"{where} got no leaf, but a result; allowed: {allowed}")
    return tensors


NO_BACKWARD = (
    "step() without backward(): call precision.backward(loss) instead of loss.backward(), so that "
    "the loss is scaled and checked"
)
TWICE = (
    "step(loss) back-propagates the loss, and backward(loss) has done so already: call step() "
    "without it"
)
CLOSED = (
    "this Precision was closed, by close() or as another one took its model; make another one, for "
    "several optimizers with a list of them"
)
NO_GRADIENTS = (
    "step(): no parameter of the optimizer got a gradient: they are frozen, unused in the loss, or "
    "were replaced after the optimizer was made"
)


@torch.no_grad()
def check_cast(placed: PlacedModel) -> None:
    """Refuse weights that overflow in 16 bits and modules that do not run with 16-bit weights."""
    policy, kept = placed.policy, placed.kept()
    dtype = policy.param_dtype
    for name, parameter in placed.model.named_parameters():
        if not parameter.is_floating_point():
            continue
        if name not in kept:
            part = local_part(parameter)
            lost = part.to(dtype).isinf() & part.isfinite()
            if bool(lost.any()):
                worst = float(part.abs().max())
                raise PrecisionError(
                    f"{name} holds {worst:g}, which {dtype_name(dtype)} cannot (largest "
                    f"{torch.finfo(dtype).max:g}); use a *-mixed policy"
                )
    names = {parameter: name for name, parameter in placed.model.named_parameters()}
    for _, group in fsdp_groups(placed.model):
        own = [names[p.sharded_param] for p in group.fsdp_params if p.sharded_param.requires_grad]
        wide = [name for name in own if name in kept]
        if wide and len(wide) < len(own):
            raise PrecisionError(
                f"rules of policy {policy} keep {some(tuple(wide))} in fp32, and FSDP2 gathers "
                "them together with 16-bit ones, in one format; call fully_shard on their modules "
                "first, or use a *-mixed policy with the same rules"
            )
    norms = [  # torch wants their weights and statistics in one dtype
        p for p in placed.modules
        if not p.fp32 and isinstance(p.module, _NormBase)
        and p.module.running_mean is not None and [*p.module.parameters()]
    ]  # fmt: skip
    if norms:
        kinds = sorted({f"type:{type(p.module).__name__}" for p in norms})
        raise PrecisionError(
            f"{norms[0].name or 'the model'} is a {type(norms[0].module).__name__} with running "
            f"statistics in fp32, whose kernels take no {dtype_name(dtype)} weights; use a "
            f"*-mixed policy, or the rule keep_fp32={'|'.join(kinds)}"
        )


# Which saved precision states are accepted.


def check_state(
    state: Mapping[str, Any],
    policy: PrecisionPolicy,
    parameters: Mapping[str, Tensor],
    weights: Mapping[str, Tensor] | None,
) -> dict[str, Tensor]:
    """Refuse a saved precision state that is from another policy or model.

    ``parameters`` are the tensors that the optimizer updates, by name. The saved ``weights`` allow
    another policy's state. Returns the masters to load, by name: the saved weights, or those that
    states had before optimizers' states had them; none if the weights are masters.
    """
    require(state, Mapping, "load_state_dict(state)", "what Precision.state_dict() gave")
    wrong = [key for key in COUNTS if type(state.get(key)) is not int or state[key] < 0]
    wrong += ["policy"] * (type(state.get("policy")) is not str)
    wrong += ["loss_scale"] * (not isinstance(state.get("loss_scale"), Mapping))
    if wrong:
        raise PrecisionError(
            f"the saved precision state has {wrong[0]}={state.get(wrong[0])!r}; allowed: what "
            "Precision.state_dict() gave"
        )
    if parse_saved(state["policy"]) != policy and weights is None:
        raise PrecisionError(
            f"the saved precision state is from policy {state['policy']!r}, this run uses "
            f"{str(policy)!r}; resume with --precision {state['policy']}, or give the saved "
            "model's weights= to convert it"
        )
    masters, dtypes = dict(state.get("masters", {})), {torch.float32}
    if weights is not None and not masters:
        masters = {name: local_part(w) for name, w in weights.items() if name in parameters}
        dtypes = set(DTYPES.values())
    elif not masters and ("masters" not in state or not policy.keeps_more_than_weights):
        return {}
    whole = all(isinstance(m, Tensor) and m.dtype in dtypes for m in masters.values())
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    if not whole or {name: master.shape for name, master in masters.items()} != shapes:
        odd = sorted(set(masters) ^ set(shapes)) or ["shapes or dtypes differ"]
        raise PrecisionError(f"saved master weights are from another model: {', '.join(odd[:5])}")
    return masters
