"""What ``--simulate`` and ``--precision`` say together, and which layers a policy keeps in fp32."""

from __future__ import annotations

import pytest

from halfstep.trainer.run import run_config

SMALL = ("--model.n-layer", 1, "--model.n-head", 2, "--model.n-embd", 32, "--block-size", 16,
         "--tokenizer", "bytes", "--batch-size", 4, "--threads", 1)  # fmt: skip


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp32", "auto"])
def test_simulate_without_a_format_below_16_bits_is_refused(precision, halfstep, tmp_path):
    done = halfstep("train", "--precision", precision, "--simulate", "--output-dir", tmp_path / "r")
    assert done.returncode == 2
    assert f"--simulate (run.simulate=true) with precision {precision}" in done.stderr
    assert "Leave --simulate out" in done.stderr
    assert not (tmp_path / "r").exists()


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
