"""halfstep inside torchtitan's own trainer: two overrides, which its command line turns on.

Run: PYTHONPATH=examples torchrun -m torchtitan.train --module llama3 --override.imports
     torchtitan_override.loss torchtitan_override.optimizer --config llama3_debugmodel_ce_loss
"""

from contextlib import ExitStack
from dataclasses import dataclass

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config.override import override

import halfstep

RUNNING = []  # what scales a step's losses


class _Loss(CrossEntropyLoss):
    @dataclass(kw_only=True, slots=True)
    class Config(CrossEntropyLoss.Config): ...

    def __call__(self, *args, **options):
        loss, measures = super().__call__(*args, **options)
        return RUNNING[-1](lambda: loss)(), measures


class _Optimizers(OptimizersContainer):
    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        policy: str

    _resolve_optimizer_factory = staticmethod(lambda name: getattr(halfstep.optim, name))
    _build_impl_kwargs = staticmethod(lambda config: {})  # neither foreach nor fused

    def __init__(self, config, *, model_parts):
        super().__init__(config, model_parts=model_parts)
        self.precision = halfstep.Precision(config.policy, *model_parts, self.optimizers)
        if self.precision.loss_scale.value != 1:
            raise halfstep.PrecisionError("torchtitan clips what is still scaled: take bf16-mixed")
        self.health = halfstep.LayerHealth(*model_parts, self.precision)
        self.results, self.backward = [], ExitStack()

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        RUNNING[:] = [self.backward.enter_context(self.precision.scheduled(1))]

    def step(self, closure=None):  # torchtitan has clipped the gradients
        self.backward.close()
        self.results.append(self.precision.step())


@override(target=CrossEntropyLoss.Config)
def loss(config):
    return _Loss.Config(global_vocab_size=config.global_vocab_size)


@override(target=OptimizersContainer.Config)
def optimizer(config, policy="bf16-split"):
    return _Optimizers.Config(policy=policy, param_groups=config.param_groups)
