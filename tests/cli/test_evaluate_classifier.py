"""``halfstep evaluate`` of a classifier: the report of its run, and counts made by hand."""

from __future__ import annotations

import json
import math
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.training.classifiers import (
    classify_config,
    rows,
    whole_run,
    write_bert,
    write_csv,
    write_files,
)

from halfstep.cli.main import main
from halfstep.training.predict import Predictor


@pytest.fixture(scope="module", params=["scratch", "bert"])
def finished(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    patch = pytest.MonkeyPatch()
    patch.setitem(sys.modules, "matplotlib.figure", None)  # pictures take half of the time
    patch.setattr("halfstep.training.pace.gemm_flops_per_second", lambda *_: 1e9)
    bert = request.param == "bert"
    source = str(write_bert(folder / "encoder")) if bert else "scratch:tiny"
    config = classify_config(
        write_files(folder / "data"), model__source=source, optimizer__learning_rate=3e-3
    )
    whole_run(config, folder / "run")
    patch.undo()
    return folder / "run"


@pytest.fixture
def halfstep(capsys):
    """Runs ``halfstep evaluate`` in this process: exit code, stdout, stderr."""

    def call(*words):
        code = main(["evaluate", *map(str, words)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def assert_one_line(err, *words):
    assert err.startswith("halfstep: error: "), err
    assert len(err.splitlines()) == 1, err
    for word in words:
        assert str(word) in err, err


@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_the_validation_texts_give_the_report_of_the_run(finished, halfstep, batch_size):
    code, out, _ = halfstep("--run", finished, "--json", "--batch-size", batch_size)
    assert code == 0
    found = json.loads(out)
    report = json.loads((finished / "report.json").read_text())
    assert found["confusion"] == report["confusion"]
    assert found["accuracy"] == report["accuracy"]
    assert found["macro_f1"] == report["macro_f1"]
    assert found["loss"] == pytest.approx(report["loss"], rel=1e-5)  # other batches pad otherwise
    assert found["precision"] == report["precision"]


def test_other_texts_are_counted_as_by_hand(finished, tmp_path, halfstep):
    texts = rows(45, seed=11)
    write_csv(tmp_path / "test.csv", texts)
    predictor = Predictor(finished / "model", "fp32", torch.device("cpu"))
    table = predictor.probabilities([text for text, _ in texts], 5)
    confusion = [[0] * 3 for _ in range(3)]
    loss = 0.0
    for (_, label), row in zip(texts, table, strict=True):
        true = predictor.labels.index(label)
        confusion[true][int(row.argmax())] += 1
        loss -= math.log(row[true]) / len(texts)
    code, out, _ = halfstep("--run", finished, "--data", tmp_path / "test.csv", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["confusion"] == confusion
    assert found["examples"] == 45
    assert found["accuracy"] == sum(confusion[i][i] for i in range(3)) / 45
    assert found["labels"] == list(predictor.labels)
    assert found["loss"] == pytest.approx(loss, rel=1e-5)


def test_the_text_holds_the_table_and_the_precision(finished, halfstep):
    code, out, _ = halfstep("--run", finished, "--precision", "bf16-mixed")
    assert code == 0
    first, blank, *table = out.rstrip("\n").split("\n")
    assert first.startswith("loss ")
    assert first.endswith(" in bf16-mixed")
    assert blank == ""
    report = (finished / "report.txt").read_text().rstrip("\n").split("\n")
    assert len(table) == len(report)
    assert table[0] == report[0]


def test_some_batches_only(finished, tmp_path, halfstep):
    write_csv(tmp_path / "test.csv", rows(45, seed=11))
    words = ["--run", finished, "--data", tmp_path / "test.csv", "--batch-size", 5, "--json"]
    code, out, _ = halfstep(*words, "--max-batches", 2)
    assert code == 0
    assert json.loads(out)["examples"] == 10


def test_labels_that_the_classifier_does_not_know(finished, tmp_path, halfstep):
    write_csv(tmp_path / "test.csv", [*rows(5, seed=11), ("glad sun", "boredom")])
    code, out, err = halfstep("--run", finished, "--data", tmp_path / "test.csv")
    assert (code, out) == (2, "")
    assert_one_line(err, "test.csv", "unknown label 'boredom'", "the classifier has no such class")


def test_data_that_is_not_there(finished, tmp_path, halfstep):
    code, out, err = halfstep("--run", finished, "--data", tmp_path / "no.csv")
    assert (code, out) == (2, "")
    assert_one_line(err, "no.csv")


def test_outputs_beyond_the_format_are_no_score(finished, tmp_path, halfstep):
    shutil.copytree(finished, tmp_path / "r")
    file = tmp_path / "r" / "model" / "model.safetensors"
    weights = {name: torch.full_like(tensor, 1e38) for name, tensor in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    code, out, err = halfstep("--run", tmp_path / "r")
    assert code == 3, err
    assert out == ""
    assert "not finite" in err


def test_a_run_that_has_not_ended(finished, tmp_path, halfstep):
    shutil.copytree(finished, tmp_path / "r")
    shutil.rmtree(tmp_path / "r" / "model")
    code, _, err = halfstep("--run", tmp_path / "r")
    assert code == 2
    assert_one_line(err, "has no model yet", "--resume")
