"""A run's folder for a loop that is not halfstep's own: what the trainer writes, in its formats.

::

    config.toml     the precision
    metrics.jsonl   one line per step: loss, norm, scale, whether it was applied and why not

``halfstep report`` reads the folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Self

import torch.distributed as dist

from halfstep.diagnostics.metrics import METRICS, Record, append_line, keep_lines
from halfstep.errors import CheckpointError, NonFiniteError, PrecisionError, SpikeError
from halfstep.precision.border import require
from halfstep.precision.result import StepResult
from halfstep.precision.scaling.gradients import Judged
from halfstep.precision.step import Precision


class Recorder:
    """Writes what the trainer writes for a loop of one's own: metrics.

    What a step computes is recorded by :class:`halfstep.record`.

    Example:
        >>> import tempfile, torch, halfstep
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> precision = halfstep.Precision("fp32", model, optimizer, on_nonfinite="skip:9")
        >>> folder = tempfile.mkdtemp()
        >>> with Recorder(precision, folder) as recorder:
        ...     for x in (torch.ones(2, 4), torch.full((2, 4), torch.nan)):
        ...         with precision.autocast():
        ...             loss = model(x).square().mean()
        ...         result = recorder.step(precision.step(loss))
        >>> result.applied, result.reason
        (False, 'nonfinite_loss')
    """

    def __init__(self, precision: Precision, folder: Path | str) -> None:
        """Begin, or go on, in a folder.

        Args:
            precision: What takes the steps. After a resume load its state first, so that lines of
                steps that run again are dropped.
            folder: The run's folder; made if absent. With several ranks all share it.

        Raises:
            PrecisionError: If ``precision`` is not a Precision, or records already.
            CheckpointError: If the folder cannot be written.
        """
        self._precision = require(
            precision, Precision, "Recorder(precision)", "a halfstep.Precision"
        )
        if precision.outcome.on_stop is not None:
            raise PrecisionError(
                "this Precision has a Recorder already; write recorder.close() first"
            )
        self._written = -1  # the last step with a line
        self._metrics: Path | None = None
        if not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
            self._metrics = self._begun(Path(folder))
        precision.outcome.on_stop = self._stop

    def _begun(self, folder: Path) -> Path:
        """Begin the metrics, without the lines of steps that a resume takes again."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            policy = f"precision = {json.dumps(str(self._precision.policy))}\n"
            (folder / "config.toml").write_text(policy, encoding="utf-8")
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be written: {error}") from error
        keep_lines(folder / METRICS, self._step)
        return folder / METRICS

    @property
    def _step(self) -> int:
        """Steps taken, skipped ones included."""
        return self._precision.progress.steps

    def step(self, result: StepResult) -> StepResult:
        """Write the step's line; returns the result, so that it can stand around the step."""
        self._write(Record.of(self._step, result))
        return result

    def _stop(self, judged: Judged, error: NonFiniteError | SpikeError) -> None:
        """Write the line of a step that raises an error, whoever catches that."""
        self._write(
            Record(
                step=self._step,
                applied=False,
                loss=judged.loss,
                grad_norm=judged.norm,
                skip_reason=str(judged.reason),
            )
        )

    def _write(self, record: Record) -> None:
        if self._metrics is not None and record.step > self._written:
            append_line(self._metrics, record.line())
            self._written = record.step

    def close(self) -> None:
        """Write no more lines, and let the Precision have another Recorder."""
        self._precision.outcome.on_stop = None
        self._metrics = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
