"""Folders and hub names that are opened, and all that is refused before anything of it runs."""

from __future__ import annotations

import json
import os
import shutil

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.trainer.models.pretrained_folders import (
    edit_json,
    save_classifier,
    save_tokenizer,
)

from halfstep.errors import CheckpointError, ConfigError
from halfstep.trainer.models.pretrained import (
    open_folder,
    open_tokenizer,
    resolve_source,
)
from halfstep.trainer.tasks.classify import open_classifier


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = save_classifier(tmp_path_factory.mktemp("pretrained") / "bert")
    return save_tokenizer(folder, model_max_length=32)


@pytest.fixture
def folder(good, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(good, tmp_path / "bert")


def test_a_good_folder_opens_in_one_file_or_in_shards_and_outlives_its_file(folder):
    whole = open_folder(folder).tensors
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    file.write_bytes(b"\xff" * file.stat().st_size)
    assert all(torch.equal(whole[name], tensors[name]) for name in tensors)
    file.unlink()
    half = len(tensors) // 2
    for number, names in enumerate((list(tensors)[:half], list(tensors)[half:]), 1):
        part = {name: tensors[name] for name in names}
        save_file(part, folder / f"model-0000{number}-of-00002.safetensors", {"format": "pt"})
    shards = open_folder(folder).tensors
    assert shards.keys() == tensors.keys()
    assert all(torch.equal(shards[name], tensors[name]) for name in tensors)


def test_the_stored_dtype_holds_all_numbers(folder):
    found = open_folder(folder)
    fp16, bf16 = torch.zeros(1, dtype=torch.float16), torch.zeros(1, dtype=torch.bfloat16)
    for tensors, dtype in (
        ((fp16, torch.zeros(1, dtype=torch.int64)), torch.float16),
        ((bf16,), torch.bfloat16),
        ((fp16, bf16), torch.float32),  # neither 16-bit format holds the other's numbers
    ):
        found.tensors.clear()
        found.tensors.update(enumerate(tensors))
        assert found.stored_dtype == dtype


def test_a_pickle_is_not_opened(folder, monkeypatch):
    monkeypatch.setattr(torch, "load", lambda *a, **k: pytest.fail("opened a pickle"))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    index = {"weight_map": {"pooler.dense.bias": "pytorch_model.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    edit_json(folder / "config.json", transformers_weights="pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"A pickle.*is not read.*save_pretrained"):
        open_classifier(folder, ["a", "b"])


def test_damaged_weights(folder):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (b"", whole[:-1], b"\xff" * 8 + whole[8:]):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"model\.safetensors is missing, damaged"):
            open_folder(folder)


@pytest.mark.parametrize("text", ["{", "{}", '{"model_type": "none_such"}'])
def test_an_invalid_config(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"cannot read its config\.json"):
        open_folder(folder)


def test_adapters_and_quantized_weights_are_no_model_to_train(folder):
    edit_json(folder / "config.json", quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(ConfigError, match="quantized"):
        open_folder(folder)
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "evil/model"}')
    with pytest.raises(ConfigError, match="holds an adapter"):
        open_folder(folder)


# --- code ---


def test_code_of_a_folder_does_not_run(folder, tmp_path):
    mark = tmp_path / "mark"
    (folder / "own.py").write_text(f"open({str(mark)!r}, 'w')\n")
    own = {"AutoConfig": "own.C", "AutoModelForSequenceClassification": "own.M"}
    edit_json(folder / "config.json", auto_map=own)
    assert type(open_classifier(folder, ["a", "b"]).model).__module__.startswith("transformers.")
    edit_json(folder / "config.json", model_type="own")
    with pytest.raises(CheckpointError, match="halfstep runs no code that comes with a model"):
        open_folder(folder)
    edit_json(folder / "config.json", model_type="bert")
    edit_json(
        folder / "tokenizer_config.json", tokenizer_class="Own",
        auto_map={"AutoTokenizer": [None, "own.T"]},
    )  # fmt: skip
    assert open_tokenizer(folder, max_length=9).encode_plain(["the cat"]) == [[4, 5]]
    assert not mark.exists()


@pytest.mark.parametrize("chosen", ["eager", "evil/kernel", {"": "evil/kernel"}])
@pytest.mark.parametrize(
    "key", ["attn_implementation", "_attn_implementation_internal", "experts_implementation"]
)
def test_a_folder_does_not_choose_the_kernels_that_compute_it(folder, key, chosen):
    """A name of a kernel would be fetched from the hub and run."""
    edit_json(folder / "config.json", **{key: chosen})
    assert open_classifier(folder, ["a", "b"]).model.config._attn_implementation == "sdpa"


# --- the hub ---


def test_a_hub_name_is_downloaded_without_pickles_and_code(good, monkeypatch):
    asked = []

    def download(name, *, allow_patterns):
        asked.append(name)
        assert not any(p.endswith((".bin", ".pt", ".py", "*")) for p in allow_patterns)
        return os.fspath(good)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert open_folder("tiny/bert").name == "tiny/bert"
    assert asked == ["tiny/bert"]


def test_without_the_hub_it_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for path in ("/none/such", "./none", "a/b/c", ""):  # nothing that could be downloaded
        with pytest.raises(ConfigError, match="is not a folder here, and the hub answers: Repo id"):
            resolve_source(path)
    with pytest.raises(ConfigError, match=r"variable\. Where .*hf download tiny/b"):
        resolve_source("tiny/bert")
