"""Wraps Hugging Face's causal language models for fine-tuning: GPT-2, Llama, Qwen, Mistral, ...

Only the positions with a target go through the head. Rows may hold several documents, kept apart by
position ids that restart at 0: without a mask and a cache, ``transformers`` masks attention between
such documents (**Source:** ``find_packed_sequence_indices`` of ``transformers.masking_utils``), but
not in every architecture, which is why :meth:`PretrainedLM.check_packing` tests it.

Shapes: B rows, T positions, N positions with a target, C width, V vocabulary.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from halfstep.errors import ConfigError
from halfstep.trainer.models.cross_entropy import IGNORE_INDEX, linear_cross_entropy_sum
from halfstep.trainer.models.language_model import check_drawing, require_finite
from halfstep.trainer.models.pretrained.folder import open_folder, stored_dtype
from halfstep.trainer.models.pretrained.hub import quiet, require_library
from halfstep.trainer.models.pretrained.weights import Pretrained, load_weights

LMBatch: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""(ids_BT, targets_BT with -100 where nothing is learned, positions_BT), all int64."""


def open_causal_lm(
    source: str | os.PathLike[str],
    *,
    dropout: float | None = None,
    gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
    revision: str = "",
) -> PretrainedLM:
    """Load a pretrained causal LM in its stored dtype on the CPU, in training mode.

    Arguments are those of :func:`~halfstep.trainer.models.pretrained.classifier.open_classifier`;
    with ``gradient_checkpointing``, each layer's activations are recomputed in backward.

    Raises:
        ConfigError: If the source or the architecture cannot be used.
        CheckpointError: If the folder is damaged or lacks weights.
    """
    folder = open_folder(source, trust_remote_code=trust_remote_code, revision=revision)
    model_class = folder.model_class("AutoModelForCausalLM", "causal language model")
    config = folder.config
    masked = folder.has_class("AutoModelForMaskedLM")
    if getattr(config, "is_encoder_decoder", False) or (
        masked and not getattr(config, "is_decoder", False)
    ):
        raise ConfigError(
            f"{folder.folder}: {config.model_type!r} is an encoder, which sees the tokens that it "
            "is to predict; take a causal language model (GPT-2, Llama, Qwen, Mistral, ...)"
        )
    dtype = stored_dtype(folder.tensors)
    model, _ = load_weights(folder, model_class, dtype, dropout=dropout)
    for module in model.modules():  # the check would read the ids of each step from the device
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = _no_warning
    if gradient_checkpointing:
        with quiet():
            model.gradient_checkpointing_enable({"use_reentrant": False})
    return PretrainedLM(model, dtype)


