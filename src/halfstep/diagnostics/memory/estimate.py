"""Estimates the memory of a training step before there is one, from shapes alone.

The model's forward runs on tensors without memory (torch's FakeTensor), under the policy's casts;
what autograd would save is counted as :class:`MemoryMeter` counts it in a real step.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from halfstep.diagnostics.memory.saved import Bytes, SavedTensors
from halfstep.diagnostics.memory.table import Memory
from halfstep.errors import PrecisionError
from halfstep.kernels.forward import compiled, on_shapes
from halfstep.optim.storage.moments import BLOCK
from halfstep.precision.border import as_device, require_model
from halfstep.precision.casting.autocast import support
from halfstep.precision.casting.cast import cast_floating
from halfstep.precision.casting.op_casts import AutocastCasts, StoredCasts
from halfstep.precision.explain import bytes_per_parameter
from halfstep.precision.ownership import tensors_in
from halfstep.precision.policy.devices import default_device
from halfstep.precision.policy.policy import PrecisionPolicy, dtype_name
from halfstep.precision.policy.rules import place
from halfstep.precision.policy.spelling import parse_policy

Loss = Callable[[Any], Tensor]


def estimate(
    model: nn.Module,
    policy: str | PrecisionPolicy = "auto",
    batch: object = (),
    *,
    loss: Loss | None = None,
    logits: int = 0,
    ranks: int = 1,
    device: str | torch.device | None = None,
    averages: float | Mapping[str, float] = 2,
    micro_batches: int = 1,
    least: bool = False,
) -> Memory:
    """Estimate what a training step holds; allocates nothing, and changes nothing.

    Args:
        model: Any module, also on the meta device (``with torch.device("meta"): Model()``).
        policy: A policy, its name, field string or ``.toml`` file; ``auto``: what suits ``device``.
        batch: The model's arguments: a tensor, a tuple of them, or a mapping of keyword arguments.
            Only shapes and dtypes count, so meta tensors will do. None: the state alone.
        loss: Makes the scalar loss of the model's output. None: its ``loss``, or the sum of its
            first tensor.
        logits: The number of classes or tokens, by which saved logits are told from other
            activations.
        ranks: Ranks that weights, masters, gradients and moments are sharded over.
        device: What it is for; None: the device that this machine would train on.
        averages: Tensors of a parameter's size that the optimizer keeps: 2 for AdamW, 1 for SGD
            with momentum; or of each parameter by its name, as ``optimizer.averages(model)`` of
            halfstep's optimizers gives them (Muon: 1 of a matrix).
        micro_batches: Micro-batches of a step, whose gradients add up in ``grad_dtype``.
        least: Leave out what shapes cannot be sure of, so that the step holds no less: whether
            halfstep's kernels run, which save less than torch's operations, and attention masks,
            which models drop where nothing is padded.

    Returns:
        The bytes by part and dtype.

    Raises:
        PrecisionError: For a policy or model that is none, or whose forward cannot be run on
            shapes alone, because it depends on values.
    """
    require_model(model, "estimate(model)")
    where = default_device() if device is None else as_device(device)
    value = parse_policy(policy, where)
    found: Bytes = _state(model, value, max(1, ranks), averages, micro_batches > 1)
    modules: Bytes = {}
    rows = 0
    if batch is not None and any(True for _ in tensors_in(batch)):
        try:
            native = where.type == "cpu" and support(value, where).status == "native"
            how = _How(least or (native and compiled()), not least, logits)
            saved, modules = _saved(model, value, batch, loss, how)
            found |= saved
        except PrecisionError:
            raise
        except Exception as error:  # whatever a stranger's forward raises on shapes alone
            raise PrecisionError(
                f"estimate(model): its forward cannot be run on shapes alone "
                f"({type(error).__name__}: {str(error)[:160]}); measure a real step by "
                "halfstep.MemoryMeter"
            ) from error
        tensors = list(tensors_in(batch))
        rows = len(tensors[0]) if tensors[0].dim() else 0
        sizes: dict[str, int] = {}
        for tensor in tensors:
            name = dtype_name(tensor.dtype)
            sizes[name] = sizes.get(name, 0) + tensor.nbytes
        found["batch"] = sizes
    return Memory(str(value), False, found, rows, max(1, ranks), modules)


def _state(
    model: nn.Module,
    policy: PrecisionPolicy,
    ranks: int,
    averages: float | Mapping[str, float],
    several: bool,
) -> Bytes:
    """The bytes between steps: of weights, masters, gradients and moments."""
    kept = place(policy, model).kept()
    names = {id(p): n for n, p in model.named_parameters()}
    found: dict[str, dict[str, int]] = {}

    def add(part: str, form: str, size: float) -> None:
        if size:
            forms = found.setdefault(part, {})
            forms[form] = forms.get(form, 0) + round(size)

    for parameter in dict.fromkeys(model.parameters()):
        count, is_kept = parameter.numel() / ranks, names[id(parameter)] in kept
        stored = parameter.dtype
        if parameter.is_floating_point() and policy.param_dtype != torch.float32:
            stored = torch.float32 if is_kept else policy.param_dtype
        add("weights", dtype_name(stored), count * stored.itemsize)
        if not parameter.requires_grad:
            continue
        each = bytes_per_parameter(policy, kept=is_kept, several=several)
        grad = {4: "fp32", 2: dtype_name(policy.param_dtype)}[int(each["gradients"])]
        add("masters", "fp32", count * each["masters"])
        add("masters", "remainder", count * each["remainder"])
        add("gradients", grad, count * each["gradients"])
        moments = "fp32" if is_kept and not policy.needs_own_optimizer else policy.moment_format
        number = averages
        if isinstance(number, Mapping):
            number = number.get(names[id(parameter)], 0)
        add("moments", moments, number * _moment_bytes(count, moments))
    for buffer in model.buffers():
        add("weights", dtype_name(buffer.dtype), buffer.nbytes)
    return found


def _moment_bytes(count: float, form: str) -> float:
    """The bytes of a moment of so many elements, with the tops of 8-bit blocks."""
    if form == "8bit":
        return count + math.ceil(count / BLOCK)
    return count * {"fp32": 4, "bf16": 2, "fp16": 2}[form]


class _How(NamedTuple):
    """Whether compiled kernels run, whether masks count, and the last dimension of logits."""

    kernels: bool
    masks: bool
    logits: int


def _saved(
    model: nn.Module,
    policy: PrecisionPolicy,
    batch: object,
    loss: Loss | None,
    how: _How,
) -> tuple[Bytes, Bytes]:
    """What one forward saves for its backward: by part, and its activations by module."""
    low = policy.param_dtype != torch.float32
    kept = place(policy, model).kept()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def fake(tensor: Tensor, dtype: torch.dtype) -> Tensor:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
            return made.requires_grad_(tensor.requires_grad)

        held = {}
        twins: dict[int, Tensor] = {}
        for name, tensor in [*model.named_parameters(remove_duplicate=False),
                             *model.named_buffers(remove_duplicate=False)]:  # fmt: skip
            is_weight = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
            dtype = policy.param_dtype if is_weight and low and name not in kept else tensor.dtype
            held[name] = twins.setdefault(id(tensor), fake(tensor, dtype))

        def given(value: Any) -> Any:
            if isinstance(value, Tensor):
                return torch.empty(value.shape, dtype=value.dtype, device="cpu")
            if isinstance(value, Mapping):
                return {key: given(part) for key, part in value.items()}
            return tuple(map(given, value)) if isinstance(value, list | tuple) else value

        batched = given(batch)
        inputs = cast_floating(batched, policy.compute_dtype) if low else batched
        args = () if isinstance(inputs, Mapping) else inputs
        args = (args,) if isinstance(args, Tensor) else args
        kwargs = inputs if isinstance(inputs, Mapping) else {}
        counted = SavedTensors(model, held.values(), tensors_in(batched), how.logits)
        assert mode is not None
        shapes = on_shapes(FakeTensor, kernels=how.kernels)
        with shapes, _FusedAttention(), _casts(policy), _Masks(how.masks), counted:
            output = torch.func.functional_call(model, held, args, dict(kwargs), tie_weights=True)
            result = _loss_of(output, loss)
            found = counted.bytes, counted.modules
            del result, output
    return found


def _loss_of(output: Any, loss: Loss | None) -> Tensor:
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


class _Masks(TorchFunctionMode):
    """Passes attention's masks on, or none of them."""

    def __init__(self, kept: bool) -> None:
        super().__init__()
        self._kept = kept

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is functional.scaled_dot_product_attention and not self._kept:
            args = (*args[:3], None, *args[4:]) if len(args) > 3 else args
            options.pop("attn_mask", None)
        return func(*args, **options)


class _FusedAttention(TorchFunctionMode):
    """Lets attention on shapes save what the fused kernels save, not every probability."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is functional.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            options |= dict(zip(names, args, strict=False))
            q, k, v = (options[name] for name in names[:3])
            if not options.get("dropout_p") and q.dim() == 4:
                if torch.is_autocast_enabled("cpu"):
                    q, k, v = (t.to(torch.get_autocast_dtype("cpu")) for t in (q, k, v))
                mask = options.get("attn_mask")
                if mask is not None and mask.dtype == torch.bool:
                    mask = torch.zeros_like(mask, dtype=q.dtype)  # what torch adds to the scores
                flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
                return flash(q, k, v, 0.0, bool(options.get("is_causal")),
                             attn_mask=mask)[0]  # fmt: skip
        return func(*args, **(kwargs or {}))
