"""The commands trace and memory: one step of a run, of which nothing is kept."""

from __future__ import annotations

from halfstep.cli.main import main


def test_a_run_is_left_as_it_was(settings, tmp_path, capsys):
    path = tmp_path / "r"
    train = ["--max-steps", "2", "--precision", "bf16-mixed", "--quiet", "--output-dir", str(path)]
    assert main(["train", *settings, *train]) == 0
    before = {p: p.stat().st_mtime_ns for p in path.rglob("*") if p.is_file()}
    capsys.readouterr()
    assert main(["trace", str(path)]) == 0
    assert capsys.readouterr().out.endswith("all operations ran as bf16-mixed says\n")
    assert main(["memory", str(path)]) == 0
    after = {p: p.stat().st_mtime_ns for p in path.rglob("*") if p.is_file()}
    assert before == after
