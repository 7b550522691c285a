"""torchtitan's own trainer, with the override package of examples/, on its Llama debug model.

It is made for GPUs. What stands in for one here: the name of the device, its memory's statistics,
a barrier by device number, attention by ``F.scaled_dot_product_attention`` (as of its own tests).
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from strangers.engines import POLICIES, Training, compared, held, launched, tell, tried, weights

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, ROWS, SEED = 4, 4, "seed/checkpoint/step-0"


def parts() -> Any:
    """Its data and tokenizer, which a package does not bring, and what stands in for a GPU."""
    from torchtitan.components import metrics
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.distributed import utils

    sizes = ("max_reserved_gib", "max_reserved_pct", "num_alloc_retries", "num_ooms")
    stats = SimpleNamespace(**dict.fromkeys((*sizes, "max_active_gib", "max_active_pct"), 0))
    monitor = SimpleNamespace(device_name="", get_peak_stats=lambda: stats, reset_peak_stats=int)
    metrics.build_device_memory_monitor = lambda: monitor
    utils.set_pg_timeouts = lambda **_: None

    class Data(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config): ...

        def __init__(self, config: Any, *, dp_rank: int, dp_world_size: int, **_: Any) -> None:
            self.at, self.mine = 0, slice(dp_rank, None, dp_world_size)

        def __iter__(self) -> Any:
            while True:
                draw = torch.Generator().manual_seed(self.at)
                rows = torch.randint(64, (ROWS, 17), generator=draw)[self.mine]
                self.at += 1
                places = torch.arange(16).expand(len(rows), -1)
                yield {"input": rows[:, :-1], "positions": places}, rows[:, 1:]

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    class Bytes(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config): ...

        def __init__(self, config: Any, **_: Any) -> None: ...

        encode = decode = get_vocab_size = None

    return Data.Config(), Bytes.Config()


def made(policy: str, folder: Path, ranks: int, start: Path | None, whole: bool) -> Any:
    """A trainer that starts from a checkpoint: from the whole of it, or from its model."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel_ce_loss

    config = llama3_debugmodel_ce_loss()
    del config.model_spec.model.layers[2:]  # of six
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.dataloader, config.tokenizer = parts()
    config.validator.enable = config.debug.enable_structured_logging = False
    config.debug.seed, config.dump_folder, config.activation_checkpoint = 1, str(folder), None
    training, low = config.training, policy in ("bf16-split", "bf16-master")
    training.local_batch_size, training.seq_len, training.steps = ROWS // ranks, 16, STEPS
    training.disable_cuda_graphs, config.parallelism.spmd_backend = True, "partial_dtensor"
    training.mixed_precision_param = "bfloat16" if low else "float32"
    config.optimizer.implementation = "foreach"
    for group in config.optimizer.param_groups:
        group.optimizer_kwargs["eps"] = 1e-3  # Adam would make steps of what rounding leaves
    config.checkpoint = CheckpointManager.Config(
        enable=True, interval=STEPS // 2, last_save_model_only=False,
        create_seed_checkpoint=start is None, initial_load_model_only=not whole,
        initial_load_path=None if start is None else str(start),
    )  # fmt: skip
    if policy:
        ours = ("torchtitan_override.optimizer", {"policy": policy})
        config.override.imports = ["torchtitan_override.loss", ours]
    return config.build()


def run(*given: Any) -> tuple[Any, Training]:
    """One that has trained, and what it logged."""
    trainer, logged = made(*given), []
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):  # gloo cannot multiply while it sums
            module.set_force_sum_reduction_for_comms(True)
    trainer.metrics_processor.log = lambda *seen, **_: logged.append([*map(float, seen)])
    trainer.train()
    trainer.checkpointer.close()
    losses = [loss for _, loss, *_ in logged]  # its norm is torch's on a CPU, 1e-4 off
    end = weights(trainer.model_parts[0])
    return trainer, {"losses": losses, "weights": end[:: len(end) // 4096]}


def train(policy: str, ranks: int, folder: Path) -> Training:
    """The whole training; one that goes on from torchtitan's checkpoint ends in the same bits."""
    seed, kept = folder / SEED, folder / f"{policy}-{ranks}"
    first, found = run(policy, kept, ranks, seed, False)
    middle = kept / f"checkpoint/step-{STEPS // 2}"
    _, rest = run(policy, folder / f"{policy}-{ranks}-again", ranks, middle, True)
    assert rest["losses"] == found["losses"][STEPS // 2 :]
    assert rest["weights"] == found["weights"]
    if policy:
        assert all(result.applied for result in first.optimizers.results)
        assert not first.optimizers.health.alarms
    return found


def main(ranks: int, folder: Path) -> None:
    torch._utils._get_available_device_type = lambda: "cpu"  # before torchtitan looks
    sys.path.insert(0, str(EXAMPLES))
    importlib.import_module("torchtitan_override")
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    os.environ |= {k: v for k, v in {**alone, "MASTER_PORT": "0"}.items() if k not in os.environ}
    found: dict[str, Any] = {}
    if ranks == 1:  # each draws its first weights in another way: all begin with these
        made("", folder / "seed", 1, None, False).checkpointer.save(curr_step=0, last_step=True)
        found["plain"] = train("", ranks, folder)
    tell(found | {policy: tried(train, policy, ranks, folder) for policy in POLICIES})


@pytest.mark.strangers
@pytest.mark.timeout(900)
def test_torchtitan_trains_what_one_process_does(tmp_path):
    version = pytest.importorskip("torchtitan").__version__
    alone, ranks = (launched(__file__, n, str(n), str(tmp_path)) for n in (1, 2))
    plain = alone.pop("plain")
    instead = {"fp16-mixed": ("bf16-mixed", "bf16-mixed")}
    held("torchtitan, FSDP2, override", version, compared(ranks, alone, plain, instead))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
