"""GPT-2, plain torch: learned positions, pre-LN blocks, head tied to the token embedding.

Shapes: B batch, T positions, C width, V vocabulary, N = B T tokens.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from halfstep.errors import ConfigError, DataError
from halfstep.models.cross_entropy import linear_cross_entropy_sum
from halfstep.models.gpt_config import GPTConfig
from halfstep.models.islands import autocast_off, matmul_dtype
from halfstep.models.layers import Block, Embedding, KeyValueCache, LayerNorm
from halfstep.models.vocabulary import WHOLE

__all__ = ["GPT", "GPTConfig"]


class GPT(nn.Module):
    """The GPT-2 network; the same code in fp32, under autocast, and with all parameters in 16 bits.

    Weights are drawn on the CPU from ``seed`` alone, so they are the same on every device and the
    global random state is left as it was. Under ``with torch.device("meta")`` nothing is drawn:
    call ``to_empty`` and :meth:`init_weights_` later.

    **Source:** Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", §2.3.
    """

    def __init__(self, config: GPTConfig, *, seed: int = 0) -> None:
        """Builds the model on torch's default device, or the one of a ``torch.device`` context.

        Args:
            config: Its shape.
            seed: Of the weights.

        Raises:
            ConfigError: The vocabulary is still to be filled in.
        """
        if not config.vocab_size:
            raise ConfigError("model.vocab_size is 0: fill in the tokenizer's vocabulary size")
        super().__init__()
        self.config = config
        device = torch.get_default_device()
        with torch.device("meta"):  # torch's own initialisation would draw from the global state
            self.wte = Embedding(config.vocab_size, config.n_embd)
            self.wte.vocabulary = WHOLE  # as the table is the head's too
            self.wpe = Embedding(config.block_size, config.n_embd)
            self.dropout = nn.Dropout(config.dropout)
            self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
            self.final_norm = LayerNorm(config.n_embd, eps=config.layer_norm_eps)
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights_(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def init_weights_(self, generator: torch.Generator) -> None:
        """Draws every parameter anew, in the order of ``named_parameters``.

        Weights are normal with standard deviation 0.02, those of projections back into the residual
        stream 0.02 / sqrt(2 n_layer); biases are 0 and norm gains 1. Numbers are drawn in fp32 on
        the generator's device and rounded to the parameter's dtype.

        Args:
            generator: A CPU generator gives the same weights on every device.

        **Source:** 0.02 is GPT-2's ``initializer_range``; the scaling is Radford et al. 2019, §2.3,
        1/sqrt(N) for N residual layers, of which a block has two.
        """
        residual_std = 0.02 / math.sqrt(2 * self.config.n_layer)
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                std = residual_std if name.endswith(("proj.weight", "down.weight")) else 0.02
                drawn = torch.randn(
                    parameter.shape,
                    generator=generator,
                    dtype=torch.float32,
                    device=generator.device,
                )
                parameter.copy_(drawn.mul_(std))

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits of the next token at every position.

        Args:
            tokens_BT: Token ids, ``(B, T)`` int64, ``T <= block_size``.

        Returns:
            ``(B, T, V)`` fp32: the matmul runs in the compute dtype, the result is widened.

        Raises:
            DataError: ``T`` exceeds ``block_size``, or (CPU) a token is out of range.
        """
        return self._head(self.hidden(tokens_BT))

    def loss_sum(
        self, batch: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of next-token losses over a batch, and how many there are; never all logits.

        Args:
            batch: ``(tokens_BT, targets_BT)``, int64; a target of -100 is not counted.

        Returns:
            Loss sum in nats (fp32 scalar with gradient) and count (int64 scalar).

        Raises:
            DataError: As :meth:`forward`, or (CPU) a target is out of range.
        """
        tokens_BT, targets_BT = batch
        x_NC = self.hidden(tokens_BT).flatten(0, 1)
        return linear_cross_entropy_sum(
            x_NC, self.wte.weight, targets_BT.flatten(), vocabulary=self.wte.vocabulary
        )

    def last_logits(
        self, tokens_BT: torch.Tensor, caches: list[KeyValueCache] | None = None
    ) -> torch.Tensor:
        """Logits after the last position only, ``(B, V)`` fp32.

        Args:
            tokens_BT: ``(B, T)`` int64. With filled caches: the one position that follows them.
            caches: From :meth:`new_caches`; filled on the way.

        Raises:
            DataError: As :meth:`forward`, counting the cached positions.
        """
        return self._head(self.hidden(tokens_BT, caches)[:, -1])

    def new_caches(self) -> list[KeyValueCache]:
        """Empty key-value caches, one per block, for :meth:`last_logits`."""
        return [KeyValueCache() for _ in self.layers]

    def hidden(
        self, tokens_BT: torch.Tensor, caches: list[KeyValueCache] | None = None
    ) -> torch.Tensor:
        """Final, normalised hidden states, ``(B, T, C)`` in the dtype of the residual stream."""
        past = caches[0].length if caches is not None else 0
        end = past + tokens_BT.shape[1]
        if end > self.config.block_size:
            raise DataError(
                f"the sequence has {end} tokens, but the model has {self.config.block_size} "
                "positions: shorten the sequence or raise model.block_size"
            )
        positions_T = torch.arange(past, end, device=tokens_BT.device)
        x_BTC = self.dropout(self._embed(tokens_BT) + self.wpe(positions_T))
        for i, block in enumerate(self.layers):
            x_BTC = block(x_BTC, None if caches is None else caches[i])
        normed_BTC: torch.Tensor = self.final_norm(x_BTC)
        return normed_BTC

    def _embed(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Token embeddings; turns torch's bare IndexError (CPU) into one that shows the token."""
        try:
            embedded_BTC: torch.Tensor = self.wte(tokens_BT)
        except IndexError as error:
            low, high = (int(t) for t in torch.aminmax(tokens_BT))
            raise DataError(
                f"tokens run from {low} to {high}, but the model knows 0 to "
                f"{self.config.vocab_size - 1}: check the tokenizer against model.vocab_size"
            ) from error
        return embedded_BTC

    def _head(self, x_C: torch.Tensor) -> torch.Tensor:
        """Logits in fp32 of hidden states ``(..., C)``; the same matmul as the loss head."""
        vocabulary = self.wte.vocabulary
        x_C, weight_VC = vocabulary.share(x_C), vocabulary.local(self.wte.weight)
        dtype = matmul_dtype(x_C, weight_VC)
        with autocast_off(x_C.device.type):
            logits_V = F.linear(x_C.to(dtype), weight_VC.to(dtype))
        wide = torch.promote_types(dtype, torch.float32)  # fp64 stays fp64
        return vocabulary.gather(logits_V.to(wide))

    def blocks(self) -> list[nn.Module]:
        """The transformer blocks in order: what to shard, checkpoint or compile one by one."""
        return list(self.layers)

    def tp_plan(self) -> dict[str, str]:
        """How tensor parallelism places each module that owns parameters, by module name.

        ``colwise`` splits a linear layer's outputs and ``rowwise`` its inputs (sum the results);
        ``colwise:U`` keeps U outputs together: here query, key and value of a head, so that the
        number of ranks must divide ``n_head``. ``replicate`` keeps all on every rank; ``vocab``
        splits an embedding over its tokens, and with it the head, as ``wte`` is both.

        Where the sequence between blocks is split over ranks too, it is from ``wte`` and
        ``replicate:scatter``, which takes a rank's part of its input's positions, to
        ``replicate:gather``, whose output is made whole again.

        **Source:** Shoeybi et al. 2019, "Megatron-LM", §3; Korthikanti et al. 2022, "Reducing
        Activation Recomputation in Large Transformer Models", §4.2.2.
        """
        head = 3 * self.config.n_embd // self.config.n_head
        plan = {"wte": "vocab", "wpe": "replicate:scatter"}
        for i in range(self.config.n_layer):
            plan[f"layers.{i}.attn_norm"] = "replicate"
            plan[f"layers.{i}.attn.qkv"] = f"colwise:{head}"
            plan[f"layers.{i}.attn.proj"] = "rowwise"
            plan[f"layers.{i}.mlp_norm"] = "replicate"
            plan[f"layers.{i}.mlp.up"] = "colwise"
            plan[f"layers.{i}.mlp.down"] = "rowwise"
        plan["final_norm"] = "replicate:gather"
        return plan

    def num_parameters(self) -> int:
        """The number of parameters, the tied embedding counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, block_size: int) -> int:
        """Floating-point operations of forward and backward per token: 6 N + 12 n_layer n_embd T.

        Args:
            block_size: T, the sequence length in tokens.

        N counts all parameters but the position embeddings: the tied table counts, for the head
        multiplies by it. Attention is counted in full, as if it were not causal, and recomputation
        by activation checkpointing is not counted: this is the number for model FLOPs utilisation.

        **Source:** Chowdhery et al. 2022, "PaLM", appendix B: 6 N + 12 L H Q T with H Q = n_embd.
        """
        n = self.num_parameters() - self.wpe.weight.numel()
        return 6 * n + 12 * self.config.n_layer * self.config.n_embd * block_size
