"""Predictions against a softmax by hand, in order, for any input and any device's precision."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from tests.trainer.classifiers import (
    classify_config,
    rows,
    whole_run,
    write_bert,
    write_files,
)

from halfstep.cli.main import main
from halfstep.errors import ConfigError
from halfstep.trainer.tasks.classify import LoadedClassifier

NAMES = ("joy", "sad", "怒")
TEXTS = [text for text, _ in rows(50, seed=4)]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A finished run from scratch and one of a pretrained encoder."""
    folder = tmp_path_factory.mktemp("runs")
    files = write_files(folder / "data")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    bert = write_bert(folder / "encoder")
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)  # pictures take half of the time
        patch.setattr("halfstep.trainer.loop.gemm_flops_per_second", lambda *_: 1e9)
        for name, source in (("scratch", "scratch:tiny"), ("bert", str(bert))):
            config = classify_config(files, model__source=source, optimizer__learning_rate=3e-3)
            whole_run(config, folder / name)
            found[name] = folder / name
    torch.set_num_threads(threads)
    return found


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def logits_by_hand(folder, text):
    """Of one text, without padding."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    return model.eval()(**tokenizer([text], return_tensors="pt")).logits[0]


@pytest.mark.parametrize(("kind", "batch_size"), [("scratch", 1), ("bert", 7), ("bert", 64)])
def test_probabilities_are_a_softmax(runs, kind, batch_size):
    predictor = LoadedClassifier(runs[kind] / "model", "fp32", CPU)
    table = predictor.probabilities(TEXTS, batch_size)
    assert table.shape == (50, 3)
    assert table.dtype == np.float64
    assert np.abs(table.sum(axis=1) - 1).max() < 1e-12  # three fp64 quotients
    with torch.no_grad():
        logits = torch.stack([logits_by_hand(runs[kind], t) for t in TEXTS[:12]])
    expected = np.exp(logits.double().numpy())
    expected /= expected.sum(axis=1, keepdims=True)
    # fp32 logits below 10, padded or not: some ulp of 1e-6 each
    np.testing.assert_allclose(table[:12], expected, rtol=2e-5, atol=1e-7)


def test_order_is_kept_and_the_best_label_is_told(runs):
    predictor = LoadedClassifier(runs["bert"] / "model", "fp32", CPU)
    table = predictor.probabilities(TEXTS, 3)
    many = TEXTS * 5  # more than are sorted together
    found = list(predictor.predict(iter(many), 3))
    assert [text for text, _, _ in found] == many
    for i, (_, label, probability) in enumerate(found):
        row = table[i % 50]
        assert label == NAMES[row.argmax()]
        # other neighbours, other padding
        assert probability == pytest.approx(row.max(), rel=1e-5)
    assert len({label for _, label, _ in found}) > 1
    assert all(type(p) is float for _, _, p in found)
    assert list(predictor.predict([], 3)) == []


def test_texts_are_read_as_they_are_needed(runs):
    predictor = LoadedClassifier(runs["scratch"] / "model", "fp32", CPU)
    read = []

    def endless():
        while True:
            read.append(1)
            yield "glad sun"

    stream = predictor.predict(endless(), 2)
    assert next(stream)[0] == "glad sun"
    assert len(read) <= 64


@pytest.mark.parametrize(
    ("kind", "policy"),
    [("scratch", "bf16-mixed"), ("bert", "fp16-mixed"), ("bert", "bf16-split"),
     ("scratch", "fp16-master")],
)  # fmt: skip
def test_every_precision_predicts_nearly_the_same(runs, kind, policy):
    exact = LoadedClassifier(runs[kind] / "model", "fp32", CPU).probabilities(TEXTS, 16)
    found = LoadedClassifier(runs[kind] / "model", policy, CPU).probabilities(TEXTS, 16)
    assert not np.array_equal(found, exact)
    # logits below 10 that went through a few roundings of 2^-9 each
    assert np.abs(found - exact).max() < 0.15


# --- the command ---


@pytest.fixture
def predict(capsys, monkeypatch):
    """Runs the command: exit code, stdout, stderr."""

    def call(*words, stdin=None):
        if stdin is not None:
            stream = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
            monkeypatch.setattr(sys, "stdin", stream)
        code = main(["predict", "--device", "cpu", *map(str, words)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def objects(text):
    return [json.loads(line) for line in text.splitlines()]


def assert_one_line(err, *words):
    assert err.startswith("halfstep: error: "), err
    assert len(err.splitlines()) == 1, err
    for word in words:
        assert str(word) in err


UNICODE = ['骂 "气", 火', "smile 😀 tab\there", "e\u0301 <b> \\n & \u2028 end", "  glad  "]


def write_jsonl(path):
    path.write_text("".join(json.dumps({"text": t, "id": 3}) + "\n" for t in UNICODE), "utf-8")


def write_csv(path):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("text", "other"), *((t, "x") for t in UNICODE)])


def write_txt(path):
    path.write_text("".join(t + "\n" for t in UNICODE), "utf-8")


@pytest.mark.parametrize(
    ("name", "write"),
    [("in.jsonl", write_jsonl), ("in.csv", write_csv), ("in.txt", write_txt)],
)
@pytest.mark.parametrize("flag", ["--run", "--model"])
def test_every_input_gives_every_text_unchanged(runs, tmp_path, predict, name, write, flag):
    write(tmp_path / name)
    source = runs["scratch"] if flag == "--run" else runs["scratch"] / "model"
    out = tmp_path / "out.jsonl"
    code, text, err = predict(flag, source, "--input", tmp_path / name, "--output", out)
    assert (code, text, err) == (0, f"Labels of 4 texts written: {out}\n", "")
    written = out.read_text("utf-8")
    assert "骂" in written
    assert len(written.split("\n")) == len(UNICODE) + 1
    found = [json.loads(line) for line in written.split("\n")[:-1]]
    assert [each["text"] for each in found] == UNICODE
    expected = LoadedClassifier(runs["scratch"] / "model", "fp32", CPU).predict(UNICODE, 64)
    assert [list(each) for each in found] == [["text", "label", "probability"]] * len(UNICODE)
    assert [tuple(each.values()) for each in found] == list(expected)
    assert {p.name for p in tmp_path.iterdir()} == {name, "out.jsonl"}

    code, text, err = predict(flag, source, "--input", tmp_path / name)
    assert (code, err) == (0, "")
    assert text == written


def test_stdin_to_stdout(runs, predict):
    run = runs["bert"]
    code, plain, _ = predict("--run", run, "--input", "-", stdin="气 火\nglad\r\n".encode())
    assert code == 0
    assert [each["text"] for each in objects(plain)] == ["气 火", "glad"]
    lines = '{"text": "气 火"}\n\n{"text": "glad"}\n'.encode()
    code, found, _ = predict("--run", run, "--input", "-", "--output", "-", stdin=lines)
    assert (code, found) == (0, plain)


def test_the_runs_own_precision_is_the_default(runs, tmp_path, predict, monkeypatch):
    used = []
    real = LoadedClassifier.__init__

    def spy(self, folder, precision, *more, **options):
        used.append(precision)
        real(self, folder, precision, *more, **options)

    monkeypatch.setattr(LoadedClassifier, "__init__", spy)
    path = shutil.copytree(runs["scratch"], tmp_path / "r")
    config = path / "config.toml"
    config.write_text(config.read_text().replace('precision = "fp32"', 'precision = "bf16-mixed"'))
    for words in (["--run", path], ["--run", path, "--precision", "bf16-pure"],
                  ["--model", path / "model"]):  # fmt: skip
        assert predict(*words, "--input", "-", stdin=b"glad")[0] == 0
    assert list(map(str, used)) == ["bf16-mixed", "bf16-pure", "fp32"]


def test_texts_are_cut_as_in_training_and_counted(runs, tmp_path, predict):
    files = write_files(tmp_path / "d")
    source = str(runs["bert"] / "model")
    config = classify_config(files, model__source=source, model__max_length=6, run__max_steps=3)
    _, ticks = whole_run(config, tmp_path / "r")
    code, out, err = predict("--run", tmp_path / "r", "--input", files[1])
    assert code == 0
    assert re.fullmatch(r"note: \d+ texts were cut at 6 tokens\n", err)
    pairs = list(zip(objects(out), rows(41, seed=2), strict=True))
    right = sum(found["label"] == label for found, (_, label) in pairs)
    # the last evaluation is the best or is not; the model is of the best
    assert right / 41 == max(t.evaluation.accuracy for t in ticks if t.evaluation)


def test_a_column_by_name(runs, tmp_path, predict):
    (tmp_path / "in.csv").write_text("text,body\nwrong,glad\n")
    _, out, _ = predict(
        "--run", runs["scratch"], "--input", tmp_path / "in.csv", "--text-column", "body"
    )
    assert objects(out)[0]["text"] == "glad"


def test_output_is_written_whole_or_not_at_all(runs, tmp_path, predict):
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [json.dumps({"text": t}) for t in TEXTS]
    lines[40] = '{"text": ""}'
    file.write_text("\n".join(lines) + "\n", "utf-8")
    words = ("--run", runs["scratch"], "--input", file, "--output", out, "--batch-size", 1)
    code, text, err = predict(*words)
    assert (code, text) == (2, "")
    assert_one_line(err, file, "41", "empty")
    assert {p.name for p in tmp_path.iterdir()} == {"in.jsonl"}
    out.write_text("an earlier one")
    assert predict(*words)[0] == 2
    assert out.read_text() == "an earlier one"


def test_an_output_that_is_no_file_is_written_to_as_it_is(runs, tmp_path, predict):
    import threading

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text("utf-8")))
    reader.start()
    code, _, err = predict(
        "--run", runs["scratch"], "--input", "-", "--output", pipe, stdin=b"glad\n"
    )
    reader.join(timeout=60)
    assert (code, err) == (0, "")
    assert objects(read[0])[0]["text"] == "glad"
    assert pipe.is_fifo()

    target = tmp_path / "target.jsonl"
    target.write_text("old")
    (tmp_path / "link.jsonl").symlink_to(target)
    words = ("--input", "-", "--output", tmp_path / "link.jsonl")
    assert predict("--run", runs["scratch"], *words, stdin=b"glad\n")[0] == 0
    assert (tmp_path / "link.jsonl").is_symlink()
    assert objects(target.read_text("utf-8"))[0]["text"] == "glad"


@pytest.mark.parametrize("goes_to", ["pipe", "file"])
def test_the_name_of_standard_output_is_standard_output(goes_to, runs, tmp_path):
    words = [sys.executable, "-m", "halfstep", "predict", "--run", str(runs["scratch"])]
    words += ["--input", "-", "--output", "/dev/stdout"]
    path = tmp_path / "out.jsonl"
    with path.open("wb", buffering=0) as file:
        file.write(b"{}\n")  # of the command before it, as in { first; second; } > out.jsonl
        stdout = file if goes_to == "file" else subprocess.PIPE
        done = subprocess.run(words, input=b"glad\n", stdout=stdout, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")
    *before, found = objects(path.read_text("utf-8") + (done.stdout or b"").decode())
    assert (before, found["text"]) == ([{}], "glad")


def test_an_output_may_be_a_pipe_that_only_a_descriptor_names(runs):
    """As a shell's ``--output >(gzip > labels.gz)`` does."""
    reading, writing = os.pipe()
    words = [sys.executable, "-m", "halfstep", "predict", "--run", str(runs["scratch"])]
    words += ["--input", "-", "--output", f"/dev/fd/{writing}"]
    done = subprocess.run(words, input=b"glad\n", capture_output=True, pass_fds=[writing])
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        assert (done.returncode, done.stderr) == (0, b"")
        assert objects(pipe.read())[0]["text"] == "glad"


