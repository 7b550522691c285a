"""The optimizer step on the device: check, unscale, clip, update and adapt without the host.

A step is one pass over the gradients, one small program that decides, and the update; all use one
buffer (buffer.py). It holds every value that changes, so the whole training step can be captured
into a CUDA graph, and an overflow inside a replay skips the step and lowers the scale as usual.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import halfstep.optim.kernels.cuda as cuda
from halfstep.errors import PrecisionError
from halfstep.optim.base import LowPrecisionOptimizer, plain_options
from halfstep.optim.kernels.cpu import RULES
from halfstep.optim.on_device.buffer import Head, Row, head, loss_scale_state, read_result
from halfstep.optim.on_device.tensors import Bound, Bundle
from halfstep.precision.border import require
from halfstep.precision.checks import check_max_norm
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.precision.policy.spelling import parse_policy
from halfstep.precision.result import StepResult
from halfstep.precision.scaling.loss_scale import LossScaleConfig, make_loss_scale

_STATE = {"loss_scale", "skipped_total", "skipped_in_a_row"}


@dataclass(frozen=True, slots=True)
class PendingResult:
    """The result of a step, while its values are still being copied to the host."""

    numbers: Tensor
    names: tuple[str, ...]
    flags_at: int
    event: torch.cuda.Event | None

    def ready(self) -> bool:
        """Whether :meth:`get` would return at once."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def get(self) -> StepResult:
        """The step's result; waits for this one copy if need be.

        Raises:
            NonFiniteError: As :meth:`DeviceScaler.result`.
        """
        if self.event is not None:
            self.event.synchronize()
        flags = self.numbers[self.flags_at :].view(torch.int32).tolist()
        return read_result(self.numbers.tolist(), flags, self.names)


