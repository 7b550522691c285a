"""Fine-tuning a classifier through the command line: refusals, notes, resume, signals."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys

import pytest
import torch
from tests.cli.ranks import assert_one_line, assert_refused
from tests.trainer.classifiers import (
    TELLING,
    checkpoint_of,
    metrics,
    rows,
    write_bert,
    write_csv,
    write_files,
)
from tests.trainer.models.pretrained_folders import edit_json

from halfstep.cli import train
from halfstep.cli.main import main
from halfstep.trainer.config.config import load_config


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return write_bert(tmp_path_factory.mktemp("bert") / "b")


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # they take half of the time


def words_of(files, path, *more, steps=6):
    """The words of a run that takes a second; later ones win."""
    given = ["--train", files[0], "--dev", files[1], "--model", "scratch:tiny", "--device", "cpu",
             "--precision", "fp32", "--batch-size", 24, "--output-dir", path]  # fmt: skip
    return [*given, *(["--max-steps", steps] if steps else []), *more]


def classify(halfstep, *words):
    return halfstep("finetune", "classify", *words)


# --- a whole run ---


def test_a_run_from_text_to_predictions(files, tmp_path, halfstep):
    path = tmp_path / "r"
    words = words_of(files, path, "--epochs", 2, "--seed", 7, "--learning-rate", "3e-3", steps=0)
    code, out, err = classify(halfstep, *words)
    assert code == 0, err
    summary, judged, left = out.splitlines()
    assert judged.startswith("too short to judge: 0 of ")
    best = json.loads((path / "report.json").read_text())["step"]
    assert summary.startswith(f"{path}: step 18; validation loss ")
    assert f"; best at step {best}; 18 steps applied, 0 skipped; " in summary
    assert left == f"model in {path / 'model'}, report in {path / 'report.txt'}"
    assert "200 training and 41 validation examples of 3 classes, on cpu" in err
    assert "step 9: validation loss " in err
    assert "on 41 examples" in err
    config = load_config(str(path / "config.toml"))
    assert (config.run.epochs, config.run.max_steps, config.run.seed) == (2, 18, 7)
    assert config.optimizer.learning_rate == 3e-3
    assert config.name == "classify-scratch"

    out_file = tmp_path / "out.jsonl"
    code, out, err = halfstep("predict", "--run", path, "--input", files[1], "--output", out_file,
                              "--device", "cpu")  # fmt: skip
    assert (code, out, err) == (0, f"Labels of 41 texts written: {out_file}\n", "")
    found = [json.loads(line) for line in out_file.read_text("utf-8").splitlines()]
    dev = rows(41, seed=2)
    assert [each["text"] for each in found] == [text for text, _ in dev]
    right = sum(each["label"] == label for each, (_, label) in zip(found, dev, strict=True))
    assert right / 41 == json.loads((path / "report.json").read_text())["accuracy"]


def test_a_pretrained_model_has_its_own_defaults(files, bert, tmp_path, halfstep):
    path = tmp_path / "r"
    words = words_of(files, path, "--quiet", "--model", bert, steps=2)
    assert classify(halfstep, *words)[0] == 0
    config, shipped = load_config(str(path / "config.toml")), load_config("classify-pretrained")
    assert config.optimizer == shipped.optimizer
    assert config.name == "classify-pretrained"
    # its own model goes on from there, head and all
    words = words_of(files, tmp_path / "s", "--quiet", "--model", path / "model", steps=1)
    assert classify(halfstep, *words)[0] == 0


def test_notes_are_printed(tmp_path, halfstep):
    pairs = rows(60, seed=1)
    files = (
        write_csv(tmp_path / "train.csv", [*pairs, ("glad", "Joy "), (pairs[5][0], "sad"),
                                           (pairs[5][0], "joy")]),
        write_csv(tmp_path / "dev.csv", [("glad sun", "joy"), (pairs[5][0], "joy")]),
    )  # fmt: skip
    words = words_of(files, tmp_path / "r", "--max-length", 9, steps=1)
    code, _, err = classify(halfstep, *words)
    assert code == 0, err
    notes = [line.removeprefix("note: ") for line in err.splitlines() if "note: " in line]
    together = "\n".join(notes)
    assert re.search(r"\d+ of 63 training texts are longer than 9 tokens and were cut", together)
    assert "1 of 2 dev texts also stand in train" in together
    assert "dev has no text of" in together


def test_skips_and_scale_are_shown(files, tmp_path, halfstep):
    precision = "params=fp32,compute=fp16,scale=dynamic,init_scale=16777216"
    words = words_of(files, tmp_path / "r", "--precision", precision)
    code, out, err = classify(halfstep, *words)
    assert code == 0, err
    lines = metrics(tmp_path / "r")
    skipped = [line for line in lines if not line["applied"]]
    assert skipped
    for line in skipped:
        assert (
            f"step {line['step']}: skipped ({line['skip_reason']}) at loss scale "
            f"{line['loss_scale']:g}"
        ) in err
    assert err.count("(a few are normal") == 1
    assert f"{6 - len(skipped)} steps applied, {len(skipped)} skipped" in out
    assert re.search(r"step 1/6  loss \d\.\d+  scale 2\^\d+  skipped 1  ", err)


# --- resume ---


@pytest.fixture(scope="module")
def finished(files, tmp_path_factory):
    """A finished run of 8 steps with an evaluation every 2; tests copy it."""
    path = tmp_path_factory.mktemp("finished") / "r"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    words = words_of(files, path, "--quiet", "--eval-every", 2, "--keep", 9, "--save-every", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "keep_freed_memory", lambda: None)
        assert main(["finetune", "classify", *map(str, [*words, "--max-steps", 8])]) == 0
    torch.set_num_threads(threads)
    return path


def copy_of(finished, target):
    shutil.copytree(finished, target)
    config = target / "config.toml"
    config.write_text(config.read_text().replace(str(finished), str(target)))
    return target


def content(path):
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_a_finished_run_has_nothing_to_do(finished, tmp_path, halfstep):
    path = copy_of(finished, tmp_path / "r")
    before = content(path)
    code, out, err = classify(halfstep, "--resume", "--output-dir", path)
    assert code == 0, err
    assert out.splitlines()[0] == f"{path}: step 8 of 8: nothing to do"
    after = content(path)
    before.pop("run.lock"), after.pop("run.lock")
    assert after == before


def test_a_finished_run_whose_model_was_lost_gets_it_back(finished, tmp_path, halfstep):
    path = copy_of(finished, tmp_path / "r")
    shutil.rmtree(path / "model")
    assert classify(halfstep, "--resume", "--output-dir", path, "--quiet")[0] == 0
    assert content(path / "model") == content(finished / "model")


@pytest.mark.parametrize(
    "more", [["--max-steps", 12], ["--epochs", 1.3], ["--max-steps", 12, "--epochs", 3]]
)
def test_a_finished_run_can_go_on_longer(finished, tmp_path, halfstep, more):
    path = copy_of(finished, tmp_path / "r")
    code, _, err = classify(halfstep, "--resume", "--output-dir", path, *more)
    assert code == 0, err
    assert "resumed from " in err
    assert metrics(path)[:8] == metrics(finished)
    assert [line["step"] for line in metrics(path)] == list(range(1, 13))  # 1.3 epochs of 9 steps
    again = load_config(str(path / "config.toml"))
    assert again.run.max_steps == 12


def test_the_same_command_line_with_resume(files, finished, tmp_path, halfstep):
    path = copy_of(finished, tmp_path / "r")
    for step in (7, 8):
        shutil.rmtree(path / "checkpoints" / f"step-{step:08d}")
    words = words_of(files, path, "--eval-every", 2, "--keep", 9, "--save-every", 1, "--quiet")
    assert classify(halfstep, *words, "--max-steps", 8, "--resume")[0] == 0
    assert metrics(path) == metrics(finished)
    for name, tensor in checkpoint_of(finished).weights.items():
        assert torch.equal(tensor, checkpoint_of(path).weights[name])
    # with a configuration by name: what the first start resolved is filled in
    shutil.rmtree(path / "checkpoints" / "step-00000008")
    words = ["--config", "classify-scratch", *words, "--max-steps", 8, "--resume"]
    code, _, err = classify(halfstep, *words)
    assert code == 0, err
    assert metrics(path) == metrics(finished)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--batch-size", 12], "--resume cannot change batch_size=12 (the run has 24)"),
        (["--model", "scratch:small"], "model.source='scratch:small' (the run has 'scratch:tiny')"),
        (["--best-by", "loss"], "best_by='loss'"),
        (["--seed", 1], "seed=1"),
        (["--class-weights", "balanced"], "model.class_weights='balanced'"),
        (["--max-length", 20], "model.max_length=20"),
        (["--train", "other.csv"], "data.train=('other.csv',)"),
        (["--config", "classify-scratch", "--schedule.min_ratio", 0.5], "schedule.min_ratio=0.5"),
    ],
)
def test_a_resume_that_would_compute_something_else(
    files, finished, tmp_path, halfstep, more, expected
):
    path = copy_of(finished, tmp_path / "r")
    before = content(path)
    words = words_of(files, path, "--eval-every", 2, "--keep", 9, "--save-every", 1)
    code, out, err = classify(halfstep, *words, "--max-steps", 8, "--resume", *more)
    assert (code, out) == (2, "")
    assert_one_line(err, expected)
    assert content(path) == before


def test_changed_files_do_not_resume(tmp_path, halfstep):
    files = write_files(tmp_path / "d", train=60, dev=10)
    path = tmp_path / "r"
    assert classify(halfstep, *words_of(files, path, "--quiet", steps=2))[0] == 0
    with files[0].open("a", encoding="utf-8") as file:
        file.write("glad sun,joy\n")
    assert_refused(
        classify(halfstep, "--resume", "--output-dir", path, "--max-steps", 4, "--quiet"),
        "made with another data",
    )


def test_tasks_do_not_mix(finished, tmp_path, halfstep):
    other = tmp_path / "p"
    other.mkdir()
    (other / "config.toml").write_text(
        "[model]\nn_layer = 1\nn_head = 2\nn_embd = 32\nblock_size = 32\n"
    )
    resume, config = ("--resume", "--output-dir"), ("--output-dir", tmp_path / "r", "--config")
    for words, *expected in (
        (("train", *resume, finished), "task classify", "halfstep finetune classify --resume"),
        (("finetune lm", *resume, finished), "task classify", "finetune classify --resume"),
        (("finetune classify", *resume, other), "task pretrain", "halfstep train --resume"),
        (("generate", "--run", finished, "--prompt", "x"),
         "a run of finetune classify, for which there is no generate"),
        (("finetune classify", *config, "gpt-tiny"),
         "configuration gpt-tiny is of the task pretrain: use halfstep train"),
        (("finetune classify", *config, "lm-lora"),
         "configuration lm-lora is of the task lm: use halfstep finetune lm"),
        (("train", *config, "classify-scratch"), "task classify: use halfstep finetune classify"),
        (("finetune lm", *config, "classify-scratch"), "classify: use halfstep finetune classify"),
    ):  # fmt: skip
        assert_refused(halfstep(*words[0].split(), *words[1:]), *expected)
    assert not (tmp_path / "r").exists()


# --- bad input ---


def test_bad_words_are_one_line(files, bert, tmp_path, halfstep, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.csv").write_text("body,kind\nglad,joy\nrain,sad\n")
    empty = shutil.copytree(bert, tmp_path / "no-weights")
    (empty / "model.safetensors").unlink()
    corrupt = shutil.copytree(bert, tmp_path / "corrupt")
    data = (corrupt / "model.safetensors").read_bytes()
    (corrupt / "model.safetensors").write_bytes(data[: len(data) // 2])
    foreign = shutil.copytree(bert, tmp_path / "foreign")
    edit_json(foreign / "config.json", model_type="no-such-model")
    cases = [
        (["--model", "scratch:huge"], "scratch:huge", "scratch:tiny"),
        (["--model", tmp_path / "nowhere"], tmp_path / "nowhere"),
        (["--model", empty], empty),
        (["--model", corrupt], corrupt / "model.safetensors", "damaged"),
        (["--model", foreign], foreign),
        (["--train", "nowhere.csv"], "nowhere.csv"),
        (["--dev", "nowhere.csv"], "nowhere.csv"),
        (["--labels", "joy", "sad", "怒", "fear"], "no training text has the label 'fear'"),
        (["--labels", "joy", "sad"], "unknown label '怒'"),
        (["--train", "odd.csv"], "odd.csv", "body", "kind"),
        (["--text-column", "body"], "body", files[0]),
        (["--label-column", "class"], "class", files[0]),
        (["--batch-size", 4, "--grad-accum", 3], "run.batch_size=4 cannot be split"),
        (["--batch-size", 0], "run.batch_size=0"),
        (["--max-steps", -1], "run.max_steps=-1"),
        (["--max-steps", "many"], "run.max_steps: 'many'; allowed: an integer"),
        (["--epochs", 0, "--max-steps", 0], "run.epochs=0.0; allowed: > 0"),
        (["--best-by", "f1"], "run.best_by: 'f1'"),
        (["--class-weights", "some"], "model.class_weights: 'some'; allowed: none, balanced"),
        (["--precision", "fp31"], "unknown precision policy 'fp31'"),
        (["--precision", "tf32"], "tf32"),
        (["--device", "cuda:99"], "cuda"),
        (["--max-length", 2], "model.max_length=2; allowed: integers >= 3"),
        (["--model.dropot", 0.1], "unknown option --model.dropot, did you mean '--model.dropout'?"),
        (["--schedule.warmup_steps", 50], "schedule.warmup_steps=50 is longer than the run"),
        (["--resume"], "holds no run"),
        (["--parallel", "data=2"], "parallel=data=2 needs 2 ranks, the run has 1"),
        (["--parallel", "tensor=1,data=1", "--nproc", 0], "--nproc 0"),
    ]
    before = {p.name for p in tmp_path.iterdir()}
    for more, *expected in cases:
        code, out, err = classify(halfstep, *words_of(files, tmp_path / "r", *more, "--quiet"))
        assert (code, out) == (2, ""), (more, err)
        assert_one_line(err, *expected)
        assert not (tmp_path / "r").exists(), more
    assert {p.name for p in tmp_path.iterdir()} == before

    code, _, err = classify(halfstep, "--model", "scratch:tiny", "--output-dir", tmp_path / "r")
    assert code == 2
    assert_one_line(err, "--train")
    code, _, err = classify(halfstep, "--resume", "--device", "cpu")
    assert code == 2
    assert_one_line(err, "--resume needs --output-dir")
    for more in (["--no-such-option", "1"], ["--trian", "x"], ["stray"]):
        code, _, err = classify(halfstep, *words_of(files, tmp_path / "r", "--quiet"), *more)
        assert code == 2
        assert_one_line(err)
    assert_refused(halfstep("finetune"), "finetune what? One of: classify, lm")


def test_a_classifier_from_scratch_is_trained_on(files, finished, tmp_path, halfstep):
    words = words_of(files, tmp_path / "r", "--model", finished / "model", "--quiet", steps=1)
    code, _, err = classify(halfstep, *words)
    assert code == 0, err


@pytest.mark.parametrize(
    ("train_pairs", "dev_pairs", "expected"),
    [
        (rows(30, 1), [("glad", "fear")], ["dev.csv", "unknown label 'fear'"]),
        ([*rows(30, 1), ("", "joy")], rows(9, 2), ["train.csv", "32", "empty"]),
        (rows(30, 1), [*rows(9, 2), ("  ", "joy")], ["dev.csv", "11", "empty"]),
        ([*rows(30, 1), ("glad", "")], rows(9, 2), ["train.csv", "32", "label"]),
        ([(t, "joy") for t, _ in rows(30, 1)], [("glad", "joy")], ["at least two classes"]),
        ([], rows(9, 2), ["train.csv"]),
        (rows(30, 1), [], ["dev.csv"]),
    ],
)
def test_bad_data_is_one_line(tmp_path, halfstep, train_pairs, dev_pairs, expected):
    files = (
        write_csv(tmp_path / "train.csv", train_pairs),
        write_csv(tmp_path / "dev.csv", dev_pairs),
    )
    assert_refused(classify(halfstep, *words_of(files, tmp_path / "r", "--quiet")), *expected)
    assert not (tmp_path / "r").exists()


def test_a_label_that_is_no_word_goes_all_the_way(tmp_path, halfstep):
    names = dict(zip(TELLING, ("$_$", "tab\there", "[red]x"), strict=True))
    files = tuple(
        write_csv(tmp_path / f"{i}.csv", [(t, names[n]) for t, n in rows(60, i)]) for i in (1, 2)
    )
    code, _, err = classify(halfstep, *words_of(files, tmp_path / "r", steps=1))
    assert code == 0, err
    report = json.loads((tmp_path / "r" / "report.json").read_text("utf-8"))
    assert set(report["labels"]) == set(names.values())


def test_predictions_are_utf8_under_any_locale(finished, monkeypatch):
    streams = [io.TextIOWrapper(io.BytesIO(given), "ascii") for given in ("气 火\n".encode(), b"")]
    for name, stream in zip(("stdin", "stdout"), streams, strict=True):
        monkeypatch.setattr(sys, name, stream)
    words = ["predict", "--run", str(finished), "--input", "-", "--device", "cpu"]
    assert main(words) == 0
    written = streams[1].buffer.getvalue()
    assert json.loads(written.decode("utf-8"))["text"] == "气 火"