def test_bad_bytes_on_stdin(runs, predict):
    code, _, err = predict("--run", runs["scratch"], "--input", "-", stdin=b"glad\n\xff\xfe\n")
    assert code == 2
    assert_one_line(err, "standard input", "UTF-8")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--input", "missing.jsonl"], "missing.jsonl"),
        (["--input", "in.parquet"], "in.parquet"),
        (["--input", "in.csv"], "in.csv"),
        (["--input", "ok.txt", "--batch-size", "0"], "--batch-size 0; allowed: integers >= 1"),
        (["--input", "ok.txt", "--output", "no/such/out.jsonl"], "no/such/out.jsonl"),
        (["--input", "ok.txt", "--output", "."], "Is a directory"),
        (["--input", "ok.txt", "--precision", "fp31"], "unknown precision policy 'fp31'"),
        (["--input", "ok.txt", "--precision", "tf32"], "tf32"),
    ],
)
def test_bad_input_is_one_line(runs, tmp_path, predict, monkeypatch, words, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.csv").write_text("body,n\nglad,1\n")
    (tmp_path / "ok.txt").write_text("glad\n")
    before = set(tmp_path.iterdir())
    code, out, err = predict("--run", runs["scratch"], *words)
    assert (code, out) == (2, "")
    assert_one_line(err, expected)
    assert set(tmp_path.iterdir()) == before


def test_what_holds_no_classifier_is_refused(runs, tmp_path, predict):
    text = tmp_path / "in.txt"
    text.write_text("glad\n")
    unfinished = shutil.copytree(runs["scratch"], tmp_path / "r")
    shutil.rmtree(unfinished / "model")
    bert = write_bert(tmp_path / "bert")
    for flag, source, *expected in (
        ("--run", unfinished, "has no model yet", "--resume --output-dir"),
        ("--run", tmp_path, "holds no run"),
        ("--model", bert, "has no trained classifier on top"),
        ("--model", tmp_path / "nothing", tmp_path / "nothing"),
        ("--model", tmp_path, tmp_path),
    ):
        code, out, err = predict(flag, source, "--input", text)
        assert (code, out) == (2, ""), source
        assert_one_line(err, *expected)
    with pytest.raises(ConfigError, match="no trained classifier"):
        LoadedClassifier(bert, "fp32", CPU)


def test_a_damaged_folder_is_refused(runs, tmp_path, predict):
    folder = shutil.copytree(runs["scratch"] / "model", tmp_path / "m")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    code, out, err = predict("--model", folder, "--input", "-", stdin=b"glad\n")
    assert (code, out) == (2, "")
    assert_one_line(err, folder)


def test_a_run_of_another_task_is_refused(runs, tmp_path, predict, corpus):
    config = "[model]\nn_layer = 1\nn_head = 2\nn_embd = 32\nblock_size = 32\n"
    (tmp_path / "config.toml").write_text(config)
    code, _, err = predict("--run", tmp_path, "--input", corpus)
    assert code == 2
    assert_one_line(err, "a run of train, for which there is no predict; there is generate")
