"""DeepSpeed's own engine on two ranks: a run whose data breaks ends as the observer says."""

from __future__ import annotations

import runpy
from typing import Any

import pytest
import torch.distributed as dist

from strangers.engines import TESTS, launched, tell

EXAMPLE = TESTS.parent / "examples/deepspeed_observed.py"
FP16 = {"dtype": "fp16", "fp16": {"enabled": True, "initial_scale_power": 2}}
AUTOCAST = {"dtype": "torch_autocast", "torch_autocast": {"enabled": True, "dtype": "float16"}}
RUNS: dict[str, tuple[dict[str, Any], int, str]] = {  # how many steps are skipped, and how it ends
    **{f"bf16, stage {n}": ({"stage": n}, 3, "skip_limit") for n in range(4)},
    "fp16, stage 0": ({"stage": 0, **FP16}, 5, "skip_limit"),  # 4, 2, and three at 1
    "fp16 autocast, stage 0": ({"stage": 0, **AUTOCAST}, 19, "skip_limit"),  # 2**16 to 1, and three
    "fp16 autocast, stage 2": ({"stage": 2, **AUTOCAST}, 3, "skip_limit"),  # its scale never falls
    "fp32": ({"stage": 0, "bf16": {"enabled": False}}, 1, "gradients"),
    "unchecked": ({"bf16": {"enabled": True, "check_grad_overflow": False}}, 0, "gradients"),
}


def main() -> None:
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled
    type(get_accelerator()).is_fp16_supported = lambda _: True  # slow on a CPU, but right
    example, found = runpy.run_path(str(EXAMPLE))["main"], {}
    for name, (options, *_) in RUNS.items():
        results, end = example(broken_from=2, **options)
        applied = [result.applied for result in results]
        seen = [applied[0], applied.count(False), end.cause, len(end.parameters)]
        others: list[Any] = [None, None]
        dist.all_gather_object(others, seen)
        assert others == [seen, seen]
        found[name] = seen
    tell(found)


@pytest.mark.strangers
def test_a_deepspeed_run_that_would_skip_for_ever_ends(monkeypatch):
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    found = launched(__file__, 2)
    for name, (_, skipped, cause) in RUNS.items():
        names = 0 if name == "unchecked" else 4
        assert found[name] == [True, skipped, cause, names], name


if __name__ == "__main__":
    main()
