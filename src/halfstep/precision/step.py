"""Precision: the object that a training loop holds.

One optimizer step, in this order (the order of Megatron-Core's mixed-precision optimizer)::

    backward   loss * scale, gradients add up over micro-batches (in fp32 masters where there are)
    check      one global norm in fp32; not finite: name the parameters, skip or stop
    update     gradients * (clip factor / scale); optimizer.step(); round masters into weights
    adapt      the loss scale backs off, holds or grows
    report     StepResult

The check runs in every precision and before anything is changed, so a skipped step leaves weights,
moments and step counters bit-identical.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import NonFiniteError, PrecisionError
from halfstep.precision.autocast import arithmetic, autocast, require_support
from halfstep.precision.cast import cast_at_border
from halfstep.precision.checks import (
    check_max_norm,
    check_parameters,
    check_state,
    one_device,
    some,
)
from halfstep.precision.gradients import (
    NonFinite,
    clip_factor,
    exact_global_norm,
    find_nonfinite,
    global_norm,
    multiply_,
)
from halfstep.precision.loss_scale import make_loss_scale
from halfstep.precision.master_weights import make_masters
from halfstep.precision.parse import parse_policy
from halfstep.precision.policy import PrecisionPolicy, dtype_name
from halfstep.precision.result import StepResult

# Below this norm, squares of fp32 gradients come near the smallest fp32 number, 2^-149.
_SQUARES_FIT = 1e-15


class Precision:
    """Mixed-precision training in somebody's own loop, under one policy.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Linear(4, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        >>> precision = Precision("bf16-mixed", model, optimizer)
        >>> for _ in range(3):
        ...     with precision.autocast():
        ...         loss = model(torch.ones(8, 4)).square().mean()
        ...     result = precision.step(loss, max_norm=1.0)
        >>> result.applied, result.loss_scale
        (True, 1.0)
    """

    def __init__(
        self, policy: str | PrecisionPolicy, model: nn.Module, optimizer: Optimizer
    ) -> None:
        """Check the policy against the device, and cast and copy weights where it says so.

        Args:
            policy: A policy, its name, field string or ``.toml`` file.
            model: On its final device. With a ``*-master`` or ``*-pure`` policy its floating
                parameters are cast in place, and ``model(...)`` casts floating inputs to the
                compute dtype and floating outputs to fp32.
            optimizer: Any optimizer over the model's parameters that has not stepped yet. With a
                ``*-master`` policy its parameter groups get the fp32 masters instead.

        Raises:
            PrecisionError: If policy, device, model and optimizer do not go together; nothing has
                been changed then.
        """
        self.policy = parse_policy(policy)
        self.device = one_device(model)
        self.support = require_support(self.policy, self.device)
        self.loss_scale = make_loss_scale(self.policy.loss_scale)
        self.optimizer = optimizer
        self.skipped_total = 0
        self.skipped_in_a_row = 0
        self._loss: Tensor | None = None
        check_parameters(self.policy, model, optimizer)
        optimizer.zero_grad()  # what is left from before was scaled by nobody
        self.masters = make_masters(self.policy, model, optimizer)
        cast_at_border(model, self.policy)
        self._model = model

    def autocast(self) -> AbstractContextManager[None]:
        """The context for the forward and the loss; harmless to enter for any policy."""
        return autocast(self.policy, self.device)

    def backward(self, loss: Tensor) -> None:
        """Scale the loss and back-propagate; call once per micro-batch.

        Args:
            loss: A scalar. For k micro-batches, hand over each loss divided so that the sum is the
                loss of the whole batch.

        Raises:
            PrecisionError: If the loss is no scalar or has no gradient.
        """
        if loss.numel() != 1 or not loss.requires_grad:
            raise PrecisionError(
                f"backward() got a loss of shape {tuple(loss.shape)} that "
                f"{'requires' if loss.requires_grad else 'does not require'} a gradient; allowed: "
                "a scalar computed from trainable parameters. Were they frozen or detached?"
            )
        with arithmetic(self.policy, self.device):
            self.loss_scale.scale(loss.reshape(())).backward()  # type: ignore[no-untyped-call]
        value = loss.detach().float().reshape(())
        self._loss = value if self._loss is None else self._loss + value

    def step(self, loss: Tensor | None = None, *, max_norm: float | None = None) -> StepResult:
        """Check, unscale, clip and apply the gradients, or skip the step; then clear them.

        Gradients are consumed: every ``grad`` is None afterwards, so ``zero_grad`` is not needed.

        Args:
            loss: Handed to :meth:`backward` first; leave it out after calls of ``backward``.
            max_norm: Clip the global 2-norm of the unscaled gradients to this, or None.

        Returns:
            What happened; reading it costs no further host synchronisation.

        Raises:
            NonFiniteError: If going on cannot help: the loss itself is not finite; gradients are
                not and there is no scale to lower; the scale is at its floor; or too many steps in
                a row were skipped. Weights and optimizer state are as before the step.
            PrecisionError: If ``backward`` was not called, or no parameter got a gradient.
            ValueError: If ``max_norm`` is not above 0.
        """
        check_max_norm(max_norm)
        if loss is not None:
            self.backward(loss)
        gradients = self._gradients()
        scale = self.loss_scale.value
        try:
            loss_value, scaled_norm = self._read(gradients)
            found = NonFinite((), ())
            if not math.isfinite(scaled_norm):
                found = find_nonfinite(zip(self._names(gradients), gradients.values(), strict=True))
            if not found.names and not _SQUARES_FIT < scaled_norm < math.inf:
                scaled_norm = float(exact_global_norm(list(gradients.values())))
            if found.names:
                return self._skip(loss_value, scaled_norm, found)
            norm = scaled_norm / scale
            multiply_(list(gradients.values()), clip_factor(norm, max_norm) / scale)
            self.optimizer.step()
            self.masters.push_()
        finally:
            self._loss = None
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        self.loss_scale.update(found_nonfinite=False)
        self.skipped_in_a_row = 0
        return self._result(loss_value, norm, scale, NonFinite((), ()))

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """What the optimizer updates, by the model's names: masters, or the parameters."""
        return dict(self.masters.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        """All that a resume needs besides the model's and the optimizer's own state."""
        masters = self.named_parameters() if self.policy.has_masters else {}
        return {
            "policy": str(self.policy),
            "loss_scale": self.loss_scale.state_dict(),
            "skipped_total": self.skipped_total,
            "skipped_in_a_row": self.skipped_in_a_row,
            "masters": {name: master.detach() for name, master in masters.items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where :meth:`state_dict` was taken.

        Raises:
            PrecisionError: If it is damaged, or of another policy or model; nothing is changed.
        """
        masters = self.named_parameters() if self.policy.has_masters else {}
        check_state(state, self.policy, masters)
        self.loss_scale.load_state_dict(state["loss_scale"])
        self.skipped_total = state["skipped_total"]
        self.skipped_in_a_row = state["skipped_in_a_row"]
        for name, master in masters.items():
            master.copy_(state["masters"][name])
        self.masters.push_()

    def _gradients(self) -> dict[nn.Parameter, Tensor]:
        """Parameter to gradient, for all that the optimizer is about to update."""
        if self._loss is None:
            raise PrecisionError(
                "step() without backward(): call precision.backward(loss) instead of "
                "loss.backward(), so that the loss is scaled and checked"
            )
        owned = [p for group in self.optimizer.param_groups for p in group["params"]]
        late = [p for p in owned if p.requires_grad and not self.masters.covers(p)]
        gradients = {p: p.grad for p in owned if p.grad is not None}
        if late or not gradients:
            self._loss = None
            if late:
                raise PrecisionError(
                    f"{some(self._names(late))} came to the optimizer or became trainable after "
                    "Precision was made, and has no fp32 master there; make Precision after that"
                )
            raise PrecisionError(
                "step(): no parameter of the optimizer got a gradient: they are frozen, unused in "
                "the loss, or were replaced after the optimizer was made"
            )
        return gradients

    def _names(self, parameters: Iterable[nn.Parameter]) -> tuple[str, ...]:
        names = {p: name for name, p in self._model.named_parameters()}
        names |= {p: name for name, p in self.masters.named_parameters()}
        return tuple(names.get(p, "a tensor that is not the model's") for p in parameters)

    def _read(self, gradients: dict[nn.Parameter, Tensor]) -> tuple[float, float]:
        """Loss and scaled norm on the host: the one synchronisation of a step."""
        assert self._loss is not None
        norm = global_norm(list(gradients.values()))
        loss, scaled_norm = torch.stack([self._loss, norm.to(self._loss.device)]).tolist()
        if not math.isfinite(loss):
            broken = find_nonfinite(self._model.named_parameters()).names
            source, end = "the forward pass or the data made it", "; the weights are unchanged"
            if broken:
                source, end = f"the weights {some(broken)} are not finite", ""
            raise NonFiniteError(
                f"the loss is {loss} before any gradient: {source}, no loss scale can help (policy "
                f"{self.policy}){end}",
                cause="forward",
                parameters=broken,
            )
        return loss, scaled_norm

    def _skip(self, loss: float, norm: float, found: NonFinite) -> StepResult:
        """Back off and report, or stop where a smaller scale cannot help."""
        scale = self.loss_scale.value
        kind = self.policy.loss_scale.kind
        self.skipped_total += 1
        self.skipped_in_a_row += 1
        limit = self.policy.loss_scale.max_consecutive_skips
        what = "NaN" if found.nan and not found.inf else "inf" if not found.nan else "NaN and inf"
        where = f"{what} in the gradients of {some(found.names)} under a finite loss of {loss:g}"
        same = "the weights are unchanged"
        if kind == "none":
            raise NonFiniteError(
                f"{where}, and policy {self.policy} has no loss scale to lower: a bug in a "
                f"backward pass, or values beyond {dtype_name(self.policy.compute_dtype)}; {same}",
                cause="gradients",
                parameters=found.names,
            )
        if self.loss_scale.at_floor:
            raise NonFiniteError(
                f"{where} at the smallest loss scale {scale:g}: no smaller scale can help, so this "
                f"is no overflow by scaling but a bug or values beyond the format; {same}",
                cause="loss_scale_floor",
                parameters=found.names,
            )
        if self.skipped_in_a_row >= limit:
            raise NonFiniteError(
                f"{where}: {self.skipped_in_a_row} steps in a row skipped, the limit "
                f"(max_consecutive_skips), at loss scale {scale:g}; {same}",
                cause="skip_limit",
                parameters=found.names,
            )
        self.loss_scale.update(found_nonfinite=True)
        return self._result(loss, norm, scale, found)

    def _result(self, loss: float, norm: float, scale: float, found: NonFinite) -> StepResult:
        return StepResult(
            applied=not found.names,
            reason=found.reason,
            loss=loss,
            grad_norm=norm,
            loss_scale=scale,
            next_loss_scale=self.loss_scale.value,
            skipped_total=self.skipped_total,
            skipped_in_a_row=self.skipped_in_a_row,
            nonfinite_parameters=found.names,
        )
