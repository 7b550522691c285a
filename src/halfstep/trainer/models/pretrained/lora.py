"""Adds LoRA adapters to a language model, or reads them from a folder, through ``peft``.

Adapters are small, fp32 and beside the frozen linear layers. The base stays in its stored dtype,
bit for bit. A merge is computed in fp32, and reports what is lost by rounding to the written dtype.

**Source:** Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022, section 4.1:
``W + (alpha / r) B A``.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from halfstep.errors import CheckpointError, ConfigError
from halfstep.trainer.models.pretrained.folder import (
    ADAPTER,
    first_line,
    read_json_object,
    read_safetensors,
)
from halfstep.trainer.models.pretrained.hub import quiet, require_library, resolve_source
from halfstep.trainer.models.pretrained.lm import PretrainedLM, open_causal_lm
from halfstep.trainer.models.pretrained.weights import all_parameters, new_folder, save_model

ALL_LINEAR = "all-linear"
_PLAIN = {"peft_type": "LORA", "bias": "none", "use_dora": False, "use_rslora": False}
_OTHER_WAYS = ("modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform")
"""Settings in adapter_config.json that change an adapter's function or scale; not supported."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_NAME = "default"
"""Name of the adapter inside ``peft``."""


def add_lora(
    lm: PretrainedLM,
    r: int = 8,
    alpha: float = 16.0,
    dropout: float = 0.0,
    targets: Sequence[str] = (),
    seed: int = 0,
) -> LoraLM:
    """Put adapters beside a model's linear layers; the given model is changed in place.

    ``targets`` are last parts of the names of layers; ``("all-linear",)`` means all but the head,
    () the default of ``peft`` for the architecture. The caller's generators are not touched.

    Raises:
        ConfigError: If a target matches no layer; the message lists those that exist.
    """
    peft = require_library("peft")
    names = [name for name, _ in lm.core.named_modules()]
    lost = [
        target
        for target in targets
        if target != ALL_LINEAR and not any(f".{name}".endswith(f".{target}") for name in names)
    ]
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=r,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=ALL_LINEAR if ALL_LINEAR in targets else list(targets) or None,
    )
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            if lost:
                raise ValueError(f"no layer has the target {lost[0]!r}")
            model = peft.get_peft_model(lm.core, config, autocast_adapter_dtype=True)
        except ValueError as error:  # no default, or a layer of another kind
            layers = ", ".join(sorted(_linears(lm.core)))
            raise ConfigError(
                f"LoRA cannot be put there: {first_line(error)}. Name targets; layers: {layers}; "
                f"or {ALL_LINEAR!r}"
            ) from error
    table = lm.core.get_input_embeddings()
    if any(layer.get_base_layer().weight is table.weight for layer in _layers(model)):
        raise ConfigError(
            "the head shares its table with the embedding, so an adapter of it could not be "
            "merged; name other LoRA targets"
        )
    return LoraLM(lm, model)


def open_adapted_lm(
    folder: str | os.PathLike[str], *, trust_remote_code: bool = False, revision: str = ""
) -> LoraLM:
    """Load a saved adapter and the base model that it names, ready to be trained further.

    ``folder`` has ``adapter_config.json`` and ``adapter_model.safetensors``, or is a hub name;
    ``revision`` is that of the base model.

    Raises:
        ConfigError: If no base is named, or the adapter is not plain LoRA.
        CheckpointError: If a file is missing or damaged, or does not fit the base.
    """
    peft = require_library("peft")
    folder = resolve_source(folder)
    file = folder / ADAPTER
    found = read_json_object(file, "it is where peft keeps an adapter's settings")
    other = [key for key in _OTHER_WAYS if found.get(key)]
    other += [key for key, plain in _PLAIN.items() if (found.get(key) or plain) != plain]
    source = found.get("base_model_name_or_path")
    if other or not isinstance(source, str) or not source:
        raise ConfigError(
            f"{file}: only plain LoRA on a named base can be opened, this has "
            f"{', '.join(other) or 'no base'}; merge it into its base with peft (merge_and_unload)"
        )
    targets = found.get("target_modules")
    lora = add_lora(
        open_causal_lm(source, trust_remote_code=trust_remote_code, revision=revision),
        int(found.get("r", 8)),
        float(found.get("lora_alpha", 8)),
        float(found.get("lora_dropout", 0)),
        [targets] if isinstance(targets, str) else list(targets or ()),
    )
    tensors = read_safetensors(folder / ADAPTER_WEIGHTS)
    wanted = peft.get_peft_model_state_dict(lora.model, save_embedding_layers=False)
    if {k: t.shape for k, t in wanted.items()} != {k: t.shape for k, t in tensors.items()}:
        raise CheckpointError(
            f"{folder / ADAPTER_WEIGHTS} does not fit the base {source}: tensors are missing, "
            "surplus or of another shape"
        )
    with quiet():
        peft.set_peft_model_state_dict(lora.model, tensors)
    return lora


