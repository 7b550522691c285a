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
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from halfstep.errors import CheckpointError, ConfigError
from halfstep.files import read_json, require_intact
from halfstep.precision.loss_head import linear_cross_entropy
from halfstep.precision.policy.policy import dtype_name
from halfstep.trainer.models import IGNORE_INDEX
from halfstep.trainer.models.gpt import GPT, require_finite_logits
from halfstep.trainer.models.pretrained import (
    ADAPTER,
    WEIGHTS,
    Pretrained,
    first_line,
    new_folder,
    open_folder,
    quiet,
    read_safetensors,
    require_finite,
    require_library,
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

    def probe(self) -> Tensor:
        """Choose ids, int64 ``(2, T)``: random ones, or those that an adapter changes most."""
        table, length = self.core.get_input_embeddings(), min(16, self.max_length or 16)
        adapters = getattr(table, "lora_embedding_A", {})
        if ADAPTER_NAME in adapters:
            most: Tensor = adapters[ADAPTER_NAME].norm(dim=0).argsort(descending=True)
            return most.repeat(2 * length)[: 2 * length].view(2, length)
        return random_ids(len(table.weight), length)

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
    settings = {"r": r, "lora_alpha": alpha, "lora_dropout": dropout}
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return LoraLM(lm, _adapted(lm.core, targets, settings))
    except ValueError as error:  # or peft has no default for the architecture
        raise ConfigError(
            f"LoRA cannot be put there: {first_line(error).rstrip('.')}; name other layers by "
            "--lora-targets"
        ) from error


def _adapted(model: Any, targets: Sequence[str], settings: Mapping[str, Any]) -> Any:
    """Put adapters into a model; raise ValueError where one could not be put or merged."""
    peft, layers = require_library("peft"), _layers(model)
    for target in set(targets) - {ALL_LINEAR}:
        if not any(f".{name}".endswith(f".{target}") for name in layers):
            raise ValueError(f"no linear layer has the target {target!r}, and no embedding")
    modules = ALL_LINEAR if ALL_LINEAR in targets else list(targets) or None
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=modules, **settings)
    with quiet():
        adapted = peft.get_peft_model(model, config)
    for name, module in adapted.base_model.model.named_modules():
        why = layers.get(name, "it is no linear layer or embedding")
        if why and isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer):
            raise ValueError(f"an adapter of {name!r} could not be merged: {why}")
    return adapted


def _layers(model: nn.Module) -> dict[str, str]:
    """Map the linear layers and embeddings to why an adapter of theirs could not be merged.

    "" means that it can: ``peft`` adds it to a weight that only this layer uses, and only in the
    way that the layer's class says.
    """
    conv1d = require_library("transformers").pytorch_utils.Conv1D  # GPT-2's linear layer
    modules, found = dict(model.named_modules()), {}
    held = ((*m._parameters.values(), *m._modules.values()) for m in modules.values())
    users = Counter(map(id, chain.from_iterable(held)))
    for name, module in modules.items():
        if not isinstance(module, nn.Linear | nn.Embedding | conv1d):
            continue
        found[name] = ""
        if max(users[id(module.weight)], users[id(module)]) > 1:
            found[name] = "another layer has its weight too, as where the head shares its table"
        elif isinstance(modules[name.rpartition(".")[0]], nn.MultiheadAttention):
            found[name] = "attention reads its weight and does not call it"
        elif isinstance(module, nn.Embedding) and type(module).forward != nn.Embedding.forward:
            found[name] = f"a {type(module).__name__} is more than its table"
    return found


