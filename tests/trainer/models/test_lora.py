"""LoRA: what trains, what stays, and which targets and adapters fit."""

from __future__ import annotations

import shutil

import pytest
import torch
from tests.trainer.models.pretrained_folders import edit_json, save_lm
from tests.trainer.models.test_pretrained_lm import batch

from halfstep.errors import CheckpointError, ConfigError
from halfstep.precision.step import Precision
from halfstep.trainer.models.causal_lm import add_lora, open_adapted_lm, open_causal_lm

POLICIES = {"fp16-mixed": torch.float16, "bf16-mixed": torch.bfloat16, "fp32": torch.float32}

pytestmark = pytest.mark.covering


def trained(folder, policy="fp32", steps=20, **options):
    """A LoRA model after some steps, its losses, and its base before them."""
    checkpointing = options.pop("gradient_checkpointing", False)
    lm = open_causal_lm(folder, gradient_checkpointing=checkpointing)
    lora = add_lora(lm, **{"r": 4, **options})
    base = {n: p.detach().clone() for n, p in lora.named_parameters() if not p.requires_grad}
    trainable = [p for p in lora.parameters() if p.requires_grad]
    assert {p.dtype for p in trainable} == {torch.float32}
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    precision = Precision(policy, lora, optimizer)
    losses = []
    for _ in range(steps):
        with precision.autocast():
            loss, count = lora.loss_sum(batch())
        precision.step(loss / count)
        losses.append(loss.item() / count.item())
    return lora, losses, base


@pytest.mark.parametrize(
    ("kind", "policy", "targets"),
    [
        ("GPT2", "fp16-mixed", ()),
        ("GPT2", "bf16-mixed", ("all-linear",)),
        ("Llama", "fp16-mixed", ("all-linear",)),
        ("Llama", "fp32", ()),
    ],
)
def test_a_frozen_base_trains_in_its_stored_dtype(kind, policy, targets, tmp_path):
    folder = save_lm(tmp_path / "m", kind, POLICIES[policy])
    lora, losses, base = trained(
        folder,
        policy,
        steps=8 if targets else 20,
        targets=targets,
        gradient_checkpointing=bool(targets),
    )
    assert losses[-1] < 0.95 * losses[0]
    now = dict(lora.named_parameters())
    assert {p.dtype for p in base.values()} == {POLICIES[policy]}
    assert all(torch.equal(now[name], before) for name, before in base.items())
    adapters = {n: p for n, p in now.items() if p.requires_grad}
    assert all(".lora_" in name for name in adapters)
    assert {p.dtype for p in adapters.values()} == {torch.float32}


def test_targets(tmp_path):
    for kind in ("GPT2", "Llama"):
        save_lm(tmp_path / kind, kind)

    def adapted(kind, *targets):
        names = dict(add_lora(open_causal_lm(tmp_path / kind), targets=targets).named_parameters())
        return {n.split(".lora_")[0].rpartition(".")[2] for n in names if ".lora_" in n}

    assert adapted("GPT2") == {"c_attn"}
    assert adapted("Llama") == {"q_proj", "v_proj"}
    assert adapted("Llama", "o_proj", "model.layers.1.mlp.up_proj") == {"o_proj", "up_proj"}
    every = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert adapted("Llama", "all-linear") == every  # and no lm_head
    with pytest.raises(ConfigError, match=r"no linear layer has the target 'query', .*; name"):
        adapted("Llama", "q_proj", "query")
    with pytest.raises(ConfigError, match="head shares its table"):
        adapted("GPT2", "c_attn", "lm_head")


def test_new_adapters_change_nothing_and_follow_their_seed(tmp_path):
    folder = save_lm(tmp_path / "m", "Llama")
    before = torch.get_rng_state()
    one, same, other = (add_lora(open_causal_lm(folder), seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    ids_BT = batch()[0]
    with torch.no_grad():
        assert torch.equal(one.logits(ids_BT), open_causal_lm(folder).logits(ids_BT))
    a, b, c = (next(p for p in m.parameters() if p.requires_grad) for m in (one, same, other))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    path = tmp_path_factory.mktemp("lora")
    lora = add_lora(open_causal_lm(save_lm(path / "m")))
    lora.save_(path / "adapter", {})
    return path / "adapter"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"use_rslora": True}, ConfigError, "one alpha / r"),
        ({"base_model_name_or_path": None}, ConfigError, "on a named base"),
        ({"r": None}, CheckpointError, "missing or damaged"),
        ({"r": 3}, CheckpointError, "does not fit plain LoRA"),
        ({"target_modules": ["up_proj"]}, CheckpointError, "does not fit plain LoRA"),
    ],
)
def test_adapters_that_do_not_fit(adapter, tmp_path, changes, error, message):
    folder = shutil.copytree(adapter, tmp_path / "a")
    edit_json(folder / "adapter_config.json", **changes)
    with pytest.raises(error, match=message):
        open_adapted_lm(folder)
