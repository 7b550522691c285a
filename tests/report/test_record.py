"""What is read of a run's folder, whole or broken."""

import pytest

from halfstep.errors import ConfigError
from halfstep.report.record import read_run
from report.conftest import line


def test_a_whole_run(folder):
    run = read_run(folder([line(2), line(1, val_loss=5.5), line(3, lost_updates={"g": 0.5})]))
    assert [each["step"] for each in run.steps] == [1, 2, 3]
    assert run.series("val_loss") == ([1], [5.5])
    assert run.groups("lost_updates") == {"g": ([3], [0.5])}
    assert (run.policy, run.planned_steps, run.name) == ("bf16-mixed", 3, "run")
    assert run.damaged == {}


def test_a_resumed_step_counts_once_by_its_last_line(folder):
    run = read_run(folder([line(1, loss=9.0), line(1, loss=5.0)]))
    assert run.series("loss") == ([1], [5.0])


@pytest.mark.parametrize(
    "torn", ['{"step": 4, "lo', "[1, 2]", "nonsense", "[" * 100_000, '{"step": 1e999}x', "\x00\x00"]
)
def test_a_line_that_a_crash_cut_is_counted_and_left_out(folder, torn):
    path = folder([line(1), line(2)])
    with (path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    run = read_run(path)
    assert len(run.steps) == 2
    assert run.damaged == {"metrics.jsonl": 1}


@pytest.mark.parametrize(
    "wrong", [{"step": "7"}, {"step": -1}, {"step": True}, {"step": 1.5}, {}, {"step": 2**60}]
)
def test_a_line_without_a_step_is_no_step(folder, wrong):
    run = read_run(folder([line(1), {**wrong, "loss": 1.0}]))
    assert [each["step"] for each in run.steps] == [1]


def test_files_of_another_kind(folder):
    path = folder([line(1)])
    (path / "config.toml").write_text("precision = [not toml")
    (path / "env.json").write_text("[1]")
    run = read_run(path)
    assert (run.policy, run.planned_steps, run.environment) == ("?", None, {})
    assert run.damaged == {"config.toml": 1, "env.json": 1}
    (path / "config.toml").write_text('precision = 3\nrun = "text"')
    run = read_run(path)
    assert (run.policy, run.planned_steps) == ("?", None)


def test_no_run(tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="holds no run"):
        read_run(tmp_path / "nowhere")
