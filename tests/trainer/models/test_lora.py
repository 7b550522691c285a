"""LoRA: what trains, what stays, and which targets and adapters fit."""

from __future__ import annotations

import pytest
import torch
from tests.trainer.models.pretrained_folders import save_lm
from tests.trainer.models.test_pretrained_lm import batch

from halfstep.errors import ConfigError
from halfstep.trainer.models.causal_lm import add_lora, open_causal_lm

pytestmark = pytest.mark.covering


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
    with pytest.raises(ConfigError, match=r"no layer has the target 'query'; name"):
        adapted("Llama", "q_proj", "query")
    with pytest.raises(ConfigError, match=r"LoRA cannot be put there: .*query"):
        adapted("Llama", "query")


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
