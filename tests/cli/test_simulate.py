"""What ``--simulate`` and ``--precision`` say together."""

from __future__ import annotations

from halfstep.trainer.run import run_config

SMALL = ("--model.n-layer", 1, "--model.n-head", 2, "--model.n-embd", 32, "--block-size", 16,
         "--tokenizer", "bytes", "--batch-size", 4, "--threads", 1)  # fmt: skip


def test_a_run_goes_on_in_a_simulated_precision_and_back(corpus, halfstep, tmp_path):
    path = tmp_path / "r"
    words = ("train", *SMALL, "--data", corpus, "--output-dir", path, "--quiet")
    for more, simulated in (
        (("--max-steps", 1, "--precision", "bf16-mixed"), False),
        (("--max-steps", 2, "--precision", "mxfp8", "--simulate", "--resume"), True),
        (("--max-steps", 3, "--precision", "fp32", "--resume"), False),
    ):
        done = halfstep(*words, *more)
        assert done.returncode == 0, done.stderr
        config = run_config(path)
        assert config.run.simulate is simulated
        assert getattr(config.precision, "simulate", False) is simulated
