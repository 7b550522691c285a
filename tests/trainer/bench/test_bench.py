"""A measurement as a whole, of a tiny model in real processes."""

import math

import pytest

from halfstep.precision.policy.spelling import parse_policy
from halfstep.trainer.bench.bench import bench
from halfstep.trainer.bench.row import config_of_row
from halfstep.trainer.config.config import config_from_table, config_to_table
from trainer.runs import small_config

POLICIES = ("bf16-mixed", "fp32", "tf32", "fp16-pure")
STEPS = 6


@pytest.fixture(scope="module")
def found():
    config = small_config("", **{"data.train": [], "optimizer.eps": 1e-8, "run.threads": 1})
    said = []
    policies = [parse_policy(name) for name in POLICIES]
    # generous, for a machine that is busy with other tests: the steps end it, not the time
    report = bench(config, policies, steps=STEPS, seconds=250, say=said.append)
    return report, said


def test_policies_are_measured_beside_fp32(found):
    report, said = found
    assert [str(row.policy) for row in report.rows] == ["fp32", "bf16-mixed", "tf32", "fp16-pure"]
    assert [str(row.policy) for row in report.measured] == ["fp32", "bf16-mixed"]
    for row in report.measured:
        assert len(row.timed) == STEPS
        assert row.steps[0].tokens == 4 * 32
        assert row.opened["threads"] == 1
        rate = report.rate(row)
        assert 0 < rate.low <= rate.median <= rate.high
        assert row.steps[-1].peak_memory_bytes > 10**7
        assert not math.isnan(report.lost(row))
    assert any(line.startswith("fp32: native") for line in said)


def test_what_cannot_be_measured_says_why(found):
    report, _ = found
    reasons = {str(row.policy): row.why_not for row in report.rows if row.why_not}
    assert "a CPU has no tf32" in reasons["tf32"]
    assert "eps=1e-08 is 0 in fp16" in reasons["fp16-pure"]


def test_every_row_sees_the_same_weights_and_batches(found):
    fp32, bf16 = (row.steps for row in found[0].measured)
    # the first loss is of the initial weights on the first batch; bf16 rounds to 2^-9
    assert fp32[0].loss == pytest.approx(bf16[0].loss, rel=2**-7)
    assert found[0].learned > 0


def test_the_configuration_of_a_row_has_no_end_and_leaves_nothing():
    config = config_of_row(small_config("x.txt"), parse_policy("bf16-split"))
    assert str(config.precision) == "bf16-split"
    run = config.run
    assert (run.save_every, run.output_dir, run.report_to, run.batch_size) == (0, "", (), 4)
    assert min(run.max_steps, run.eval_every) > 10**5
    assert config_from_table(config_to_table(config)) == config
