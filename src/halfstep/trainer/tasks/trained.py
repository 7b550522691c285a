"""The trained model that a command works on: of a run, by its task, or of a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from halfstep.trainer.config.tasks import ClassifyConfig, LMConfig, ModuleConfig, TrainConfig
from halfstep.trainer.config.use import Exporting, Use
from halfstep.trainer.run.folder import run_config
from halfstep.trainer.tasks.classify import TrainedClassifier
from halfstep.trainer.tasks.lm import TrainedLM
from halfstep.trainer.tasks.task import Trained
from halfstep.trainer.tasks.text_model import TrainedText

TRAINED: Mapping[str, type[Trained]] = {
    TrainConfig.TASK: TrainedText,
    ClassifyConfig.TASK: TrainedClassifier,
    LMConfig.TASK: TrainedLM,
    ModuleConfig.TASK: Trained,
}
"""A task to what its runs leave."""


def open_trained(use: Use | Exporting, folder_task: str = "") -> Trained:
    """What ``use`` names, without loading it yet.

    Args:
        use: With a run, or the folder of a model.
        folder_task: The task whose models such a folder holds.

    Raises:
        ConfigError: If there is no run.
    """
    if not use.run and isinstance(use, Use):
        return TRAINED[folder_task](Path(use.model))
    path = Path(use.run)
    config = run_config(path)
    return TRAINED[config.TASK](path, config)
