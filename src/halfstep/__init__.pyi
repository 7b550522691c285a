"""The public names of halfstep; each is loaded on first use."""

from .errors import (
    CheckpointError as CheckpointError,
    ConfigError as ConfigError,
    DataError as DataError,
    HalfstepError as HalfstepError,
    NonFiniteError as NonFiniteError,
    PrecisionError as PrecisionError,
)
from .formats import FloatFormat as FloatFormat
from .precision.autocast import autocast as autocast, support as support
from .precision.explain import explain as explain
from .precision.loss_scale import LossScaleConfig as LossScaleConfig
from .precision.parse import parse_policy as parse_policy
from .precision.policy import POLICIES as POLICIES, PrecisionPolicy as PrecisionPolicy
from .precision.result import StepResult as StepResult
from .precision.simulate import simulated_fp16 as simulated_fp16
from .precision.step import Precision as Precision

__version__: str
