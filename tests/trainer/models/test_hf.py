"""Hugging Face folders that are written: the same logits there, and nothing half written."""

from __future__ import annotations

import json
import stat
from functools import partial

import pytest
import torch
import transformers

import halfstep.files as files
import halfstep.trainer.models.pretrained as weights
from halfstep.errors import CheckpointError
from halfstep.trainer.models.causal_lm import save_gpt2
from halfstep.trainer.models.gpt import GPT, GPTConfig

OURS = GPTConfig(
    n_layer=2, n_head=3, n_embd=24, block_size=16, vocab_size=37, dropout=0.25, layer_norm_eps=0.02
)


def save(model, folder):
    with weights.new_folder(folder, "fp32") as empty:
        save_gpt2(model, empty)


def test_transformers_reads_the_same_weights_and_computes_the_same_logits(tmp_path):
    model, g = GPT(OURS, seed=1), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():  # so large that every part of the network shows
            p += 0.2 * torch.randn(p.shape, generator=g)
    save(model, tmp_path / "out")
    read = partial(
        transformers.GPT2LMHeadModel.from_pretrained, tmp_path / "out", local_files_only=True
    )
    assert read(dtype="auto").dtype == torch.float32
    other, info = read(dtype=torch.float32, output_loading_info=True)
    assert not any(info.values())  # nothing missing, unexpected or mismatched
    assert (other.config.bos_token_id, other.config.eos_token_id) == (None, None)
    assert {getattr(other.config, f"{part}_pdrop") for part in ("attn", "embd", "resid")} == {0.25}
    tokens = torch.randint(0, 37, (2, 16), generator=g)
    want = other.eval()(tokens).logits
    assert want.abs().max() > 1  # the weights are large enough to tell layouts apart
    # fp32 rounding of the same sums in another order (6e-8 each, logits near 10).
    torch.testing.assert_close(model.eval()(tokens), want, rtol=0, atol=1e-5)


def test_only_gpt2s_vocabulary_has_its_end_of_text_token(tmp_path):
    for vocab, end in ((50257, 50256), (50304, None)):
        config = GPTConfig(n_layer=1, n_head=1, n_embd=4, block_size=4, vocab_size=vocab)
        save(GPT(config), tmp_path / str(vocab))
        written = json.loads((tmp_path / str(vocab) / "config.json").read_text())
        assert written["bos_token_id"] == written["eos_token_id"] == end


def test_nothing_that_exists_is_overwritten_but_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/precious").write_text("data")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("full", "dangling"):
        with pytest.raises(CheckpointError, match="choose another name"):
            save(GPT(OURS), tmp_path / name)
    assert (tmp_path / "full/precious").read_text() == "data"
    (tmp_path / "empty").mkdir()
    save(GPT(OURS), tmp_path / "empty")
    save(GPT(OURS), tmp_path / "new/deep")
    for name in ("empty", "new/deep"):
        written = sorted((tmp_path / name).iterdir())
        assert [p.name for p in written] == [
            "config.json", "manifest.json", "model.safetensors"
        ]  # fmt: skip
        modes = {stat.S_IMODE(p.stat().st_mode) for p in written}
        assert len(modes) == 1  # readable by whoever may read the config
    assert {p.name for p in tmp_path.iterdir()} == {"full", "dangling", "empty", "new"}


def test_everything_is_on_the_disk_before_the_name_appears(tmp_path, monkeypatch):
    synced = []
    real = files.sync

    def sync(path):
        synced.append((path.name.endswith(".tmp") or path.name, (tmp_path / "out").exists()))
        real(path)

    monkeypatch.setattr(files, "sync", sync)  # of the files and their folder
    monkeypatch.setattr(weights, "sync", sync)  # of the parent
    save(GPT(OURS), tmp_path / "out")
    before = [name for name, visible in synced if not visible]
    assert sorted(before[:3]) == ["config.json", "manifest.json", "model.safetensors"]
    assert before[3:] == [True]
    assert synced[4:] == [(tmp_path.name, True)]

    def fail(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "sync", fail)
    with pytest.raises(CheckpointError, match=r"cannot be written.*No space left"):
        save(GPT(OURS), tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_weights_that_are_not_finite_are_not_written(tmp_path):
    model = GPT(OURS)
    with torch.no_grad():
        model.layers[1].mlp.up.bias[3] = float("nan")
    with pytest.raises(CheckpointError, match=r"h\.1\.mlp\.c_fc\.bias'"):
        save(model, tmp_path / "out")
    assert not any(tmp_path.iterdir())
