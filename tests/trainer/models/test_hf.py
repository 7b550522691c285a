"""Hugging Face folders: the same logits both ways, and everything else refused by name."""

from __future__ import annotations

import json
import shutil
import stat

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.trainer.models.pretrained_folders import edit_json

import halfstep.files as files
import halfstep.trainer.models.pretrained as weights
from halfstep.errors import CheckpointError
from halfstep.trainer.models.gpt import GPT, GPTConfig
from halfstep.trainer.models.gpt2_folder import load_gpt2, save_gpt2

SHAPE = dict(n_layer=2, n_head=3, n_embd=24, n_positions=16, vocab_size=37)
OURS = GPTConfig(
    n_layer=2, n_head=3, n_embd=24, block_size=16, vocab_size=37, dropout=0.25, layer_norm_eps=0.02
)


def random_(model, seed=0):
    """Weights large enough for every part of the network to show in the logits."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn(p.shape, generator=g).to(p.dtype)
    return model


def theirs(**overrides):
    config = transformers.GPT2Config(**{**SHAPE, "bos_token_id": 0, "eos_token_id": 0, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return random_(transformers.GPT2LMHeadModel(config)).eval()


@pytest.fixture(scope="module")
def saved_by_transformers(tmp_path_factory):
    path = tmp_path_factory.mktemp("hf") / "model"
    theirs().save_pretrained(path)
    return path


@pytest.fixture
def folder(saved_by_transformers, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(saved_by_transformers, tmp_path / "model")


def edit_weights(folder, change):
    path = folder / "model.safetensors"
    tensors = {name: t.clone() for name, t in load_file(path).items()}
    save_file(change(tensors), path, metadata={"format": "pt"})


def tokens(vocab=37, t=16):
    return torch.randint(0, vocab, (2, t), generator=torch.Generator().manual_seed(1))


def assert_same_logits(ours, other):
    ours.eval()
    want = other.eval()(tokens()).logits
    assert want.abs().max() > 1  # the weights are large enough to tell layouts apart
    # fp32 rounding of the same sums in another order (6e-8 each, logits near 10).
    torch.testing.assert_close(ours(tokens()), want, rtol=0, atol=1e-5)


# --- both ways -----------------------------------------------------------------------------------


def test_a_folder_of_transformers_gives_the_same_logits(saved_by_transformers):
    assert_same_logits(load_gpt2(saved_by_transformers), theirs())


def test_a_saved_folder_loads_in_transformers_with_the_same_logits(tmp_path):
    model = random_(GPT(OURS, seed=1))
    save_gpt2(model, tmp_path / "out")
    other, info = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path / "out", local_files_only=True, output_loading_info=True
    )
    assert not any(info.values())  # nothing missing, unexpected or mismatched
    assert other.config.bos_token_id is None
    assert other.config.eos_token_id is None
    assert_same_logits(model, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_saving_and_loading_is_exact_up_to_the_dtype_asked_for(tmp_path, dtype):
    model = random_(GPT(OURS, seed=1))
    save_gpt2(model, tmp_path / "out", dtype=dtype)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    loaded = load_gpt2(tmp_path / "out")
    assert loaded.config == OURS
    assert loaded.training
    for p, q in zip(model.parameters(), loaded.parameters(), strict=True):
        assert q.dtype == torch.float32
        assert q.requires_grad
        assert torch.equal(q, p.to(dtype).float())
    auto = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", dtype="auto")
    assert auto.dtype == dtype


def test_the_base_models_names_and_old_files_buffers_are_read(folder):
    def old(tensors):
        tensors = {name.removeprefix("transformer."): t for name, t in tensors.items()}
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 16, 16).tril().bool()
        tensors["h.1.attn.masked_bias"] = torch.tensor(-1e4)
        tensors["lm_head.weight"] = tensors["wte.weight"].clone()
        return tensors

    edit_weights(folder, old)
    assert_same_logits(load_gpt2(folder), theirs())


def test_absent_keys_mean_what_transformers_means(folder):
    file = folder / "config.json"
    edit_json(file, layer_norm_epsilon=..., embd_pdrop=..., attn_pdrop=..., resid_pdrop=...)
    edit_json(file, activation_function=..., tie_word_embeddings=..., scale_attn_weights=...)
    model = load_gpt2(folder)
    assert (model.config.dropout, model.config.layer_norm_eps) == (0.1, 1e-5)
    assert_same_logits(model, theirs())


def test_only_gpt2s_vocabulary_has_its_end_of_text_token(tmp_path):
    for vocab, end in ((50257, 50256), (50304, None)):
        config = GPTConfig(n_layer=1, n_head=1, n_embd=4, block_size=4, vocab_size=vocab)
        save_gpt2(GPT(config), tmp_path / str(vocab))
        written = json.loads((tmp_path / str(vocab) / "config.json").read_text())
        assert written["bos_token_id"] == written["eos_token_id"] == end


# --- what is refused -----------------------------------------------------------------------------


def test_what_our_gpt_cannot_honour_is_refused_by_name(folder):
    whole = (folder / "config.json").read_text()
    for key, value in [
        ("model_type", "gpt_neo"), ("activation_function", "relu"), ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True), ("reorder_and_upcast_attn", True),
        ("add_cross_attention", True), ("tie_word_embeddings", False), ("n_head", 5),
        ("n_layer", "two"), ("vocab_size", None),
    ]:  # fmt: skip
        (folder / "config.json").write_text(whole)
        edit_json(folder / "config.json", **{key: value})
        with pytest.raises(CheckpointError, match=key):
            load_gpt2(folder)
    for damaged in ("{", "[1]"):
        (folder / "config.json").write_text(damaged)
        with pytest.raises(CheckpointError, match="cannot be read as GPT-2's"):
            load_gpt2(folder)


NAME = "transformer.h.1.mlp.c_fc.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {k: v for k, v in t.items() if k != NAME}, "c_fc.weight' is missing, not fin"),
        (lambda t: t | {NAME: t[NAME].T.contiguous()}, r"another shape than \(24, 96\)"),
        (lambda t: t | {NAME: t[NAME] * float("inf")}, "c_fc.weight' is missing, not finite"),
        (lambda t: t | {"score.weight": torch.ones(2, 24)}, "score.weight' has no place"),
        (lambda t: t | {"h.2.ln_1.bias": torch.ones(24)}, "h.2.ln_1.bias' has no place"),
        (
            lambda t: t | {"lm_head.weight": t["transformer.wte.weight"] + 1},
            "lm_head.*has no place",
        ),
        (lambda t: t | {"lm_head.weight": torch.ones(38, 24)}, "lm_head.weight' has no place"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(folder, change, message):
    edit_weights(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load_gpt2(folder)


# --- saving --------------------------------------------------------------------------------------


def test_nothing_that_exists_is_overwritten_but_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/precious").write_text("data")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("full", "dangling"):
        with pytest.raises(CheckpointError, match="choose another name"):
            save_gpt2(GPT(OURS), tmp_path / name)
    assert (tmp_path / "full/precious").read_text() == "data"
    (tmp_path / "empty").mkdir()
    save_gpt2(GPT(OURS), tmp_path / "empty")
    save_gpt2(GPT(OURS), tmp_path / "new/deep")
    for name in ("empty", "new/deep"):
        written = sorted((tmp_path / name).iterdir())
        assert [p.name for p in written] == ["config.json", "model.safetensors"]
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
    save_gpt2(GPT(OURS), tmp_path / "out")
    before = [name for name, visible in synced if not visible]
    assert sorted(before[:2]) == ["config.json", "model.safetensors"]
    assert before[2:] == [True]
    assert synced[3:] == [(tmp_path.name, True)]

    def fail(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "sync", fail)
    with pytest.raises(CheckpointError, match=r"cannot be written.*No space left"):
        save_gpt2(GPT(OURS), tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_weights_that_are_not_finite_are_not_written(tmp_path):
    model = GPT(OURS)
    with torch.no_grad():
        model.layers[1].mlp.up.bias[3] = 1e6
    with pytest.raises(CheckpointError, match=r"h\.1\.mlp\.c_fc\.bias' holds .* as torch.float16"):
        save_gpt2(model, tmp_path / "out", dtype=torch.float16)
    save_gpt2(model, tmp_path / "wide", dtype=torch.bfloat16)
    with torch.no_grad():
        model.layers[1].mlp.up.bias[3] = float("nan")
    with pytest.raises(CheckpointError, match=r"h\.1\.mlp\.c_fc\.bias'"):
        save_gpt2(model, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["wide"]
