"""Lightning's ModelParallelStrategy: FSDP2, tensor parallelism and both, by the plugin."""

from __future__ import annotations

import runpy
import sys
import tempfile

import pytest
import torch
import torch.distributed as dist

from strangers import engines
from strangers.engines import POLICIES, TESTS, Training, compared, held, launched, tell, tried

EXAMPLE = TESTS.parent / "examples/lightning_sharded.py"
AXES = {"FSDP2": (2, 1), "tensor parallelism": (1, 2), "FSDP2 x tensor parallelism": (2, 2)}


def train(axes: tuple[int, int], policy: str) -> Training:
    """The whole training; from the middle, a new one that loads its state ends in the same bits."""
    main = runpy.run_path(str(EXAMPLE))["main"]
    trainer, whole, precision = main(policy, *axes, 6)
    folder = [tempfile.mkdtemp()]
    if max(axes) > 1:
        dist.broadcast_object_list(folder)
    main(policy, *axes, 3)[0].save_checkpoint(path := f"{folder[0]}/saved")
    _, resumed, _ = main(policy, *axes, 6, path)
    assert torch.stack(resumed.losses).equal(torch.stack(whole.losses[3:]))
    weights = engines.weights(whole)
    assert engines.weights(resumed) == weights
    losses = torch.stack(whole.losses).detach()
    if max(axes) > 1:
        dist.all_reduce(losses)
        losses /= dist.get_world_size()
    evaluated = type(whole)()  # gets its own fp32 weights back
    own = [p.detach().clone() for p in evaluated.parameters()]
    evaluated.validation_step = evaluated.training_step
    trainer.validate(evaluated, range(1), verbose=False)
    assert engines.weights(evaluated) == torch.cat([p.flatten() for p in own]).tolist()
    norms = [precision.last_step.grad_norm]
    return {"losses": losses.tolist(), "norms": norms, "weights": weights}


@pytest.mark.strangers
@pytest.mark.parametrize("kind", AXES)
def test_lightning_trains_what_one_process_does(kind):
    version = pytest.importorskip("lightning").__version__
    data, tensor = AXES[kind]
    alone = launched(__file__, 1, "1", "1")
    cells = compared(
        launched(__file__, data * tensor, f"{data}", f"{tensor}"), alone, alone["fp32"]
    )
    held(f"Lightning, ModelParallelStrategy, {kind}", version, cells)


if __name__ == "__main__":
    shape = (int(sys.argv[1]), int(sys.argv[2]))
    tell({policy: tried(train, shape, policy) for policy in POLICIES})
