"""The classifier that a run of ``halfstep finetune classify`` left: opened, and evaluated."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from halfstep.cli.console import write_out
from halfstep.data.labelled import read_known, read_labelled
from halfstep.training.classification_report import report_table, report_values
from halfstep.training.environment import choose_device
from halfstep.training.finetune_config import ClassifyConfig
from halfstep.training.predict import Predictor
from halfstep.training.tuned_lm import model_folder


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
    if arguments.data:
        texts, note = read_known(tuple(arguments.data), config.data, predictor.labels, "--data")
        notes = [note] if note else []
    else:
        data = read_labelled(config.data, config.run.seed)
        texts, notes = data.dev, list(data.notes)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    found = predictor.evaluate(texts, arguments.batch_size, arguments.max_batches)
    precision = str(predictor.policy)
    if arguments.json:
        values = {"loss": found.loss, "examples": found.targets, "precision": precision}
        values |= report_values(found.confusion, predictor.labels)
        write_out(json.dumps(values, ensure_ascii=False))
        return
    write_out(f"{found.text.removeprefix('validation ')} in {precision}\n")
    write_out(report_table(found.confusion, predictor.labels))
