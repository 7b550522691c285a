"""``halfstep report`` on a run that was really trained, and the verdict at a run's end."""

import pytest


def test_a_run_ends_with_its_verdict_and_has_a_page_in_both_languages(tmp_path, halfstep):
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("to be or not to be, that is the question; " * 400)
    done = halfstep(
        *("train", "--config", "gpt-tiny", "--data", text, "--tokenizer", "bytes"),
        *("--max-steps", 24, "--schedule.warmup-steps", 2, "--batch-size", 4, "--n-layer", 1),
        *("--output-dir", run, "--quiet", "--eval-every", 12, "--precision", "fp32"),
    )
    assert done.returncode == 0, done.stderr
    healthy = "numerics: ok: 0 of 24 steps skipped"
    assert f"{healthy}; a page about the run: halfstep report {run}" in done.stdout
    done = halfstep("report", run)
    assert done.stdout.splitlines() == [f"run: {healthy}", f"Written: {run / 'report.html'}"]
    assert (run / "report.html").read_text().count("<svg") >= 3
    done = halfstep("report", run, run, "--lang", "zh", "--out", tmp_path / "r.html")
    assert "数值正常" in done.stdout
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
