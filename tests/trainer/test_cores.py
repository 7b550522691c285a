"""A busy machine is recognised, an idle one is not; a run computes with the threads given."""

import itertools
import json
import subprocess
import sys
import threading
import time

import pytest
import torch

from halfstep.cli.main import main
from halfstep.trainer import cores
from halfstep.trainer.cores import BUSY, Waiting, Watch, remark, seconds_waited
from halfstep.trainer.run import execute
from trainer.runs import small_config, start

LINUX = pytest.mark.skipif(not seconds_waited(), reason="the system does not tell")


@pytest.fixture
def planted(monkeypatch):
    """A clock that one sets, and threads of which the second waits a share of its time."""
    clock = [0.0]
    share = [0.0]
    waited = [1.0]

    def goes_on(seconds):
        clock[0] += seconds
        waited[0] += seconds * share[0]

    monkeypatch.setattr(cores.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(cores, "seconds_waited", lambda: {"1": 5.0, "2": waited[0]})
    return goes_on, share


def test_the_thread_that_waits_most_decides(planted):
    goes_on, share = planted
    waiting = Waiting()
    share[0] = 0.25
    goes_on(4.0)
    assert waiting.share() == 0.25
    assert waiting.seconds == 4.0


def test_a_thread_that_starts_later_counts_from_its_start(monkeypatch, planted):
    waiting = Waiting()
    planted[0](2.0)
    monkeypatch.setattr(cores, "seconds_waited", lambda: {"1": 5.0, "3": 1.0})
    assert waiting.share() == 0.5


def test_nobody_knows_without_the_scheduler(monkeypatch):
    monkeypatch.setattr(cores, "_THREADS", "/nowhere")
    assert seconds_waited() == {}
    assert Waiting().share() is None
    assert remark(None, 2) == ""


@pytest.mark.parametrize("share", [0.0, 0.02, BUSY - 0.01])
def test_an_idle_machine_is_not_remarked_on(planted, share):
    goes_on, now = planted
    now[0] = share
    watch = Watch(2)
    for _ in range(50):
        goes_on(cores.WINDOW_SECONDS)
        assert watch.look() == ""
    assert remark(share, 2) == ""


def test_a_busy_machine_is_told_once_and_with_the_remedy(planted):
    goes_on, share = planted
    watch, said = Watch(2), []
    share[0] = 0.4
    for _ in range(50):
        goes_on(cores.WINDOW_SECONDS / 2)
        said.append(watch.look())
    assert said[:3] == ["", "", ""]  # the first window alone may be the start of something
    assert "busy: a thread waited 40% of the time" in said[3]
    assert "--threads 1" in said[3]
    assert "OMP_WAIT_POLICY=passive" in said[3]
    assert not any(said[4:])
    assert "--threads" not in remark(0.4, 1)


def test_a_busy_moment_is_not_told(planted):
    goes_on, share = planted
    watch = Watch(2)
    for wait in itertools.islice(itertools.cycle([0.9, 0.0]), 20):
        share[0] = wait
        goes_on(cores.WINDOW_SECONDS)
        assert watch.look() == ""


@LINUX
def test_a_core_that_is_shared_is_seen():
    """Two programs on one core: whatever else runs here, each waits about half of the time."""
    program = (
        "import os, time\n"
        "from halfstep.trainer.cores import Waiting\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "if os.fork() == 0:\n"
        "    end = time.monotonic() + 1.5\n"
        "    while time.monotonic() < end: pass\n"
        "    os._exit(0)\n"
        "shares = []\n"
        "for _ in range(5):\n"
        "    waiting = Waiting()\n"
        "    while waiting.seconds < 0.2: pass\n"
        "    shares.append(waiting.share())\n"
        "print(max(shares))\n"
        "os.wait()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert float(done.stdout) > BUSY, done.stderr


@LINUX
def test_a_thread_that_sleeps_does_not_wait():
    asleep = threading.Event()
    thread = threading.Thread(target=asleep.wait)
    thread.start()
    waiting = Waiting()
    before = seconds_waited()[str(thread.native_id)]
    time.sleep(0.05)
    assert seconds_waited()[str(thread.native_id)] - before < 0.05
    asleep.set()
    thread.join()
    assert waiting.share() is not None


@pytest.mark.parametrize("busy", [True, False])
def test_a_run_tells_once_that_its_machine_is_busy(corpus, tmp_path, monkeypatch, busy):
    monkeypatch.setattr(cores, "WINDOW_SECONDS", 0.0)
    monkeypatch.setattr(Waiting, "share", lambda self: 0.5 if busy else 0.01)
    config = small_config(corpus)
    said = []
    session, folder = start(config, tmp_path / "unused")
    folder.close()
    execute.execute(session, tmp_path / "r", said.append, lambda tick: None)
    assert sum("this machine is busy" in line for line in said) == int(busy)


def test_a_run_computes_with_the_threads_it_was_given(corpus, tmp_path):
    before = torch.get_num_threads()
    try:
        start(small_config(corpus, run__threads=3), tmp_path / "r")[1].close()
        assert torch.get_num_threads() == 3
        start(small_config(corpus), tmp_path / "s")[1].close()
        assert torch.get_num_threads() == 3  # 0 leaves them as they are
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("share", "words"), [(0.5, "busy"), (0.0, "the cores are free"), (None, "not known")]
)
def test_env_says_whether_the_machine_is_busy(capsys, monkeypatch, share, words):
    monkeypatch.setattr("halfstep.cli.env.probe", lambda: share)
    monkeypatch.setattr("halfstep.cli.env.gemm_table", lambda device: [])
    assert main(["env"]) == 0
    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("load"))
    assert words in line
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["waiting_for_cores"] == share


def test_the_probe_measures():
    share = cores.probe(0.05)
    assert share is None or 0 <= share <= 1
