"""How a sharded run begins: with one process's values, which no rank's memory has held whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.trainer.classifiers import classify_config, write_bert, write_files
from tests.trainer.lm_folders import alpaca, save_base, write
from tests.trainer.runs import small_config

from distributed.parity import same_bits
from halfstep.distributed.strategy import Strategy
from halfstep.distributed.world import World
from halfstep.precision.masters.local_part import is_sharded, place_like
from halfstep.trainer.config.config import load_config
from halfstep.trainer.session import open_session

pytestmark = [pytest.mark.distributed, pytest.mark.covering(ends=True)]

# Task, options, and what a rank may make of the bytes: new heads, adapters, and what is scratch.
CASES = [
    ("train", {"policy": "bf16-split", "model__n_embd": 34}, 0),
    ("train", {"policy": "bf16-sr"}, 0),
    ("classify", {"model__source": "scratch:tiny"}, 1),
    ("classify", {"precision": "bf16-master"}, 0.1),
    ("lm", {"kind": "GPT2", "model__lora_r": 0}, 0),
    ("lm", {"dtype": torch.bfloat16, "model__lora_r": 0}, 0),
    ("lm", {"model__lora_r": 2}, 0.2),
    ("lm", {"dtype": torch.float16, "precision": "bf16-mixed"}, 0.4),
]


def config_of(at, task, *, kind="Llama", dtype=torch.float32, **over):
    if task == "train":
        return small_config(write(at / "corpus.txt", [{"line": n} for n in range(999)]), **over)
    if task == "classify":
        source = over.pop("model__source", None) or str(write_bert(at / "bert"))
        return classify_config(write_files(at / "texts"), model__source=source, **over)
    values = {"model.source": str(save_base(at / "base", kind, dtype)), "precision": "fp32",
              "data.train": [str(write(at / "records.jsonl", alpaca(60)))],
              "run.device": "cpu", "run.batch_size": 8, "run.max_steps": 2}  # fmt: skip
    return load_config(
        "lm-lora", [*values.items(), *((k.replace("__", "."), v) for k, v in over.items())]
    )


def started(rank, config):
    """Weights, masters and buffers of a run that begins; the bytes that this rank had made."""
    made, place_ = [], Strategy.place_

    def watched(self, model, *plan):
        memory = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        files = [line.split()[0].split("-") for line in memory if line.endswith(".safetensors")]
        mapped = [range(int(start, 16), int(end, 16)) for start, end in files]
        own = [p for p in model.parameters() if not p.is_meta]
        made.extend(p.nbytes for p in own if not any(p.data_ptr() in file for file in mapped))
        place_(self, model, *plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Strategy, "place_", watched)
        session = open_session(config, world=World() if rank is None else World.around_group())
    model, exact = session.task.model, session.precision.masters.items()
    values = {**model.state_dict(keep_vars=True), **dict(model.named_buffers())}
    values |= {f"{n}, exact": place_like(p, values[n]) for n, p in exact}
    whole = {n: v.full_tensor() if is_sharded(v) else v for n, v in values.items()}
    return {n: v.detach().clone() for n, v in whole.items()}, sum(made)


@pytest.mark.parametrize(("task", "options", "most"), CASES)
@pytest.mark.parametrize(
    ("pool", "layout"), [(2, "shard=2"), (4, "shard=4"), (4, "data=2,shard=2")], indirect=["pool"]
)
def test_a_sharded_run_begins_with_one_process_values(pool, layout, tmp_path, task, options, most):
    config = config_of(tmp_path, task, **options)
    one, made = started(None, config)
    parallel = replace(config, run=replace(config.run, parallel=layout))
    for values, here in pool.run(started, config=parallel):
        same_bits(values, one)
        assert here <= most * made
