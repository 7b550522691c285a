"""``halfstep predict`` and ``evaluate`` of a classifier: against a softmax and counts by hand."""

from __future__ import annotations

import io
import json
import math
import shutil
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cli.ranks import assert_refused
from tests.trainer.classifiers import (
    classify_config,
    opened,
    rows,
    whole_run,
    write_bert,
    write_csv,
    write_files,
)

NAMES = ("joy", "sad", "怒")
TEXTS = [text for text, _ in rows(50, seed=4)]
UNICODE = ['骂 "气", 火', "smile 😀 tab\there", "e\u0301 <b> \\n & \u2028 end", "  glad  "]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run from scratch, and one of a pretrained encoder whose texts are cut at 12 tokens."""
    folder = tmp_path_factory.mktemp("runs")
    files = write_files(folder / "data")
    bert = str(write_bert(folder / "encoder"))
    for name, source, length in (("scratch", "scratch:tiny", 128), ("bert", bert, 12)):
        config = classify_config(
            files, model__source=source, model__max_length=length,
            optimizer__learning_rate=3e-3,
        )  # fmt: skip
        whole_run(config, folder / name)
    return {"scratch": folder / "scratch", "bert": folder / "bert"}


@pytest.fixture
def predict(halfstep, monkeypatch):
    def call(*words, stdin=b""):
        stream = io.TextIOWrapper(io.BytesIO(stdin), encoding="ascii")  # whatever the locale
        monkeypatch.setattr(sys, "stdin", stream)
        return halfstep("predict", "--device", "cpu", *words)

    return call


def objects(text):
    return [json.loads(line) for line in text.split("\n")[:-1]]


# --- predictions ---


@pytest.mark.parametrize(("kind", "batch_size"), [("scratch", 1), ("bert", 7)])
def test_probabilities_are_a_softmax(runs, kind, batch_size):
    transformers = pytest.importorskip("transformers")
    folder = runs[kind] / "model"
    predictor = opened(runs[kind])
    table = predictor.probabilities(TEXTS, batch_size)
    assert table.shape == (50, 3)
    assert table.dtype == np.float64
    assert np.abs(table.sum(axis=1) - 1).max() < 1e-12  # three fp64 quotients
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():  # one by one, without padding
        cut = {"truncation": True, "max_length": predictor.tokenizer.max_length}  # as in training
        logits = [model(**tokenizer([t], return_tensors="pt", **cut)).logits[0] for t in TEXTS[:12]]
    expected = torch.stack(logits).double().softmax(dim=-1).numpy()
    # fp32 logits below 10, padded or not: some ulp of 1e-6 each
    np.testing.assert_allclose(table[:12], expected, rtol=2e-5, atol=1e-7)


def test_order_is_kept_and_texts_are_read_as_they_are_needed(runs):
    predictor = opened(runs["bert"])
    table = predictor.probabilities(TEXTS, 3)
    many = TEXTS * 5  # more than are sorted together
    found = list(predictor.predict(iter(many), 3))
    assert [text for text, _, _ in found] == many
    for i, (_, label, probability) in enumerate(found):
        row = table[i % 50]
        assert label == NAMES[row.argmax()]
        # other neighbours, other padding
        assert probability == pytest.approx(row.max(), rel=1e-5)
    assert len({round(probability, 4) for _, _, probability in found}) > 9  # so order shows
    assert list(predictor.predict([], 3)) == []
    read = []

    def endless():
        while True:
            read.append(1)
            yield "glad sun"

    assert next(predictor.predict(endless(), 2))[0] == "glad sun"
    assert len(read) <= 64


def test_a_file_and_a_stream_give_every_text_unchanged(runs, tmp_path, predict):
    file, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    file.write_text("".join(f"{line}\n" for line in UNICODE), "utf-8")
    expected = list(opened(runs["scratch"]).predict(UNICODE, 64))
    done = predict("--run", runs["scratch"], "--input", file, "--output", out)
    assert done == (0, f"Labels of 4 texts written: {out}\n", "")
    written = out.read_text("utf-8")
    assert "骂" in written
    found = objects(written)
    assert [list(each) for each in found] == [["text", "label", "probability"]] * 4
    assert [tuple(each.values()) for each in found] == expected
    assert {p.name for p in tmp_path.iterdir()} == {file.name, "out.jsonl"}
    given = "".join(f"{json.dumps({'text': t}, ensure_ascii=False)}\n\n" for t in UNICODE)
    run = ["--run", runs["scratch"], "--input", "-"]
    assert predict(*run, stdin=given.encode()) == (0, written, "")
    assert objects(predict(*run, stdin="气 火\r\n".encode())[1])[0]["text"] == "气 火"


def test_output_is_written_whole_or_not_at_all(runs, tmp_path, predict):
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [json.dumps({"text": t}) for t in TEXTS]
    lines[40] = '{"text": ""}'
    file.write_text("\n".join(lines) + "\n", "utf-8")
    words = ("--run", runs["scratch"], "--input", file, "--output", out, "--batch-size", 1)
    assert_refused(predict(*words), file, "41", "empty")
    assert {p.name for p in tmp_path.iterdir()} == {"in.jsonl"}
    out.write_text("an earlier one")
    assert predict(*words)[0] == 2
    assert out.read_text() == "an earlier one"


# --- evaluation ---


def test_other_texts_are_counted_as_by_hand(runs, tmp_path, halfstep):
    run, texts = runs["scratch"], rows(45, seed=11)
    file = write_csv(tmp_path / "test.csv", texts)
    predictor = opened(run)
    table = predictor.probabilities([text for text, _ in texts], 5)
    confusion = [[0] * 3 for _ in range(3)]
    loss = 0.0
    for (_, label), row in zip(texts, table, strict=True):
        true = predictor.labels.index(label)
        confusion[true][int(row.argmax())] += 1
        loss -= math.log(row[true]) / len(texts)
    words = ["evaluate", "--run", run, "--data", file]
    found = json.loads(halfstep(*words, "--json")[1])
    assert found["confusion"] == confusion
    assert found["examples"] == 45
    assert found["labels"] == list(predictor.labels)
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    some = halfstep(*words, "--json", "--batch-size", 5, "--max-batches", 2)
    assert json.loads(some[1])["examples"] == 10
    first, *table = halfstep(*words, "--precision", "bf16-mixed")[1].rstrip("\n").split("\n")
    assert first.startswith("loss ")
    assert first.endswith(" in bf16-mixed")
    assert len(table) == len((run / "report.txt").read_text().rstrip("\n").split("\n"))
    # texts that cannot be counted, a class that the model does not know
    write_csv(file, [*texts[:9], (" ", "joy")])
    assert_refused(halfstep(*words), "test.csv:11: the text must be a string, got an empty one")
    write_csv(file, [*texts[:9], ("glad sun", "boredom")])
    assert_refused(halfstep(*words), "unknown label 'boredom' (allowed: 'joy', 'sad', '怒')")


def test_outputs_beyond_the_format_are_no_score(runs, tmp_path, predict, halfstep):
    shutil.copytree(runs["scratch"], tmp_path / "r")
    file = tmp_path / "r" / "model" / "model.safetensors"
    weights = {name: torch.full_like(tensor, 1e38) for name, tensor in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    (file.parent / "manifest.json").unlink()  # it was changed on purpose
    run = ["--run", tmp_path / "r", "--precision", "bf16-mixed"]
    for code, out, err in (
        halfstep("evaluate", *run), predict(*run, "--input", "-", stdin=b"glad\n"),
    ):  # fmt: skip
        assert (code, out) == (3, ""), err
        assert "not finite in bf16-mixed: take --precision fp32" in err


def test_validation_texts_must_be_those_of_the_run(tmp_path, halfstep):
    files = write_files(tmp_path / "data")
    for name, changes in (("given", {}), ("drawn", {"data__dev": None})):
        config = classify_config(files, run__max_steps=2, run__eval_every=2, **changes)
        whole_run(config, tmp_path / name)
    given, drawn = (["evaluate", "--run", tmp_path / name] for name in ("given", "drawn"))
    found = json.loads(halfstep(*drawn, "--json")[1])
    report = json.loads((tmp_path / "drawn" / "report.json").read_text())
    assert found["confusion"] == report["confusion"]
    with files[0].open("a", encoding="utf-8") as file:
        file.write("glad sun,joy\n")
    assert_refused(halfstep(*drawn), "train.csv has changed since the run", "--data")
    assert halfstep(*drawn, "--data", files[0])[0] == 0
    before = halfstep(*given, "--json")
    files[0].unlink()  # what it learned from is not needed
    assert halfstep(*given, "--json")[:2] == before[:2]
    text = files[1].read_text(encoding="utf-8")
    files[1].write_text(text.replace(",joy", ",zjoy"), encoding="utf-8")
    assert_refused(halfstep(*given), "dev.csv", "unknown label 'zjoy'")
