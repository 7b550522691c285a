"""Run folders as a trainer leaves them, written line by line."""

import json

import pytest

CONFIG = """task = "{task}"
name = "gpt-tiny"
precision = "{precision}"
[run]
max_steps = {steps}
[model]
n_layer = 4
vocab_size = {vocabulary}
"""
STOP = {"applied": False, "skipped_total": None}  # an error ended the run: no result has counts


def line(step, **values):
    """A line of metrics.jsonl of a step that went well, but for ``values``."""
    made = {"step": step, "applied": True, "loss": 6.0 - 2.0 * step / (step + 20), "grad_norm": 1.0}
    made |= {"loss_scale": 1.0, "skipped_total": 0, "tokens_per_second": 1000.0}
    return {**made, "peak_memory_bytes": 5e8, **values}


@pytest.fixture
def folder(tmp_path):
    """Writes a run folder; returns its path."""

    def write(
        lines, name="run", precision="bf16-mixed", steps=None, environment=None, task="pretrain",
        vocabulary=0,
    ):  # fmt: skip
        path = tmp_path / name
        path.mkdir(parents=True)
        planned = len(lines) if steps is None else steps
        text = CONFIG.format(precision=precision, steps=planned, task=task, vocabulary=vocabulary)
        (path / "config.toml").write_text(text, encoding="utf-8")
        (path / "env.json").write_text(json.dumps(environment or {"cpu": {"name": "A CPU"}}))
        metrics = "".join(json.dumps(each) + "\n" for each in lines)
        (path / "metrics.jsonl").write_text(metrics, encoding="utf-8")
        return path

    return write
