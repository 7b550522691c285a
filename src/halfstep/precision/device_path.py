"""Steps that are decided on the device, and what the host learns of them later.

On CUDA, a step of one of halfstep's optimizers is checked, clipped and applied, or skipped, by
kernels alone. The host reads the decision when a figure of the result is asked for, or at the next
step, and only then counts the step, names what was not finite and raises, by the same code as for
a step that it decided itself. Until then a step that did nothing has done no harm.
docs/decisions/0016-steps-on-the-device.md says what waits, and why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Generic, NoReturn, Protocol, TypeVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfstep.errors import PrecisionError
from halfstep.precision.masters.local_part import is_sharded
from halfstep.precision.masters.masters import MasterWeights
from halfstep.precision.masters.stepping import (
    Decision,
    Gradients,
    KeepsMasters,
    StepsOnDevice,
    Undecided,
    UserHooks,
)
from halfstep.precision.result import StepResult
from halfstep.precision.scaling.gradients import OneRank, Ranks
from halfstep.precision.scaling.loss_scale import (
    DynamicLossScale,
    LossScale,
    LossScaleConfig,
    ScaleState,
)

T = TypeVar("T")
Installed = Callable[[], AbstractContextManager[None]]
"""A context in which optimizers hold what they update: :meth:`MasterWeights.installed`."""


class Later(Generic[T]):
    """An attribute of Precision that the device may have to tell first."""

    def __set_name__(self, owner: type[Any], name: str) -> None:
        """Remember the attribute of ``Precision._progress`` that it is."""
        self._name = name

    @overload
    def __get__(self, precision: None, owner: type[Any]) -> Later[T]: ...

    @overload
    def __get__(self, precision: object, owner: type[Any]) -> T: ...

    def __get__(self, precision: Any, owner: type[Any]) -> Later[T] | T:
        """The value after the last step; waits for that step on the device."""
        if precision is None:
            return self
        precision.settle()
        value: T = getattr(precision._progress, self._name)
        return value


class Pending:
    """A step that the device has taken, and of which the host does not know the outcome yet."""

    def __init__(self, undecided: Undecided, learn: Callable[[Decision], StepResult]) -> None:
        self._ask: tuple[Undecided, Callable[[Decision], StepResult]] | None = undecided, learn
        self._outcome: StepResult | Exception | None = None

    def result(self) -> StepResult:
        """The step's result; the first call waits for the device and counts the step.

        Raises:
            NonFiniteError: As :meth:`Precision.step`, at every call.
        """
        if self._ask is not None:
            (undecided, learn), self._ask = self._ask, None
            try:
                self._outcome = learn(undecided.read())
            except Exception as error:
                self._outcome = error
        if isinstance(self._outcome, StepResult):
            return self._outcome
        assert self._outcome is not None, "set by the first call, which is over"
        raise self._outcome


class Stepping(Protocol):
    """The part of :class:`~halfstep.Precision` that :class:`CapturedStep` uses."""

    path: DevicePath | None
    masters: MasterWeights

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale after the last step."""

    def settle(self) -> None:
        """Learn the outcome of the last step."""

    def took(self, path: DevicePath) -> StepResult:
        """The result of a step that the device has begun to take."""


