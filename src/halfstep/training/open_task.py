"""From a configuration to its task."""

from __future__ import annotations

from halfstep.distributed.layout import Layout
from halfstep.distributed.world import World
from halfstep.training.classify_task import ClassifyTask
from halfstep.training.config import TrainConfig
from halfstep.training.finetune_config import ClassifyConfig, LMConfig
from halfstep.training.lm_task import LMTask
from halfstep.training.run_config import BaseConfig
from halfstep.training.task import Progress, Task
from halfstep.training.text_task import TextTask


def open_task(
    config: BaseConfig, layout: Layout, world: World, progress: Progress, resuming: bool
) -> Task:
    """Prepare the data and build the model of a configuration's task; all ranks together.

    Args:
        config: Of the run.
        layout: How the ranks will share the work.
        world: The ranks.
        progress: Called while data is prepared.
        resuming: Weights will be restored, so that none need be loaded where they are not frozen.

    Raises:
        HalfstepError: For data, a model or a layout that cannot be used.
    """
    match config:
        case TrainConfig():
            return TextTask(config, layout, world, progress, resuming)
        case ClassifyConfig():
            return ClassifyTask(config, world, progress)
        case LMConfig():
            return LMTask(config, world, progress)
        case _:
            raise AssertionError(type(config))
