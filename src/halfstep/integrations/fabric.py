"""halfstep's precision plugins for Lightning Fabric; the Trainer's are in ``lightning``.

Both are given as ``Fabric(plugins=[...])``, not together with ``precision=``.
``docs/integrations-lightning.md`` is the how-to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import ConfigError, PrecisionError
from halfstep.integrations.lightning_common import PolicyPlugin, ScaledSteps, check_strategy

try:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision, Precision as FabricPlugin
except ModuleNotFoundError as error:
    raise ConfigError(
        f"halfstep.integrations.fabric needs Lightning, and {error.name} is not installed: "
        "pip install 'halfstep[lightning]'"
    ) from error


class HalfstepPrecision(PolicyPlugin, FabricPlugin):
    """A whole halfstep policy inside Fabric.

    Call :meth:`setup` in place of ``fabric.setup``, since Fabric does not tell a precision plugin
    which optimizer will step. The rest of the loop is as usual in Fabric::

        precision = HalfstepPrecision("bf16-master")
        fabric = Fabric(plugins=[precision])
        model, optimizer = precision.setup(fabric, model, optimizer)
        ...
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()  # does not update the weights if precision.last_step.applied is False

    Save it with the model: ``fabric.save(path, {"model": model, "optimizer": optimizer,
    "precision": precision})``.
    """

    _not_set_up = (
        "the model or the optimizer is not under the policy: call "
        "precision.setup(fabric, model, optimizer) where fabric.setup(...) stood"
    )

    def setup(
        self, fabric: Fabric, model: nn.Module | Sequence[nn.Module], *optimizers: Optimizer
    ) -> Any:
        """Set up like ``fabric.setup``, and put the model under the policy.

        Args:
            fabric: A Fabric made with this plugin.
            model: A model with fp32 weights, or several that train together, such as a GAN's, which
                share one loss scale. Names of their parameters then begin with ``"0."``, ``"1."``.
            optimizers: One or several, each stepped separately; none for evaluation.

        Returns:
            Fabric's models and optimizers, in the given order; just the model if it is alone.

        Raises:
            ConfigError: If the Fabric has another plugin, or this is the second call.
            PrecisionError: If policy, model, optimizer and strategy are not compatible.
        """
        check_strategy(fabric.strategy, self.policy)
        if fabric.strategy.precision is not self:
            raise ConfigError(
                "setup() of a precision plugin that this Fabric does not have; make it with "
                "Fabric(plugins=[precision])"
            )
        if self.engine is not None:
            raise ConfigError(
                "setup() was called already, and all models under one HalfstepPrecision share its "
                "loss scale: give them all in one call, precision.setup(fabric, [generator, "
                "discriminator], optimizer_g, optimizer_d)"
            )
        models = [model] if isinstance(model, nn.Module) else [*model]
        if any(isinstance(one, torch._dynamo.eval_frame.OptimizedModule) for one in models):
            raise ConfigError("setup() got a compiled model; compile it after setup()")
        ready, stepping = _fabrics(fabric, models, optimizers)
        whole = ready[0].module if len(ready) == 1 else nn.ModuleList(r.module for r in ready)
        if not optimizers:
            self.evaluate_(whole)
            return ready[0] if isinstance(model, nn.Module) else tuple(ready)
        callers = [r._forward_module for r in ready]
        wrapped = callers[0] if len(callers) == 1 else nn.ModuleList(callers)
        self.train_(whole, [o.optimizer for o in stepping], wrapped)
        strategy: Any = fabric.strategy
        strategy.clip_gradients_norm = self._clip_norm
        strategy.clip_gradients_value = self._clip_value
        return (*ready, *stepping)

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Scale the loss and back-propagate."""
        self.backward_(tensor, *args, **kwargs)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        """Take the step, or skip it; see ``last_step``.

        Raises:
            NonFiniteError: If continuing cannot help; its ``cause`` says why.
            PrecisionError: Without a ``fabric.backward``, or for other arguments than a closure.
        """
        if kwargs:
            raise PrecisionError(
                f"optimizer.step({', '.join(kwargs)}=...): allowed is step(closure) alone"
            )
        output = None
        if closure is not None:
            with torch.enable_grad():
                output = closure()
        self.step_(optimizer)
        return output

    def _clip_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Return the norm of the unscaled gradients, and let the next step clip to ``max_norm``.

        It does not raise for an overflow: the step itself then skips, or stops the run.
        """
        if float(norm_type) != 2.0:
            raise PrecisionError(
                f"clip_gradients(norm_type={norm_type}); allowed: 2, the global 2-norm, or clip_val"
            )
        with self.unscaled(optimizer) as gradients:
            norms = [torch.linalg.vector_norm(g.coalesce().values() if g.is_sparse else g,
                                              dtype=torch.float32) for g in gradients]  # fmt: skip
            norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        self.clip_norm(float(max_norm))
        return norm

    def _clip_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        self.clip_value_(optimizer, float(clip_val))


def _fabrics(
    fabric: Fabric, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> tuple[list[Any], list[Any]]:
    """Fabric's wrappers of the models and of the optimizers."""
    if len(models) == 1:
        found: Any = fabric.setup(models[0], *optimizers)
        return ([found[0]], [*found[1:]]) if optimizers else ([found], [])
    ready: Any = [fabric.setup_module(model) for model in models]
    stepping: Any = fabric.setup_optimizers(*optimizers) if optimizers else ()
    return ready, [stepping] if len(optimizers) == 1 else [*stepping]


class ScaledPrecision(ScaledSteps, MixedPrecision):
    """Fabric's ``16-mixed`` with :class:`halfstep.GradScaler`; on a CPU too.

    Args:
        scaler: A scaler with your options; None: ``GradScaler(device, strict=True)``.
        device: ``"cuda"`` or ``"cpu"``; None: the scaler's, else ``"cuda"``.
    """

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Scale the loss, remember it and back-propagate."""
        self._add_loss(tensor)
        super().backward(tensor, model, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step as Fabric does, through the scaler.

        Raises:
            NonFiniteError: If the loss was not finite (on this rank), or by the scaler's options.
        """
        self._refuse_lbfgs(optimizer)
        return self._scaled_step(optimizer, kwargs)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Unscale the gradients before clipping, also for fused optimizers."""
        self.scaler.unscale_(optimizer)