def _linears(core: Any) -> set[str]:
    """Return the last names of layers that can have adapters; Conv1D is GPT-2's linear layer."""
    return {
        name.rpartition(".")[2]
        for name, module in core.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    }


@dataclass(frozen=True)
class MergeLoss:
    """What was lost by rounding merged weights to the dtype in which they were written."""

    dtype: torch.dtype
    max_error: float
    """Largest distance of a written weight from the exact sum of base and update."""
    vanished: float
    """Share of the nonzero updates that left the rounded weight unchanged."""

    def __str__(self) -> str:
        """One line for a log."""
        return (
            f"merged in {str(self.dtype).removeprefix('torch.')}: rounding moved weights by up to "
            f"{self.max_error:.3g}, and {self.vanished:.1%} of the updates vanished in it"
        )


class LoraLM(PretrainedLM):
    """A causal LM with fp32 adapters that are trained, on a base frozen in its stored dtype.

    Attributes:
        last_merge: What the last ``save_(..., merge=True)`` lost; None before the first.
    """

    def __init__(self, lm: PretrainedLM, peft_model: Any) -> None:
        nn.Module.__init__(self)  # then copy what was determined on the bare model
        known = {name: value for name, value in vars(lm).items() if name not in vars(self)}
        vars(self).update(known)
        self.model = peft_model
        self.last_merge: MergeLoss | None = None
        self.train()

    @property
    def core(self) -> Any:
        """The ``transformers`` module, whose linear layers have been replaced by adapted ones."""
        return self.model.base_model.model

    def without_adapter(self) -> AbstractContextManager[None]:
        """Return a context manager in which the model is the base alone."""
        found: AbstractContextManager[None] = self.model.disable_adapter()
        return found

    def save_(
        self,
        folder: Path,
        weights: Mapping[str, Tensor],
        merge: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write the adapter for ``peft``, or the whole model with the adapter merged in.

        For arguments see :meth:`Pretrained.save_`. With ``merge`` the whole model is written,
        without adapters, and ``last_merge`` then says what was lost. ``dtype`` None means the
        base's dtype for a merge, fp32 for an adapter.
        """
        every = all_parameters(self.model, weights)
        if merge:
            self._save_merged(Path(folder), every, dtype)
            return
        peft = require_library("peft")
        state = {
            name.removeprefix("model."): tensor.detach().to("cpu", dtype or torch.float32)
            for name, tensor in every.items()
            if ".lora_" in name
        }
        if not all(bool(torch.isfinite(tensor).all()) for tensor in state.values()):
            raise CheckpointError(f"{folder}: an adapter's weight holds NaN or inf")
        with quiet(), new_folder(Path(folder)) as temporary:
            found = peft.get_peft_model_state_dict(
                self.model, state_dict=state, save_embedding_layers=False
            )
            config = copy.copy(self.model.peft_config[ADAPTER_NAME])
            config.inference_mode = True
            config.save_pretrained(temporary)
            file = temporary / ADAPTER_WEIGHTS
            save_file({k: v.contiguous() for k, v in found.items()}, file, {"format": "pt"})
            file.chmod((temporary / ADAPTER).stat().st_mode)

    @torch.no_grad()
    def _save_merged(
        self, folder: Path, weights: dict[str, Tensor], dtype: torch.dtype | None
    ) -> None:
        """Add the adapters to the base in fp32, round once, write, and record the loss."""
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
        save_model(self.model_class, self.core, state, folder, target)
        self.last_merge = MergeLoss(target, max_error, gone / max(updates, 1))


def _layers(model: nn.Module) -> list[Any]:
    """Return the layers that have an adapter."""
    modules: list[Any] = list(model.modules())
    return [m for m in modules if hasattr(m, "lora_A") and ADAPTER_NAME in m.lora_A]
