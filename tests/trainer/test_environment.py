"""The measured rate of products, with a clock of the test's own."""

import torch

from halfstep.precision.policy.policy import POLICIES
from halfstep.trainer import environment


def test_the_rate_is_that_of_the_fastest_product_after_the_first(monkeypatch):
    # the first product of a process may wait for imports and page faults, however fast it is
    durations = iter([7.0, 0.5, 0.25, 0.5])
    clock = [0.0]

    def now():
        clock.append(clock[-1] + (next(durations) if len(clock) % 2 == 0 else 0.0))
        return clock[-1]

    monkeypatch.setattr(environment.time, "perf_counter", now)
    found = environment.gemm_flops_per_second(
        POLICIES["fp32"], torch.device("cpu"), size=8, repeats=3
    )
    assert found == 2 * 8**3 / 0.25
