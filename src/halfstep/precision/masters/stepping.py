"""How Precision steps optimizers: the interface of halfstep's own, and the device's decisions."""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle

from halfstep.errors import PrecisionError
from halfstep.precision.masters.local_part import is_divided, is_sharded, local_part
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.precision.result import StepResult

Gradients = Mapping[nn.Parameter, Tensor]
_Name = Callable[[Tensor], str]
_OF_PARAMETERS = "state", "param_groups"


@dataclass(frozen=True, slots=True)
class Decision:
    """What the device decided about a step, read by the host."""

    loss: float
    norm: float  # the global 2-norm of the gradients before clipping
    nonfinite: Mapping[nn.Parameter, bool]  # whose gradients were not finite, and if one was NaN


class DeviceDecision:
    """What the device has decided about a step, which the host reads later."""

    def __init__(
        self, loss: Tensor, norm: Tensor, flags: Tensor, parameters: Sequence[nn.Parameter],
        max_norm: float | None,
    ) -> None:  # fmt: skip
        """Decide on a step without waiting for the device, and begin to copy that to the host.

        ``norm`` is fp64 on the device; ``flags`` are int32, one for each parameter's gradient, with
        bit 0 where it holds infinities and bit 1 where NaN.
        """
        loss = loss.to(norm, non_blocking=True)
        both = loss + norm  # in fp64, where finite ones have a finite sum
        wrong = (both - both).ne(0)  # NaN, unless all is finite
        if max_norm is None:
            clip = torch.ones_like(norm)
        else:  # as ``clip_factor``, whose source is there
            clip = (max_norm / (norm + 1e-6)).clamp(max=1)
        self.numbers = torch.stack([wrong.double(), clip, loss, norm])
        """fp64 on the device: above 0 if the step changes nothing, the clip factor, loss, norm."""
        self._parameters, self._clips = parameters, max_norm is not None
        gpu = norm.is_cuda
        made = (torch.empty(t.shape, dtype=t.dtype, pin_memory=gpu) for t in (self.numbers, flags))
        self._copies = [*made]
        for copy, source in zip(self._copies, (self.numbers, flags), strict=True):
            copy.copy_(source, non_blocking=gpu)
        self._copied: torch.cuda.Event | None = None
        if gpu:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(norm.device))

    @property
    def found(self) -> Tensor:
        """Above 0 if the step changes nothing, an fp64 scalar on the device."""
        return self.numbers[0]

    @property
    def multiplier(self) -> Tensor:
        """The clip factor, an fp64 scalar on the device."""
        return self.numbers[1]

    @contextmanager
    def given_to(self, optimizer: Any) -> Iterator[None]:
        """Inside the context a ``step`` that heeds a GradScaler's tensors finds the decision there.

        It divides gradients by ``grad_scale``: by 1, where nothing is clipped, to the last bit.
        """
        optimizer.found_inf = self.found.float()
        optimizer.grad_scale = self.multiplier.reciprocal().float() if self._clips else None
        try:
            yield
        finally:
            del optimizer.found_inf, optimizer.grad_scale

    def read(self) -> Decision:
        """The decision; waits for this one copy if need be."""
        if self._copied is not None:
            self._copied.synchronize()
        _, _, loss, norm = self._copies[0].tolist()
        flags = zip(self._parameters, self._copies[1].tolist(), strict=True)
        return Decision(loss, norm, {p: bool(flag & 2) for p, flag in flags if flag})


@torch.no_grad()
def decide_by_torch(loss: Tensor, gradients: Gradients, max_norm: float | None) -> DeviceDecision:
    """Decide on a step by torch's multi-tensor operations, which read every gradient once.

    In fp64 no square of a finite fp32 number overflows or vanishes, so a norm is finite if and only
    if all elements are. **Source** of the flag: NVIDIA Apex's capturable optimizers.
    """
    order = sorted(gradients, key=lambda target: str(gradients[target].dtype))
    norms = torch.stack(
        [
            norm
            for _, members in groupby(order, lambda target: gradients[target].dtype)
            for norm in torch._foreach_norm(
                [gradients[target] for target in members], 2, dtype=torch.float64
            )
        ]
    )
    flags = norms.isinf().int() + 2 * norms.isnan()
    return DeviceDecision(loss, torch.linalg.vector_norm(norms), flags, order, max_norm)