class DevicePath:
    """The steps of a Precision that are decided on the device."""

    def __init__(self, steps: StepsOnDevice, optimizer: Optimizer, installed: Installed) -> None:
        self.steps = steps
        self._installed = installed
        self.capturing = False
        """Whether :class:`CapturedStep` is capturing a step."""
        self.captured: Gradients = {}
        """The gradients of the step that is being captured."""
        self._told: ScaleState | None = None  # the loss scale on the device, if that is known
        self._undecided: Undecided | None = None  # the decision about the step in progress
        self._pending: Pending | None = None  # the last step, until its outcome is known
        self._hooks = UserHooks(optimizer)

    def attach(
        self, optimizers: Sequence[Optimizer], settle: Callable[[], Callable[[], None] | None]
    ) -> list[RemovableHandle]:
        """Settle the last step before an optimizer's state is saved or loaded.

        ``settle`` is a weak reference to the method that does it.
        """

        def before(*_: Any) -> None:
            known = settle()
            if known is not None:
                known()

        (optimizer,) = optimizers
        return [
            optimizer.register_state_dict_pre_hook(before),
            optimizer.register_load_state_dict_pre_hook(before),
        ]

    def takes(self, gradients: Gradients) -> bool:
        """Whether the device can take this step alone.

        A user's hooks on the optimizer must not run on a skipped step, so the host decides then.
        """
        if self._hooks.present():
            return False
        with self._installed():
            return self.steps.takes(gradients)

    def asks_host(self) -> bool:
        """Whether the host decides about the next step, with gradients like the last ones."""
        return self._hooks.present() or self.steps.is_due()

    def scale(self, scale: LossScale) -> float | Tensor:
        """The loss scale of the next backward, given the host's; a tensor where it adapts."""
        if not isinstance(scale, DynamicLossScale):
            return scale.value
        self.follow(scale)
        return self.steps.scale

    def follow(self, scale: LossScale) -> None:
        """Send the host's loss scale to the device, unless it is there already or older."""
        known = ScaleState(scale.value, 0, 0)
        if isinstance(scale, DynamicLossScale):
            known = scale.state
        if self._pending is None and known != self._told:
            self.steps.write_scale(known)
            self._told = known

    def require_noticed(self) -> None:
        """Refuse a step inside a CUDA graph whose replays nobody would tell the host of."""
        if self.steps.is_capturing() and not self.capturing:
            raise PrecisionError(
                "precision.step() in a CUDA graph of your own: its replays would skip and fail "
                "unseen. Capture the whole training step by precision.captured(function)"
            )

    def examine(
        self, scale: LossScale, loss: Tensor, gradients: Gradients, max_norm: float | None
    ) -> None:
        """Decide on a step whose gradients the device takes, after the last one is settled."""
        self.follow(scale)
        with self._installed():
            self.steps.examine(loss, gradients, max_norm)
        if self.capturing:
            self.captured = gradients
        self._told, self._undecided = None, None
        if not self.capturing:
            self.examined()

    def examined(self) -> None:
        """Begin to copy the decision about the step that the device is taking to the host."""
        self._undecided = self.steps.decision()

    def places(self, gradients: Gradients) -> tuple[int | None, ...]:
        """What a captured step with these gradients depends on."""
        with self._installed():
            return self.steps.places(gradients)

    def result(self, learn: Callable[[Decision], StepResult], *, waits: bool) -> StepResult:
        """The result of the step just taken, for which ``learn`` is called now or later."""
        if self._undecided is None:
            return StepResult.later(unread)
        undecided, self._undecided = self._undecided, None
        pending = self._pending = Pending(undecided, partial(self._counted, learn))
        if waits:
            self.settle()
        return StepResult.later(pending.result)

    def settle(self) -> None:
        """Wait for the last step, if the host does not know its outcome.

        Raises:
            NonFiniteError: That of the last step.
        """
        if self._pending is not None:
            self._pending.result()

    def _counted(self, learn: Callable[[Decision], StepResult], decision: Decision) -> StepResult:
        self._pending, self._told = None, decision.scale
        if math.isfinite(decision.loss) and not decision.nonfinite:
            with self._installed():
                self.steps.count()
        return learn(decision)


def device_path(
    optimizers: Sequence[Optimizer], config: LossScaleConfig, ranks: Ranks, installed: Installed
) -> DevicePath | None:
    """The way to step on the device; None where the host decides about every step."""
    (optimizer, *others) = optimizers
    if others or not isinstance(optimizer, KeepsMasters) or not isinstance(ranks, OneRank):
        return None
    if any(is_sharded(p) for group in optimizer.param_groups for p in group["params"]):
        return None
    steps = optimizer.device_step(config)
    return None if steps is None else DevicePath(steps, optimizer, installed)


