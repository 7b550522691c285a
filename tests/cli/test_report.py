"""``halfstep report`` on a run that was really trained, and the verdict at a run's end."""

import json

import pytest


@pytest.fixture
def trained(tmp_path, halfstep):
    folder = tmp_path
    text = folder / "text.txt"
    text.write_text("to be or not to be, that is the question; " * 400)
    done = halfstep(
        *("train", "--config", "gpt-tiny", "--data", text, "--tokenizer", "bytes"),
        *("--max-steps", 24, "--schedule.warmup-steps", 2, "--batch-size", 4, "--n-layer", 1),
        *("--output-dir", folder / "run", "--quiet", "--eval-every", 12, "--precision", "fp32"),
    )
    assert done.returncode == 0, done.stderr
    return folder / "run", done.stdout


def test_a_run_ends_with_its_verdict_and_leaves_its_curves(trained):
    run, out = trained
    healthy = "healthy: 0 of 24 steps skipped; lost updates were not measured"
    assert f"{healthy} (halfstep report {run} makes a page of it)" in out
    assert (run / "curves.png").stat().st_size > 10_000


def test_a_page_of_a_run(trained, halfstep):
    run, _ = trained
    done = halfstep("report", run)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "run: healthy: 0 of 24 steps skipped; lost updates were not measured",
        f"Figure: {run / 'curves.png'}",
        f"Written: {run / 'report.html'}",
    ]
    assert (run / "report.html").read_text().count("<svg") >= 3


def test_chinese_json_and_several_runs(trained, halfstep, tmp_path):
    run, _ = trained
    done = halfstep("report", run, run, "--lang", "zh", "--out", tmp_path / "r.json")
    assert done.returncode == 0, done.stderr
    assert "正常" in done.stdout
    assert "The same in all: " in done.stdout
    assert len(json.loads((tmp_path / "r.json").read_text())["runs"]) == 2


def test_two_runs_are_compared_in_the_terminal(tmp_path, halfstep):
    for name, loss, memory in (("a", 2.5, 1e9), ("b", 2.25, 5e8)):
        folder = tmp_path / name
        folder.mkdir()
        line = {"step": 1, "applied": True, "loss": 3.0, "val_loss": loss}
        (folder / "metrics.jsonl").write_text(json.dumps({**line, "peak_memory_bytes": memory}))
    done = halfstep("report", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "r.html")
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "Validation loss 2.5000 2.2500" in lines
    assert "Peak memory 1,000 MB 500 MB" in lines
    assert any(line.startswith("The same in all: ") and "Skipped: 0" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give the folder of a run"),
        (["/nowhere"], "holds no run"),
        (["RUN", "--lang", "fr"], "allowed: en, zh"),
        (["RUN", "--out", "r.pdf"], ".html, .md, .json"),
    ],
)
def test_what_cannot_be_reported(tmp_path, halfstep, words, said):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "applied": true}\n')
    done = halfstep("report", *(tmp_path if word == "RUN" else word for word in words))
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
