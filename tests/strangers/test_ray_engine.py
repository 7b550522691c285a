"""Ray Train: DDP and FSDP2 on its workers, going on after a failure, and one worker alone."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import halfstep
from strangers.engines import POLICIES, TESTS, Training, compared, held, tried

EXAMPLE = str(TESTS.parent / "examples/ray_train.py")


def train(parallel: str, policy: str, folder: Path) -> Training:
    """The whole training; from the middle, a new one that loads its state ends in the same bits."""
    import ray.train

    told = list[tuple[float, float]]()

    def report(metrics: dict[str, float], checkpoint: Any = None) -> None:
        told.append((metrics["loss"], metrics["norm"]))
        if checkpoint is not None:  # as Ray does: all workers' files in one folder
            shutil.copytree(checkpoint.path, folder, dirs_exist_ok=True)

    loop, config = runpy.run_path(EXAMPLE)["train"], {"policy": policy, "parallel": parallel}
    with mock.patch.multiple(ray.train, report=report, get_checkpoint=lambda: None):
        loop(config)
    if dist.is_initialized():
        dist.barrier()
    middle = ray.train.Checkpoint.from_directory(folder)
    with mock.patch.multiple(ray.train, report=report, get_checkpoint=lambda: middle):
        loop(config)
    assert told[20:] == told[10:20]
    losses, norms = map(list, zip(*told[:20], strict=True))
    return {"losses": losses, "norms": norms}


def train_beside_another() -> None:
    """Worker 0 trains by itself while worker 1 does not."""
    model, group = torch.nn.Linear(2, 1), dist.new_group([0])
    if dist.get_rank() == 0:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        precision = halfstep.Precision("fp32", model, optimizer, ranks=group)
        assert precision.step(model(torch.ones(4, 2)).square().mean()).applied


def worker(config: dict[str, Any]) -> None:
    import ray.train

    first, folder = ray.train.get_checkpoint() is None, Path(config["folder"])
    if first:
        train_beside_another()
        found = {
            kind: {p: tried(train, kind, p, folder / f"{kind}-{p}") for p in POLICIES}
            for kind in ("ddp", "fsdp2")
        }
        (folder / f"found-{dist.get_rank()}.json").write_text(json.dumps(found))
    runpy.run_path(EXAMPLE)["train"]({"policy": "bf16-split", "parallel": "fsdp2"})
    assert not first, "a failure, after which Ray starts the workers again"


@pytest.mark.strangers
def test_ray_trains_what_one_process_does(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_worker_register_timeout_seconds", "300")  # on a busy machine
    ray = pytest.importorskip("ray")
    import ray.train.torch as of_torch

    one = SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: 1)
    with (
        mock.patch.object(ray.train, "get_context", return_value=one),
        mock.patch.object(of_torch, "prepare_model", lambda model: model),
    ):
        alone = {p: train("ddp", p, tmp_path / p) for p in POLICIES}
    paths = {"env_vars": {"PYTHONPATH": f"{TESTS}:{Path(halfstep.__file__).parents[1]}"}}
    ray.init(
        num_cpus=3, object_store_memory=2**27, include_dashboard=False, runtime_env=paths,
        log_to_driver=False,
    )  # fmt: skip
    try:
        result = of_torch.TorchTrainer(
            worker, train_loop_config={"folder": str(tmp_path)},
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(
                storage_path=str(tmp_path / "ray"),
                failure_config=ray.train.FailureConfig(max_failures=1),
            ),
        ).fit()  # fmt: skip
    finally:
        ray.shutdown()
    found = json.loads((tmp_path / "found-0.json").read_text())
    assert json.loads((tmp_path / "found-1.json").read_text()) == found
    # Ray keeps what was reported with a checkpoint; that from which it went on after the failure
    assert result.metrics["loss"] == found["fsdp2"]["bf16-split"]["losses"][9]
    for kind, name in (("ddp", "DDP"), ("fsdp2", "FSDP2")):
        held(f"Ray Train, {name}", ray.__version__, compared(found[kind], alone, alone["fp32"]))
