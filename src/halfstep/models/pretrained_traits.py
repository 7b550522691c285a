"""What must be known of a language model before adapters or sharding wrap it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from halfstep.errors import ConfigError
from halfstep.models.pretrained import quiet
from halfstep.models.pretrained_weights import position_limit


@dataclass(frozen=True)
class Traits:
    """What must be known of a model before anything wraps it."""

    model_class: Any
    stored_dtype: torch.dtype
    max_length: int | None
    takes_positions: bool
    plain_head: bool
    """The logits are what the head puts out, nothing behind it."""

    @classmethod
    def of(cls, model: Any, stored_dtype: torch.dtype) -> Traits:
        """The traits of a bare ``transformers`` model."""
        takes = "position_ids" in inspect.signature(model.forward).parameters
        return cls(type(model), stored_dtype, position_limit(model), takes, _head_is_plain(model))


def _head_is_plain(model: Any) -> bool:
    """Whether the logits are what the head puts out, nothing behind it; found without computing.

    One token goes through the model with all tensors on the device "meta".
    """
    head, outputs = model.get_output_embeddings(), []
    if head is None:
        raise ConfigError(f"{type(model).__name__} has no output embeddings to take a loss from")
    state = {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    hook = head.register_forward_hook(lambda module, args, output: outputs.append(output))
    try:
        with quiet(), torch.no_grad(), torch.device("meta"):
            inputs: dict[str, Any] = {"input_ids": torch.zeros(1, 1, dtype=torch.int64)}
            # With a mask of its own, transformers need not look at numbers that are not there.
            inputs["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool)
            inputs["use_cache"] = False
            out = torch.func.functional_call(model, state, (), inputs)
    except Exception:  # an architecture that looks at its numbers: then the long way is right too
        return False
    finally:
        hook.remove()
    return len(outputs) == 1 and out.logits is outputs[0]