class OwnOptimizer(Optimizer):
    """An optimizer of ``halfstep.optim``, whose base class says what it can do besides torch's."""

    has_masters = False
    """Whether a Precision has it update fp32 masters, of weights of whatever format."""

    def can_decide(self) -> bool:
        """Whether the device can decide about its steps."""
        return False


def takes_gradients(optimizer: Optimizer) -> bool:
    """Whether ``step`` accepts ``gradients=``; a user's subclass may override it without."""
    kind: Any = type(optimizer)
    return isinstance(optimizer, OwnOptimizer) and _takes_gradients(kind)


@cache
def _takes_gradients(kind: type[Any]) -> bool:
    accepted = inspect.signature(kind.step).parameters
    return {"gradients", "multiplier"} <= accepted.keys() or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()
    )


def with_inner(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """These, and then the optimizers that they are made of, under whatever attribute."""
    found, seen, todo = list[Optimizer](), set[int](), deque[Any](optimizers)
    while todo:
        value = todo.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Optimizer):
            found.append(value)
            todo += [held for key, held in vars(value).items() if key not in _OF_PARAMETERS]
        elif isinstance(value, Mapping):
            todo += value.values()
        elif isinstance(value, list | tuple | set):
            todo += value
    return found


class Movement:
    """Finds tensors that a step leaves as they were, until each was once seen to change.

    An in-place write counts ``_version`` up, which costs nothing to see. A write through ``.data``,
    a fused kernel or a broadcast does not; so where it stands still, the elements with the largest
    and the least gradient are compared.
    """

    def __init__(self) -> None:
        self._changed = set[int]()  # ids
        self.open = True
        """Whether some were not seen to change yet; to be set for new ones."""

    def begin(self, optimizers: Sequence[Optimizer]) -> Callable[[_Name], PrecisionError | None]:
        """Look, before their step, at the tensors of these that have a gradient in ``grad``.

        Returns:
            What to call after an applied step with a function that names a tensor: it returns the
            error for what did not change. The host waits only where values must be compared.
        """
        every = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        new = [p for p in every if id(p) not in self._changed and p.grad is not None]
        before = {p: (p._version, *_sample(p)) for p in new}
        return partial(self._end, optimizers, before)

    def _end(
        self, optimizers: Sequence[Optimizer], before: Mapping[Tensor, tuple[Any, ...]], name: _Name
    ) -> PrecisionError | None:
        still = list[Tensor]()
        for target, (version, *sample) in before.items():
            moved = target._version != version or (sample and _moved(target, optimizers, *sample))
            if moved:
                self._changed.add(id(target))
            elif moved is False:
                still.append(target)
        every = (p for o in optimizers for group in o.param_groups for p in group["params"])
        self.open = any(id(p) not in self._changed for p in every)
        if not still:
            return None
        kind = type(_holding(optimizers, still[0])[0][0]).__name__
        return PrecisionError(
            f"{kind}.step() left {len(still)} of {len(before)} tensors that have a gradient as "
            f"they were (first: {name(still[0])}), so the step was not applied to them. Give the "
            "optimizers that it should step, in a list, in its place"
        )


def _holding(optimizers: Iterable[Optimizer], target: Tensor) -> list[tuple[Optimizer, Any]]:
    """The optimizers and their groups that hold a tensor."""
    every = [(o, group) for o in optimizers for group in o.param_groups]
    return [(o, group) for o, group in every if any(p is target for p in group["params"])]


def _sample(target: Tensor) -> tuple[Tensor, ...]:
    """Where a dense gradient is largest and least, and the tensor's values there."""
    gradient = None if target.grad is None else local_part(target.grad)
    if gradient is None or gradient.layout is not torch.strided or not gradient.numel():
        return ()
    where = torch.stack([gradient.argmax(), gradient.argmin()])
    return where, local_part(target.detach()).take(where)