class DeviceScaler:
    """Loss scaling, clipping and the optimizer step without a host synchronisation.

    Use it in place of ``halfstep.Precision`` where the host must not wait or the step is captured
    into a CUDA graph. Gradients are only read; set them to None, or to 0, yourself.

    A step whose gradients are not finite leaves weights, moments, remainders and step numbers
    unchanged, bit for bit. If continuing cannot help (no scale to lower, the scale at its floor,
    too many skips), the error is raised only when a result is read.

    Before a capture, take at least one step; after it, the same parameters must have gradients.
    :meth:`step` writes changed learning rates and other group options to the device; before the
    replay of a captured step, call :meth:`write_options`.

    Example::

        scaler = DeviceScaler(LossScaleConfig(kind="dynamic"), optimizer)
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(max_norm=1.0)
        optimizer.zero_grad()
        print(scaler.result().grad_norm)  # waits

    **Source:** flag, scale and step counter are on the device as in NVIDIA Apex's capturable
    optimizers and torch's fused ones; the scale's algorithm is in precision/scaling/loss_scale.py.
    """

    def __init__(
        self,
        config: LossScaleConfig | str | PrecisionPolicy,
        optimizer: LowPrecisionOptimizer,
        *,
        names: Mapping[Tensor, str] | None = None,
    ) -> None:
        """Make the buffer; the optimizer may have stepped already.

        Args:
            config: How the loss is scaled; or a policy, or its name, whose loss scale to use.
            optimizer: One of :mod:`halfstep.optim`, with all its parameters on one CUDA device.
            names: Names of parameters, for results; by default the groups' ``param_names``, if any.

        Raises:
            PrecisionError: For another optimizer, without triton, with parameters elsewhere, or
                with ``init_scale=auto``, which needs the host.
        """
        if not isinstance(config, LossScaleConfig):
            config = parse_policy(config).loss_scale
        require(optimizer, LowPrecisionOptimizer, "DeviceScaler(optimizer)", "halfstep.optim's")
        rule = optimizer.algorithm.name
        kernels = cuda.triton_kernels() if rule in RULES else f"no kernel has the rule {rule!r}"
        if isinstance(kernels, str):
            raise PrecisionError(f"DeviceScaler has no torch-operations form: {kernels}")
        if config.calibrate:
            raise PrecisionError("init_scale=auto is for halfstep.Precision; give a number here")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        devices = {p.device for p in parameters}
        if len(devices) != 1 or not cuda.can_launch(next(iter(devices))):
            found = ", ".join(sorted(map(str, devices)))
            raise PrecisionError(f"DeviceScaler needs all parameters on one CUDA device: {found}")
        optimizer.state_dict()  # runs the hook of another scaler, which writes its step numbers
        self.config = config
        self.optimizer = optimizer
        self._kernels: ModuleType = kernels
        self._device: torch.device = devices.pop()
        self._flags_at = Head.SIZE + len(parameters) * Row.SIZE
        size = self._flags_at + (len(parameters) + 1) // 2
        self._buffer = torch.zeros(size, dtype=torch.float64, device=self._device)
        self._flags = self._buffer[self._flags_at :].view(torch.int32)
        self._max_norm = float("inf")
        self._write(0, head(config, make_loss_scale(config)))
        self._bundle = Bundle(optimizer, self._device, names or {})
        self._options: list[tuple[float, ...]] = []
        optimizer.register_state_dict_pre_hook(lambda _: self._pull())
        optimizer.register_step_pre_hook(lambda *_: self._pull())

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the current scale, a scalar in fp32; call ``backward`` on it.

        Args:
            loss: A scalar. Divide a micro-batch's loss so that their sum is the batch's loss.
        """
        with torch.no_grad():
            self._buffer[Head.LOSS].add_(loss.detach().reshape(()))
        return loss.float() * self._buffer[Head.SCALE].float()

    @torch.no_grad()
    def step(self, max_norm: float | None = None) -> None:
        """Check, unscale, clip and apply the gradients, or skip the step; adapt the scale.

        Args:
            max_norm: Clip the global 2-norm of the unscaled gradients to this, or None. A captured
                step keeps its value.

        Raises:
            PrecisionError: If no parameter has a gradient, a bf16 weight has no ``update``, a
                capture was not preceded by such a step, or ``max_norm`` is not above 0.
        """
        check_max_norm(max_norm)
        bundle = self._bundle
        with cuda.on(self._device):
            if bundle.changed():
                self._attach()
            bundle.locate()
            self.write_options()
            wanted = float("inf") if max_norm is None else max_norm
            if wanted != self._max_norm:
                self._write(Head.MAX_NORM, [wanted])
                self._max_norm = wanted
            self._flags.zero_()
            for bound in bundle.bounds:
                bundle.launch_statistics(self._kernels, bound, self._flags)
            self._decide()
            for i, bound in enumerate(bundle.bounds):
                cuda.launch_update(
                    self._kernels,
                    bound.launch,
                    bundle.table,
                    aligned=bundle.aligned,
                    state=self._buffer,
                    at_row=Head.SIZE + i * Row.SIZE,
                )
            bundle.mark_written()

    def write_options(self) -> None:
        """Send changed group options (learning rates) to the device, without waiting.

        Raises:
            PrecisionError: During a capture, which would freeze them.
        """
        for i, bound in enumerate(self._bundle.bounds):
            wanted = self._settled(bound)
            if wanted != self._options[i]:
                self._write(Head.SIZE + i * Row.SIZE, list(wanted))
                self._options[i] = wanted

    def result(self) -> StepResult:
        """What the last step did. It waits for the device, which :meth:`step` does not.

        Raises:
            NonFiniteError: If, since the last call, a step was not finite and continuing cannot
                help: there is no scale to lower, it was at its floor, or too many steps in a row
                were skipped. That step changed nothing. The next call reports later steps.
            PrecisionError: Before the first step.
        """
        pending = self.async_result()
        self._pull()
        self._buffer[Head.STOP].zero_()
        return pending.get()

    def async_result(self) -> PendingResult:
        """The last step's result, to be read later: its copy to pinned memory has begun."""
        if not self._bundle.bounds:
            raise PrecisionError("result() before the first step()")
        gpu = self._device.type == "cuda"
        numbers = torch.empty(self._buffer.shape, dtype=torch.float64, pin_memory=gpu)
        numbers.copy_(self._buffer, non_blocking=gpu)
        event = None
        if gpu:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
        return PendingResult(numbers, self._bundle.names, self._flags_at, event)

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs besides model and optimizer, as in ``Precision``; waits."""
        numbers = self._buffer[: Head.SIZE].tolist()
        return {
            "loss_scale": loss_scale_state(self.config, numbers),
            "skipped_total": int(numbers[Head.SKIPPED_TOTAL]),
            "skipped_in_a_row": int(numbers[Head.SKIPPED_IN_A_ROW]),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`; further keys, such as ``Precision``'s, are ignored.

        Raises:
            PrecisionError: If it is damaged or from another configuration; nothing is changed then.
        """
        missing = _STATE - set(state)
        if missing:
            raise PrecisionError(f"the saved state has no {', '.join(sorted(missing))}")
        scale = make_loss_scale(self.config)
        scale.load_state_dict(state["loss_scale"])
        numbers = head(self.config, scale)
        numbers[Head.SKIPPED_TOTAL] = state["skipped_total"]
        numbers[Head.SKIPPED_IN_A_ROW] = state["skipped_in_a_row"]
        numbers[Head.MAX_NORM] = self._max_norm
        self._write(0, numbers)

    def _attach(self) -> None:
        """Attach the parameters that have gradients now, with their step numbers."""
        self._pull()
        self._bundle.attach()
        self._options = []
        for i, bound in enumerate(self._bundle.bounds):
            found = self._settled(bound)
            self._write(Head.SIZE + i * Row.SIZE, [*found, float(bound.step)])
            self._options.append(found)

    def _settled(self, bound: Bound) -> tuple[float, ...]:
        """The constants of a launch's group, padded with zeros."""
        found = self.optimizer.algorithm.settled(plain_options(bound.group))
        return (*map(float, found), *(0.0 for _ in range(Row.STEP - len(found))))

    def _pull(self) -> None:
        """Copy the device's step numbers into the optimizer's state; waits for the device."""
        if self._bundle.bounds:
            rows = self._buffer[Head.SIZE : self._flags_at].view(-1, Row.SIZE)
            self._bundle.set_steps(rows[:, Row.STEP].tolist())

    def _write(self, at: int, numbers: list[float]) -> None:
        if cuda.is_capturing(self._device):
            raise PrecisionError(
                "group options or max_norm changed just before a CUDA graph capture, which would "
                "freeze them; take one more step, or call write_options(), before the capture"
            )
        gpu = self._device.type == "cuda"  # a copy from pinned memory makes nobody wait
        source = torch.tensor(numbers, dtype=torch.float64, pin_memory=gpu)
        self._buffer[at : at + len(numbers)].copy_(source, non_blocking=True)

    def _decide(self) -> None:
        bundle = self._bundle
        self._kernels.decide_kernel[(1,)](
            self._buffer,
            bundle.partials,
            self._flags,
            bundle.partials.numel(),
            len(bundle.names),
            len(bundle.bounds),
            rule=self.optimizer.algorithm.name,
            tile=4096,
            rows=max(16, 1 << (len(bundle.bounds) - 1).bit_length()),
            **self._kernels.LAUNCH,
        )
