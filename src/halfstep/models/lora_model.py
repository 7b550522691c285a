"""LoRA: small fp32 adapters beside the frozen linear layers of a language model, through ``peft``.

The base stays in its stored dtype, bit for bit; the adapters are what the optimizer sees. A merge
is computed in fp32 and says what rounding to the written dtype takes from it.

**Source:** Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022, section 4.1:
``W + (alpha / r) B A``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from halfstep.errors import CheckpointError
from halfstep.models.pretrained import ADAPTER, quiet
from halfstep.models.pretrained_hub import require
from halfstep.models.pretrained_lm import PretrainedLM
from halfstep.models.pretrained_weights import new_folder, save_model

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_NAME = "default"
"""Name of the adapter inside ``peft``."""


@dataclass(frozen=True)
class MergeLoss:
    """What rounding the merged weights to the written dtype took from them."""

    dtype: torch.dtype
    max_error: float
    """Largest distance of a written weight from the exact sum of base and update."""
    vanished: float
    """Share of the updates that are not 0 and left the rounded weight where it was."""

    def __str__(self) -> str:
        """One line for a log."""
        return (
            f"merged in {str(self.dtype).removeprefix('torch.')}: rounding moved weights by up to "
            f"{self.max_error:.3g}, and {self.vanished:.1%} of the updates vanished in it"
        )


class LoraLM(PretrainedLM):
    """A causal LM with adapters: they are fp32 and train, the base is frozen as it was stored.

    Attributes:
        last_merge: What the last ``save_(..., merge=True)`` lost; None before one.
    """

    def __init__(self, lm: PretrainedLM, peft_model: Any) -> None:
        super().__init__(peft_model, lm.traits)
        self.explicit_mask = lm.explicit_mask
        self.last_merge: MergeLoss | None = None

    @property
    def core(self) -> Any:
        """The ``transformers`` module, in which adapters stand in place of linear layers."""
        return self.model.base_model.model

    def save_(
        self,
        folder: Path,
        weights: Mapping[str, Tensor],
        merge: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Writes the adapter for ``peft``, or the whole model with the adapter added in.

        Args:
            folder: Must not exist, or be empty; appears complete or not at all.
            weights: By parameter name; those it lacks are taken from this module.
            merge: Write the whole model, without adapters; ``last_merge`` then says what it lost.
            dtype: Of the written weights; None: the base's for a merge, fp32 for an adapter.

        Raises:
            CheckpointError: The folder cannot be written, or a weight is not finite in ``dtype``.
        """
        own = {f"model.{n}": p.detach() for n, p in self.model.named_parameters()}
        unknown = sorted(set(weights) - set(own))
        if unknown:
            raise CheckpointError(f"weights has {unknown[0]!r}, which is no parameter of the model")
        if merge:
            self._save_merged(Path(folder), {**own, **weights}, dtype)
            return
        peft = require("peft")
        state = {
            name.removeprefix("model."): tensor.detach().to("cpu", dtype or torch.float32)
            for name, tensor in {**own, **weights}.items()
            if ".lora_" in name
        }
        for name, tensor in state.items():
            if not bool(torch.isfinite(tensor).all()):
                raise CheckpointError(f"{folder}: tensor {name!r} holds NaN or inf")
        with quiet(), new_folder(Path(folder)) as temporary:
            found = peft.get_peft_model_state_dict(
                self.model, state_dict=state, save_embedding_layers=False
            )
            config = self.model.peft_config[ADAPTER_NAME]
            config.inference_mode = True
            try:
                config.save_pretrained(temporary)
            finally:
                config.inference_mode = False
            file = temporary / ADAPTER_WEIGHTS
            save_file({k: v.contiguous() for k, v in found.items()}, file, {"format": "pt"})
            file.chmod((temporary / ADAPTER).stat().st_mode)

    @torch.no_grad()
    def _save_merged(
        self, folder: Path, weights: dict[str, Tensor], dtype: torch.dtype | None
    ) -> None:
        """Adds the adapters into the base in fp32, rounds once, writes, and keeps the account."""
        target = self.stored_dtype if dtype is None else dtype
        names = {id(p): n for n, p in self.model.named_parameters()}
        merged: dict[int, Tensor] = {}
        max_error, updates, gone = 0.0, 0, 0
        for layer in _layers(self.model):
            base = layer.get_base_layer().weight
            a_RI, b_OR = (
                weights[f"model.{names[id(part[ADAPTER_NAME].weight)]}"].to("cpu", torch.float32)
                for part in (layer.lora_A, layer.lora_B)
            )
            update = (b_OR @ a_RI) * layer.scaling[ADAPTER_NAME]
            old = weights[f"model.{names[id(base)]}"].to("cpu", torch.float32)
            update = update.T if layer.fan_in_fan_out else update
            exact = old + update
            written = exact.to(target).float()
            meant = update != 0
            updates += int(meant.sum())
            gone += int((meant & (written == old.to(target).float())).sum())
            max_error = max(max_error, float((written - exact).abs().max()))
            merged[id(base)] = exact
        state: dict[str, Tensor] = {}
        for key, tensor in self.core.state_dict(keep_vars=True).items():
            if ".lora_" not in key:
                mine = weights.get(f"model.{names.get(id(tensor), '')}", tensor)
                state[key.replace(".base_layer.", ".")] = merged.get(id(tensor), mine)
        save_model(self.traits.model_class, self.core, state, folder, target)
        self.last_merge = MergeLoss(target, max_error, gone / max(updates, 1))


def _layers(model: nn.Module) -> list[Any]:
    """The layers that have an adapter."""
    modules: list[Any] = list(model.modules())
    return [m for m in modules if hasattr(m, "lora_A") and ADAPTER_NAME in m.lora_A]
