"""``halfstep report`` on a run that was really trained, and the verdict at a run's end."""

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


def test_a_run_ends_with_its_verdict(trained):
    run, out = trained
    healthy = "healthy: 0 of 24 steps skipped; lost updates were not measured"
    assert f"{healthy} (halfstep report {run} makes a page of it)" in out


def test_a_page_of_a_run(trained, halfstep):
    run, _ = trained
    done = halfstep("report", run)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "run: healthy: 0 of 24 steps skipped; lost updates were not measured",
        f"Written: {run / 'report.html'}",
    ]
    assert (run / "report.html").read_text().count("<svg") >= 3


def test_chinese_and_several_runs(trained, halfstep, tmp_path):
    run, _ = trained
    done = halfstep("report", run, run, "--lang", "zh", "--out", tmp_path / "r.html")
    assert done.returncode == 0, done.stderr
    assert "正常" in done.stdout
    assert 'lang="zh-CN"' in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give the folder of a run"),
        (["/nowhere"], "holds no run"),
        (["RUN", "--lang", "fr"], "allowed: en, zh"),
        (["RUN", "--out", "r.pdf"], "ends in .html"),
    ],
)
def test_what_cannot_be_reported(tmp_path, halfstep, words, said):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "applied": true}\n')
    done = halfstep("report", *(tmp_path if word == "RUN" else word for word in words))
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