def _moved(
    target: Tensor, optimizers: Sequence[Optimizer], where: Tensor, old: Tensor
) -> bool | None:
    """Whether a value changed; None where a change of rate x gradient may have rounded to none."""
    if not torch.equal(local_part(target.detach()).take(where), old):
        return True
    # the least of all groups' rates, as a container's own may be stale
    rates = [group.get("lr") for _, group in _holding(optimizers, target)]
    rate = min([float(rate) for rate in rates if rate is not None], default=1.0)
    if target.grad is None:  # cleared by the step
        return None
    change = rate * local_part(target.grad).take(where).abs().float().clamp(max=1)
    seen = change > old.abs().float() * torch.finfo(old.dtype).eps
    return False if bool(seen.any()) else None


def require_own_optimizer(policy: PrecisionPolicy, optimizers: Sequence[Optimizer]) -> None:
    """Refuse an optimizer that cannot keep weights or moments as the policy says."""
    if not policy.needs_own_optimizer:
        return
    for optimizer in optimizers:
        if not isinstance(optimizer, OwnOptimizer):
            nearest = "bf16-master" if policy.update != "nearest" else f"{policy}".split(",")[0]
            raise PrecisionError(
                f"policy {policy} needs an optimizer that keeps update={policy.update} and "
                f"moments={policy.moment_format}: one of halfstep.optim; "
                f"{type(optimizer).__name__} does not. The nearest policy for it is {nearest}"
            )


_ADAMS = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SparseAdam")
_ELEMENTWISE = tuple(
    getattr(torch.optim, name)
    for name in ("Adadelta", "Adagrad", *_ADAMS, "ASGD", "RMSprop", "Rprop", "SGD")
)


def require_elementwise(optimizers: Sequence[Optimizer]) -> None:
    """Refuse an optimizer of sharded weights whose update of an element may depend on others.

    It would get this rank's parts for the whole. A class of a user's own says what it is by its
    attribute ``elementwise``; one that only holds other optimizers is judged by them.
    """
    for optimizer in with_inner(optimizers):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(map(is_divided, parameters)):
            continue
        inner = with_inner([optimizer])[1:]
        known = isinstance(optimizer, (OwnOptimizer, *_ELEMENTWISE))
        if not getattr(optimizer, "elementwise", known or bool(inner)):
            raise PrecisionError(
                f"{type(optimizer).__name__} may need whole tensors, and each rank has a part of "
                "them; use halfstep.optim.Muon or an optimizer like AdamW, or set elementwise = "
                "True on this one if an element of it needs no other's gradient"
            )


def has_users(hooks: Mapping[int, Any]) -> bool:
    """Whether there are hooks that are not halfstep's own."""
    return any(
        not str(getattr(hook, "__module__", "")).startswith("halfstep.") for hook in hooks.values()
    )


# Steps that the device decides about, and what the host learns of them later.
#
# On CUDA, a step of halfstep's optimizers and of torch's fused ones is checked, clipped and
# applied, or skipped, by kernels alone. The host reads the decision when a figure of the result is
# asked for, before the next step, or before the next backward whose loss scale depends on it. Only
# then it counts the step, names what was not finite and raises, by the same code as for a step that
# it decided itself. Until then a step that did nothing has done no harm:
# docs/decisions/0016-steps-on-the-device.md.

Installed = Callable[[], AbstractContextManager[None]]
"""A context in which optimizers hold what they update: :meth:`MasterWeights.installed`."""


