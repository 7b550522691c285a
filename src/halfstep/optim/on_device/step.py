"""The optimizer step on the device: check, clip, update and adapt the scale without the host.

A step is one pass over the gradients, one small program that decides, and the update; all use one
buffer (buffer.py). It holds every value that changes, so the whole training step can be captured
into a CUDA graph, and an overflow inside a replay skips the step and lowers the scale as usual.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import halfstep.optim.kernels.cuda as cuda
from halfstep.errors import PrecisionError
from halfstep.optim.kernels.cpu import RULES
from halfstep.optim.on_device.buffer import Head, Row, limits
from halfstep.optim.on_device.tensors import Bound, Bundle, Gradients, Stepped
from halfstep.optim.options import plain_options
from halfstep.optim.storage.fallback import is_due
from halfstep.precision.masters.stepping import Decision
from halfstep.precision.scaling.loss_scale import LossScaleConfig, ScaleState

_INFINITY = float("inf")


@dataclass(frozen=True, slots=True)
class _Copy:
    """What a step decided, while it is being copied to the host."""

    numbers: Tensor
    flags_at: int
    members: tuple[tuple[nn.Parameter, int], ...]  # in the order of the flags, with their streams
    event: torch.cuda.Event | None

    def read(self) -> Decision:
        """The decision; waits for this one copy if need be."""
        if self.event is not None:
            self.event.synchronize()
        head = self.numbers[: Head.SIZE].tolist()
        flags = self.numbers[self.flags_at :].view(torch.int32).tolist()
        broken = [pair for pair in zip(self.members, flags, strict=False) if pair[1]]
        broken.sort(key=lambda pair: pair[0][1])  # the optimizer's order
        value, good_steps, left = head[: len(ScaleState._fields)]
        return Decision(
            head[Head.LOSS],
            head[Head.NORM],
            {target: bool(flag & 2) for (target, _), flag in broken},
            ScaleState(value, int(good_steps), int(left)),
        )


class DeviceStep:
    """The steps of one optimizer whose every decision is made on the device.

    For each step call :meth:`examine`, then the optimizer's ``step`` with this object as its
    ``multiplier``. A step whose loss or gradients are not finite leaves weights, moments,
    remainders and step numbers unchanged, bit for bit. Gradients are unscaled, and only read.

    **Source:** flag, scale and step counter are on the device as in NVIDIA Apex's capturable
    optimizers and torch's fused ones; the scale's algorithm is in precision/scaling/loss_scale.py.
    """

    def __init__(
        self,
        optimizer: Stepped,
        config: LossScaleConfig,
        device: torch.device,
        kernels: ModuleType,
    ) -> None:
        self._optimizer = optimizer
        self._device = device
        self._kernels = kernels
        self._bundle = Bundle(optimizer, device)
        self._options: list[tuple[float, ...]] = []
        self._buffer = torch.zeros(Head.SIZE, dtype=torch.float64, device=device)
        self._write(Head.DYNAMIC, limits(config))
        self._allocate(0, 0)
        self._attached = 0  # how often other parameters were attached

    @property
    def scale(self) -> Tensor:
        """The loss scale of the next backward: an fp32 scalar on the device, in new memory."""
        return self._buffer[Head.SCALE].float()

    @property
    def multiplier(self) -> Tensor:
        """The clip factor of the step just examined: an fp64 scalar on the device."""
        return self._buffer[Head.MULTIPLIER]

    @property
    def found(self) -> Tensor:
        """Above 0 if the step just examined changes nothing: an fp64 scalar on the device."""
        return self._buffer[Head.FOUND]

    def write_scale(self, state: ScaleState) -> None:
        """Set the loss scale, without waiting."""
        self._write(Head.SCALE, [float(number) for number in state])

    def takes(self, gradients: Gradients) -> bool:
        """Whether the device can take a step with these gradients alone; it is attached to them.

        Raises:
            PrecisionError: As the optimizer's ``step``.
        """
        if self._bundle.attach(gradients):
            self._attach()
        return not self.is_due()

    def is_due(self) -> bool:
        """Whether 8-bit moments are compared with their gradients in the step after the last.

        The host decides about such a step (``storage/fallback.py``).
        """
        second = len(self._optimizer.algorithm.moments) > 1
        return any(
            second and bound.plan.moments == "8bit" and is_due(bound.step + 1)
            for bound in self._bundle.bounds
        )

    @torch.no_grad()
    def examine(self, loss: Tensor, gradients: Gradients, max_norm: float | None) -> None:
        """Decide on a step, after :meth:`takes`; nothing waits.

        Args:
            loss: fp32 scalar.
            gradients: Of the parameters, unscaled; fp32, bf16 or fp16.
            max_norm: Clip the global 2-norm of the gradients to this, or None.
        """
        bundle, kernels = self._bundle, self._kernels
        with cuda.on(self._device):
            bundle.locate(gradients)
            self.write_options()
            self._flags.zero_()
            for bound in bundle.bounds:
                bundle.launch_statistics(kernels, bound, self._flags)
            kernels.decide_kernel[(1,)](
                self._buffer,
                bundle.partials,
                self._flags,
                loss.to(self._device, torch.float32, non_blocking=True),
                _bits(_INFINITY if max_norm is None else max_norm),
                bundle.partials.numel(),
                self._flags.numel(),
                len(bundle.bounds),
                rule=self._optimizer.algorithm.name,
                tile=4096,
                rows=max(16, 1 << (len(bundle.bounds) - 1).bit_length()),
                **kernels.LAUNCH,
            )

    def update(self) -> None:
        """Apply the step just examined, unless it was decided to skip it."""
        with cuda.on(self._device):
            for i, bound in enumerate(self._bundle.bounds):
                cuda.launch_update(
                    self._kernels,
                    bound.launch,
                    self._bundle.table,
                    aligned=self._bundle.aligned,
                    state=self._buffer,
                    at_row=Head.SIZE + i * Row.SIZE,
                )
            self._bundle.finish()

    def decision(self) -> _Copy:
        """Begin to copy the last step's decision to the host, where it can be read later."""
        gpu = self._device.type == "cuda"
        numbers = torch.empty(self._buffer.shape, dtype=torch.float64, pin_memory=gpu)
        numbers.copy_(self._buffer, non_blocking=gpu)
        event = None
        if gpu:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
        return _Copy(numbers, self._flags_at, tuple(self._bundle.members()), event)

    def count(self) -> None:
        """Count an applied step in the optimizer's state, once the host knows of it."""
        self._bundle.count()
        # the device has counted it already
        self._options = [
            (*options[: Row.STEP], options[Row.STEP] + 1.0) for options in self._options
        ]

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

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a CUDA graph."""
        return cuda.is_capturing(self._device)

    def places(self, gradients: Gradients) -> tuple[int | None, ...]:
        """What a captured step depends on: it differs once the step would use other memory."""
        return (self._attached, *self._bundle.places(gradients))

    def held(self) -> list[Any]:
        """What a CUDA graph of the last step reads, to be kept for as long as the graph."""
        return [self._buffer, *self._bundle.held()]

    def _attach(self) -> None:
        """Give every launch a row, with its step number."""
        self._attached += 1
        bounds = self._bundle.bounds
        self._allocate(len(bounds), sum(len(bound.members) for bound in bounds))
        self._options = [() for _ in bounds]
        self.write_options()

    def _allocate(self, rows: int, tensors: int) -> None:
        """Make a buffer with this many rows, and flags of this many tensors behind them."""
        head = self._buffer[: Head.SIZE]
        self._flags_at = Head.SIZE + rows * Row.SIZE
        size = self._flags_at + (tensors + 1) // 2
        self._buffer = torch.zeros(size, dtype=torch.float64, device=self._device)
        self._buffer[: Head.SIZE].copy_(head)
        self._flags = self._buffer[self._flags_at :].view(torch.int32)

    def _settled(self, bound: Bound) -> tuple[float, ...]:
        """What the host writes in a launch's row: its constants, its sign and its step number."""
        found = self._optimizer.algorithm.settled(plain_options(bound.group))
        padded = (*map(float, found), *(0.0 for _ in range(Row.SIGN - len(found))))
        return (*padded, -1.0 if bound.group.get("maximize") else 1.0, float(bound.step))

    def _write(self, at: int, numbers: list[float]) -> None:
        if cuda.is_capturing(self._device):
            raise PrecisionError(
                "a learning rate, another group option or the loss scale changed inside a function "
                "that is being captured into a CUDA graph, which would freeze it; change it "
                "between two calls"
            )
        gpu = self._device.type == "cuda"  # a copy from pinned memory makes nobody wait
        source = torch.tensor(numbers, dtype=torch.float64, pin_memory=gpu)
        self._buffer[at : at + len(numbers)].copy_(source, non_blocking=True)


def device_step(optimizer: Stepped, config: LossScaleConfig) -> DeviceStep | None:
    """The optimizer's steps on the device; None where no kernel can take them."""
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    if len(devices) != 1 or optimizer.algorithm.name not in RULES:
        return None
    device = devices.pop()
    if not cuda.can_launch(device):
        return None
    kernels = cuda.triton_kernels()
    return None if isinstance(kernels, str) else DeviceStep(optimizer, config, device, kernels)


def _bits(value: float) -> int:
    """The bits of an fp64 number, as Triton passes whole numbers exactly and others in fp32."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits
