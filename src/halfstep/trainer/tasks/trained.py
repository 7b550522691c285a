"""Opens the trained model that a command works on, from a run or from a model folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from halfstep.trainer import part
from halfstep.trainer.config.tasks import ClassifyConfig, LMConfig, ModuleConfig, TrainConfig
from halfstep.trainer.config.use import Exporting, Use
from halfstep.trainer.run import run_config
from halfstep.trainer.tasks.task import Trained

TRAINED: Mapping[str, str] = {
    TrainConfig.TASK: "trainer.tasks.text_model:TrainedText",
    ClassifyConfig.TASK: "trainer.tasks.classify:TrainedClassifier",
    LMConfig.TASK: "trainer.tasks.lm:TrainedLM",
    ModuleConfig.TASK: "trainer.tasks.task:Trained",
}
"""Name of a task to the place of the class of the models that its runs leave."""


def open_trained(use: Use | Exporting, folder_task: str = "") -> Trained:
    """Find the trained model that ``use`` names, without loading it yet.

    Args:
        use: Names a run or a model folder.
        folder_task: The task whose models a model folder holds.

    Raises:
        ConfigError: If the named folder holds no run.
    """
    if not use.run and isinstance(use, Use):
        path, config, task = Path(use.model), None, folder_task
    else:
        path = Path(use.run)
        config = run_config(path)
        task = config.TASK
    found: Trained = part(TRAINED[task])(path, config)
    return found
