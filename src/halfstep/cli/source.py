"""The trained model that ``generate`` and ``evaluate`` work on: of a run, or a folder."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from halfstep.precision.casting.autocast import require_support
from halfstep.precision.casting.cast import around_model, cast_to_policy_
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.precision.policy.spelling import parse_policy
from halfstep.trainer.config.config import TrainConfig
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.data.tokenizers.files import load_tokenizer
from halfstep.trainer.data.tokenizers.tokenizer import Tokenizer
from halfstep.trainer.environment import choose_device
from halfstep.trainer.models.gpt.gpt import GPT
from halfstep.trainer.models.gpt.hf import load_gpt2
from halfstep.trainer.run.folder import load_trained, run_config


@dataclass(frozen=True, slots=True)
class Source:
    """A model in evaluation mode on its device, under its policy."""

    model: GPT
    tokenizer: Tokenizer
    config: TrainConfig | None
    """The run's configuration; None for a Hugging Face folder."""
    policy: PrecisionPolicy
    device: torch.device

    def around(self) -> AbstractContextManager[None]:
        """The context of a forward pass in the source's precision."""
        return around_model(self.policy, self.model, self.device)


def config_of_run(arguments: argparse.Namespace) -> BaseConfig | None:
    """The configuration of ``--run``, of whatever task; None without it.

    Raises:
        ConfigError: ``--run`` holds no run.
    """
    return None if arguments.run is None else run_config(Path(arguments.run))


def open_source(arguments: argparse.Namespace) -> Source:
    """Load what ``--run`` or ``--model`` names, in the precision that was asked for.

    Raises:
        HalfstepError: For a folder that is no run or no model, or a policy that cannot be honoured.
    """
    device = choose_device(arguments.device)
    config: TrainConfig | None = None
    if arguments.run is not None:
        model, tokenizer, config = load_trained(Path(arguments.run))
        precision = arguments.precision or config.precision
    else:
        model = load_gpt2(Path(arguments.model))
        tokenizer = load_tokenizer(Path(arguments.model))
        precision = arguments.precision or "fp32"
    policy = parse_policy(precision)
    require_support(policy, device)
    cast_to_policy_(model, policy)
    return Source(model.to(device).eval(), tokenizer, config, policy, device)
