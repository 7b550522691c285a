"""One commit of a model on the hub for a whole run: all ranks, model and tokenizer, resumes."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from halfstep.distributed.world import World
from halfstep.models.pretrained_hub import pin
from halfstep.training.finetune_config import ClassifyConfig, LMConfig

Config = TypeVar("Config", ClassifyConfig, LMConfig)


def pinned(config: Config, world: World) -> tuple[Config, dict[str, Any]]:
    """The configuration with the commit that its model's name means now; all ranks together.

    Returns:
        The configuration, and what opening model and tokenizer takes: revision and trust.

    Raises:
        ConfigError: If there is no such model.
    """
    choice = config.model
    trust = choice.trust_remote_code
    own = world.main_only(lambda: pin(choice.source, choice.revision, trust_remote_code=trust))
    revision = world.share(own or "")
    model: Any = dataclasses.replace(choice, revision=revision)
    options = {"revision": revision, "trust_remote_code": trust}
    return dataclasses.replace(config, model=model), options
