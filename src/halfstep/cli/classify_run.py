"""The classifier that a run of ``halfstep finetune classify`` left: opened, and evaluated."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from halfstep.cli.console import write_out
from halfstep.errors import CheckpointError, ConfigError
from halfstep.trainer.config.finetune import ClassifyConfig
from halfstep.trainer.data.labelled.config import LabelledTexts
from halfstep.trainer.data.labelled.labelled import read_known, read_labelled
from halfstep.trainer.environment import choose_device
from halfstep.trainer.tasks.predict import Predictor
from halfstep.trainer.tasks.scores import report_table, report_values
from halfstep.trainer.tasks.tuned_lm import model_folder


def open_run(arguments: argparse.Namespace, config: ClassifyConfig) -> Predictor:
    """The best state of ``--run``, in the precision that was asked for or the run's.

    Raises:
        HalfstepError: The run has not ended, a file is damaged, or the policy cannot be honoured.
    """
    return Predictor(
        model_folder(Path(arguments.run)),
        arguments.precision or config.precision,
        choose_device(arguments.device),
        max_length=config.model.max_length,
        trust_remote_code=arguments.trust_remote_code,
    )


def evaluate(arguments: argparse.Namespace, config: ClassifyConfig) -> None:
    """Print the report on the run's validation texts, or on others."""
    predictor = open_run(arguments, config)
    texts, notes = _texts(arguments, config, predictor.labels)
    found = predictor.evaluate(texts, arguments.batch_size, arguments.max_batches)
    if predictor.tokenizer.truncated:
        notes.append(cut_note(predictor))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    precision = str(predictor.policy)
    if arguments.json:
        values = {"loss": found.loss, "examples": found.targets, "precision": precision}
        values |= report_values(found.confusion, predictor.labels)
        write_out(json.dumps(values, ensure_ascii=False))
        return
    write_out(f"loss {found.loss:.4f}, macro F1 {found.macro_f1:.4f} in {precision}")
    write_out(report_table(found.confusion, predictor.labels))


def cut_note(predictor: Predictor) -> str:
    """How many texts were too long."""
    tokenizer = predictor.tokenizer
    return f"{tokenizer.truncated} texts were cut at {tokenizer.max_length} tokens"


def _texts(
    arguments: argparse.Namespace, config: ClassifyConfig, labels: tuple[str, ...]
) -> tuple[LabelledTexts, list[str]]:
    """``--data``, or what the run was validated on, in the classifier's numbers; and notes."""
    given = {"text_column": arguments.text_column, "label_column": arguments.label_column}
    changes = {key: value for key, value in given.items() if value is not None}
    drop = arguments.drop_empty or config.data.drop_empty
    data = dataclasses.replace(config.data, drop_empty=drop, **changes)
    if arguments.data or data.dev:
        inputs = tuple(arguments.data) if arguments.data else data.dev
        role = "test" if arguments.data else "dev"
        texts, note = read_known(inputs, data, labels, role)
        return texts, [note] if note else []
    whole = read_labelled(data, config.run.seed)
    report = Path(arguments.run) / "report.json"
    try:
        before = json.loads(report.read_text(encoding="utf-8"))["data"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{report} is missing or damaged: {error!r}") from error
    if whole.sha256 != before:
        raise ConfigError(
            f"{', '.join(data.train)} has changed since the run, so the validation texts drawn "
            "from it would be others; put it back, or give --data"
        )
    return whole.dev, list(whole.notes)
