"""Gradients released during backward: a parameter is updated as soon as its gradient is complete.

Its gradient is freed at once, so that a full set of gradients never exists::

    backward    for each parameter, in the order in which gradients are complete:
                its norm joins the step's; if it is finite the optimizer updates this parameter
    step        counts the step, advances schedules and the EMA, and reports

Backward has read a weight for the last time when its gradient is complete, but for uses without a
gradient (``weight.detach()``), where autograd notices the write and raises. An update that is made
cannot be taken back: what needs all gradients before the first update, or undoes a step, is
refused, and so is any look at a gradient that is gone.

**Source:** Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited
Resources", ACL 2024 (LOMO), section 3.1, which clips single values or runs a second backward where
the norm is clipped; here clipping is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from halfstep.errors import PrecisionError
from halfstep.precision.checks import no_backward, no_gradients
from halfstep.precision.masters.local_part import is_sharded
from halfstep.precision.masters.masters import MasterWeights, Weight
from halfstep.precision.masters.stepping import UserHooks, takes_parts
from halfstep.precision.ownership import StepDoor
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.precision.scaling.gradients import Examiner, Judged, NonFinite, OneRank, Ranks

_ASKED = "release_gradients=True"


def require_releasable(
    policy: PrecisionPolicy,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    ranks: Ranks,
    choices: Sequence[object],
) -> None:
    """Refuse, before anything is changed, to release gradients where a step could not be honoured.

    ``choices`` are ``on_nonfinite`` and ``on_spike``.
    """
    require_unscaled(policy)
    for optimizer in optimizers:
        if not takes_parts(optimizer):
            raise PrecisionError(
                f"{_ASKED} with {type(optimizer).__name__}, which steps all parameters at once; "
                "allowed: the optimizers of halfstep.optim (a step of one's own takes gradients, "
                "multiplier and part)"
            )
    distributed = any(isinstance(module, DistributedDataParallel) for module in model.modules())
    if distributed or not isinstance(ranks, OneRank) or any(map(is_sharded, model.parameters())):
        raise PrecisionError(
            f"{_ASKED} on several ranks, whose gradients must be summed before the first update; "
            "train in one process, or shard the state over ranks without it (parallel=shard=N)"
        )
    for option, choice in zip(("on_nonfinite", "on_spike"), choices, strict=True):
        if str(choice) not in ("stop", "off") or (option, str(choice)) == ("on_spike", "stop"):
            raise PrecisionError(
                f"{_ASKED} with {option}={choice}, which leaves out or undoes a whole step, when "
                "some of its updates have been made already; allowed: on_nonfinite=stop and "
                "on_spike=off"
            )


def require_unscaled(policy: PrecisionPolicy) -> None:
    """Refuse to release gradients under a policy with a loss scale."""
    if policy.loss_scale.kind != "none":
        raise PrecisionError(
            f"{_ASKED} with policy {policy}: its loss scale skips a step that overflows, and "
            "updates made during backward cannot be undone. Use a bf16 policy, such as "
            "bf16-split24,moments=8bit"
        )


class ReleasedGradient(Tensor):
    """Stands in ``p.grad`` for a gradient that is gone, and refuses to be read.

    None there would let ``clip_grad_norm_`` or a mask do nothing without a word.
    """

    @staticmethod
    def of(parameter: Tensor) -> ReleasedGradient:
        """One of a parameter's shape, dtype and device; it takes the memory of one NaN."""
        value = torch.full((), math.nan, dtype=parameter.dtype, device=parameter.device)
        return value.expand(parameter.shape).as_subclass(ReleasedGradient)

    @classmethod
    def __torch_function__(cls, *_: Any) -> NoReturn:
        """Refuse whatever is asked of it."""
        raise PrecisionError(
            f"this gradient is gone: {_ASKED} has updated its parameter during backward. To clip, "
            "mask, add up or look at gradients leave release_gradients out; a hook on the "
            "parameter (register_hook) sees its gradient before"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return "ReleasedGradient()"


class GradientRelease:
    """Updates the parameters of one Precision during its backwards."""

    def __init__(
        self,
        masters: MasterWeights,
        examiner: Examiner,
        door: StepDoor,
        optimizers: Sequence[Optimizer],
    ) -> None:
        self._masters = masters
        self._examiner = examiner
        self._door = door
        self._optimizers = optimizers
        self._hooks = [UserHooks(optimizer) for optimizer in optimizers]
        self._step = 0  # number of the backward, for hooks on optimizers
        self.reset()

    def reset(self) -> None:
        """Forget a backward that no step has counted, as after loading a checkpoint."""
        self._loss: Tensor | None = None  # of the backward that waits for its step
        self._waiting: dict[Tensor, Weight] = {}  # whose gradients have not arrived
        self._arrived: list[Tensor] = []  # parameters whose gradients were released
        self._rates: list[Any] = []  # each group's learning rate in the backward
        self._squares = 0.0  # sum of the squared norms so far, in fp64
        self._updated = 0
        self._broken: Judged | None = None  # what stopped the updates
        self._ended = False  # whether the backward ran to its end

    @contextmanager
    def during(self, loss: Tensor, once_more: bool) -> Iterator[None]:
        """The context for the backward of a step's loss, in which parameters are updated.

        A loss that is not finite updates nothing, nor does any gradient from the first one on that
        is not finite.

        Args:
            loss: The whole step's.
            once_more: Whether the graph is to serve another backward.

        Raises:
            PrecisionError: If the step would need all of its gradients, or some are there already.
        """
        self._require_one(once_more)
        self._require_no_hooks()
        self._masters.take_written_()
        self._door.take()
        self.reset()
        value = float(loss.detach())
        if not math.isfinite(value):
            self._broken = Judged(value, math.nan, None)
        self._loss, self._rates = loss.detach().float().reshape(()), self._lrs()
        self._step += 1
        self._waiting = {weight.parameter: weight for weight in self._masters.trained()}
        with self._door.open():  # tells optimizers that parts of a step begin
            self._masters.update_({}, 1.0, part=self._step)
        handles = [
            parameter.register_post_accumulate_grad_hook(self._arrive)  # type: ignore[no-untyped-call]
            for parameter in self._waiting
        ]
        try:
            yield
            self._ended = True
        except BaseException as error:
            error.add_note(f"{_ASKED}: {self._partly()}")
            if not self._updated:
                self.reset()  # so the backward may be repeated
            raise
        finally:
            for handle in handles:
                handle.remove()
            for parameter in self._arrived if self._ended else ():
                parameter.grad = ReleasedGradient.of(parameter)

    @torch.no_grad()
    def _arrive(self, parameter: Tensor) -> None:
        """Update a parameter by its complete gradient, and free that; a hook of the parameter."""
        gradient, parameter.grad = parameter.grad, None
        weight = self._waiting.pop(parameter, None)
        if weight is None:
            raise PrecisionError(
                f"{_ASKED}: a second gradient of a parameter of shape {tuple(parameter.shape)} "
                "arrived after its update, so the first one was not complete: one backward inside "
                "another, as by torch.utils.checkpoint(use_reentrant=True); use "
                "use_reentrant=False"
            )
        if gradient is None:  # a user's hook has dropped it
            return
        self._arrived.append(parameter)
        if self._broken is not None:
            return
        assert self._loss is not None, "set before the backward"
        given = {weight.target: gradient}
        judged = self._examiner.judge(self._loss, given, first=False)
        if judged.broken:
            self._broken = judged
            return
        self._squares += judged.norm * judged.norm
        with self._door.open():
            self._masters.update_(given, 1.0, part=self._step)
        self._updated += 1

    def finish(self) -> Judged:
        """End the step whose updates the backward has made, and return what was measured in it.

        The norm is the root of the sum of the parameters' squared norms, in fp64: that of all
        gradients but for the order of additions.

        Raises:
            PrecisionError: If there was no backward or no gradient, or a learning rate has changed.
        """
        loss, rates, arrived = self._loss, self._rates, self._arrived
        if loss is None:
            raise no_backward()
        if not self._ended:
            raise PrecisionError(
                f"step() after a backward that did not end: {_ASKED}, and {self._partly()}. Load a "
                "checkpoint"
            )
        judged = self._broken or Judged(float(loss), math.sqrt(self._squares), NonFinite((), ()))
        judged = replace(judged, updated=self._updated)
        self._masters.clear()
        self.reset()
        if not arrived:
            raise no_gradients()
        if rates != self._lrs():
            raise PrecisionError(
                f"{_ASKED}: a learning rate was changed between backward and step, and the updates "
                "were made by the old one, during backward; set it before the backward"
            )
        if not judged.broken:
            with self._door.open():
                self._masters.update_({}, 1.0)  # tells hooks on optimizers that the step is over
        return judged

    def require_plain(self, loss: object, max_norm: float | None) -> None:
        """Refuse a step that clips, or that evaluates its loss itself."""
        if max_norm is not None:
            raise PrecisionError(
                f"step(max_norm={max_norm:g}) with {_ASKED}: the norm of all gradients is known "
                "when all parameters have been updated. Leave max_norm out, or leave "
                "release_gradients out; a hook on a parameter (register_hook) may clip its own"
            )
        if loss is not None and not isinstance(loss, Tensor):
            raise PrecisionError(
                f"step(closure) with {_ASKED}: a closure is evaluated several times before an "
                "update; allowed: the loss as a scalar tensor, or backward(loss) and step()"
            )

    def require_finished(self, what: str) -> None:
        """Refuse what would count a step as not taken whose updates have been made."""
        if self._loss is not None:
            raise PrecisionError(
                f"{what} between a backward and its step: {_ASKED}, and {self._partly()}. Call "
                "step() first, or load a checkpoint"
            )

    def _partly(self) -> str:
        return f"{self._updated} parameters have been updated already, which cannot be undone"

    def _lrs(self) -> list[Any]:
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return [None if group.get("lr") is None else float(group["lr"]) for group in groups]

    def _require_one(self, once_more: bool) -> None:
        self.require_finished("a second backward")
        if once_more:
            raise PrecisionError(
                f"backward(retain_graph=True) or create_graph with {_ASKED}: the next backward "
                "over the same graph would meet updated weights. Add the losses and call backward "
                "once, or leave release_gradients out"
            )
        if any(weight.parameter.grad is not None for weight in self._masters.trained()):
            raise PrecisionError(
                f"gradients are there before the backward, and {_ASKED} updates by each as soon as "
                "it is complete: call optimizer.zero_grad() before, or leave release_gradients out "
                "to add up gradients of several backwards"
            )

    def _require_no_hooks(self) -> None:
        if any(hooks.present() for hooks in self._hooks):
            raise PrecisionError(
                f"{_ASKED}: an optimizer has step hooks (register_step_pre_hook or _post_hook), "
                "which would run once for each parameter; remove them, or leave release_gradients "
                "out"
            )
