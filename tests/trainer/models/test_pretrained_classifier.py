"""Encoders as classifiers: heads, losses, files, and folders that do not fit."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.trainer.models.pretrained_folders import (
    edit_json,
    save,
    save_classifier,
    silence,
)

from halfstep.errors import CheckpointError, ConfigError
from halfstep.trainer.models.causal_lm import open_causal_lm
from halfstep.trainer.models.pretrained import quiet
from halfstep.trainer.tasks.classify import open_classifier

NAMES = ("joy", "anger", "fear")
KINDS = ["Bert", "Roberta", "Albert"]


@pytest.fixture
def folder(tmp_path):
    return save_classifier(tmp_path / "bert")


def batch(rows=4, length=7, seed=0):
    g = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(5, 64, (rows, length), generator=g)
    lengths_B = torch.randint(2, length + 1, (rows, 1), generator=g)
    mask_BT = torch.arange(length) < lengths_B
    labels_B = torch.arange(rows) % 3
    return ids_BT.masked_fill(~mask_BT, 0), mask_BT, labels_B


def without_dropout(model):
    for module in model.modules():
        module.p = 0.0
    return model


def reload(folder):
    with quiet():
        return transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_any_encoder_trains_and_comes_back(tmp_path, kind):
    with silence():
        model = open_classifier(save_classifier(tmp_path / "in", kind), NAMES)
    assert model.training
    assert model.head_is_new
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.max_length == (38 if kind == "Roberta" else 40)
    assert len(model.blocks()) == (1 if kind == "Albert" else 2)  # ALBERT has one layer, used twice
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss, weight = model.loss_sum(batch())
        (loss / weight).backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.eval()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    with silence():
        model.save_(tmp_path / "out", weights)
    again, ours = reload(tmp_path / "out"), open_classifier(tmp_path / "out", NAMES).eval()
    ids_BT, mask_BT = batch()[:2]
    with torch.no_grad():
        wanted = model.logits(batch())
        assert torch.equal(again(input_ids=ids_BT, attention_mask=mask_BT.long()).logits, wanted)
        assert torch.equal(ours.logits(batch()), wanted)
    assert again.config.id2label == dict(enumerate(NAMES))
    assert again.config.label2id == {name: i for i, name in enumerate(NAMES)}
    assert not ours.head_is_new
    assert not list((tmp_path / "out").glob("*.bin"))


def test_the_loss_is_that_of_the_definition(folder):
    model = without_dropout(open_classifier(folder, NAMES, label_smoothing=0.1))
    ids_BT, mask_BT, labels_B = batch()
    labels_B[1] = -100
    loss, count = model.loss_sum((ids_BT, mask_BT, labels_B))
    log_p = model.logits(batch()).double().log_softmax(-1)
    smoothed = sum(
        -0.9 * log_p[i, y] - 0.1 / 3 * log_p[i].sum() for i, y in enumerate(labels_B) if y >= 0
    )
    # fp32 sums of a few numbers of size 1.
    torch.testing.assert_close(loss.double(), smoothed, rtol=1e-6, atol=0)
    assert count.item() == 3
    plain, _ = model.eval().loss_sum((ids_BT, mask_BT, labels_B))  # not smoothed in evaluation
    wanted = sum(-log_p[i, y] for i, y in enumerate(labels_B) if y >= 0)
    torch.testing.assert_close(plain.double(), wanted, rtol=1e-6, atol=0)


def test_a_new_head_follows_its_seed_and_no_other(folder):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    one, same, other = (open_classifier(folder, NAMES, seed=s).model.classifier for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.weight, same.weight)
    assert not torch.equal(one.weight, other.weight)


def test_a_head_is_kept_only_for_its_own_labels(tmp_path):
    head = dict(id2label=dict(enumerate(NAMES)), label2id={n: i for i, n in enumerate(NAMES)})
    folder = save_classifier(tmp_path / "c", head="ForSequenceClassification", **head)
    stored = load_file(folder / "model.safetensors")["classifier.weight"]
    kept = open_classifier(folder, NAMES)
    assert not kept.head_is_new
    assert torch.equal(kept.model.classifier.weight, stored)
    for names in (NAMES[::-1], ("a", "b", "c"), ("a", "b"), (*NAMES, "x")):
        model = open_classifier(folder, names)
        assert model.head_is_new
        assert model.model.classifier.weight.shape[0] == len(names)
        assert not torch.equal(model.model.classifier.weight[:2], stored[:2])
        encoder = model.model.bert.encoder.layer[0].output.dense.weight
        assert torch.equal(encoder, kept.model.bert.encoder.layer[0].output.dense.weight)


def test_stored_16_bits_are_widened_exactly(tmp_path):
    dtype = torch.bfloat16
    folder = save_classifier(tmp_path / "m")
    tensors = {n: t.to(dtype) for n, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", dtype=str(dtype).removeprefix("torch."))
    model = open_classifier(folder, NAMES)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for name, parameter in model.model.bert.named_parameters():
        assert torch.equal(parameter, tensors[name].float())
    model.save_(tmp_path / "out", {})
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    assert reload(tmp_path / "out").dtype == torch.float32


def test_architectures_that_are_no_classifier_or_no_causal_lm(tmp_path):
    vit = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    save(transformers.ViTModel(vit), tmp_path / "vit")
    with pytest.raises(ConfigError, match="'vit' has no AutoModelForSequenceClassification"):
        open_classifier(tmp_path / "vit", NAMES)
    with pytest.raises(ConfigError, match="'vit' has no AutoModelForCausalLM"):
        open_causal_lm(tmp_path / "vit")
    with pytest.raises(ConfigError, match="'bert' is an encoder"):
        open_causal_lm(save_classifier(tmp_path / "bert-lm", head="ForMaskedLM"))


def without(name):
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            without("encoder.layer.1.output.dense.weight"),
            r"lacks 1 weights of the model, such as bert\.encoder\.layer\.1",
        ),
        (lambda t: {f"distilbert.{n}": w for n, w in t.items()}, "are of different models"),
        (
            lambda t: t | {"encoder.layer.0.intermediate.dense.bias": torch.ones(40)},
            r"intermediate\.dense\.bias \(another shape\)",
        ),
    ],
)
def test_weights_that_do_not_fit_are_never_drawn(folder, change, message):
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        open_classifier(folder, NAMES)
