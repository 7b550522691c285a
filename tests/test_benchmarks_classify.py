"""The classification benchmarks: their data, the sameness of their rows, their verdict."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
MODULES = ("docstring_data", "classify_setup", "classify_rows", "classify_methods",
           "classify_ways", "english_encoder", "common")  # fmt: skip


@pytest.fixture(scope="module")
def benchmarks():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import classify_methods
        import classify_rows
    yield {m.__name__: m for m in (classify_methods, classify_rows)}
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def job(benchmarks, tmp_path_factory):
    """Tiny model and data, and a learning rate so small that no weight changes."""
    folder = tmp_path_factory.mktemp("job")
    for name, count in (("train", 40), ("dev", 37)):
        rows = [{"text": " ".join(["ab cd", "ef"][n % 2] for _ in range(1 + n * 7 % 11)),
                 "label": "xyz"[n % 3]} for n in range(count)]  # fmt: skip
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    methods = benchmarks["classify_methods"]
    arguments = methods.parse(
        ["--train", str(folder / "train.jsonl"), "--dev", str(folder / "dev.jsonl"), "--layers",
         "1", "--width", "64", "--max-steps", "3", "--batch-size", "8", "--learning-rate", "1e-30",
         "--vocabulary", "60", "--max-length", "16"]
    )  # fmt: skip
    made, about = methods.prepare(arguments, folder)
    assert about["examples"] == {"train": 40, "dev": 37}
    label_as_guessed(made)
    return made | {"count": 3, "short": False}


def label_as_guessed(job):
    """Give dev examples the class that the untouched model finds, one text at a time; one not."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(job["model"]).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["model"])
    rows = [json.loads(line) for line in Path(job["dev"]).read_text().splitlines()]
    with torch.no_grad():
        for number, row in enumerate(rows):
            ids = tokenizer(row["text"], truncation=True, max_length=16, return_tensors="pt")
            guess = model(**ids).logits.argmax().item()
            row["label"] = job["labels"][(guess + (number == 5)) % len(job["labels"])]
    Path(job["dev"]).write_text("".join(json.dumps(row) + "\n" for row in rows))


ROWS = ("torch fp32", "dataparallel fp32", "lightning fp32", "torch fp32, length groups",
        "accelerate fp32", "trainer fp32", "accelerate fp32 + halfstep", "trainer fp32 + halfstep",
        "halfstep fp32, default malloc")  # fmt: skip


# Lightning 2.6 with torch 2.13; and advice about loaders that a set in memory does not need
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_every_row_starts_from_the_same_weights_and_counts_every_example(
    name, benchmarks, job, tmp_path, monkeypatch
):
    # a row has a process of its own; here other tests came before
    pytest.importorskip("accelerate").state.AcceleratorState._reset_state(True)
    row, *rest = benchmarks["classify_rows"].ROWS[name]
    found = row(job | {"scratch": str(tmp_path)}, *rest)
    assert found["steps"] == 3
    assert found["accuracy"] == 36 / 37  # so none was left out or counted twice
    assert found["train_seconds"] > found["seconds_after_first_step"] > 0
    assert found["evaluation_seconds"] > 0


def made(seconds, accuracy=0.5, **more):
    return {"whole_train_seconds": seconds, "evaluation_seconds": 1.0, "wall_seconds": 9.0,
            "accuracy": accuracy, "peak_bytes": 10**8, "skipped": None, "extrapolated": False,
            "processes": 1, "steps": 4, **more}  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "right", "says"),
    [
        (8.0, 0.5, "halfstep is the fastest: halfstep fp32 takes 0.80 of"),
        (20.0, 0.5, "halfstep is NOT the fastest: halfstep fp32 takes 2.00 of"),
        (8.0, 0.3, "fastest is torch fp32; less accurate: halfstep fp32"),
    ],
)
def test_verdict_says_who_is_fastest_at_equal_accuracy(benchmarks, ours, right, says):
    methods = benchmarks["classify_methods"]
    rows = {
        "torch fp32": methods.condense([made(11.0), made(10.0), {"failed": "no word"}]),
        "halfstep fp32": methods.condense([made(ours, right)]),
        "torch bf16": methods.condense([made(1.0, None, extrapolated=True)]),
        "trainer fp32": methods.condense([{"failed": "ValueError: broken"}]),
    }
    (line,) = methods.verdicts(rows, dev_examples=1000)
    assert says in line
    lines = methods.table(rows, threads=2)
    assert any("ValueError: broken" in line for line in lines)
    assert any("| ~1.0 |" in line and "| - |" in line for line in lines)
