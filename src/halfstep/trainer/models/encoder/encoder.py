"""A text classifier from scratch: a small transformer beside a linear model of n-grams.

Shapes: B texts, T positions, C width, L classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.models.encoder.config import EncoderConfig
from halfstep.trainer.models.encoder.files import (
    read_encoder_config,
    read_encoder_weights,
    save_encoder,
)
from halfstep.trainer.models.gpt.gpt import MLP, Embedding, LayerNorm
from halfstep.trainer.models.losses.classification import class_weights_tensor, classification_loss
from halfstep.trainer.models.losses.fp32_regions import autocast_off
from halfstep.trainer.models.pretrained.hf_files import read_tensors
from halfstep.trainer.models.pretrained.skeleton import (
    own_skeleton,
    refuse_more_layers,
    require_plain_files,
)

__all__ = ["Encoder", "EncoderConfig", "load_encoder"]

Batch = tuple[Tensor, Tensor, Tensor, Tensor]
"""``(ids_BT, mask_BT, labels_B, keys_B)``: int64, bool, int64 (-1 does not count), int64."""


class Encoder(nn.Module):
    """An encoder and its classification head; the same code in fp32, under autocast, in 16 bits.

    Weights are drawn on the CPU from ``seed`` alone, so they are the same on every device and the
    global random state is left as it was. Under ``with torch.device("meta")`` nothing is drawn:
    call ``to_empty`` and :meth:`init_weights_` later.

    What is dropped out of a text depends on its key alone (:class:`KeyedDropout`), so losses and
    gradients are sums over texts, however ranks and micro-batches share them.
    """

    def __init__(
        self,
        config: EncoderConfig,
        *,
        seed: int = 0,
        label_smoothing: float = 0.0,
        class_weights: Sequence[float] | None = None,
    ) -> None:
        """Builds the model on torch's default device, or the one of a ``torch.device`` context.

        Args:
            config: Its shape.
            seed: Of the weights.
            label_smoothing: Share of the target spread evenly over all classes, in ``[0, 1)``;
                in training mode only.
            class_weights: Weight of each class in the loss; None: 1.

        Raises:
            ConfigError: Weights or smoothing are out of range.
        """
        if not 0.0 <= label_smoothing < 1.0:
            raise ConfigError(f"label_smoothing must be in [0, 1), got {label_smoothing!r}")
        super().__init__()
        self.config = config
        self.label_smoothing = label_smoothing
        device = torch.get_default_device()
        with torch.device("meta"):  # torch's own initialisation would draw from the global state
            self.wte = Embedding(config.vocab_size, config.n_embd)
            self.wpe = Embedding(config.max_length, config.n_embd)
            self.token_dropout = KeyedDropout(config.token_dropout, -1, positions=True)
            self.dropout = KeyedDropout(config.dropout, -2)
            self.layers = nn.ModuleList(EncoderBlock(config, i) for i in range(config.n_layer))
            self.final_norm = LayerNorm(config.n_embd, eps=config.layer_norm_eps)
            self.pooled_dropout = KeyedDropout(config.dropout, -3)
            self.head = Head(2 * config.n_embd, len(config.labels))
            self.ngrams = nn.ModuleList(
                NgramBag(config, n, -4 - i) for i, n in enumerate(config.ngram_orders)
            )
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights_(torch.Generator().manual_seed(seed))
        weights = class_weights_tensor(class_weights, config.labels)
        self.class_weights: Tensor | None
        # Not persistent: it belongs to the training, not to the model that is saved.
        self.register_buffer("class_weights", weights, persistent=False)

    @torch.no_grad()
    def init_weights_(self, generator: torch.Generator) -> None:
        """Draws every parameter anew, in the order of ``named_parameters``.

        As :meth:`halfstep.trainer.models.gpt.gpt.GPT.init_weights_`, but n-gram tables are 0.

        Args:
            generator: A CPU generator gives the same weights on every device.
        """
        residual_std = 0.02 / math.sqrt(2 * self.config.n_layer)
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                std = 0.02
                if name.endswith(("proj.weight", "down.weight")):
                    std = residual_std
                elif name.startswith("ngrams."):
                    std = 0.0
                drawn = torch.randn(
                    parameter.shape,
                    generator=generator,
                    dtype=torch.float32,
                    device=generator.device,
                )
                parameter.copy_(drawn.mul_(std))

    def forward(self, ids_BT: Tensor, mask_BT: Tensor, keys_B: Tensor | None = None) -> Tensor:
        """Logits of the classes.

        Args:
            ids_BT: Token ids, ``(B, T)`` int64 with ``T <= max_length``, padded on the right.
            mask_BT: ``(B, T)`` bool, True at real tokens.
            keys_B: ``(B,)`` int64: what dropout follows in training; -1 or None: no dropout.

        Returns:
            ``(B, L)`` fp32.

        Raises:
            DataError: ``T`` exceeds ``max_length``, or (CPU) a token is out of range.
        """
        length = ids_BT.shape[1]
        if length > self.config.max_length:
            raise DataError(
                f"the longest text has {length} tokens, but the model has "
                f"{self.config.max_length} positions: truncate texts or raise max_length"
            )
        if keys_B is None:
            keys_B = torch.full_like(ids_BT[:, 0], NO_DROPOUT)
        # A row without a real token would divide by 0; its first position stands for it.
        first_T = torch.arange(length, device=mask_BT.device) == 0
        mask_BT = mask_BT | first_T
        x_BTC = self.dropout(self._embed(ids_BT, keys_B), keys_B)
        for block in self.layers:
            x_BTC = block(x_BTC, mask_BT, keys_B)
        pooled_BC = pool(self.final_norm(x_BTC), mask_BT)
        logits_BL: Tensor = self.head(self.pooled_dropout(pooled_BC, keys_B))
        for ngram in self.ngrams:
            logits_BL = logits_BL + ngram(ids_BT, mask_BT, keys_B)
        return logits_BL

    def _embed(self, ids_BT: Tensor, keys_B: Tensor) -> Tensor:
        """Embeddings of tokens and positions, some positions dropped, ``(B, T, C)``."""
        try:
            x_BTC: Tensor = self.wte(ids_BT)
        except IndexError as error:
            low, high = (int(t) for t in torch.aminmax(ids_BT))
            raise DataError(
                f"tokens run from {low} to {high}, but the model knows 0 to "
                f"{self.config.vocab_size - 1}: check the tokenizer against the model"
            ) from error
        x_BTC = x_BTC + self.wpe(torch.arange(ids_BT.shape[1], device=ids_BT.device))
        dropped_BTC: Tensor = self.token_dropout(x_BTC, keys_B)
        return dropped_BTC

    def loss_sum(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The sum of the texts' losses, and of their weights.

        Args:
            batch: ``(ids_BT, mask_BT, labels_B, keys_B)``; a label of -1 does not count.

        Returns:
            Loss sum in nats (fp32 scalar with gradient) and sum of weights (fp32 scalar).

        Raises:
            DataError: As :meth:`forward`.
        """
        ids_BT, mask_BT, labels_B, keys_B = batch
        smoothing = self.label_smoothing if self.training else 0.0
        logits_BL = self(ids_BT, mask_BT, keys_B)
        # Casts of the whole module reach buffers too, and the loss wants fp32.
        weights_L = None if self.class_weights is None else self.class_weights.float()
        return classification_loss(logits_BL, labels_B, weights_L, smoothing)

    def logits(self, batch: Batch) -> Tensor:
        """``(B, L)`` fp32 logits of a batch as :meth:`loss_sum` takes it."""
        ids_BT, mask_BT, _, keys_B = batch
        logits_BL: Tensor = self(ids_BT, mask_BT, keys_B)
        return logits_BL

    def blocks(self) -> list[nn.Module]:
        """The transformer blocks in order: what to shard, checkpoint or compile one by one."""
        return list(self.layers)

    def num_parameters(self) -> int:
        """The number of parameters, everything counted."""
        return sum(parameter.numel() for parameter in self.parameters())

    def save_(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Writes ``config.json`` and ``model.safetensors``, from which ``load_encoder`` makes it.

        Args:
            folder: Made if it is missing; files of the same names are overwritten.
            weights: fp32 tensors by parameter name: all of them, whole.

        Raises:
            CheckpointError: A weight is missing, surplus, of wrong shape or dtype or not finite, or
                the folder cannot be written.
        """
        shapes = {name: p.shape for name, p in self.named_parameters()}
        save_encoder(folder, self.config, shapes, weights)


def load_encoder(folder: Path) -> Encoder:
    """The encoder that :meth:`Encoder.save_` wrote, in fp32 on the CPU, in training mode.

    Raises:
        CheckpointError: A file is missing or damaged, of another model, or a tensor does not fit.
    """
    require_plain_files(folder)
    config = read_encoder_config(folder)
    stored = {name: tensor for name, (tensor, _) in read_tensors(folder).items()}
    refuse_more_layers(folder / "config.json", {"n_layer": config.n_layer}, len(stored))
    model = own_skeleton(folder, stored, lambda: Encoder(config))
    shapes = {name: p.shape for name, p in model.named_parameters()}
    model.load_state_dict(read_encoder_weights(folder, shapes), strict=True, assign=True)
    return model


# The parts of a text encoder: dropout by key, bags of n-grams, attention both ways, pooling.
#
# As in the GPT no part knows the precision: a 16-bit parameter makes a 16-bit result,
# autocast casts operands of matmuls and attention, and what must be fp32 is so by its own doing.
#
# Shapes: B texts, T positions, C width, H heads, D width of a head (C = H D), L classes.


NO_DROPOUT = -1
"""Key of a text from which nothing is dropped."""

_LOW_32 = 0xFFFFFFFF


def mix(x: torch.Tensor) -> torch.Tensor:
    """A number from 0 to 2^32 - 1 for each of ``x``, far from those of its neighbours.

    Args:
        x: int64, any shape; only its low 32 bits count.

    **Source:** the constants of Wellons, "Prospecting for Hash Functions" (2018), ``lowbias32``:
    every input bit changes every output bit with a probability near one half.
    """
    # Products of two 32-bit numbers wrap in int64, which leaves their low 32 bits right.
    x = x & _LOW_32
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW_32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW_32
    return x ^ (x >> 16)


class KeyedDropout(nn.Module):
    """Dropout whose mask is a function of the text's key and nothing else.

    A text keeps its mask whichever rank or micro-batch it is in, on every device, whatever was
    drawn before and when activations are computed again. In evaluation mode, and for texts with
    the key -1, nothing is dropped.

    Args:
        p: Probability of zeroing.
        site: Number of this place in the model; places with different numbers drop independently.
        positions: Zero whole positions. Otherwise features, each in all positions of its text.

    **Source:** features in all positions: Gal and Ghahramani, "A Theoretically Grounded Application
    of Dropout in Recurrent Neural Networks", NeurIPS 2016; masks by counter instead of state:
    Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
    """

    def __init__(self, p: float, site: int, *, positions: bool = False) -> None:
        super().__init__()
        self.p = p
        self.site = site
        self.positions = positions

    def forward(self, x_BTC: torch.Tensor, keys_B: torch.Tensor) -> torch.Tensor:
        """``x`` times 0 or 1 / (1 - p), rounded once to its dtype; ``(B, T, C)`` or ``(B, C)``."""
        if not self.training or self.p == 0.0:
            return x_BTC
        size = x_BTC.shape[1] if self.positions else x_BTC.shape[-1]
        wide = torch.promote_types(x_BTC.dtype, torch.float32)
        factor = self.factors(keys_B, size).to(wide)
        shape = [len(keys_B), *[1] * (x_BTC.dim() - 1)]
        shape[1 if self.positions else -1] = size
        return (x_BTC * factor.view(shape)).to(x_BTC.dtype)

    def factors(self, keys_B: torch.Tensor, size: int) -> torch.Tensor:
        """``(B, size)`` fp64: 0, 1 / (1 - p), or 1 in rows whose key is -1."""
        places = torch.arange(size, device=keys_B.device)
        streams_B = mix(mix(keys_B + 0x9E3779B9 * (self.site + 1)) ^ mix(keys_B >> 32))
        drawn = mix(streams_B.unsqueeze(1) + 0x9E3779B9 * places)
        kept = drawn >= int(self.p * 2**32)
        factor = kept.double() / (1.0 - self.p)
        return torch.where((keys_B == NO_DROPOUT).unsqueeze(1), 1.0, factor)

    def extra_repr(self) -> str:
        """The sizes that ``print(model)`` shows for this layer."""
        return f"p={self.p}, site={self.site}"


class NgramBag(nn.Module):
    """A linear model of which n-grams of tokens a text holds: one row of logits for each.

    Short texts with few examples are told apart by which words stand in them more than by how they
    go on. A linear model learns that without learning texts by heart, as each n-gram of a text
    moves the logits by itself, and little; the transformer learns what is left.

    Rows begin at 0 and are multiplied by ``ngram_scale``, which is how much faster than the rest
    they learn: AdamW's steps do not depend on the size of gradients.

    **Source:** Cheng et al., "Wide & Deep Learning for Recommender Systems", DLRS 2016; hashing:
    Joulin et al., "Bag of Tricks for Efficient Text Classification", EACL 2017, section 2.1.
    """

    def __init__(self, config: EncoderConfig, order: int, site: int) -> None:
        super().__init__()
        self.order = order
        self.buckets = config.ngram_buckets
        self.scale = config.ngram_scale
        self.table = Embedding(config.ngram_buckets, len(config.labels))
        self.dropout = KeyedDropout(config.ngram_dropout, site, positions=True)

    def forward(
        self, ids_BT: torch.Tensor, mask_BT: torch.Tensor, keys_B: torch.Tensor
    ) -> torch.Tensor:
        """Sums over a text's n-grams by the root of their number, ``(B, L)`` fp32 (or fp64)."""
        rows_BTL = self.table(self.bucket(ids_BT))
        with autocast_off(rows_BTL.device.type):
            rows_BTL = rows_BTL.to(torch.promote_types(rows_BTL.dtype, torch.float32))
            rows_BTL = self.dropout(rows_BTL, keys_B)
            real_BT1 = mask_BT.unsqueeze(-1)
            sum_BL = (rows_BTL * real_BT1).sum(1) * self.scale
            logits_BL: torch.Tensor = sum_BL / real_BT1.sum(1).to(sum_BL.dtype).sqrt()
            return logits_BL

    def bucket(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """The table's row for the n tokens that end at each position (0 before the text)."""
        length = ids_BT.shape[1]
        padded = F.pad(ids_BT, (self.order - 1, 0))
        code_BT = torch.full_like(ids_BT, self.order)
        for i in range(self.order):
            code_BT = mix(code_BT * 31 + padded[:, i : i + length])
        return code_BT % self.buckets


class SelfAttention(nn.Module):
    """Multi-head attention in which every position sees every real position of its text."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.head_dim = config.n_embd // config.n_head
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x_BTC: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
        """Mixes positions; ``(B, T, C)`` in and out. Each row of the mask must have a True.

        **Source:** Vaswani et al. 2017, eq. 1: softmax(q k^T / sqrt(D)) v.
        """
        qkv_BTH3D = self.qkv(x_BTC).unflatten(-1, (-1, 3, self.head_dim))
        q_BHTD, k_BHTD, v_BHTD = qkv_BTH3D.transpose(1, 2).unbind(dim=3)
        y_BHTD = F.scaled_dot_product_attention(
            q_BHTD, k_BHTD, v_BHTD, attn_mask=mask_BT[:, None, None, :]
        )
        y_BTC: torch.Tensor = self.proj(y_BHTD.transpose(1, 2).flatten(2))
        return y_BTC


class EncoderBlock(nn.Module):
    """One pre-LN transformer block: attention and MLP, each added to the residual stream."""

    def __init__(self, config: EncoderConfig, site: int) -> None:
        """Builds block number ``site``, with dropouts at ``2 site`` and ``2 site + 1``."""
        super().__init__()
        self.attn_norm = LayerNorm(config.n_embd, eps=config.layer_norm_eps)
        self.attn = SelfAttention(config)
        self.attn_dropout = KeyedDropout(config.dropout, 2 * site)
        self.mlp_norm = LayerNorm(config.n_embd, eps=config.layer_norm_eps)
        self.mlp = MLP(config.as_gpt())
        self.mlp_dropout = KeyedDropout(config.dropout, 2 * site + 1)

    def forward(
        self, x_BTC: torch.Tensor, mask_BT: torch.Tensor, keys_B: torch.Tensor
    ) -> torch.Tensor:
        """The residual stream after this block; ``(B, T, C)`` in and out, dtype unchanged."""
        y_BTC = self.attn(self.attn_norm(x_BTC), mask_BT)
        x_BTC = x_BTC + self.attn_dropout(y_BTC, keys_B)
        y_BTC = self.mlp(self.mlp_norm(x_BTC))
        out_BTC: torch.Tensor = x_BTC + self.mlp_dropout(y_BTC, keys_B)
        return out_BTC


def pool(x_BTC: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Mean and maximum of each feature over the real positions of a text, in fp32 (or fp64).

    Args:
        x_BTC: ``(B, T, C)``, any floating dtype.
        mask_BT: ``(B, T)`` bool with a True in each row.

    Returns:
        ``(B, 2 C)``: means, then maxima.
    """
    with autocast_off(x_BTC.device.type):
        x_BTC = x_BTC.to(torch.promote_types(x_BTC.dtype, torch.float32))
        real_BT1 = mask_BT.unsqueeze(-1)
        mean_BC = (x_BTC * real_BT1).sum(1) / real_BT1.sum(1)
        max_BC = x_BTC.masked_fill(~real_BT1, float("-inf")).amax(1)
        return torch.cat((mean_BC, max_BC), dim=1)


class Head(nn.Linear):
    """A linear layer that is an fp32 island: few classes cost nothing, and logits keep 24 bits."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``(B, 2 C)`` to fp32 ``(B, L)`` (fp64 for fp64)."""
        dtype = torch.promote_types(input.dtype, torch.float32)
        dtype = torch.promote_types(dtype, self.weight.dtype)
        with autocast_off(input.device.type):
            return F.linear(input.to(dtype), self.weight.to(dtype), self.bias.to(dtype))
