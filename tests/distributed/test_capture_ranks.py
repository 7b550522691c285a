"""Captures of halfstep train over two ranks: written together, and repeated by two."""

import contextlib

import pytest
import torch
from tests.trainer.runs import small_config

from halfstep.distributed.world import World
from halfstep.errors import CheckpointError
from halfstep.trainer.checkpoint import list_checkpoints
from halfstep.trainer.data.token_file import no_progress
from halfstep.trainer.loop import train
from halfstep.trainer.replay import replay
from halfstep.trainer.run import create_run, with_run_folder
from halfstep.trainer.session import open_session

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:(the step is left out|back to a copy)"),
]


def run(rank, corpus, path, parallel, policy):
    """A run whose embedding is multiplied before step 26; its captures, each taken again."""
    world = World.around_group()
    config = small_config(
        corpus, policy, run__max_steps=26, run__eval_every=0, run__save_every=0, run__capture=2,
        run__on_spike="skip:9", run__parallel=parallel, run__grad_accum=2, model__dropout=0.1,
    )  # fmt: skip
    session = open_session(with_run_folder(config, path), no_progress, world=world)
    folder = world.main_only(lambda: create_run(path, session))
    with contextlib.closing(folder) if folder else contextlib.nullcontext():
        for _ in train(session, path):
            if session.step == 25:
                with torch.no_grad():
                    session.task.model.wte.weight.mul_(30.0)
    (capture,) = list_checkpoints(path / "captures")
    found = [replay(capture, precision, world) for precision in ("", "fp32")]
    return [(f.step, f.repeated, f.found.reason, f.found.loss, f.verdict) for f in found]


@pytest.mark.parametrize(
    ("parallel", "policy"),
    [
        ("shard=2", "bf16-master"),
        pytest.param("data=2", "bf16-mixed", marks=pytest.mark.slow),
    ],
)
def test_a_step_of_two_ranks_is_repeated_bit_for_bit_by_two(
    pool2, corpus, tmp_path, parallel, policy
):
    given = {"corpus": corpus, "path": tmp_path / "r", "parallel": parallel, "policy": policy}
    first, second = pool2.run(run, **given)
    assert first == second
    (step, repeated, reason, _, _), other = first
    assert (step, repeated) == (26, True)
    assert reason in ("loss_spike", "gradient_spike")
    assert other[4].startswith("fp32 would")
    (capture,) = list_checkpoints(tmp_path / "r" / "captures")
    with pytest.raises(CheckpointError, match=r"a step of 2 ranks, and this is 1: .*torchrun"):
        replay(capture)
