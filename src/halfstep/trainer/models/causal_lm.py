"""Fine-tunes Hugging Face's causal language models, in full or by LoRA: GPT-2, Llama, Qwen, ...

Only the positions with a target go through the head. Rows may hold several documents, kept apart by
position ids that restart at 0: without a mask and a cache, ``transformers`` masks attention between
such documents (**Source:** ``find_packed_sequence_indices`` of ``transformers.masking_utils``), but
not in every architecture, which is why :meth:`PretrainedLM.keeps_documents_apart` tests it.

Adapters are small, fp32 and beside frozen linear layers and embeddings. The base stays in its
stored dtype, bit for bit. **Source:** Hu et al., "LoRA: Low-Rank Adaptation of Large Language
Models", ICLR 2022, section 4.1: ``W + (alpha / r) B A``.

Shapes: B rows, T positions, N positions with a target, C width, V vocabulary.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from halfstep.errors import ConfigError
from halfstep.files import read_json, require_intact
from halfstep.precision.loss_head import linear_cross_entropy
from halfstep.trainer.models import IGNORE_INDEX
from halfstep.trainer.models.gpt import GPT, require_finite_logits
from halfstep.trainer.models.pretrained import (
    ADAPTER,
    WEIGHTS,
    Pretrained,
    first_line,
    open_folder,
    quiet,
    read_safetensors,
    require_finite,
)

LMBatch: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""(ids_BT, targets_BT with -100 where nothing is learned, positions_BT), all int64."""

ALL_LINEAR = "all-linear"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_NAME = "default"
"""Name of the adapter inside ``peft``."""


