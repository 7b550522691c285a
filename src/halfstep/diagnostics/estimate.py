"""Estimates the memory of a training step before there is one, from shapes alone.

A copy of the model runs forward on tensors without memory (torch's FakeTensor), under the policy's
casts and by torch's own operations; what autograd would save is counted as :class:`MemoryMeter`
counts it in a real step. halfstep's compiled kernels save less.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from halfstep.diagnostics.memory import Bytes, Memory, SavedTensors, sums
from halfstep.errors import PrecisionError
from halfstep.optim.moments import BLOCK
from halfstep.precision.border import as_device, require_model
from halfstep.precision.casting.autocast import tensors_in
from halfstep.precision.casting.cast import cast_floating
from halfstep.precision.casting.op_casts import AutocastCasts, StoredCasts
from halfstep.precision.explain import bytes_per_parameter
from halfstep.precision.policy.devices import default_device
from halfstep.precision.policy.policy import PrecisionPolicy, dtype_name
from halfstep.precision.policy.rules import place
from halfstep.precision.policy.spelling import parse_policy


def estimate(
    model: nn.Module,
    policy: str | PrecisionPolicy = "auto",
    batch: object = (),
    *,
    loss: Callable[[Any], Tensor] | None = None,
    logits: int = 0,
    ranks: int = 1,
    device: str | torch.device | None = None,
    averages: float | Mapping[str, float] = 2,
    micro_batches: int = 1,
) -> Memory:
    """Estimate what a training step holds; allocates nothing, and changes nothing.

    Args:
        model: Any module, also on the meta device (``with torch.device("meta"): Model()``).
        policy: A policy, its name or field string; ``auto``: what suits ``device``.
        batch: The model's arguments: a tensor, a tuple of them, or a mapping of keyword arguments.
            Only shapes and dtypes count, so meta tensors will do. None: the state alone.
        loss: Makes the scalar loss of the model's output. None: its ``loss``, or the sum of its
            first tensor.
        logits: The number of classes or tokens, which tells saved logits from other
            activations.
        ranks: Ranks that weights, masters, gradients and moments are sharded over.
        device: What it is for; None: the device that this machine would train on.
        averages: Tensors of a parameter's size that the optimizer keeps: 2 for AdamW, 1 for SGD
            with momentum; or of each parameter by its name, as ``optimizer.averages(model)`` of
            halfstep's optimizers gives them (Muon: 1 of a matrix).
        micro_batches: Micro-batches of a step, whose gradients add up in ``grad_dtype``.

    Returns:
        The bytes by part and dtype.

    Raises:
        PrecisionError: For a policy or model that is none, or whose forward cannot be run on
            shapes alone, because it depends on values.
    """
    require_model(model, "estimate(model)")
    value = parse_policy(policy, default_device() if device is None else as_device(device))
    state = estimate_state(model, value, ranks, averages, micro_batches)
    tensors = [] if batch is None else list(tensors_in(batch))
    if not tensors:
        return state
    saved = _saved_bytes(model, value, batch, loss, logits)
    sizes = sums(("batch", dtype_name(t.dtype), t.nbytes) for t in tensors)
    return replace(state, bytes={**state.bytes, **saved, **sizes})


def estimate_state(
    model: nn.Module,
    policy: PrecisionPolicy,
    ranks: int = 1,
    averages: float | Mapping[str, float] = 2,
    micro_batches: int = 1,
) -> Memory:
    """Count what is kept between steps, with all gradients: weights, masters and moments."""
    kept, ranks = place(policy, model).kept(), max(1, ranks)
    names = {id(p): n for n, p in model.named_parameters()}
    rows = list[tuple[str, str, float]]()
    for parameter in dict.fromkeys(model.parameters()):
        count, is_kept = parameter.numel() / ranks, names[id(parameter)] in kept
        stored = parameter.dtype
        if parameter.is_floating_point() and policy.param_dtype != torch.float32:
            stored = torch.float32 if is_kept else policy.param_dtype
        rows.append(("weights", dtype_name(stored), count * stored.itemsize))
        if not parameter.requires_grad:
            continue
        each = bytes_per_parameter(policy, kept=is_kept, several=micro_batches > 1)
        grad = {4: "fp32", 2: dtype_name(policy.param_dtype)}[int(each["gradients"])]
        rows += [
            ("masters", "fp32", count * each["masters"]),
            ("masters", "remainder", count * each["remainder"]),
            ("gradients", grad, count * each["gradients"]),
        ]
        moments = "fp32" if is_kept and not policy.needs_own_optimizer else policy.moment_format
        number = averages
        if isinstance(number, Mapping):
            number = number.get(names[id(parameter)], 0)
        size = count * {"fp32": 4, "bf16": 2, "fp16": 2, "8bit": 1}[moments]
        tops = math.ceil(count / BLOCK) if moments == "8bit" else 0  # of its blocks
        rows.append(("moments", moments, number * (size + tops)))
    rows += [("weights", dtype_name(buffer.dtype), buffer.nbytes) for buffer in model.buffers()]
    found = sums((part, form, round(size)) for part, form, size in rows if size)
    return Memory(str(policy), False, found, ranks)


def _saved_bytes(
    model: nn.Module, policy: PrecisionPolicy, batch: Any, loss: Any, logits: int
) -> Bytes:
    """Count what one forward of a batch saves, on shapes alone."""
    log = logging.getLogger("torch._subclasses.fake_tensor")  # writes a traceback of its own
    before, log.disabled = log.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            twin, given = _twin(model, policy), _without_memory(batch)
            low = policy.param_dtype != torch.float32
            inputs = cast_floating(given, policy.compute_dtype) if low else given
            counted = SavedTensors(twin, tensors_in(given), logits)
            with _OnShapes(), _casts(policy), counted:
                if isinstance(inputs, Mapping):
                    result = twin(**inputs)
                else:
                    result = twin(*inputs) if isinstance(inputs, tuple) else twin(inputs)
                result = _loss_of(result, loss)
                return counted.bytes  # while the graph is alive
    except PrecisionError:
        raise
    except Exception as error:  # whatever a stranger's forward raises on shapes alone
        raise PrecisionError(
            f"estimate(model): its forward cannot be run on shapes alone "
            f"({type(error).__name__}: {' '.join(str(error).split())[:160]}); measure a real step "
            "by halfstep.MemoryMeter"
        ) from error
    finally:
        log.disabled = before


def _without_memory(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="cpu")
    if isinstance(value, Mapping):
        return {key: _without_memory(part) for key, part in value.items()}
    return tuple(map(_without_memory, value)) if isinstance(value, list | tuple) else value


def _twin(model: nn.Module, policy: PrecisionPolicy) -> nn.Module:
    """Copy a model onto tensors without memory, with weights in the policy's dtype.

    Running the model itself could leave tensors without numbers in what it remembers.
    """
    kept = place(policy, model).kept()
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        low = parameter.is_floating_point() and policy.param_dtype != torch.float32
        dtype = policy.param_dtype if low and name not in kept else parameter.dtype
        made = torch.empty_strided(parameter.shape, parameter.stride(), dtype=dtype, device="cpu")
        memo.setdefault(id(parameter), nn.Parameter(made, requires_grad=parameter.requires_grad))
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
    return copy.deepcopy(model, memo)


def _loss_of(output: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    if loss is not None:
        return loss(output)
    if isinstance(getattr(output, "loss", None), Tensor):
        return output.loss  # type: ignore[no-any-return]
    first = next(tensors_in(getattr(output, "logits", output)), None)
    if first is None:
        raise PrecisionError(
            "estimate(model): its output holds no tensor; give loss=, which makes a scalar of it"
        )
    return first.float().sum()


@contextlib.contextmanager
def _casts(policy: PrecisionPolicy) -> Iterator[None]:
    """The policy's casts on a CPU that multiplies its format natively."""
    with contextlib.ExitStack() as stack:
        if policy.param_dtype != torch.float32:
            stack.enter_context(StoredCasts(policy.compute_dtype))
        elif policy.compute_dtype != torch.float32:
            stack.enter_context(AutocastCasts())
            stack.enter_context(torch.autocast("cpu", dtype=policy.compute_dtype))
        yield


