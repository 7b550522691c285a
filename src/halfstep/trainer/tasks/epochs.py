"""What the tasks with epochs share: dealing out examples, models from the hub, and ``model/``."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from torch import nn

from halfstep.distributed.world import World
from halfstep.errors import CheckpointError, ConfigError
from halfstep.files import sync
from halfstep.trainer.config.tasks import (
    ClassifierConfig,
    ClassifyConfig,
    FinetuneConfig,
    LMConfig,
)
from halfstep.trainer.data.batches import EpochBatches
from halfstep.trainer.data.config import InstructionsConfig
from halfstep.trainer.models.pretrained.hub import pin
from halfstep.trainer.models.pretrained.weights import new_folder
from halfstep.trainer.tasks.task import Task


class EpochTask(Task):
    """A task with epochs, each of which has every example once."""

    config: FinetuneConfig

    def deal(self, config: FinetuneConfig, lengths: npt.ArrayLike) -> None:
        """Deal the examples out to steps by their lengths, and resolve epochs into steps."""
        run = config.run
        self._lengths = np.asarray(lengths)
        self._batches = EpochBatches(lengths, run.batch_size, run.seed)
        self.smallest_batch = len(self._lengths) // self._batches.steps_per_epoch
        self.config = config.resolved(self._batches.steps_per_epoch)

    def indices(self, step: int) -> npt.NDArray[np.int64]:
        """Return the indices of a step's examples."""
        return self._batches.indices(step)

    def batch_size(self, step: int) -> int:
        """Return the number of a step's examples; steps of an epoch differ by one at most."""
        return len(self.indices(step))

    def rows(self, step: int) -> Mapping[str, list[int]]:
        """Return the positions of a step's examples among the training examples."""
        return {"examples": self.indices(step).tolist()}

    def tokens(self, step: int) -> int:
        """Return the tokens of the step's examples, special tokens included."""
        return int(self._lengths[self.indices(step)].sum())


# A run uses one commit of a hub model throughout: all ranks, model and tokenizer, all resumes.


Config = TypeVar("Config", ClassifyConfig, LMConfig)


def pinned(config: Config, world: World) -> tuple[Config, dict[str, Any]]:
    """Pin the configuration to the model's current commit on the hub; all ranks call it.

    Returns:
        The configuration, and keyword arguments for opening model and tokenizer.

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


Part = TypeVar("Part", ClassifierConfig, InstructionsConfig)


def within(part: Part, section: str, limit: int | None, source: str) -> Part:
    """Limit a section's default ``max_length`` to the number of a model's positions.

    Raises:
        ConfigError: If the user set a ``max_length`` beyond it.
    """
    if limit is None or part.max_length <= limit:
        return part
    if part.max_length != type(part)().max_length:
        raise ConfigError(
            f"{section}.max_length={part.max_length} is over the {limit} positions of "
            f"model.source={source}; lower --max-length"
        )
    return dataclasses.replace(part, max_length=limit)


# The model folder that a run leaves for others to load.


def model_folder(run: Path) -> Path:
    """Return the folder in which a run of ``finetune`` left its best state.

    Raises:
        ConfigError: If the run has not ended yet.
    """
    folder = run / "model"
    if not folder.is_dir():
        raise ConfigError(
            f"--run {run} has no model yet: it is written when the run ends; go on with it by "
            f"halfstep finetune classify (or lm) --resume --output-dir {run}"
        )
    return folder


def matrix_parameters(model: nn.Module) -> int:
    """Count the matrix weights that each token is multiplied with, for estimates of FLOPs.

    Embeddings do not count, as they are looked up, unless they also serve as the output layer.
    """
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    used = [p for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters()]
    multiplied = {id(p) for p in used}
    return sum(
        p.numel()
        for p in model.parameters()
        if p.dim() == 2 and (id(p) not in looked_up or id(p) in multiplied)
    )


def frozen_fingerprint(model: nn.Module) -> str:
    """Hash the frozen parameters: SHA-256 over their names, shapes, dtypes and sampled values."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            flat = parameter.detach().flatten()
            sample = flat[:: max(1, flat.numel() // 1024)].float().numpy()
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} ".encode())
            digest.update(sample.tobytes())
    return digest.hexdigest()


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder atomically: ``target`` appears only when it is complete.

    Raises:
        CheckpointError: If ``target`` is not empty, lies in ``source`` or cannot be written.
    """
    if target.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(f"{target} lies in {source}, which is copied; choose another name")
    with new_folder(target) as empty:
        shutil.copytree(source, empty, dirs_exist_ok=True)


def replace_folder(final: Path, write: Callable[[Path], object]) -> None:
    """Write a folder completely, then put it in the place of an earlier one.

    Args:
        final: The folder to replace.
        write: Makes and fills a folder that does not exist yet.

    Raises:
        CheckpointError: If it cannot be written; the earlier folder stays.
    """
    temporary = final.with_name(f".unfinished-{final.name}")
    old = final.with_name(f".old-{final.name}")
    try:
        if old.exists() and not final.exists():  # an earlier process died between the two renames
            old.rename(final)
        for left in (temporary, old):
            shutil.rmtree(left, ignore_errors=True)
        write(temporary)
        for path in [*temporary.rglob("*"), temporary]:
            sync(path)
        if final.exists():
            final.rename(old)
        temporary.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"{final} cannot be written: {error}") from error