def unread() -> NoReturn:
    """Refuse to read the result of a step that is only being captured."""
    raise PrecisionError(
        "a result was read inside a function that is being captured into a CUDA graph, which has "
        "taken no step yet; return it, and read what the captured step returns"
    )


_WARM_UPS = 3
"""Steps that run before one is captured, as the notes on CUDA graphs of torch advise."""


class CapturedStep:
    """A training step that is replayed as one CUDA graph: see :meth:`Precision.captured`."""

    def __init__(self, precision: Stepping, function: Callable[..., StepResult]) -> None:
        """Refuse a Precision whose steps the host decides about."""
        if precision.path is None:
            raise PrecisionError(
                "captured() needs steps that are decided on the device: one optimizer of "
                "halfstep.optim on CUDA, with Triton, in a run of one process, without on_spike "
                "and fp8-delayed. Call the function itself instead"
            )
        self._precision, self._path = precision, precision.path
        self._function = function
        self._forget()

    def __call__(self, *inputs: Tensor) -> StepResult:
        """Take one step with these inputs, and return its result, which nothing waits for.

        Args:
            inputs: Tensors on the device, of the same shapes and dtypes at every call.

        Raises:
            NonFiniteError: Of the step before, as :meth:`Precision.step`.
            PrecisionError: If an input is not a tensor, or of another shape or dtype than before.
        """
        precision, path = self._precision, self._path
        self._require_alike(inputs)
        precision.settle()
        path.follow(precision.loss_scale)
        if self._graph is not None and path.places(self._gradients) != self._places:
            self._forget()  # other parameters, or a state that was loaded since
        if self._graph is None and (self._left > 0 or path.asks_host()):
            self._left -= 1
            return self._aside(inputs)
        if self._graph is None:
            self._capture(inputs)
        elif precision.masters.were_loaded() or not path.takes(self._gradients):
            return self._aside(inputs)  # the host takes over weights, or decides about the step
        assert self._graph is not None, "captured above"
        for held, given in zip(self._inputs, inputs, strict=True):
            held.copy_(given, non_blocking=True)
        path.steps.write_options()
        self._graph.replay()
        path.examined()
        return precision.took(path)

    def _forget(self) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None
        self._left = _WARM_UPS
        self._inputs: list[Tensor] = []
        self._places: tuple[int | None, ...] = ()
        self._gradients: Gradients = {}  # in the graph's own memory
        self._held: list[Any] = []  # what the graph reads

    def _require_alike(self, inputs: Sequence[object]) -> None:
        for number, given in enumerate(inputs):
            if not isinstance(given, Tensor):
                raise PrecisionError(
                    f"input {number} of a captured step is a {type(given).__name__}; allowed: "
                    "tensors, since a graph keeps everything else as it was when it was captured"
                )
        kinds = [(tuple(t.shape), t.dtype) for t in inputs if isinstance(t, Tensor)]
        if self._graph is not None and kinds != [(tuple(t.shape), t.dtype) for t in self._inputs]:
            wanted = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in self._inputs)
            found = ", ".join(f"{shape} {dtype}" for shape, dtype in kinds)
            raise PrecisionError(
                f"a captured step got inputs {found}; allowed: those that it was captured with, "
                f"{wanted}. Call the function itself for a batch of another shape"
            )

    def _aside(self, inputs: Sequence[Tensor]) -> StepResult:
        """Take the step outside of a graph, on a stream of its own."""
        stream, own = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        own.wait_stream(stream)
        with torch.cuda.stream(own):
            result = self._function(*inputs)
        stream.wait_stream(own)
        return result

    def _capture(self, inputs: Sequence[Tensor]) -> None:
        """Record the step, without taking it."""
        self._inputs = [given.clone() for given in inputs]
        graph = torch.cuda.CUDAGraph()
        self._path.capturing = True
        try:
            with torch.cuda.graph(graph):
                self._function(*self._inputs)
        finally:
            self._path.capturing = False
            self._gradients, self._path.captured = self._path.captured, {}
        self._graph = graph
        self._held = self._path.steps.held()
        self._places = self._path.places(self._gradients)
