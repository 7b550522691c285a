"""How a sharded run begins: with one process's values, and no rank's memory holds all of them."""

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

# The most that a rank makes before it holds a part: new heads and adapters; all that is scratch.
CASES = {
    "train": ("train", {}, 0),
    "train 16-bit": ("train", {"policy": "bf16-split", "model__n_embd": 34}, 0),
    "train stochastic": ("train", {"policy": "bf16-sr"}, 0),
    "classify, scratch": ("classify", {"model__source": "scratch:tiny"}, 1),
    "classify": ("classify", {"precision": "bf16-master"}, 0.1),
    "GPT2": ("lm", {"kind": "GPT2", "model__lora_r": 0}, 0),
    "Llama in 16 bits": ("lm", {"dtype": torch.bfloat16, "model__lora_r": 0}, 0),
    "LoRA": ("lm", {"model__lora_r": 2}, 0.2),
    "LoRA in fp16": ("lm", {"dtype": torch.float16, "precision": "bf16-mixed"}, 0.4),
}


@pytest.fixture(scope="module")
def config_of(tmp_path_factory):
    at = tmp_path_factory.mktemp("start")
    (at / "corpus.txt").write_text("".join(f"line {n} of many\n" for n in range(999)))
    files, bert = write_files(at / "texts"), str(write_bert(at / "bert"))
    records = str(write(at / "records.jsonl", alpaca(60)))

    def config(task, *, kind="Llama", dtype=torch.float32, **over):
        if task == "train":
            return small_config(at / "corpus.txt", **over)
        if task == "classify":
            return classify_config(files, **{"model__source": bert} | over)
        base = at / f"{kind}-{dtype}"
        if not base.exists():
            save_base(base, kind, dtype)
        values = {"model.source": str(base), "data.train": [records], "precision": "fp32",
                  "run.device": "cpu", "run.batch_size": 8, "run.max_steps": 2}  # fmt: skip
        values |= {key.replace("__", "."): value for key, value in over.items()}
        return load_config("lm-lora", list(values.items()))

    return config


def started(rank, config):
    """Weights, masters and buffers of a run that begins; the bytes that each rank had made."""
    made, place_ = [], Strategy.place_

    def watched(self, model, *plan):
        memory = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        files = [line.split()[0].split("-") for line in memory if line.endswith(".safetensors")]
        mapped = [range(int(start, 16), int(end, 16)) for start, end in files]
        made.append(
            sum(p.nbytes for p in model.parameters()
                if not p.is_meta and not any(p.data_ptr() in file for file in mapped))
        )  # fmt: skip
        place_(self, model, *plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Strategy, "place_", watched)
        session = open_session(config, world=World() if rank is None else World.around_group())
    model = session.task.model
    weights, exact = dict(model.named_parameters()), dict(session.precision.masters.items())
    values = {**weights, **model.state_dict(), **dict(model.named_buffers())}
    values |= {f"{n}, exact": place_like(p, weights[n]) for n, p in exact.items()}
    whole = {n: v.full_tensor() if is_sharded(v) else v for n, v in values.items()}
    return {n: v.detach().clone() for n, v in whole.items()}, made[0]


def same_start(pool, config, layout):
    """All ranks have one process's values; the largest share of them that one rank had made."""
    one, _ = started(None, config)
    ranks = pool.run(started, config=replace(config, run=replace(config.run, parallel=layout)))
    for values, _ in ranks:
        same_bits(values, one)
    size = sum(v.nbytes for n, v in one.items() if not n.endswith("exact"))
    return max(made for _, made in ranks) / size


@pytest.mark.parametrize("case", CASES)
def test_a_sharded_run_begins_with_one_process_values(pool2, config_of, case):
    task, options, most = CASES[case]
    assert same_start(pool2, config_of(task, **options), "shard=2") <= most


@pytest.mark.parametrize("layout", ["shard=4", "data=2,shard=2"])
@pytest.mark.parametrize("case", CASES)
def test_so_it_does_on_four_ranks(pool4, config_of, case, layout):
    task, options, most = CASES[case]
    assert same_start(pool4, config_of(task, **options), layout) <= most
