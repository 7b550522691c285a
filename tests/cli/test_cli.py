"""The command line as a user meets it: exit codes, one-line errors, files, --help at once."""

import io
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from halfstep.cli import train
from halfstep.cli.grammar import split_overrides
from halfstep.cli.main import main
from halfstep.trainer.checkpoint.store import list_checkpoints, load_checkpoint
from halfstep.trainer.models.gpt.gpt import GPT

SMALL = [
    "--config", "gpt-tiny", "--tokenizer", "bytes", "--device", "cpu",
    "--model.n_layer", "1", "--model.n_embd=32", "--model.n_head", "2", "--model.block_size=32",
    "--batch-size", "4", "--schedule.warmup_steps", "2", "--run.eval_batches", "2",
]  # fmt: skip


@dataclass
class Done:
    """How a command ended that ran in this process."""

    returncode: int
    stdout: str
    stderr: str


def halfstep(*arguments, **environment):
    """Run a command in this process, one thread, without the benchmark of products."""
    out, err = io.StringIO(), io.StringIO()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(train, "keep_freed_memory", lambda: None)
        patch.setattr("halfstep.trainer.loop.gemm_flops_per_second", lambda *_: 1e9)
        for name, value in environment.items():
            patch.setenv(name, value)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # as Python does for users
                code = main([*map(str, arguments)])
        except SystemExit as end:
            code = end.code
        finally:
            torch.set_num_threads(threads)
    return Done(code, out.getvalue(), err.getvalue())


