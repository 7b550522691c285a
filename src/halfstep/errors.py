"""Every error that halfstep raises on purpose.

Each message says in one line what is wrong, what was found, what is allowed and what to do; that of
a NaN has up to four. The command line leaves with the class's ``exit_code``; a library user catches
:class:`HalfstepError` or one of its children.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any


class HalfstepError(Exception):
    """The base of all errors that halfstep raises on purpose.

    Attributes:
        exit_code: The process exit status of the command line: 2 means refused before any work was
            lost, 3 means stopped by a numerics guard, 75 that storage failed, 1 that another rank
            did.
    """

    exit_code = 2


class ConfigError(HalfstepError, ValueError):
    """A configuration key, type or combination that cannot be run; the message holds the key."""


class PrecisionError(HalfstepError, ValueError):
    """A precision policy that cannot be honoured exactly; the message names the nearest that can.

    The rule behind it: a policy is applied exactly or refused, never silently replaced.
    """


class DataError(HalfstepError, ValueError):
    """Input data that cannot be used; the message names the file and, where known, the offset."""


class CheckpointError(HalfstepError, RuntimeError):
    """A checkpoint or model folder that is damaged, foreign, incompatible or cannot be written."""


class StorageError(CheckpointError):
    """A disk or object store that failed, and still did after a few tries: a later run may pass.

    A launcher with ``--max-restarts`` starts such a run again.
    """

    exit_code = 75  # EX_TEMPFAIL of sysexits.h


class _Stopped(HalfstepError, ArithmeticError):
    """What stops a run; its text has up to four lines, of which the last says what to type."""

    exit_code = 3
    first_cause: Any = None
    to_do = typed = ""

    def __init__(self, message: str, *, cause: str, parameters: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.cause, self.parameters = cause, parameters

    def __str__(self) -> str:
        found = self.first_cause
        first, to_do = (found.summary, found.remedy) if found else ("", self.to_do)
        lines = {"first cause": first, "to do": to_do, "try": self.typed}
        return "\n".join([*self.args, *(f"{key}: {line}" for key, line in lines.items() if line)])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with the keyword arguments, so that a worker process can send it to its parent."""
        return partial(type(self), cause=self.cause, parameters=self.parameters), (str(self),)


class NonFiniteError(_Stopped):
    """A run stopped because a value overflowed or became NaN and continuing could not help.

    Attributes:
        cause: ``"forward"`` (the loss itself was NaN or inf), ``"gradients"`` (finite loss, NaN or
            inf gradients, and scaling cannot help), ``"loss_scale_floor"``, ``"skip_limit"`` or
            ``"weights"`` (a checkpoint was about to be written from them).
        parameters: Names of the parameters whose gradients were not finite, as far as known.
        first_cause: The :class:`halfstep.Cause`, where the step was run again to find it, else
            None. It does not travel to another process; the text holds its line.
    """


class SpikeError(_Stopped):
    """A run stopped because a finite loss or gradient norm was far above those of the steps before.

    Attributes:
        cause: ``"loss_spike"`` or ``"gradient_spike"``, by which of the two was further out.
    """


class PeerError(HalfstepError, RuntimeError):
    """Another rank of the run failed or is gone, so that this one cannot go on.

    The other rank's own message gives the cause; this one only names the rank, where known.
    """

    exit_code = 1


class PartedError(PrecisionError, PeerError):
    """Ranks with copies of one model hold different weights, or take different steps.

    A launcher with ``--max-restarts`` starts such a run again, from its last good checkpoint.
    """


# What torch.distributed raises when another process is gone: class names, and phrases from the
# messages of gloo, NCCL and the store. They are text because importing torch takes seconds.
_GONE_CLASSES = {"DistBackendError", "DistNetworkError", "DistStoreError"}
_GONE_WORDS = re.compile(
    r"gloo[/\\]|Connection (closed|reset|refused)|Broken pipe|pair closure|Timed out waiting|"
    r"wait timeout|Socket Timeout|NCCL (error|timeout)|failed to (recv|send)",
    re.IGNORECASE,
)


def lost_contact(error: BaseException) -> bool:
    """Whether an error in a multi-rank run is only the consequence of another rank's exit."""
    gone = isinstance(error, PeerError) or type(error).__name__ in _GONE_CLASSES
    return gone or (isinstance(error, RuntimeError) and bool(_GONE_WORDS.search(str(error))))