class _OnShapes(TorchFunctionMode):
    """Lets three operations save what their kernels save, where torch's shapes know less."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.lstm:
            raise PrecisionError(
                "estimate(model): an LSTM's kernel saves a workspace of its own, whose size shapes "
                "do not tell; measure a real step by halfstep.MemoryMeter"
            )
        if func in (functional.grouped_mm, torch._grouped_mm):
            a, b = (*args, *options.values())[:2]
            if (a.dim(), b.dim()) == (2, 3):
                with torch.autocast("cpu", enabled=False):  # the policy's casts are done
                    return a @ b[0]  # saves both too, whole; torch's shapes are for bf16 alone
        if func is functional.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            options |= dict(zip(names, args, strict=False))
            q, k, v = (options[name] for name in names[:3])
            mask = options.get("attn_mask")
            learned = mask is not None and mask.requires_grad  # T5's: torch computes it plainly
            if not options.get("dropout_p") and q.dim() == 4 and not learned:
                if torch.is_autocast_enabled("cpu"):
                    q, k, v = (t.to(torch.get_autocast_dtype("cpu")) for t in (q, k, v))
                if mask is not None and mask.dtype == torch.bool:
                    mask = torch.zeros_like(mask, dtype=q.dtype)  # what torch adds to the scores
                flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
                return flash(q, k, v, 0.0, bool(options.get("is_causal")),
                             attn_mask=mask)[0]  # fmt: skip
        return func(*args, **(kwargs or {}))