class DevicePath:
    """The steps of a Precision that are decided on the device, which its optimizers heed."""

    def __init__(self, optimizers: Sequence[Optimizer], installed: Installed) -> None:
        self._optimizers: Sequence[Any] = optimizers
        self._own: list[Any] = [o for o in optimizers if isinstance(o, OwnOptimizer)]  # 1 at most
        self._installed = installed
        self._pending: Callable[[], StepResult] | None = None  # of the last step, until it is known

    def attach(self, settle: Callable[[], Callable[[], None] | None]) -> list[RemovableHandle]:
        """Settle the last step before an optimizer's state is saved or loaded.

        ``settle`` is a weak reference to the method that does it.
        """

        def before(*_: Any) -> None:
            known = settle()
            if known is not None:
                known()

        handles = []
        for optimizer in self._optimizers:
            handles.append(optimizer.register_state_dict_pre_hook(before))
            handles.append(optimizer.register_load_state_dict_pre_hook(before))
        return handles

    def decide(
        self, loss: Tensor, gradients: Gradients, max_norm: float | None
    ) -> DeviceDecision | None:
        """Decide on a step on the device; None where the host must.

        A user's hooks on an optimizer, or a wrapper of its ``step``, must not run on a skipped
        step, so the host decides then; or where the places of a decision hold a user's own.
        """
        hooks: list[Any] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
        for optimizer in self._optimizers:
            hooks += [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
            own = type(optimizer).step  # which a scheduler of the learning rate wraps to count
            step = vars(optimizer).get("step", own)
            if step is not own and getattr(step, "__wrapped__", None) is not own:
                return None
            if not {"found_inf", "grad_scale"}.isdisjoint(vars(optimizer)):
                return None
        if any(map(has_users, hooks)):
            return None
        if not all(g.layout is torch.strided and g.is_floating_point() for g in gradients.values()):
            return None  # fused steps take no others
        others = [o for o in self._optimizers if o not in self._own]
        with self._installed():
            begun = all(_has_begun(optimizer, gradients) for optimizer in others)
        return decide_by_torch(loss, gradients, max_norm) if begun else None

    def result(
        self,
        decision: DeviceDecision,
        gradients: Gradients,
        learn: Callable[[Decision], StepResult],
    ) -> StepResult:
        """The result of a step just taken; ``learn`` counts it, once, when it is asked for."""
        targets, outcome = [*gradients], list[StepResult | Exception]()

        def read() -> StepResult:
            if not outcome:
                self._pending, known = None, decision.read()
                if known.nonfinite or not math.isfinite(known.loss):
                    with self._installed():
                        for own in self._own:  # torch's fused ones have taken it back themselves
                            own.uncount([p for p in targets if p in own.state])
                try:
                    outcome.append(learn(known))
                except Exception as error:  # each look at the result raises it
                    outcome.append(error)
            if isinstance(outcome[0], Exception):
                raise outcome[0]
            return outcome[0]

        self._pending = read
        return StepResult.later(read)

    def settle(self) -> None:
        """Wait for the last step, if the host does not know its outcome."""
        if self._pending is not None:
            self._pending()


def device_path(optimizers: Sequence[Optimizer], installed: Installed) -> DevicePath | None:
    """The way to step on the device; None where the host decides about every step."""
    parameters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    own = [o for o in optimizers if isinstance(o, OwnOptimizer)]
    others = [o for o in optimizers if not isinstance(o, OwnOptimizer)]
    if len(own) > 1 or any(is_sharded(p) for p in parameters) or not all(map(_heeds, others)):
        return None
    if others and not all(_waits_for_host(p.device) for p in parameters):
        return None
    return DevicePath(optimizers, installed) if all(o.can_decide() for o in own) else None


def _waits_for_host(device: torch.device) -> bool:
    """Whether a device would idle while the host decides."""
    return device.type == "cuda"


def _heeds(optimizer: Optimizer) -> bool:
    """Whether ``step`` heeds a GradScaler's tensors on the device, as torch's fused ones do.

    A subclass with a ``step`` of its own says so in its body: what it does there besides torch's
    step could change something in a skipped one.
    """
    kind: Any = type(optimizer)
    says = "_step_supports_amp_scaling" in vars(kind) or kind.step.__module__.startswith(
        "torch.optim"
    )
    return says and getattr(optimizer, "_step_supports_amp_scaling", False)


def _has_begun(optimizer: Optimizer, gradients: Gradients) -> bool:
    """Whether a step on the device finds its state, and makes it undone if it is skipped.

    A first step makes the state, which a skipped one must not; fused SGD fills its momenta only
    where it steps. Nor do those of other options heed a flag.
    """
    for group in optimizer.param_groups:
        if not group.get("fused", True):  # as loaded from another optimizer's state
            return False
        stateless = group.get("momentum") == 0
        for target in [] if stateless else filter(gradients.__contains__, group["params"]):
            if all(value is None for value in optimizer.state.get(target, {}).values()):
                return False
    return True
