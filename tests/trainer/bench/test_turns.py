"""Who takes a turn and for how long, by a clock of the test's own and processes that are none."""

import time

import pytest
import torch

from halfstep.precision.policy.spelling import parse_policy
from halfstep.trainer.bench import turns
from halfstep.trainer.bench.row import StepLine
from halfstep.trainer.bench.turns import LEAST, WARM_UP, Ended, take_turns
from halfstep.trainer.config.config import load_config

CPU = torch.device("cpu")


class Clock:
    """Seconds that pass when a process works."""

    def __init__(self):
        self.now = 100.0
        self.order = []
        self.alive = set()
        self.most_alive = 0


class Planned:
    """A process with known times; ``plan`` maps policies to seconds of opening and of a step."""

    plan = None
    clock = None

    def __init__(self, row, order):
        self.row = row
        self.opening, self.seconds, self.fails = self.plan[str(row.policy)]
        self.order = order

    def load(self, until):
        pass

    def open(self, until):
        self.clock.alive.add(id(self))
        self.clock.most_alive = max(self.clock.most_alive, len(self.clock.alive))
        self.pass_time(self.opening, until)
        self.row.opened = {"summary": "", "support": "native: yes", "threads": 1}
        for _ in range(2):
            self.step(until)

    def step(self, until):
        if len(self.row.steps) == self.fails:
            raise Ended("it failed")
        self.pass_time(self.seconds, until)
        self.clock.order.append(str(self.row.policy))
        number = len(self.row.steps)
        self.row.steps.append(
            StepLine(
                seconds=self.seconds, rows=1, tokens=1, loss=1.0, applied=True,
                peak_memory_bytes=1000, lost=0.0 if number % 8 == 7 else None,
            )
        )  # fmt: skip

    def pass_time(self, seconds, until):
        self.clock.now += min(seconds, until - self.clock.now)
        if self.clock.now >= until:
            raise Ended("too late")

    def close(self):
        self.clock.alive.discard(id(self))


@pytest.fixture
def measure(monkeypatch, tmp_path):
    clock = Clock()
    monkeypatch.setattr(turns.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(Planned, "clock", clock)
    monkeypatch.setattr(turns, "_Process", Planned)
    monkeypatch.setattr(turns, "free_bytes", lambda device: 10**9)

    def call(plan, seconds=90.0, steps=0):
        full = {name: (*times, None)[:3] for name, times in plan.items()}
        monkeypatch.setattr(Planned, "plan", full)
        begin = clock.now
        rows, together = take_turns(
            load_config("gpt-tiny"), [parse_policy(name) for name in plan], CPU, tmp_path,
            steps=steps, until=begin + seconds, say=lambda text: None,
        )  # fmt: skip
        clock.spent = clock.now - begin
        assert not clock.alive, "every process has ended"
        return {str(row.policy): row for row in rows}, together, clock

    return call


def test_rows_take_turns_until_the_time_is_over(measure):
    rows, together, clock = measure({"fp32": (5, 2.0), "bf16-mixed": (5, 1.0)})
    assert together
    assert 85 < clock.spent <= 90
    assert clock.order[4:] == ["fp32", "bf16-mixed"] * ((len(clock.order) - 4) // 2)
    counts = {len(row.steps) for row in rows.values()}
    assert len(counts) == 1
    assert len(rows["fp32"].timed) >= LEAST


def test_no_more_steps_are_taken_than_asked_for(measure):
    rows, _, clock = measure({"fp32": (1, 1.0), "bf16-mixed": (1, 1.0)}, steps=7)
    assert [len(row.timed) for row in rows.values()] == [7, 7]
    assert clock.spent < 40


def test_what_the_device_refuses_is_a_row_that_says_why(measure):
    rows, _, clock = measure({"fp32": (1, 1.0), "tf32": (1, 1.0)})
    assert "a CPU has no tf32" in rows["tf32"].why_not
    assert "tf32" not in clock.order
    assert not rows["fp32"].why_not


def test_a_row_that_would_leave_the_others_too_few_steps_is_dropped(measure):
    rows, _, clock = measure({"fp32": (2, 2.0), "fp16-mixed": (2, 12.0), "bf16-mixed": (2, 1.0)})
    assert "too slow to be measured here: a step took 12.0 s" in rows["fp16-mixed"].why_not
    assert "--seconds" in rows["fp16-mixed"].why_not
    assert len(rows["fp32"].timed) >= LEAST
    assert clock.spent <= 90


def test_a_slow_reference_is_kept(measure):
    rows, _, _ = measure({"fp32": (2, 9.0), "bf16-mixed": (2, 1.0)}, seconds=60)
    assert not rows["fp32"].why_not
    assert len(rows["fp32"].steps) > WARM_UP


def test_where_all_are_slow_each_takes_what_fits(measure):
    rows, _, clock = measure({"fp32": (2, 9.0), "bf16-mixed": (2, 8.0)}, seconds=60)
    assert not any(row.why_not for row in rows.values())
    assert clock.spent <= 60
    assert all(len(row.steps) == 3 for row in rows.values())


def test_a_row_that_does_not_open_in_its_share_leaves_time_to_the_others(measure):
    rows, _, clock = measure({"fp32": (1, 1.0), "fp16-mixed": (500, 1.0), "bf16-mixed": (1, 1.0)})
    assert rows["fp16-mixed"].why_not == "too late"
    assert len(rows["bf16-mixed"].timed) >= LEAST
    assert clock.spent <= 90


@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_row_that_fails_is_told_and_the_others_go_on(measure, at):
    rows, _, _ = measure({"fp32": (1, 1.0), "bf16-mixed": (1, 1.0, at), "bf16-split": (1, 1.0)})
    assert rows["bf16-mixed"].why_not == "it failed"
    assert len(rows["bf16-split"].timed) > LEAST


def test_where_memory_holds_two_they_take_turns_and_then_the_next(measure, monkeypatch):
    room = iter([2000, 500, 2000, 500])
    monkeypatch.setattr(turns, "free_bytes", lambda device: next(room))
    names = ["fp32", "bf16-mixed", "bf16-split", "bf16-master"]
    rows, together, clock = measure({name: (1, 1.0) for name in names})
    assert not together
    assert clock.most_alive == 2
    assert all(len(row.timed) >= LEAST for row in rows.values())
    assert clock.spent <= 90
    first = clock.order.index("bf16-split")
    assert set(clock.order[:first]) == {"fp32", "bf16-mixed"}


def test_a_process_that_is_late_or_dies_says_so(tmp_path, monkeypatch):
    """Real processes, which run another program."""
    programs = {
        "late": "import time; time.sleep(60)",
        "dead": "import sys; print('bad thing', file=sys.stderr); sys.exit(7)",
        "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "refused": 'print(\'{"refused": "no such policy"}\', flush=True)',
    }
    popen = turns.subprocess.Popen
    found = {}
    for name, program in programs.items():
        monkeypatch.setattr(
            turns.subprocess,
            "Popen",
            lambda words, program=program, **options: popen([words[0], "-c", program], **options),
        )
        process = turns._Process(turns.Row(parse_policy("fp32")), {})
        try:
            with pytest.raises(Ended) as ended:
                process.load(time.monotonic() + (0.2 if name == "late" else 60))
            found[name] = str(ended.value)
        finally:
            process.close()
    assert found["late"].startswith("Python and torch were not loaded after")
    assert found["dead"] == "its process ended with code 7: bad thing"
    assert "killed, as Linux does where memory runs out" in found["killed"]
    assert found["refused"] == "no such policy"