def open_causal_lm(
    source: str | os.PathLike[str], *, gradient_checkpointing: bool = False
) -> PretrainedLM:
    """Load a pretrained causal LM in its stored dtype on the CPU, in training mode.

    With ``gradient_checkpointing``, each layer's activations are recomputed in backward.
    """
    folder = open_folder(source)
    config = folder.config
    masked = folder.knows("AutoModelForMaskedLM") and not getattr(config, "is_decoder", False)
    if masked or getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{folder.folder}: {config.model_type!r} is an encoder, which sees the tokens that it "
            "is to predict; take a causal language model (GPT-2, Llama, Qwen, Mistral, ...)"
        )
    dtype = folder.stored_dtype
    model, _ = folder.build("AutoModelForCausalLM", dtype)
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

    def loss_sum(self, batch: LMBatch) -> tuple[Tensor, Tensor]:
        """Return the summed loss of all targets and their number, without computing other logits.

        The loss sum is in nats, an fp32 scalar with gradient. Positions restart at 0 where a row's
        next document begins.
        """
        ids_BT, targets_BT, positions_BT = batch
        counted_BT = targets_BT != IGNORE_INDEX
        targets_N = targets_BT[counted_BT]
        head = self.core.get_output_embeddings()
        # Hook the head instead of calling it: what comes before it (a projection) and after it
        # (softcapping, a factor) differs between architectures, and must run too.
        fused = self.plain_head and type(head) is nn.Linear
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
            how = {"bias": head.bias, "reduction": "sum"}
            loss = linear_cross_entropy(rows[0], head.weight, targets_N, **how)
        else:
            loss = functional.cross_entropy(logits_1NV[0].float(), targets_N, reduction="sum")
        return loss, counted_BT.sum()

    def logits(self, ids_BT: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        """Compute logits ``(B, T, V)`` in fp32; positions are 0 to T - 1 unless given."""
        if positions_BT is None:
            positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
        return self._run(ids_BT, positions_BT).float()

    def read_back(self, folder: Path) -> dict[str, Tensor]:
        """Read the weights, in the dtype of the files."""
        return dict(open_causal_lm(folder).named_parameters())

    def _run(self, ids_BT: Tensor, positions_BT: Tensor | None) -> Tensor:
        """Compute the model's logits, in its own dtype; no positions: one document a row."""
        # a cache would not keep documents apart; without it, shapes alone get a mask for that
        inputs: dict[str, Any] = {"use_cache": positions_BT is None}
        if self.takes_positions and positions_BT is not None:
            inputs["position_ids"] = positions_BT
        logits: Tensor = self.core(input_ids=ids_BT, **inputs).logits
        return logits

    @torch.no_grad()
    def keeps_documents_apart(self) -> bool:
        """Whether documents in one row do not see each other; call before sharding.

        Two rows differ in their first document only: the logits of their second document must be
        equal, and equal to those of the document alone.
        """
        weight = self.core.get_input_embeddings().weight
        ids = torch.arange(9, device=weight.device) % weight.shape[0]
        first, other, second = ids[:3], ids[3:6], ids[6:]
        positions_1T = torch.arange(3, device=weight.device).repeat(2)[None]
        training = self.training
        self.eval()
        one, two = (
            self.logits(torch.cat([before, second])[None], positions_1T)[0, 3:]
            for before in (first, other)
        )
        alone = self.logits(second[None])[0]
        self.train(training)
        # Both rows have the same shape, so sums have the same order, and masked positions add exact
        # zeros; the small tolerance is for experts, which may sum in another order. A document
        # alone has another shape, and so other rounding errors.
        size = float(alone.abs().max())
        eps = torch.finfo(weight.dtype).eps
        leak, change = float((one - two).abs().max()), float((one - alone).abs().max())
        return leak <= 4 * torch.finfo(torch.float32).eps * size and change <= 16 * eps * size


def _head_is_plain(model: Any) -> bool:
    """Whether the logits are the head's unchanged output, found without computing anything.

    One token goes through the model with all tensors on the device "meta".
    """
    if model.get_output_embeddings() is None:
        raise ConfigError(f"{type(model).__name__} has no output embeddings to take a loss from")
    outputs: list[Any] = []
    try:
        with quiet(), torch.no_grad(), torch.device("meta"):
            bare = type(model)(model.config)
            bare.get_output_embeddings().register_forward_hook(
                lambda *call: outputs.append(call[2])
            )
            # Given a mask, transformers need not read values, which meta tensors do not have.
            mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
            ids = torch.zeros(1, 1, dtype=torch.int64)
            out = bare(input_ids=ids, attention_mask=mask, use_cache=False)
    except Exception:  # the architecture reads values; False is always right, only slower
        return False
    return len(outputs) == 1 and out.logits is outputs[0]


# LoRA, through ``peft``.


def add_lora(
    lm: PretrainedLM,
    r: int = 8,
    alpha: float = 16.0,
    dropout: float = 0.0,
    targets: Sequence[str] = (),
    seed: int = 0,
) -> LoraLM:
    """Put adapters beside a model's layers; the given model is changed in place.

    ``targets`` are last parts of the names of layers; ``("all-linear",)`` means all but the head,
    () the default of ``peft`` for the architecture. The caller's generators are not touched.
    """
    peft = import_module("peft")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=r, lora_alpha=alpha, lora_dropout=dropout,
        target_modules=ALL_LINEAR if ALL_LINEAR in targets else list(targets) or None,
    )  # fmt: skip
    try:
        with quiet(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            adapted = peft.get_peft_model(lm.core, config)
        names = adapted.base_model.targeted_module_names
        for target in set(targets) - {ALL_LINEAR}:  # peft is content if one of several is there
            if not any(f".{name}".endswith(f".{target}") for name in names):
                raise ValueError(f"no layer has the target {target!r}")
    except ValueError as error:  # or peft has no default for the architecture
        raise ConfigError(
            f"LoRA cannot be put there: {first_line(error).rstrip('.')}; name other layers by "
            "--lora-targets"
        ) from error
    return LoraLM(lm, adapted)


def open_adapted_lm(folder: Path) -> LoraLM:
    """Load the adapter that a run left, and the base model that it names.

    Of the adapter's settings only those of plain LoRA are passed on: ``peft`` would import a module
    that others name.
    """
    peft = import_module("peft")
    require_intact(folder)
    found = read_json(folder / ADAPTER)
    lora = add_lora(
        open_causal_lm(found["base_model_name_or_path"]),
        found["r"],
        found["lora_alpha"],
        found["lora_dropout"],
        found["target_modules"],
    )
    with quiet():
        peft.set_peft_model_state_dict(lora.model, read_safetensors(folder / ADAPTER_WEIGHTS))
    return lora


class LoraLM(PretrainedLM):
    """A causal LM with fp32 adapters that are trained, on a base frozen in its stored dtype."""

    def __init__(self, lm: PretrainedLM, peft_model: Any) -> None:
        nn.Module.__init__(self)  # then copy what was determined on the bare model
        known = {name: value for name, value in vars(lm).items() if name not in vars(self)}
        vars(self).update(known)
        self.model = peft_model
        self.train()

    @property
    def core(self) -> Any:
        """The ``transformers`` module, whose linear layers have been replaced by adapted ones."""
        return self.model.base_model.model

    def save_(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write the adapter for ``peft``, in fp32; see :meth:`Pretrained.save_`."""
        state = {}
        for name, parameter in self.model.named_parameters():
            if ".lora_" in name:
                own = weights.get(f"model.{name}", parameter).detach()
                state[name] = own.to("cpu", torch.float32)
                require_finite(state[name], folder, name)
        with quiet():
            self.model.save_pretrained(folder, state_dict=state, save_embedding_layers=False)
            (folder / "README.md").unlink(missing_ok=True)  # a form of blanks

    def read_back(self, folder: Path) -> dict[str, Tensor]:
        """Read the adapter; its base is not opened."""
        names = {n.replace(f".{ADAPTER_NAME}", ""): n for n, _ in self.named_parameters()}
        tensors = read_safetensors(folder / ADAPTER_WEIGHTS)
        return {names.get(f"model.{name}", name): tensor for name, tensor in tensors.items()}


# Generation, through ``transformers``' own generate and cache.


@torch.no_grad()
def generate_ids(
    lm: PretrainedLM,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    seed: int = 0,
    ends: Sequence[int] = (),
) -> list[int]:
    """Generate ids after a prompt, up to the model's last position or one of ``ends``.

    The same seed gives the same ids. The model is left in evaluation mode, and without the
    settings of its folder's ``generation_config.json``, which are ignored.
    """
    limit = lm.max_length or len(prompt) + max_new_tokens + 1
    if not 0 < len(prompt) < limit:
        raise ConfigError(
            f"the prompt has {len(prompt)} tokens and the model {limit} positions; give at least "
            "one token, and leave a position to write at"
        )
    settings = import_module("transformers").GenerationConfig
    drawing = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    config = settings(
        max_new_tokens=min(max_new_tokens, limit - len(prompt)),
        pad_token_id=0,  # unused for one row, but transformers requires it
        eos_token_id=list(ends) or None,
        **(drawing if temperature else {}),
    )

    core = lm.eval().core
    core.generation_config = settings()  # generate takes what config leaves open from there
    ids_1T = torch.tensor([list(prompt)], device=core.get_input_embeddings().weight.device)
    with quiet(), torch.random.fork_rng(devices=[ids_1T.device] if ids_1T.is_cuda else []):
        torch.manual_seed(seed)
        out_1T = core.generate(
            input_ids=ids_1T,
            attention_mask=torch.ones_like(ids_1T),
            generation_config=config,
            logits_processor=[lambda _, logits: require_finite_logits(logits)],
        )
    written: list[int] = out_1T[0, len(prompt) :].tolist()
    return written[:-1] if written and written[-1] in ends else written


# A GPT of our own as a folder of GPT-2. Besides the names, two things differ: their ``Conv1D``
# weights are ``(in, out)`` where ours are ``(out, in)``, and their fused attention projection has
# outputs in the order (q|k|v, head, D) where ours has (head, q|k|v, D).


_NAMES = {
    "layers.": "h.",
    "attn_norm": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.proj": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
    "final_norm": "ln_f",
}
"""Parts of a parameter's name, ours to theirs."""


def save_gpt2(model: GPT, folder: Path) -> None:
    """Write into an empty folder, in fp32, what ``GPT2LMHeadModel.from_pretrained`` reads.

    Raises:
        CheckpointError: If a weight is not finite.
    """
    shape, tensors = model.config, {}
    # only GPT-2's vocabulary has <|endoftext|> at 50256, where transformers assumes it
    end = 50256 if shape.vocab_size == 50257 else None
    config = import_module("transformers").GPT2Config(
        n_layer=shape.n_layer, n_head=shape.n_head, n_embd=shape.n_embd,
        n_positions=shape.block_size, vocab_size=shape.vocab_size,
        layer_norm_epsilon=shape.layer_norm_eps, attn_pdrop=shape.dropout,
        embd_pdrop=shape.dropout, resid_pdrop=shape.dropout, bos_token_id=end, eos_token_id=end,
        architectures=["GPT2LMHeadModel"], dtype=torch.float32,
    )  # fmt: skip
    for name, parameter in model.named_parameters():
        theirs = f"transformer.{name}"
        for ours, other in _NAMES.items():
            theirs = theirs.replace(ours, other)
        tensor = to_hf(name, parameter.detach(), shape.n_head).to("cpu", torch.float32)
        require_finite(tensor, folder, theirs)
        tensors[theirs] = tensor.contiguous()
    config.save_pretrained(folder)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def to_hf(name: str, parameter: torch.Tensor, n_head: int) -> torch.Tensor:
    """Convert our parameter to their layout, same dtype, maybe as a view."""
    if ".qkv." in name:
        parameter = torch.unflatten(parameter, 0, (n_head, 3, -1)).transpose(0, 1).flatten(0, 2)
    return parameter.t() if name.startswith("layers.") and parameter.ndim == 2 else parameter
