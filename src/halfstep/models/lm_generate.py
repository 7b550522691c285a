"""Text from a pretrained language model, through ``transformers``' own generation and cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import ConfigError, NonFiniteError
from halfstep.models.pretrained import quiet
from halfstep.models.pretrained_hub import require
from halfstep.models.pretrained_lm import PretrainedLM


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
    """The ids that the model writes after a prompt; the same seed gives the same ones.

    How the model's author means it to generate (``generation_config.json``) is not used; what is
    asked for here is all. The global random state is as before afterwards.

    Args:
        lm: On its device; run under the autocast of its policy.
        prompt: At least one id.
        max_new_tokens: Most ids to write; fewer where the model's positions end.
        temperature: Divides the logits; 0 takes the most probable id every time.
        top_k: Draw from the most probable ids only, so many; None: all.
        top_p: Draw from the most probable ids that reach this probability together; None: all.
        seed: Of the draws.
        ends: Sequences of ids after which it stops; the one that stopped it is left out.

    Raises:
        ConfigError: An argument is out of range, or the prompt leaves no position to write at.
        NonFiniteError: The model's logits hold NaN or inf.
    """
    room = _check(lm, prompt, max_new_tokens, temperature, top_k, top_p, seed)
    if not room:
        return []
    transformers = require("transformers")
    config = transformers.GenerationConfig(
        max_new_tokens=room,
        do_sample=temperature > 0,
        pad_token_id=0,  # one row needs none, but transformers asks
        use_cache=True,
        **(
            {"temperature": temperature, "top_k": top_k or 0, "top_p": top_p or 1.0}
            if temperature
            else {}
        ),
    )
    core, training = lm.core, lm.training
    device = core.get_input_embeddings().weight.device
    ids_1T = torch.tensor([list(prompt)], device=device)
    own, core.generation_config = core.generation_config, transformers.GenerationConfig()
    lm.eval()
    cuda = [device] if device.type == "cuda" else []
    try:
        with quiet(), torch.random.fork_rng(devices=cuda):
            torch.manual_seed(seed)
            out_1T = core.generate(
                input_ids=ids_1T,
                attention_mask=torch.ones_like(ids_1T),
                generation_config=config,
                logits_processor=transformers.LogitsProcessorList([_finite]),
                stopping_criteria=transformers.StoppingCriteriaList([_Ends(len(prompt), ends)]),
            )
    finally:
        core.generation_config = own
        lm.train(training)
    written: list[int] = out_1T[0, len(prompt) :].tolist()
    end = next((end for end in ends if end and written[-len(end) :] == list(end)), ())
    return written[: len(written) - len(end)]


class _Ends:
    """Says that a row is done when it ends with one of some sequences of ids."""

    def __init__(self, start: int, ends: Sequence[Sequence[int]]) -> None:
        self._start = start
        self._ends = [list(end) for end in ends if end]

    def __call__(self, ids_BT: Tensor, scores: Any, **_: Any) -> Tensor:
        """Whether each row is done, as a boolean tensor ``(B,)``."""
        rows = ids_BT[:, self._start :].tolist()
        done = [any(row[-len(end) :] == end for end in self._ends) for row in rows]
        return torch.tensor(done, device=ids_BT.device)


def _finite(ids_BT: Tensor, logits_BV: Tensor) -> Tensor:
    """The logits as they are, if there is something to draw from."""
    if not bool(torch.isfinite(logits_BV).all()):
        raise NonFiniteError(
            "the model's logits hold NaN or inf, so there is nothing to draw from: the weights are "
            "damaged, or the range of the compute dtype is too small for them",
            cause="forward",
        )
    return logits_BV


def _check(
    lm: PretrainedLM,
    prompt: Sequence[int],
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
) -> int:
    """How many ids can be written; raises ConfigError for arguments out of range."""
    if max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens must be 0 or more, got {max_new_tokens}")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ConfigError(f"temperature must be finite and 0 or more, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k must be 1 or more, or None for all tokens, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"top_p must be in (0, 1], or None for all tokens, got {top_p}")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed must be in [0, 2**63), got {seed}")
    if not prompt:
        raise ConfigError("the prompt is empty; give at least one token")
    limit = lm.max_length
    if limit is None:
        return max_new_tokens
    if len(prompt) >= limit:
        raise ConfigError(
            f"the prompt has {len(prompt)} tokens and the model {limit} positions, which leaves "
            "none to write at; shorten the prompt"
        )
    return min(max_new_tokens, limit - len(prompt))