class PretrainedLM(Pretrained):
    """A ``transformers`` causal LM with loss sums; ``stored_dtype`` is that of its folder."""

    def __init__(self, model: Any, stored_dtype: torch.dtype) -> None:
        super().__init__(model)
        self.stored_dtype = stored_dtype
        # Determined on the bare model, before adapters or sharding wrap it.
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.plain_head = _head_is_plain(model)
        self.explicit_mask = False

    def forward(self, batch: LMBatch) -> tuple[Tensor, Tensor]:
        """Return the loss and count of a batch, as :meth:`loss_sum` does."""
        return self.loss_sum(batch)

    def loss_sum(self, batch: LMBatch) -> tuple[Tensor, Tensor]:
        """Return the summed loss of all targets and their number, without computing other logits.

        Args:
            batch: ids, targets and positions, each ``(B, T)`` int64. A target of -100 is not
                counted; positions restart at 0 where a row's next document begins.

        Returns:
            Loss sum in nats (fp32 scalar with gradient) and count (int64 scalar).
        """
        ids_BT, targets_BT, positions_BT = batch
        counted_BT = targets_BT != IGNORE_INDEX
        targets_N = targets_BT[counted_BT]
        head = self.core.get_output_embeddings()
        # Hook the head instead of calling it: what comes before it (a projection) and after it
        # (softcapping, a factor) differs between architectures, and must run too.
        fused = self.plain_head and type(head) is nn.Linear and head.bias is None
        rows: list[Tensor] = []

        def take(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
            x_NC = args[0][counted_BT]
            rows.append(x_NC)
            return ((x_NC[:0] if fused else x_NC).unsqueeze(0),)

        hook = head.register_forward_pre_hook(take)
        try:
            logits_1NV = self._run(ids_BT, positions_BT)
        finally:
            hook.remove()
        if fused:
            return linear_cross_entropy_sum(rows[0], head.weight, targets_N)
        loss = functional.cross_entropy(logits_1NV[0].float(), targets_N, reduction="sum")
        return loss, counted_BT.sum()

    def logits(self, ids_BT: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        """Compute logits ``(B, T, V)`` in fp32; positions are 0 to T - 1 unless given."""
        if positions_BT is None:
            positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
        return self._run(ids_BT, positions_BT).float()

    @torch.no_grad()
    def check_packing(self) -> None:
        """Check that documents in one row do not see each other; call before sharding.

        Two rows differ in their first document only: the logits of their second document must be
        equal, and equal to those of the document alone. If ``transformers``' own mask fails that,
        an explicit mask is tried.

        Raises:
            ConfigError: If the architecture cannot keep documents apart.
        """
        training, failed = self.training, None
        self.eval()
        try:
            for self.explicit_mask in (False, True):
                try:
                    if self._documents_are_apart():
                        return
                except (RuntimeError, ValueError, TypeError, IndexError) as error:
                    failed = error  # not every architecture accepts a 4-dim mask
        finally:
            self.train(training)
        self.explicit_mask = False
        raise ConfigError(
            f"{self.model_class.__name__} lets documents that are packed into one row see "
            "each other; pad instead of packing"
        ) from failed

    def _run(self, ids_BT: Tensor, positions_BT: Tensor | None) -> Tensor:
        """Compute the model's logits, in its own dtype; no positions: one document a row."""
        # a cache would not keep documents apart; without it, shapes alone get a mask for that
        inputs: dict[str, Any] = {"use_cache": positions_BT is None}
        if self.takes_positions and positions_BT is not None:
            inputs["position_ids"] = positions_BT
        if self.explicit_mask and positions_BT is not None:
            inputs["attention_mask"] = self._mask(positions_BT)
        logits: Tensor = self.core(input_ids=ids_BT, **inputs).logits
        return logits

    def _mask(self, positions_BT: Tensor) -> Tensor:
        """Make the attention mask ``(B, 1, T, T)``: causal, and only within a document."""
        document_BT = (positions_BT == 0).cumsum(1)
        same_BTT = document_BT[:, :, None] == document_BT[:, None, :]
        seen_B1TT = same_BTT.tril().unsqueeze(1)
        if self.core.config._attn_implementation == "sdpa":
            return seen_B1TT
        dtype = self.core.dtype
        return torch.zeros((), dtype=dtype, device=seen_B1TT.device).masked_fill(
            ~seen_B1TT, torch.finfo(dtype).min
        )

    def _documents_are_apart(self) -> bool:
        """Whether a document's logits do not depend on what precedes it in its row."""
        weight = self.core.get_input_embeddings().weight
        ids = torch.arange(9, device=weight.device) % weight.shape[0]
        first, other, second = ids[:3], ids[3:6], ids[6:]
        positions_1T = torch.arange(3, device=weight.device).repeat(2)[None]
        one, two = (
            self.logits(torch.cat([before, second])[None], positions_1T)[0, 3:]
            for before in (first, other)
        )
        # For a single document the model's own mask is right: compare the explicit one with it.
        explicit, self.explicit_mask = self.explicit_mask, False
        try:
            alone = self.logits(second[None], positions_1T[:, :3])[0]
        finally:
            self.explicit_mask = explicit
        # Both rows have the same shape, so sums have the same order, and masked positions add exact
        # zeros; the small tolerance is for experts, which may sum in another order. A document
        # alone has another shape, and so other rounding errors.
        size = float(alone.abs().max())
        eps = max(torch.finfo(weight.dtype).eps, _autocast_eps(weight.device.type))
        leak, change = float((one - two).abs().max()), float((one - alone).abs().max())
        return leak <= 4 * torch.finfo(torch.float32).eps * size and change <= 16 * eps * size


def _no_warning(*_: Any) -> None:
    """Replace ``transformers``' warning: causal attention never sees padding on the right."""


def _autocast_eps(device_type: str) -> float:
    """Return the spacing at 1 of autocast's dtype; 0 if autocast is off."""
    if not torch.is_autocast_enabled(device_type):
        return 0.0
    return torch.finfo(torch.get_autocast_dtype(device_type)).eps


def _head_is_plain(model: Any) -> bool:
    """Whether the logits are the head's unchanged output, found without computing anything.

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
            # Given a mask, transformers need not read values, which meta tensors do not have.
            inputs["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool)
            inputs["use_cache"] = False
            out = torch.func.functional_call(model, state, (), inputs)
    except Exception:  # the architecture reads values; False is always right, only slower
        return False
    finally:
        hook.remove()
    return len(outputs) == 1 and out.logits is outputs[0]


# Generation from a pretrained language model, through ``transformers``' own generate and cache.


@torch.no_grad()
def generate_ids(
    lm: PretrainedLM,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    ends: Sequence[Sequence[int]] = (),
) -> list[int]:
    """Generate ids after a prompt, up to the model's last position or one of ``ends``.

    The same seed gives the same ids; the folder's own ``generation_config.json`` is ignored.
    """
    check_drawing(max_new_tokens, temperature, top_k, top_p, seed)
    limit = lm.max_length or len(prompt) + max_new_tokens + 1
    if not 0 < len(prompt) < limit:
        raise ConfigError(
            f"the prompt has {len(prompt)} tokens and the model {limit} positions; give at least "
            "one token, and leave a position to write at"
        )
    if not max_new_tokens:
        return []
    transformers = require_library("transformers")
    drawing = {"temperature": temperature, "top_k": top_k or 0, "top_p": top_p or 1.0}
    config = transformers.GenerationConfig(
        max_new_tokens=min(max_new_tokens, limit - len(prompt)),
        do_sample=temperature > 0,
        pad_token_id=0,  # unused for one row, but transformers requires it
        **(drawing if temperature else {}),
    )
    core, training, device = lm.core, lm.training, lm.core.get_input_embeddings().weight.device
    ids_1T = torch.tensor([list(prompt)], device=device)
    own, core.generation_config = core.generation_config, transformers.GenerationConfig()
    lm.eval()
    try:
        with quiet(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            out_1T = core.generate(
                input_ids=ids_1T,
                attention_mask=torch.ones_like(ids_1T),
                generation_config=config,
                logits_processor=[lambda _, logits: require_finite(logits)],
                stopping_criteria=[_Ends(len(prompt), ends)],
            )
    finally:
        core.generation_config = own
        lm.train(training)
    written: list[int] = out_1T[0, len(prompt) :].tolist()
    end = next((end for end in ends if end and written[-len(end) :] == list(end)), ())
    return written[: len(written) - len(end)]


class _Ends:
    """Stopping criterion: a row is done when it ends with one of the given sequences of ids."""

    def __init__(self, start: int, ends: Sequence[Sequence[int]]) -> None:
        self._start = start
        self._ends = [list(end) for end in ends if end]

    def __call__(self, ids_BT: Tensor, scores: Any, **_: Any) -> Tensor:
        """Return whether each row is done, as a boolean tensor ``(B,)``."""
        rows = ids_BT[:, self._start :].tolist()
        done = [any(row[-len(end) :] == end for end in self._ends) for row in rows]
        return torch.tensor(done, device=ids_BT.device)
