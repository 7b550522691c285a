"""Folders of an encoder: what is written is read back, and what does not fit is refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from halfstep.errors import CheckpointError
from halfstep.trainer.models.encoder.encoder import Encoder, EncoderConfig, load_encoder
from halfstep.trainer.models.encoder.files import is_encoder_folder, read_encoder_config

CONFIG = EncoderConfig(
    labels=("悲伤", "高兴"),
    vocab_size=9,
    max_length=6,
    n_layer=1,
    n_head=2,
    n_embd=8,
    ngram_orders=(3,),
    ngram_buckets=7,
)


def fp32_weights(model):
    return {name: p.detach().float() for name, p in model.named_parameters()}


@pytest.fixture
def folder(tmp_path):
    model = Encoder(CONFIG, seed=1, class_weights=[1.0, 2.0])
    model.save_(tmp_path / "a" / "model", fp32_weights(model))
    return tmp_path / "a" / "model"


def change(folder, **values):
    file = folder / "config.json"
    found = {**json.loads(file.read_text(encoding="utf-8")), **values}
    found = {key: value for key, value in found.items() if value != "absent"}
    file.write_text(json.dumps(found), encoding="utf-8")


def test_a_saved_encoder_is_loaded_bit_for_bit(folder):
    model = load_encoder(folder)
    want = Encoder(CONFIG, seed=1)
    assert model.config == CONFIG
    for p, q in zip(model.parameters(), want.parameters(), strict=True):
        assert torch.equal(p, q)
        assert p.requires_grad
    ids = torch.tensor([[2, 5, 3]])
    assert torch.equal(model(ids, ids > 0), want(ids, ids > 0))


def test_the_folder_says_what_it_is(folder, tmp_path):
    text = (folder / "config.json").read_text(encoding="utf-8")
    assert json.loads(text)["model_type"] == "halfstep-encoder"
    assert "悲伤" in text
    assert is_encoder_folder(folder)
    assert not is_encoder_folder(tmp_path)
    change(folder, model_type="bert")
    assert not is_encoder_folder(folder)
    modes = {(folder / name).stat().st_mode for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1


def test_weights_of_16_bits_are_saved_from_fp32_copies_only(tmp_path):
    model = Encoder(CONFIG).bfloat16()
    model.save_(tmp_path / "m", fp32_weights(model))
    assert load_encoder(tmp_path / "m").head.weight.dtype == torch.float32
    with pytest.raises(CheckpointError, match="bfloat16, must be float32"):
        model.save_(tmp_path / "n", dict(model.named_parameters()))
    assert not (tmp_path / "n").exists()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", r"'head\.bias' is missing"),
        ("surplus", "'extra' has no place"),
        ("shape", r"'head\.bias' has shape \(3,\), config\.json means \(2,\)"),
        ("dtype", r"'head\.bias' is torch\.float16"),
        ("nan", r"'head\.bias' holds NaN or inf"),
    ],
)
def test_weights_that_do_not_fit_are_refused_on_both_ways(folder, tmp_path, fault, message):
    weights = load_file(folder / "model.safetensors")
    if fault == "missing":
        del weights["head.bias"]
    elif fault == "surplus":
        weights["extra"] = torch.zeros(1)
    else:
        value = {
            "shape": torch.zeros(3),
            "dtype": torch.zeros(2, dtype=torch.float16),
            "nan": torch.tensor([0.0, float("nan")]),
        }[fault]
        weights["head.bias"] = value
    with pytest.raises(CheckpointError, match=message):
        Encoder(CONFIG).save_(tmp_path / "new", weights)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_encoder(folder)


def test_a_damaged_or_missing_file_is_named(folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        load_encoder(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "model.safetensors").write_bytes(b"\x00" * 50)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load_encoder(copy)
    (copy / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors"):
        load_encoder(copy)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "bert"}, "model_type is not 'halfstep-encoder'"),
        ({"n_layer": "absent"}, "n_layer is missing"),
        ({"depth": 3}, "depth is unknown"),
        ({"n_layer": 0}, r"model\.n_layer must be an integer"),
        ({"labels": "ab"}, r"model\.labels"),
        ({"labels": ["a", ["b"]]}, r"model\.labels"),
    ],
)
def test_a_config_that_cannot_be_used_is_named(folder, values, message):
    change(folder, **values)
    with pytest.raises(CheckpointError, match=message):
        read_encoder_config(folder)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe"])
def test_a_config_that_is_no_json_object_is_named(folder, content):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_encoder(folder)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    model = Encoder(CONFIG)
    with pytest.raises(CheckpointError, match="cannot be written"):
        model.save_(tmp_path / "file" / "model", fp32_weights(model))
