"""A text classifier from scratch: a small transformer beside a linear model of n-grams.

Shapes: B texts, T positions, C width, L classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from halfstep.errors import ConfigError, DataError
from halfstep.models.classification_loss import class_weights_tensor, classification_loss
from halfstep.models.encoder_config import EncoderConfig
from halfstep.models.encoder_files import (
    read_encoder_config,
    read_encoder_weights,
    save_encoder,
)
from halfstep.models.encoder_layers import (
    NO_DROPOUT,
    EncoderBlock,
    Head,
    KeyedDropout,
    NgramBag,
    pool,
)
from halfstep.models.hf_files import read_tensors
from halfstep.models.layers import Embedding, LayerNorm
from halfstep.models.skeleton import own_skeleton, refuse_more_layers, require_plain_files

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

        As :meth:`halfstep.models.gpt.GPT.init_weights_`, but n-gram tables are 0.

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
