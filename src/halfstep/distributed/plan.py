"""Describes as data how a model may be split, so that strategies need not know any model."""

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
    """Modules to shard, each gathered as one unit, in the order in which they run."""
    tensor: Mapping[str, str] = field(default_factory=dict)
    """Module name to style of tensor parallelism (``tensor_parallel.parallelize_``); empty: the
    model does not support it."""
    methods: tuple[str, ...] = ()
    """Methods besides ``forward`` that run the model, such as ``loss_sum``."""

    def __post_init__(self) -> None:
        """Raise ConfigError unless all blocks are modules."""
        several = self.blocks if isinstance(self.blocks, list | tuple) else (None,)
        if not all(isinstance(block, nn.Module) for block in several):
            raise ConfigError(
                f"ParallelPlan(blocks={self.blocks!r:.80}); allowed: a tuple of the model's own "
                "modules, in the order they run"
            )


def plan_of(model: nn.Module) -> ParallelPlan:
    """Return the plan that a model provides, or the one derived from a Hugging Face model.

    A user's own model needs ``blocks()``, a list of modules, and for tensor parallelism
    ``tp_plan()``, a mapping from module name to style. The blocks of a Hugging Face model are the
    modules whose class is named in ``_no_split_modules``.

    Raises:
        ConfigError: If the model is neither of these.
        PrecisionError: If ``model`` is not a module.
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