def open_adapted_lm(folder: Path) -> LoraLM:
    """Load a saved adapter and the base model that it names, ready to be trained further.

    Of the adapter's settings only those of plain LoRA are passed on: ``peft`` would import a module
    that others name.
    """
    peft = require_library("peft")
    require_intact(folder)
    file = folder / ADAPTER
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        source, targets = found["base_model_name_or_path"], found["target_modules"]
        r, alpha = int(found["r"]), float(found["lora_alpha"])
        dropout = float(found["lora_dropout"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is missing or damaged: {error!r}") from error
    if not source or found.get("alpha_pattern") or found.get("use_rslora"):
        raise ConfigError(
            f"{file}: only an adapter with one alpha / r on a named base can be opened; merge this "
            "one into its base with peft (merge_and_unload)"
        )
    targets = [targets] if isinstance(targets, str) else targets
    lora = add_lora(open_causal_lm(source), r, alpha, dropout, targets)
    weights = folder / ADAPTER_WEIGHTS
    tensors = read_safetensors(weights)
    wanted = peft.get_peft_model_state_dict(lora.model, save_embedding_layers=False)
    if {k: t.shape for k, t in wanted.items()} != {k: t.shape for k, t in tensors.items()}:
        raise CheckpointError(
            f"{weights} does not fit plain LoRA on the base {source}: tensors are missing, surplus "
            "or of another shape"
        )
    with quiet():
        peft.set_peft_model_state_dict(lora.model, tensors)
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

    def save_(
        self, folder: Path, weights: Mapping[str, Tensor], dtype: torch.dtype | None = None
    ) -> None:
        """Write the adapter for ``peft``, in fp32 by default; see :meth:`Pretrained.save_`."""
        state = {}
        for name, parameter in self.model.named_parameters():
            if ".lora_" in name:
                own = weights.get(f"model.{name}", parameter).detach()
                state[name] = own.to("cpu", dtype or torch.float32)
                require_finite(state[name], folder, name)
        with quiet():
            self.model.save_pretrained(folder, state_dict=state, save_embedding_layers=False)
            (folder / "README.md").unlink(missing_ok=True)  # a form of blanks

    def read_back(self, folder: Path) -> dict[str, Tensor]:
        """Read the adapter, if its settings are this one's; its base is not opened."""
        found, own = read_json(folder / ADAPTER), self.model.peft_config[ADAPTER_NAME]
        modules: list[Any] = list(self.modules())
        scales = {m.scaling[ADAPTER_NAME] for m in modules if hasattr(m, "lora_alpha")}
        same = {*found["target_modules"]} == {*own.target_modules} and not found["use_rslora"]
        if not same or scales != {found["lora_alpha"] / found["r"]}:
            raise CheckpointError(f"no model was left: its {ADAPTER} is not what was trained")
        names = {n.replace(f".{ADAPTER_NAME}", ""): n for n, _ in self.named_parameters()}
        tensors = read_safetensors(folder / ADAPTER_WEIGHTS)
        return {names.get(f"model.{name}", name): tensor for name, tensor in tensors.items()}

    def merge_(self) -> PretrainedLM:
        """Add the adapters to the base, in fp32; this module must not be used any more."""
        self.model.float()
        return PretrainedLM(self.model.merge_and_unload(), self.stored_dtype)


# What is delivered is what was trained.


def random_ids(vocabulary: int, length: int) -> Tensor:
    """Draw ids, int64 ``(2, length)``, always the same."""
    return torch.randint(vocabulary, (2, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def require_faithful(
    folder: Path,
    dtype: torch.dtype,
    model: nn.Module,
    logits: Callable[[Tensor], Tensor],
    ids_BT: Tensor,
    trained_BTV: Tensor,
) -> str:
    """Refuse a written model whose logits are not those of the trained one; say how near they are.

    ``model`` is what was written to ``folder`` in ``dtype``, itself in fp32 and not rounded; it is
    used up. ``logits`` computes its logits, fp32, which are compared at the median position, as a
    last digit may send some through other experts.

    Raises:
        CheckpointError: If ``model`` is not the trained one, or the folder not ``model``, up to
            fp32's rounding; or if rounding moves the logits further than the eps of ``dtype``
            explains, as underflow does; that is measured by small changes of all weights.

    **Source:** to first order; rounding changes a normal number by at most eps / 2 of it (Higham,
    "Accuracy and Stability of Numerical Algorithms", 2002, theorem 2.2).
    """
    # that of the rounding, under which experts change as often; for fp32 far above its own
    share = max(2.0**-12, torch.finfo(dtype).eps / 2)

    exact = logits(ids_BT)
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype))
    rounded = logits(ids_BT)
    _nudge_(model, share)
    changed = logits(ids_BT)
    model.to("meta")  # frees its memory for the next
    written = open_causal_lm(folder).float().eval().logits(ids_BT)
    size, moved = _distance(trained_BTV, 0 * trained_BTV), _distance(rounded, trained_BTV)
    slope = _distance(changed, rounded) / share + size
    # 16: sums in another order come to 4 at most. 2: rounding comes to 0.2, with experts to 0.4.
    near = 16 * 2.0**-24 * slope
    for what, found, bound in (
        ("the merged model is not the trained one", _distance(exact, trained_BTV), near),
        ("the files are not the model", _distance(written, rounded), near),
        (f"{dtype_name(dtype)} cannot hold it", moved, near + 2 * torch.finfo(dtype).eps * slope),
    ):
        if not found <= bound:  # or it is NaN
            raise CheckpointError(
                f"nothing was exported, as {what}: logits are off by {found:.2g}, of which "
                f"rounding explains {bound:.2g}. Try another --dtype, or please report this"
            )
    return f"logits within {moved:.2g} of the trained model's, which are of size {size:.2g}"


def _nudge_(model: nn.Module, share: float) -> None:
    """Change every weight by this share of it, at random signs."""
    g = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        signs = torch.randint(2, parameter.shape, generator=g, dtype=torch.int8) * 2 - 1
        parameter.mul_(1 + share * signs)


def _distance(a_BTV: Tensor, b_BTV: Tensor) -> float:
    """Compute the root mean square of a position's differences, at the median position."""
    return float((a_BTV - b_BTV).square().mean(dim=-1).sqrt().median())


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
    if not max_new_tokens:
        return []
    settings = require_library("transformers").GenerationConfig
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


@torch.no_grad()
def export_gpt2(
    model: GPT, folder: Path, dtype: torch.dtype, beside: Callable[[Path], object]
) -> str:
    """Write such a folder, and what ``beside`` writes there, if ``transformers`` computes the same.

    The model must be in fp32 and is used up. For result and errors see :func:`require_faithful`.
    """
    ids_BT = random_ids(model.config.vocab_size, min(16, model.config.block_size))
    trained_BTV = model.eval()(ids_BT)
    with new_folder(folder) as empty:
        save_gpt2(model, empty, dtype)
        beside(empty)
        return require_faithful(empty, dtype, model, model, ids_BT, trained_BTV)


def save_gpt2(model: GPT, folder: Path, dtype: torch.dtype) -> None:
    """Write into an empty folder what ``GPT2LMHeadModel.from_pretrained`` reads.

    Raises:
        CheckpointError: If a weight is not finite in ``dtype``.
    """
    shape, tensors = model.config, {}
    # only GPT-2's vocabulary has <|endoftext|> at 50256, where transformers assumes it
    end = 50256 if shape.vocab_size == 50257 else None
    config = require_library("transformers").GPT2Config(
        n_layer=shape.n_layer, n_head=shape.n_head, n_embd=shape.n_embd,
        n_positions=shape.block_size, vocab_size=shape.vocab_size,
        layer_norm_epsilon=shape.layer_norm_eps, attn_pdrop=shape.dropout,
        embd_pdrop=shape.dropout, resid_pdrop=shape.dropout, bos_token_id=end, eos_token_id=end,
        architectures=["GPT2LMHeadModel"], dtype=dtype,
    )  # fmt: skip
    for name, parameter in model.named_parameters():
        theirs = f"transformer.{name}"
        for ours, other in _NAMES.items():
            theirs = theirs.replace(ours, other)
        tensor = to_hf(name, parameter.detach(), shape.n_head).to("cpu", dtype)
        require_finite(tensor, folder, theirs)
        tensors[theirs] = tensor.contiguous()
    config.save_pretrained(folder)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def to_hf(name: str, parameter: torch.Tensor, n_head: int) -> torch.Tensor:
    """Convert our parameter to their layout, same dtype, maybe as a view."""
    if ".qkv." in name:
        parameter = torch.unflatten(parameter, 0, (n_head, 3, -1)).transpose(0, 1).flatten(0, 2)
    return parameter.t() if name.startswith("layers.") and parameter.ndim == 2 else parameter
