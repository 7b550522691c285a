"""Opens the trained model that a command works on, from a run or from a model folder."""

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
"""Name of a task to the class of the models that its runs leave."""


def open_trained(use: Use | Exporting, folder_task: str = "") -> Trained:
    """Find the trained model that ``use`` names, without loading it yet.

    Args:
        use: Names a run or a model folder.
        folder_task: The task whose models a model folder holds.

    Raises:
        ConfigError: If the named folder holds no run.
    """
    if not use.run and isinstance(use, Use):
        return TRAINED[folder_task](Path(use.model))
    path = Path(use.run)
    config = run_config(path)
    return TRAINED[config.TASK](path, config)
