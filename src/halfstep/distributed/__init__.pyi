"""Lists the public names of halfstep.distributed; each is loaded on first use."""

from .ddp import DataParallel as DataParallel
from .layout import Layout as Layout
from .shard import FullySharded as FullySharded
from .strategy import (
    ParallelPlan as ParallelPlan,
    Strategy as Strategy,
    choose_strategy as choose_strategy,
    plan_of as plan_of,
)
from .tensor_parallel import TensorParallel as TensorParallel
from .world import World as World, open_world as open_world
