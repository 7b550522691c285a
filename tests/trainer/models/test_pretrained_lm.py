"""Causal language models: the loss of the definition, documents kept apart, files both ways."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.trainer.models.pretrained_folders import save_lm, silence
from torch.nn import functional

from halfstep.errors import CheckpointError, ConfigError
from halfstep.trainer.models.causal_lm import open_causal_lm
from halfstep.trainer.models.pretrained import quiet

pytestmark = pytest.mark.covering

KINDS = ["GPT2", "Llama", "Gemma2"]
PACKED = (5, 1, 7, 3)
"""Lengths of the documents in a packed row."""


def documents(seed=0, lengths=PACKED):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 64, (n,), generator=g) for n in lengths]


def packed(parts):
    """Ids and positions of documents in one row."""
    return torch.cat(parts)[None], torch.cat([torch.arange(len(p)) for p in parts])[None]


def batch(rows=3, length=9, seed=0, ignored=0.4):
    g = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(3, 64, (rows, length), generator=g)
    targets_BT = torch.randint(3, 64, (rows, length), generator=g)
    targets_BT[torch.rand(rows, length, generator=g) < ignored] = -100
    return ids_BT, targets_BT, torch.arange(length).expand(rows, length)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def test_packed_documents_have_the_logits_that_they_have_alone(kind, tmp_path):
    lm = open_causal_lm(save_lm(tmp_path / "m", kind)).eval()
    assert lm.model.config._attn_implementation == ("eager" if kind == "Gemma2" else "sdpa")
    assert lm.keeps_documents_apart()
    parts = documents()
    with torch.no_grad():
        together = lm.logits(*packed(parts))[0]
        apart = torch.cat([lm.logits(p[None])[0] for p in parts])
        bled = lm.logits(packed(parts)[0])[0]
    # fp32 rounding: another length is another order of additions; logits are of size 1 to 5.
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=2e-5)
    assert (bled - apart).abs().max() > 1e-2  # without restarts they do see each other


def test_an_architecture_that_lets_documents_see_each_other_is_found(tmp_path):
    lm = open_causal_lm(save_lm(tmp_path / "m", "OPT"))  # which passes its positions to no mask
    assert not lm.keeps_documents_apart()
    assert lm.training


def test_the_check_of_packing_sees_a_leak_smaller_than_rounding(tmp_path, monkeypatch):
    lm = open_causal_lm(save_lm(tmp_path / "m", "Llama", torch.bfloat16))
    logits = lm.logits
    monkeypatch.setattr(lm, "logits", lambda ids, *p: logits(ids, *p) + 1e-3 * ids[0, 0])
    assert not lm.keeps_documents_apart()


def test_the_loss_is_that_of_the_definition(kind, tmp_path):
    with silence():
        lm = open_causal_lm(save_lm(tmp_path / "m", kind)).eval()
    # What follows the head (softcapping, a factor) decides whether the loss can be fused with it.
    assert lm.plain_head == (kind != "Gemma2")
    ids_BT, targets_BT, positions_BT = batch()
    rows = []
    hook = lm.model.get_output_embeddings().register_forward_hook(
        lambda module, args, out: rows.append(out.shape[:-1].numel())
    )
    loss, count = lm.loss_sum((ids_BT, targets_BT, positions_BT))
    hook.remove()
    # only positions with a target reach the head
    assert rows == [0 if lm.plain_head else int((targets_BT != -100).sum())]
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in lm.named_parameters()}
    lm.zero_grad()
    with quiet():
        logits_BTV = lm.model(ids_BT).logits.double()
    wanted = functional.cross_entropy(
        logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=-100, reduction="sum"
    )
    wanted.backward()
    assert count.item() == int((targets_BT != -100).sum())
    assert loss.dtype == torch.float32
    # fp32 sums of some 15 losses of size 5.
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=0)
    for name, parameter in lm.named_parameters():
        # fp32 gradients through two layers; another order of the additions.
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-4)
    lm.zero_grad()
    loss, count = lm.loss_sum(batch(ignored=2.0))
    loss.backward()
    assert (loss.item(), count.item()) == (0.0, 0)
    assert all(bool((p.grad == 0).all()) for p in lm.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("GPT2", torch.float32), ("GPT2", torch.float16), ("Llama", torch.bfloat16)],
)
def test_weights_come_and_go_as_stored(kind, dtype, tmp_path):
    folder = save_lm(tmp_path / "m", kind, dtype)
    stored = load_file(folder / "model.safetensors")
    lm = open_causal_lm(folder)
    assert lm.stored_dtype == dtype
    assert {p.dtype for p in lm.parameters()} == {dtype}
    assert all(p.requires_grad for p in lm.parameters())
    with silence():
        lm.save_(tmp_path / "out", {})
    again = load_file(tmp_path / "out" / "model.safetensors")
    assert again.keys() == stored.keys()
    assert all(torch.equal(again[name], stored[name]) for name in stored)
    weights = {n: p.detach().float() + 0.125 for n, p in lm.named_parameters()}
    lm.save_(tmp_path / "wide", weights)
    assert open_causal_lm(tmp_path / "wide").stored_dtype == torch.float32
    with quiet():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    assert theirs.dtype == torch.float32
    found = dict(theirs.named_parameters())
    assert all(torch.equal(found[n.removeprefix("model.")], w) for n, w in weights.items())
    lm.model.get_input_embeddings().weight.data[0] = torch.inf
    with pytest.raises(CheckpointError, match=r"' holds NaN or inf as"):
        lm.save_(tmp_path / "overflow", {})
    assert not (tmp_path / "overflow").exists()


@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_gradient_checkpointing_is_bitwise_the_same(kind, tmp_path):
    folder = save_lm(tmp_path / "m", kind)
    results = []
    for checkpointing in (False, True):
        lm = open_causal_lm(folder, gradient_checkpointing=checkpointing)
        torch.manual_seed(0)  # of dropout
        calls = []
        lm.blocks()[0].register_forward_hook(lambda *a, calls=calls: calls.append(1))
        loss, _ = lm.loss_sum(batch())
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in lm.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_how_to_generate_is_kept(tmp_path):
    folder = save_lm(tmp_path / "m", "Llama")
    file = folder / "generation_config.json"
    config = json.loads(file.read_text())
    # A temperature without sampling: transformers reads that, and its save_pretrained refuses it.
    for number, own in enumerate(
        ({"do_sample": True, "temperature": 0.5, "eos_token_id": [2, 7]}, {"temperature": 0.5})
    ):
        file.write_text(json.dumps(config | own))
        open_causal_lm(folder).save_(tmp_path / f"out{number}", {})
        saved = json.loads((tmp_path / f"out{number}" / "generation_config.json").read_text())
        assert saved.items() >= own.items()
        assert open_causal_lm(tmp_path / f"out{number}").core.generation_config.temperature == 0.5
    assert json.loads((tmp_path / "out0" / "config.json").read_text())["use_cache"] is True
    file.write_text("[")
    with pytest.raises(ConfigError, match="cannot be built"):
        open_causal_lm(folder)


def test_blocks_and_limits(tmp_path):
    for kind, name in (("GPT2", "GPT2Block"), ("Llama", "LlamaDecoderLayer")):
        lm = open_causal_lm(save_lm(tmp_path / kind, kind))
        assert [type(b).__name__ for b in lm.blocks()] == [name] * 2
        assert lm.max_length == 40
    assert open_causal_lm(save_lm(tmp_path / "b", "Bloom")).max_length is None
