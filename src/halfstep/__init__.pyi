"""The public names of halfstep; each is loaded on first use."""

from . import distributed as distributed, optim as optim
from .diagnostics.lost_updates.meter import LostUpdateMeter as LostUpdateMeter
from .diagnostics.memory.estimate import estimate as estimate
from .diagnostics.memory.saved import MemoryMeter as MemoryMeter
from .diagnostics.memory.table import Memory as Memory
from .diagnostics.nonfinite.cause import Cause as Cause
from .diagnostics.nonfinite.first_cause import first_cause as first_cause
from .diagnostics.nonfinite.trace import trace_nonfinite as trace_nonfinite
from .diagnostics.recording.recorder import Recorder as Recorder
from .diagnostics.sensitivity import Sensitivity as Sensitivity, sensitivity as sensitivity
from .diagnostics.statistics.numerics import (
    StepNumerics as StepNumerics,
    load_numerics as load_numerics,
)
from .diagnostics.statistics.values import TensorStatistics as TensorStatistics
from .diagnostics.statistics.watch import watch as watch
from .diagnostics.statistics.what_if import what_if as what_if
from .diagnostics.trace import Ran as Ran, trace as trace
from .errors import (
    CheckpointError as CheckpointError,
    ConfigError as ConfigError,
    DataError as DataError,
    HalfstepError as HalfstepError,
    NonFiniteError as NonFiniteError,
    PrecisionError as PrecisionError,
    SpikeError as SpikeError,
)
from .formats import (
    BF16 as BF16,
    E2M1 as E2M1,
    E4M3FN as E4M3FN,
    E5M2 as E5M2,
    FP8_BLOCK as FP8_BLOCK,
    FP8_TENSOR as FP8_TENSOR,
    FP16 as FP16,
    FP32 as FP32,
    MXFP4 as MXFP4,
    MXFP8 as MXFP8,
    NVFP4 as NVFP4,
    TF32 as TF32,
    BlockFormat as BlockFormat,
    FloatFormat as FloatFormat,
)
from .integrations.grad_scaler import GradScaler as GradScaler
from .precision.after_step import EMA as EMA
from .precision.agreement import (
    ManyRanks as ManyRanks,
    check_replicas as check_replicas,
)
from .precision.casting.autocast import support as support
from .precision.casting.cast import autocast as autocast
from .precision.casting.masks import mask_value as mask_value
from .precision.explain import explain as explain, explain_model as explain_model
from .precision.policy.policy import POLICIES as POLICIES, PrecisionPolicy as PrecisionPolicy
from .precision.policy.spelling import parse_policy as parse_policy
from .precision.result import StepResult as StepResult
from .precision.scaling.gradients import OneRank as OneRank, Ranks as Ranks
from .precision.scaling.loss_scale import LossScaleConfig as LossScaleConfig
from .precision.step import Precision as Precision
from .trainer.trainer import Trainer as Trainer, TrainResult as TrainResult

__version__: str
