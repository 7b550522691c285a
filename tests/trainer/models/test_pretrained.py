"""Folders and hub names that are opened, and all that is refused before anything of it runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.trainer.models.pretrained_folders import (
    edit_json,
    save_classifier,
    save_lm,
    save_tokenizer,
)

from halfstep.errors import CheckpointError, ConfigError
from halfstep.trainer.models.causal_lm import open_causal_lm
from halfstep.trainer.models.classifier import open_classifier
from halfstep.trainer.models.pretrained import open_folder, pin, require_library, resolve_source
from halfstep.trainer.models.pretrained_tokenizer import open_tokenizer

ROOT = Path(__file__).parents[3]


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


@pytest.mark.parametrize(
    "text",
    ["{", "[1]", "{}", '{"model_type": "none_such"}', '{"model_type": "bert", "vocab_size": "w"}'],
)
def test_an_invalid_config(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"cannot read its config\.json"):
        open_folder(folder)


@pytest.mark.parametrize(
    "changes", [{"hidden_act": "nonsense"}, {"hidden_size": 33}, {"to_dict": "x"}]
)
def test_a_network_that_cannot_be_is_our_error(folder, changes):
    edit_json(folder / "config.json", **changes)
    with pytest.raises((CheckpointError, ConfigError), match="bert"):
        open_classifier(folder, ["a", "b"])


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
    assert open_tokenizer(folder).encode_plain(["the cat"]) == [[4, 5]]
    assert not mark.exists()


KERNELS = """
calls = []

def get_kernel(*args, **kwargs):
    calls.append(repr((args, kwargs)))
    raise RuntimeError("a kernel was asked for")

get_local_kernel = load_kernel = has_kernel = kernelize = get_kernel

def _same(*args, **kwargs):
    return lambda decorated: decorated

use_kernel_forward_from_hub = use_kernelized_func = use_kernel_func_from_hub = _same
replace_kernel_forward_from_hub = register_kernel_mapping = use_kernel_mapping = _same

class _Plain:
    def __init__(self, *args, **kwargs):
        pass

CUDAProperties = Device = LayerRepository = LocalLayerRepository = ROCMProperties = _Plain
FuncRepository = LocalFuncRepository = KernelizeFallback = Mode = _Plain
"""
EVIL = [
    *({key: value}
      for key in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal",
                  "experts_implementation", "_experts_implementation")
      for value in ("evil/kernel", "paged|evil/kernel@main:forward", {"": "evil/kernel"})),
    {"text_config": {"_attn_implementation": "evil/kernel"}, "use_kernels": True},
    {"__dict__": {"_attn_implementation_internal": "evil/kernel"}},
    {"attribute_map": {"harmless": "_attn_implementation_internal"}, "harmless": "evil/kernel"},
    {"attribute_map": {"_attn_implementation_internal": "harmless"}, "harmless": "evil/kernel"},
    {"kernel_config": {"kernel_mapping": {"LayerNorm": "evil/kernel"}}, "allow_all_kernels": True},
]  # fmt: skip


def open_all(folders: list[str]) -> None:
    """Open folders as what they are; print how many opened, and the calls for kernels."""
    import kernels

    assert transformers.utils.is_kernels_available(), "the stub is not taken for the package"
    opened = 0
    for folder in folders:
        try:
            model = open_causal_lm(folder)
            model.logits(torch.ones(1, 3, dtype=torch.int64))
            opened += 1
        except (CheckpointError, ConfigError):
            pass
    print(json.dumps({"opened": opened, "calls": kernels.calls}))


def test_no_folder_has_a_kernel_of_the_hub_fetched(tmp_path):
    version = transformers.utils.import_utils.KERNELS_MIN_VERSION
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text(KERNELS + f"__version__ = {version!r}\n")
    (tmp_path / f"kernels-{version}.dist-info").mkdir()
    (tmp_path / f"kernels-{version}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n"
    )
    save_lm(tmp_path / "llama")
    folders = []
    for number, changes in enumerate(EVIL):
        folders.append(shutil.copytree(tmp_path / "llama", tmp_path / f"evil{number}"))
        edit_json(folders[-1] / "config.json", **changes)
    code = "import sys; from tests.trainer.models.test_pretrained import *; open_all(sys.argv[1:])"
    path = os.pathsep.join([str(ROOT / "src"), str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, folders)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["calls"] == []
    assert found["opened"] > len(EVIL) / 2  # all refused would be no test


def test_how_a_model_was_trained_does_not_choose_how_it_is_computed(folder):
    edit_json(folder / "config.json", attn_implementation="eager")
    assert open_classifier(folder, ["a", "b"]).model.config._attn_implementation == "sdpa"


# --- the hub ---


@pytest.fixture
def hub(tmp_path, good, monkeypatch):
    """A hub whose main branch moves on at every question; gives what was asked for."""
    asked = []

    def download(name, *, revision, allow_patterns):
        asked.append((revision, allow_patterns))
        snapshot = tmp_path / "snapshots" / (revision or f"{len(asked):040x}")
        return os.fspath(shutil.copytree(good, snapshot, dirs_exist_ok=True))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


def test_a_pinned_name_stays_one_commit_while_its_branch_moves(hub):
    assert resolve_source("tiny/bert") != resolve_source("tiny/bert")
    commit = pin("tiny/bert")
    assert commit == f"{3:040x}"
    assert pin("tiny/bert", commit) == resolve_source("tiny/bert", commit).name == commit
    assert open_folder("tiny/bert", commit).name == "tiny/bert"
    assert not any(p.endswith((".bin", ".pt", ".py", "*")) for p in hub[0][1])


def test_a_folder_has_no_commit(good):
    assert pin(good) == ""
    with pytest.raises(ConfigError, match="is for hub names"):
        pin(good, "v1")


@pytest.mark.parametrize("name", ["/none/such", "a/b/c", "", "tiny/bert"])
def test_without_the_hub_it_says_what_to_do(name, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="is not a folder here, and the hub answers"):
        resolve_source(name)


def test_a_missing_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"need peft.*pip install 'halfstep\[hf\]'"):
        require_library("peft")
