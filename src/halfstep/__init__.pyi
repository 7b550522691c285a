"""The public names of halfstep; each is loaded on first use."""

from . import distributed as distributed, formats as formats, optim as optim
from .diagnostics.contract import contract as contract
from .diagnostics.health import LayerHealth as LayerHealth
from .diagnostics.lost_updates import LostUpdateMeter as LostUpdateMeter
from .diagnostics.memory import MemoryMeter as MemoryMeter
from .diagnostics.nonfinite.cause import Cause as Cause
from .diagnostics.nonfinite.first_cause import (
    first_cause as first_cause,
    trace_nonfinite as trace_nonfinite,
)
from .diagnostics.recorder import Recorder as Recorder
from .diagnostics.records.compare import compare as compare
from .diagnostics.records.recording import record as record
from .diagnostics.statistics.watch import (
    load_numerics as load_numerics,
    watch as watch,
    what_if as what_if,
)
from .diagnostics.trace import trace as trace
from .diagnostics.xray import xray as xray
from .errors import (
    CheckpointError as CheckpointError,
    ConfigError as ConfigError,
    HalfstepError as HalfstepError,
    NonFiniteError as NonFiniteError,
    PrecisionError as PrecisionError,
    SpikeError as SpikeError,
)
from .integrations.grad_scaler import GradScaler as GradScaler
from .precision.agreement import ManyRanks as ManyRanks
from .precision.casting.autocast import support as support
from .precision.casting.cast import autocast as autocast
from .precision.ema import EMA as EMA
from .precision.explain import explain as explain
from .precision.loss_head import linear_cross_entropy as linear_cross_entropy
from .precision.policy.policy import POLICIES as POLICIES, PrecisionPolicy as PrecisionPolicy
from .precision.policy.spelling import parse_policy as parse_policy
from .precision.result import StepResult as StepResult
from .precision.scaling.gradients import OneRank as OneRank
from .precision.scaling.loss_scale import LossScaleConfig as LossScaleConfig
from .precision.scaling.pipeline import Stages as Stages
from .precision.step import Precision as Precision
from .trainer.trainer import Trainer as Trainer, TrainResult as TrainResult

__version__: str