def in_process_of_its_own(*arguments, timeout=120, cwd=None, **environment):
    """Run a command as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "halfstep", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.fixture(scope="module")
def finished_run(corpus, tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "r"
    cache = tmp_path_factory.getbasetemp() / "cache"
    words = ["--eval-every", 6, "--save-every", 6, "--report-to", "tensorboard"]
    done = in_process_of_its_own("train", *SMALL, "--data", corpus, "--max-steps", 12, *words,
                                 "--output-dir", path, HALFSTEP_CACHE=str(cache))  # fmt: skip
    assert done.returncode == 0, done.stderr
    return path, done


def test_help_does_not_import_torch_and_every_command_has_one():
    program = (
        "import sys; from halfstep.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    commands = ["train", "generate", "evaluate", "explain", "env", "configs", "export", "demo"]
    for arguments in [["--help"], *([command, "--help"] for command in commands)]:
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "usage: halfstep" in done.stdout
    assert all(command in done.stdout for command in ["demo"])


def test_overrides_are_split_from_options():
    rest, pairs = split_overrides(
        ["train", "--a.b", "1", "--data", "x.y", "--c.d-e=f=g", "--prompt", "--h.i"]
    )
    assert rest == ["train", "--data", "x.y", "--prompt", "--h.i"]
    assert pairs == [("a.b", "1"), ("c.d_e", "f=g")]


def test_a_run_writes_what_it_promises(finished_run):
    path, done = finished_run
    assert "validation loss" in done.stdout
    assert "bits per byte" in done.stdout
    assert "12 steps applied, 0 skipped" in done.stdout
    lines = (path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 13))
    assert json.loads((path / "env.json").read_text())["device"] == "cpu"
    assert list((path / "tensorboard").glob("events.*"))
    assert [p.name for p in list_checkpoints(path / "checkpoints")] == [
        "step-00000006", "step-00000012",
    ]  # fmt: skip


def test_a_simulated_run_says_that_compile_changes_nothing(corpus, tmp_path):
    losses = {}
    for name, more in (("plain", []), ("compiled", ["--compile"])):
        done = halfstep("train", *SMALL, "--data", corpus, "--max-steps", 6, "--precision",
                        "fp16-mixed", "--output-dir", tmp_path / name, *more)  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert ("note: --compile has no effect" in done.stderr) == bool(more)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [json.loads(line)["loss"] for line in lines]
    assert losses["compiled"] == losses["plain"]


def test_generate_evaluate_export_and_back(finished_run, tmp_path):
    path, _ = finished_run
    first = halfstep("generate", "--run", path, "--prompt", "the quick", "--max-new-tokens", 20)
    again = halfstep("generate", "--run", path, "--prompt", "the quick", "--max-new-tokens", 20)
    assert first.returncode == 0, first.stderr
    assert first.stdout == again.stdout
    assert first.stdout.startswith("the quick")

    measured = halfstep("evaluate", "--run", path, "--json", "--precision", "fp32")
    assert measured.returncode == 0, measured.stderr
    result = json.loads(measured.stdout)
    assert result["precision"] == "fp32"
    # bytes: a nat per token is a nat per byte
    assert result["bits_per_byte"] == pytest.approx(result["loss"] / 0.693147, rel=1e-4)

    other = tmp_path / "other.txt"
    other.write_text("the lazy dog box over a fox.\n" * 40)
    elsewhere = halfstep("evaluate", "--run", path, "--json", "--data", other)
    assert json.loads(elsewhere.stdout)["tokens"] == 40 * 29 - 1  # each byte but the first

    target = tmp_path / "hf"
    exported = halfstep("export", "--run", path, "--to", "hf", "--output", target)
    assert exported.returncode == 0, exported.stderr
    assert {"config.json", "model.safetensors"} <= {p.name for p in target.iterdir()}
    same = halfstep("generate", "--model", target, "--prompt", "the quick",
                    "--max-new-tokens", 20, "--precision", "bf16-mixed")  # fmt: skip
    assert same.stdout == first.stdout, same.stderr
    twice = halfstep("export", "--run", path, "--to", "hf", "--output", target)
    assert twice.returncode == 2


def test_explain_env_and_configs(tmp_path):
    text = halfstep("explain", "fp16-mixed", "params=bf16,master=bf16", "--device", "cpu").stdout
    assert "simulated" in text
    assert "bf16-pure" in text
    table = halfstep("explain", "--device", "cpu").stdout
    assert "refused: a CPU has no tf32" in table
    report = json.loads(halfstep("env", "--json", "--device", "cpu").stdout)
    statuses = {row["format"]: row["status"] for row in report["gemm"]}
    assert statuses["fp16"] == "simulated"
    assert statuses["tf32"] == "refused"
    assert all(r["gemm_flops_per_second"] > 1e6 for r in report["gemm"] if r["format"] != "tf32")
    assert "gpt-small-cpu" in halfstep("configs", "ls").stdout
    assert "n_layer = 6" in halfstep("configs", "show", "gpt-small-cpu").stdout
    copied = halfstep("configs", "cp", "gpt-tiny", tmp_path / "mine.toml")
    assert copied.returncode == 0
    assert halfstep("configs", "cp", "gpt-tiny", tmp_path / "mine.toml").returncode == 2


BAD = {
    "no command": ([], "COMMAND"),
    "unknown option": (["train", "--stepz", "3"], "--stepz"),
    "unknown key": (["train", "--optimizer.learning_rat", "3"], "did you mean 'learning_rate'"),
    "wrong type": (["train", "--max-steps", "soon"], "an integer"),
    "unknown policy": (["train", "--precision", "bf61"], "did you mean 'bf16'"),
    "refused policy": (["train", "--precision", "tf32", "--device", "cpu"], "nearest"),
    "no such device": (["train", "--device", "tpu"], "auto, cpu, cuda"),
    "no such config": (["train", "--config", "gpt-tinny"], "did you mean 'gpt-tiny'"),
    "block over model": (["train", "--block-size", "5000"], "model.block_size"),
    "warm-up over run": (
        ["train", "--max-steps", "3", "--schedule.warmup_steps", "4"],
        "warmup_steps=4 is longer",
    ),
    "missing data": (["train", "--data", "/no/such/file.txt"], "/no/such/file.txt"),
    "resume without folder": (["train", "--resume"], "--output-dir"),
    "no run": (["generate", "--run", "/tmp"], "holds no run"),
    "bad temperature": (["generate", "--run", "RUN", "--temperature", "-1"], "temperature"),
    "dotted key elsewhere": (["env", "--run.seed", "3"], "option of train"),
    "evaluate model without data": (["evaluate", "--model", "HF"], "HF"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_one_line_and_exit_code_2(name, finished_run, tmp_path, monkeypatch, capsys):
    arguments, word = BAD[name]
    arguments = [str(finished_run[0]) if a == "RUN" else a for a in arguments]
    monkeypatch.chdir(tmp_path)
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    stderr = capsys.readouterr().err
    complaint = [line for line in stderr.splitlines() if line.startswith("halfstep: error: ")]
    assert len(complaint) == 1
    assert word in complaint[0]
    assert "Traceback" not in stderr
    assert not list(tmp_path.iterdir()), "a refused command left something behind"


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "empty"),
        (b"abc\xff\xfe", "UTF-8"),
        (b"short", "block_size"),
    ],
)
def test_bad_data_leaves_no_run_folder(tmp_path, content, word, capsys):
    data = tmp_path / "data.txt"
    data.write_bytes(content)
    code = main(["train", *SMALL, "--data", str(data), "--output-dir", str(tmp_path / "r")])
    stderr = capsys.readouterr().err
    assert code == 2
    assert word in stderr
    assert "data" in stderr
    assert not (tmp_path / "r").exists()


def test_a_bin_with_ids_beyond_the_vocabulary_is_refused_by_name(tmp_path, capsys):
    data = tmp_path / "train.bin"
    data.write_bytes(b"".join((i % 256).to_bytes(2, "little") for i in range(500)) + b"\x00\x40")
    code = main(["train", *SMALL, "--data", str(data), "--output-dir", str(tmp_path / "r")])
    stderr = capsys.readouterr().err
    assert code == 2
    assert all(word in stderr for word in ("train.bin", "16384", "256"))
    assert not (tmp_path / "r").exists()


def test_a_folder_without_text_is_refused(tmp_path, capsys):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "picture.png").write_bytes(b"\x89PNG")
    code = main(["train", *SMALL, "--data", str(tmp_path / "d"), "--output-dir", "r"])
    assert code == 2
    assert str(tmp_path / "d") in capsys.readouterr().err


def test_a_model_that_returns_nan_ends_with_code_3_and_the_last_checkpoint(
    corpus, tmp_path, monkeypatch, capsys
):
    loss_sum, calls = GPT.loss_sum, []

    def broken(self, batch):
        total, count = loss_sum(self, batch)
        calls.append(0)
        return (total * float("nan") if len(calls) == 5 else total), count

    monkeypatch.setattr(GPT, "loss_sum", broken)
    path = tmp_path / "r"
    code = main(["train", *SMALL, "--data", str(corpus), "--output-dir", str(path), "--max-steps",
                 "9", "--save-every", "2", "--eval-every", "0"])  # fmt: skip
    stderr = capsys.readouterr().err
    assert code == 3
    assert "halfstep: error: step 5: the loss is nan" in stderr
    assert "step-00000004" in stderr
    assert load_checkpoint(list_checkpoints(path / "checkpoints")[-1]).state["step"] == 4


def test_debug_shows_the_traceback(tmp_path):
    done = in_process_of_its_own("train", "--precision", "bf61", cwd=tmp_path, HALFSTEP_DEBUG="1")
    assert "Traceback" in done.stderr


def wait_for_step(path: Path, step: int, process: subprocess.Popen) -> None:
    metrics = path / "metrics.jsonl"
    for _ in range(1200):
        if metrics.exists() and len(metrics.read_text().splitlines()) >= step:
            return
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    raise AssertionError("the run did not come so far in time")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_and_leaves_with_4(corpus, tmp_path, number):
    path = tmp_path / "r"
    command = [sys.executable, "-m", "halfstep", "train", *SMALL, "--data", str(corpus),
               "--max-steps", "1000000", "--eval-every", "0", "--save-every", "0",
               "--output-dir", str(path)]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_step(path, 5, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 4, err
    assert f"stopped by {number.name}" in out
    saved = load_checkpoint(list_checkpoints(path / "checkpoints")[-1]).state["step"]
    assert saved == len((path / "metrics.jsonl").read_text().splitlines())
    more = halfstep("train", "--resume", "--output-dir", path, "--max-steps", saved + 3)
    assert more.returncode == 0, more.stderr
    steps = [json.loads(x)["step"] for x in (path / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, saved + 4))
    assert f"max_steps = {saved + 3}" in (path / "config.toml").read_text()


def test_kill_and_the_same_command_with_resume_equal_an_uninterrupted_run(corpus, tmp_path):
    def command(path, *more):
        return ["train", *SMALL, "--data", str(corpus), "--max-steps", "60", "--save-every", "20",
                "--eval-every", "20", "--output-dir", str(path), *more]  # fmt: skip

    assert halfstep(*command(tmp_path / "whole")).returncode == 0
    cut = tmp_path / "cut"
    process = subprocess.Popen(
        [sys.executable, "-m", "halfstep", *command(cut)], stderr=subprocess.PIPE, text=True
    )
    wait_for_step(cut, 25, process)
    process.kill()
    process.communicate()
    done = halfstep(*command(cut, "--resume"))
    assert done.returncode == 0, done.stderr
    timing = {"tokens_per_second", "flops_per_second", "gemm_share", "peak_memory_bytes"}

    def numbers(path):
        lines = (path / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(x).items() if k not in timing} for x in lines]

    assert numbers(cut) == numbers(tmp_path / "whole")
    files = [
        list_checkpoints(p / "checkpoints")[-1] / "weights.safetensors"
        for p in (cut, tmp_path / "whole")
    ]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_changed_resume_is_refused_by_name(finished_run):
    path, _ = finished_run
    done = halfstep("train", "--resume", "--output-dir", path, "--seed", "7")
    assert done.returncode == 2
    assert "cannot change seed=7 (the run has 1337)" in done.stderr


def test_a_damaged_checkpoint_is_refused_by_file(corpus, tmp_path):
    path = tmp_path / "r"
    done = halfstep("train", *SMALL, "--data", corpus, "--max-steps", 3, "--output-dir", path)
    assert done.returncode == 0, done.stderr
    weights = list_checkpoints(path / "checkpoints")[-1] / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    done = halfstep("train", "--resume", "--output-dir", path, "--max-steps", 5)
    assert done.returncode == 2
    assert "weights.safetensors: contents do not match the manifest" in done.stderr


def test_a_full_disk_stops_with_one_line_and_the_last_checkpoint_intact(corpus, tmp_path):
    path = tmp_path / "r"
    program = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "from halfstep.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [*SMALL, "--data", str(corpus), "--output-dir", str(path), "--max-steps", "9",
               "--model.n_embd=64"]  # fmt: skip
    # The corpus is prepared beforehand, so that only the run itself meets the limit.
    assert halfstep("train", *command[:-5], "--output-dir", tmp_path / "a",
                    "--max-steps", 2).returncode == 0  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", program, "train", *command], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((path / "checkpoints").iterdir())


def test_demo_prints_a_sample_and_a_table(tmp_path, corpus):
    config = tmp_path / "c.toml"
    config.write_text(
        f"[model]\nn_layer = 1\nn_head = 2\nn_embd = 32\nblock_size = 32\n"
        f'[data]\ntrain = ["{corpus}"]\ntokenizer = "bytes"\n[run]\nbatch_size = 4\n'
        f'device = "cpu"\neval_batches = 2\n'
    )
    done = in_process_of_its_own("demo", "--config", config, "--max-steps", 3, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    header, fp32, bf16 = done.stdout.split("precision", 1)[1].splitlines()[:3]
    assert header.split() == ["val", "loss", "tokens/s", "peak", "memory", "loss", "scale",
                              "applied", "skipped", "seconds"]  # fmt: skip
    assert fp32.startswith("fp32")
    assert bf16.startswith("bf16-mixed")
    assert "times the tokens per second" in done.stdout


def test_head_closing_the_pipe_is_no_error():
    line = f"{sys.executable} -m halfstep configs show gpt2 | head -1"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
