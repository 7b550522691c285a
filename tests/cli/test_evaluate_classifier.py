"""``halfstep evaluate`` of a classifier: the report of its run, and counts made by hand."""

from __future__ import annotations

import json
import math
import shutil
import sys
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cli.ranks import assert_one_line, assert_refused
from tests.trainer.classifiers import (
    classify_config,
    rows,
    whole_run,
    write_bert,
    write_csv,
    write_files,
)

from halfstep.trainer.tasks.classify import LoadedClassifier


def trained(folder, source):
    config = classify_config(
        write_files(folder / "data"), model__source=str(source), optimizer__learning_rate=3e-3
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)  # pictures take half of the time
        whole_run(config, folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("run"), "scratch:tiny")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return trained(folder, write_bert(folder / "encoder"))


@pytest.fixture
def evaluate(halfstep):
    return partial(halfstep, "evaluate")


@pytest.mark.parametrize(
    ("which", "batch_size"), [("finished", 1), ("finished", 100), ("pretrained", 7)]
)
def test_the_validation_texts_give_the_report_of_the_run(request, evaluate, which, batch_size):
    run = request.getfixturevalue(which)
    code, out, _ = evaluate("--run", run, "--json", "--batch-size", batch_size)
    assert code == 0
    found = json.loads(out)
    report = json.loads((run / "report.json").read_text())
    assert found["confusion"] == report["confusion"]
    assert found["accuracy"] == report["accuracy"]
    assert found["macro_f1"] == report["macro_f1"]
    assert found["loss"] == pytest.approx(report["loss"], rel=1e-5)  # other batches pad otherwise
    assert found["precision"] == report["precision"]


