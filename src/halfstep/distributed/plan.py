"""What distribution needs to know of a model, as data: distribution knows no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from halfstep.errors import ConfigError
from halfstep.precision.border import require_model


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan:
    """How a model may be split."""

    blocks: tuple[nn.Module, ...]
    """Modules to shard one by one, in the order they run: what is gathered at a time."""
    tensor: Mapping[str, str] = field(default_factory=dict)
    """Module name to style of tensor parallelism
    (``tensor_parallel.parallelize_``); empty: it cannot be split."""
    methods: tuple[str, ...] = ()
    """Methods besides ``forward`` that run the model, such as ``loss_sum``."""

    def __post_init__(self) -> None:
        """Raise ConfigError for blocks that are no modules."""
        several = self.blocks if isinstance(self.blocks, list | tuple) else (None,)
        if not all(isinstance(block, nn.Module) for block in several):
            raise ConfigError(
                f"ParallelPlan(blocks={self.blocks!r:.80}); allowed: a tuple of the model's own "
                "modules, in the order they run"
            )


def plan_of(model: nn.Module) -> ParallelPlan:
    """The plan that a model hands out, or what can be told of a Hugging Face model.

    A model of one's own needs ``blocks()``, a list of modules, and for tensor parallelism
    ``tp_plan()``, a mapping from module name to style. Of a Hugging Face model the blocks are the
    modules whose class ``_no_split_modules`` names.

    Raises:
        ConfigError: For a model that is neither.
        PrecisionError: For what is no model.
    """
    require_model(model, "plan_of(model)")
    own: Any = model
    if callable(getattr(own, "blocks", None)):
        tensor = own.tp_plan() if callable(getattr(own, "tp_plan", None)) else {}
        methods = tuple(n for n in ("loss_sum", "logits") if callable(getattr(own, n, None)))
        return ParallelPlan(blocks=tuple(own.blocks()), tensor=tensor, methods=methods)
    names = set(getattr(own, "_no_split_modules", None) or ())
    blocks = tuple(m for m in model.modules() if type(m).__name__ in names)
    if not blocks:
        raise ConfigError(
            f"{type(model).__name__} does not say what to shard: it has neither blocks() nor, as "
            "Hugging Face models, _no_split_modules; give parallelism "
            "ParallelPlan(blocks=(its layers...,))"
        )
    return ParallelPlan(blocks=blocks)
