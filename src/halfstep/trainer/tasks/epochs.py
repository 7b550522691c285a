"""What the tasks with epochs share: dealing out examples, models from the hub, and ``model/``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import nn

from halfstep.errors import ConfigError
from halfstep.trainer.checkpoint import Exported
from halfstep.trainer.config.tasks import FinetuneConfig
from halfstep.trainer.data.batches import EpochBatches, Indices, evaluation_shares
from halfstep.trainer.models.pretrained import Pretrained, PretrainedTokenizer, new_folder
from halfstep.trainer.step import Judge
from halfstep.trainer.tasks.task import Task, shortened


class EpochTask(Task):
    """A task with epochs, each of which has every example once."""

    config: FinetuneConfig

    def deal(self, config: FinetuneConfig, lengths: npt.ArrayLike) -> None:
        """Deal the examples out to steps by their lengths, and resolve epochs into steps."""
        run = config.run
        self._lengths = np.asarray(lengths)
        self.batches = EpochBatches(self._lengths, run.batch_size, run.seed)
        self.smallest_batch = len(self._lengths) // self.batches.steps_per_epoch
        self.config = config.resolved(self.batches.steps_per_epoch)
        self.notes += shortened(config.schedule.warmup_steps, self.config.schedule.warmup_steps)

    def shares(self, lengths: Indices, judge: Judge) -> Iterator[tuple[Indices, bool]]:
        """Deal the batches of an evaluation out to this rank; see :func:`evaluation_shares`."""
        run = self.config.run
        size, most = run.batch_size // run.grad_accum, run.eval_batches * run.grad_accum
        return evaluation_shares(lengths, size, most, judge.rank, judge.ranks)

    def batch_size(self, step: int) -> int:
        """Return the number of a step's examples; steps of an epoch differ by one at most."""
        return len(self.batches.indices(step))

    def tokens(self, step: int) -> int:
        """Return the tokens of the step's examples, special tokens included."""
        return int(self._lengths[self.batches.indices(step)].sum())


class FinetuneTask(EpochTask):
    """A task with a model and a tokenizer of ``transformers``."""

    model: Pretrained
    tokenizer: PretrainedTokenizer
    keeps_best = True
    lengths_vary = True
    leaves = "model"
    """What the run leaves, in a word."""

    def save(self, folder: Path) -> None:
        """Write the tokenizer to ``folder/tokenizer``."""
        self.tokenizer.save(folder / "tokenizer")

    def finish(self, folder: Path, exported: Callable[[], Exported]) -> str:
        """Write the best state to ``model/``, for ``transformers`` and the commands to load."""
        weights = exported().weights
        with new_folder(folder / "model", replace=True) as empty:
            self.model.save_(empty, weights)
            self.tokenizer.save(empty)
            self.model.require_saved(empty, weights)
        return f"{self.leaves} in {folder / 'model'}"


def model_folder(run: Path, command: str) -> Path:
    """Return the folder in which an ended run of ``finetune`` left its best state."""
    folder = run / "model"
    if not folder.is_dir():
        raise ConfigError(
            f"--run {run} has no model yet: it is written when the run ends; go on with it by "
            f"halfstep {command} --resume --output-dir {run}"
        )
    return folder


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