@pytest.mark.parametrize("which", ["finished", "pretrained"])
def test_other_texts_are_counted_as_by_hand(request, tmp_path, evaluate, which):
    run = request.getfixturevalue(which)
    texts = rows(45, seed=11)
    write_csv(tmp_path / "test.csv", texts)
    predictor = LoadedClassifier(run / "model", "fp32", torch.device("cpu"))
    table = predictor.probabilities([text for text, _ in texts], 5)
    confusion = [[0] * 3 for _ in range(3)]
    loss = 0.0
    for (_, label), row in zip(texts, table, strict=True):
        true = predictor.labels.index(label)
        confusion[true][int(row.argmax())] += 1
        loss -= math.log(row[true]) / len(texts)
    code, out, _ = evaluate("--run", run, "--data", tmp_path / "test.csv", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["confusion"] == confusion
    assert found["examples"] == 45
    assert found["accuracy"] == sum(confusion[i][i] for i in range(3)) / 45
    assert found["labels"] == list(predictor.labels)
    assert found["loss"] == pytest.approx(loss, rel=1e-5)


def test_the_text_holds_the_table_and_the_precision(finished, evaluate):
    code, out, _ = evaluate("--run", finished, "--precision", "bf16-mixed")
    assert code == 0
    first, *table = out.rstrip("\n").split("\n")
    assert first.startswith("loss ")
    assert first.endswith(" in bf16-mixed")
    report = (finished / "report.txt").read_text().rstrip("\n").split("\n")
    assert len(table) == len(report)
    assert table[0].startswith("accuracy ")
    assert table[1:3] == report[1:3]


def test_some_batches_only(finished, tmp_path, evaluate):
    write_csv(tmp_path / "test.csv", rows(45, seed=11))
    words = ["--run", finished, "--data", tmp_path / "test.csv", "--batch-size", 5, "--json"]
    code, out, _ = evaluate(*words, "--max-batches", 2)
    assert code == 0
    assert json.loads(out)["examples"] == 10


def test_labels_that_the_classifier_does_not_know(finished, tmp_path, evaluate):
    write_csv(tmp_path / "test.csv", [*rows(5, seed=11), ("glad sun", "boredom")])
    assert_refused(
        evaluate("--run", finished, "--data", tmp_path / "test.csv"),
        "test.csv",
        "unknown label 'boredom'",
        "the classifier has no such class",
    )


def test_data_that_is_not_there(finished, tmp_path, evaluate):
    assert_refused(evaluate("--run", finished, "--data", tmp_path / "no.csv"), "no.csv")


def test_outputs_beyond_the_format_are_no_score(finished, tmp_path, evaluate):
    shutil.copytree(finished, tmp_path / "r")
    file = tmp_path / "r" / "model" / "model.safetensors"
    weights = {name: torch.full_like(tensor, 1e38) for name, tensor in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    for precision, remedy in (("fp32", "earlier state"), ("bf16-mixed", "take --precision fp32")):
        code, out, err = evaluate("--run", tmp_path / "r", "--precision", precision)
        assert code == 3, err
        assert out == ""
        assert f"not finite in {precision}: " in err
        assert remedy in err


def test_a_run_that_has_not_ended(finished, tmp_path, evaluate):
    shutil.copytree(finished, tmp_path / "r")
    shutil.rmtree(tmp_path / "r" / "model")
    assert_refused(evaluate("--run", tmp_path / "r"), "has no model yet", "--resume")


def test_columns_and_empty_texts_of_a_test_set(finished, tmp_path, evaluate):
    test = tmp_path / "test.csv"
    pairs = rows(9, seed=11)
    words = ["--run", finished, "--data", test]
    write_csv(test, [*pairs, (" ", pairs[0][1])])
    assert_refused(evaluate(*words), "test.csv:11: the text is empty; remove it")
    write_csv(test, pairs)
    code, out, err = evaluate(*words, "--json")
    assert (code, json.loads(out)["examples"]) == (0, 9), err
    test.write_text(test.read_text(encoding="utf-8").replace("text,label", "a,b"), encoding="utf-8")
    assert evaluate(*words)[0] == 2
    named = evaluate(*words, "--text-column", "a", "--label-column", "b", "--json")
    assert json.loads(named[1]) == json.loads(out)


def test_texts_that_are_cut_are_counted(finished, tmp_path, evaluate):
    write_csv(tmp_path / "test.csv", [("glad sun " * 500, "joy"), ("glad sun", "joy")])
    code, _, err = evaluate("--run", finished, "--data", tmp_path / "test.csv")
    assert code == 0
    assert "note: 1 texts were cut at " in err


def tiny_run(folder, files, **changes):
    whole_run(classify_config(files, run__max_steps=2, run__eval_every=2, **changes), folder)
    return folder


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


def test_validation_texts_keep_the_classes_of_the_run(quick, tmp_path, evaluate):
    files = write_files(tmp_path / "data")
    run = tiny_run(tmp_path / "run", files)
    before = json.loads(evaluate("--run", run, "--json")[1])
    files[0].unlink()  # what it learned from is not needed
    assert json.loads(evaluate("--run", run, "--json")[1]) == before
    text = files[1].read_text(encoding="utf-8")
    files[1].write_text(text.replace(",joy", ",zjoy"), encoding="utf-8")
    code, out, err = evaluate("--run", run)
    assert (code, out) == (2, "")
    assert_one_line(err, "dev.csv", "unknown label 'zjoy'")


def test_validation_texts_that_were_split_off_must_be_the_same(quick, tmp_path, evaluate):
    files = write_files(tmp_path / "data")
    run = tiny_run(tmp_path / "run", files, data__dev=None)
    found = json.loads(evaluate("--run", run, "--json")[1])
    report = json.loads((run / "report.json").read_text())
    assert found["confusion"] == report["confusion"]
    with files[0].open("a", encoding="utf-8") as file:
        file.write("glad sun,joy\n")
    assert_refused(evaluate("--run", run), "train.csv has changed since the run", "--data")
    assert evaluate("--run", run, "--data", files[0])[0] == 0
    (run / "report.json").unlink()
    assert_refused(evaluate("--run", run), "report.json is missing or damaged")
