"""Lists the public names of halfstep.distributed; each is loaded on first use."""

from .comm_hook import sum_hook as sum_hook
from .consistency import check_agreement as check_agreement
from .data.reducer import (
    DataParallel as DataParallel,
    GradientReducer as GradientReducer,
    broadcast_ as broadcast_,
)
from .layout import Layout as Layout
from .plan import ParallelPlan as ParallelPlan, plan_of as plan_of
from .select import choose_strategy as choose_strategy, decide as decide
from .shard import FullySharded as FullySharded
from .strategy import Strategy as Strategy
from .tensor.tensor_parallel import TensorParallel as TensorParallel
from .world import World as World, open_world as open_world
