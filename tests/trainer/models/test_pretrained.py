"""Folders and hub names that are opened, and all that is refused before anything of it runs."""

from __future__ import annotations

import os
import shutil

import httpx2
import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.trainer.models.pretrained_folders import edit_json, save_classifier

from halfstep.errors import CheckpointError, ConfigError
from halfstep.trainer.models.pretrained.folder import open_folder, stored_dtype
from halfstep.trainer.models.pretrained.hub import pin, quiet, require_library, resolve_source


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return save_classifier(tmp_path_factory.mktemp("pretrained") / "bert")


@pytest.fixture
def folder(good, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(good, tmp_path / "bert")


def shard(folder):
    """Replaces the one weights file by two shards and an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    half = len(tensors) // 2
    for number, names in enumerate((list(tensors)[:half], list(tensors)[half:]), 1):
        part = {name: tensors[name] for name in names}
        save_file(part, folder / f"model-0000{number}-of-00002.safetensors", {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text("{}")
    return tensors


def test_a_good_folder_opens_in_one_file_or_in_shards(folder):
    assert open_folder(folder).config.model_type == "bert"
    whole = open_folder(folder).tensors
    wanted = shard(folder)
    for tensors in (whole, open_folder(folder).tensors):
        assert tensors.keys() == wanted.keys()
        assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)


def test_tensors_outlive_their_file(folder):
    tensors = open_folder(folder).tensors
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 4096)
    assert all(torch.equal(tensors[name], before[name]) for name in before)


def test_files_that_are_missing_and_a_pickle_in_their_place(folder, monkeypatch):
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no weights in"):
        open_folder(folder)
    monkeypatch.setattr(torch, "load", lambda *a, **k: pytest.fail("opened a pickle"))
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04 not opened")
    with pytest.raises(CheckpointError, match=r"A pickle.*is not read.*save_pretrained"):
        open_folder(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        open_folder(folder)


@pytest.mark.parametrize(
    "damage", [lambda b: b[:0], lambda b: b[:5], lambda b: b[:-1], lambda b: b"\xff" * 8 + b[8:]]
)
def test_damaged_weights(folder, damage):
    file = folder / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing, damaged"):
        open_folder(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not readable JSON"),
        ("\udcff", "not readable JSON"),
        ("[" * 100_000, "not readable JSON"),
        ("[1]", "must hold a JSON object, got list"),
        ("{}", "model_type is missing"),
        ('{"model_type": 3}', "model_type is missing or no string"),
        ('{"model_type": "none_such"}', "not one that transformers"),
        ('{"model_type": "bert", "hidden_size": "wide"}', "not one that transformers"),
    ],
)
def test_an_invalid_config(folder, text, message):
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=message):
        open_folder(folder)


def test_a_link_to_the_folder_itself_is_fine(folder):
    link = folder.parent / "link"
    link.symlink_to(folder, target_is_directory=True)
    assert open_folder(link).config.model_type == "bert"


REMOTE = """
from pathlib import Path
Path({mark!r}).write_text("ran")
from transformers import BertConfig, BertForSequenceClassification
class OwnConfig(BertConfig):
    model_type = "own"
class OwnModel(BertForSequenceClassification):
    config_class = OwnConfig
"""


@pytest.fixture
def remote(folder, tmp_path, monkeypatch):
    """A folder with code of its own, which leaves a mark when it runs."""
    mark = tmp_path / "mark"
    (folder / "own.py").write_text(REMOTE.format(mark=str(mark)))
    auto_map = {
        "AutoConfig": "own.OwnConfig",
        "AutoModelForSequenceClassification": "own.OwnModel",
    }
    edit_json(folder / "config.json", auto_map=auto_map, model_type="own")
    monkeypatch.setattr(
        transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    return folder, mark


@pytest.mark.parametrize("model_type", ["own", "bert"])
def test_code_of_a_folder_does_not_run_unasked(remote, model_type):
    folder, mark = remote
    edit_json(folder / "config.json", model_type=model_type)
    with pytest.raises(ConfigError, match=r"auto_map.*Nothing of it was run.*trust-remote-code"):
        open_folder(folder)
    assert not mark.exists()


def test_code_of_a_folder_runs_where_it_is_trusted(remote):
    folder, mark = remote
    edit_json(folder / "config.json", attn_implementation="flash_attention_2")
    found = open_folder(folder, trust_remote_code=True)
    assert found.config._attn_implementation is None
    assert mark.exists()
    assert type(found.config).__name__ == "OwnConfig"
    built = found.model_class("AutoModelForSequenceClassification", "classifier")
    assert built.__name__ == "OwnModel"


def test_an_adapter_is_not_a_model(folder):
    (folder / "config.json").rename(folder / "adapter_config.json")
    with pytest.raises(ConfigError, match="holds an adapter"):
        open_folder(folder)


def test_stored_dtype_holds_all_numbers():
    fp16, bf16 = torch.zeros(1, dtype=torch.float16), torch.zeros(1, dtype=torch.bfloat16)
    assert stored_dtype({"a": fp16, "i": torch.zeros(1, dtype=torch.int64)}) == torch.float16
    assert stored_dtype({"a": bf16}) == torch.bfloat16
    # Neither 16-bit format holds the other's numbers.
    assert stored_dtype({"a": fp16, "b": bf16}) == torch.float32
    assert stored_dtype({}) == torch.float32


def test_quiet_restores_what_was():
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with pytest.raises(KeyError), quiet():
        raise KeyError
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


@pytest.mark.parametrize("name", ["/none/such", "a/b/c", "a b", "", "~n"])
def test_neither_folder_nor_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="neither an existing folder nor a hub name"):
        resolve_source(name)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty download cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def put_in_cache(cache, good, commit="0" * 40):
    """A download as the hub's library leaves it: links to blobs."""
    repository = cache / "models--tiny--bert"
    snapshot = repository / "snapshots" / commit
    (repository / "blobs").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    snapshot.mkdir(parents=True)
    for file in good.iterdir():
        shutil.copy(file, repository / "blobs" / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    return snapshot


@pytest.fixture(params=["offline", "no network", "no answer"])
def cut_off(request, monkeypatch):
    """A machine without the hub, in three ways."""
    kinds = {"no network": httpx2.ConnectError, "no answer": httpx2.ReadTimeout}

    def repo_info(self, *args, **kwargs):
        raise kinds[request.param]("Name or service not known")

    offline = request.param == "offline"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    if not offline:
        monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", repo_info)


def test_without_the_hub_an_earlier_download_is_taken(cache, cut_off, good):
    for use in (resolve_source, pin):
        with pytest.raises(ConfigError, match=r"hf download tiny/bert --local-dir DIR"):
            use("tiny/bert")
    snapshot = put_in_cache(cache, good, "7" * 40)
    assert resolve_source("tiny/bert") == snapshot
    assert pin("tiny/bert") == pin("tiny/bert", "main") == "7" * 40
    found = open_folder("tiny/bert")
    assert (found.name, found.folder) == ("tiny/bert", snapshot)
    for use in (resolve_source, pin):
        with pytest.raises(ConfigError, match="hf download"):
            use("tiny/bert", revision="v2")


def test_what_the_hub_says_no_to(cache, monkeypatch):
    kind = huggingface_hub.errors.GatedRepoError

    def repo_info(self, *args, **kwargs):
        raise kind.__new__(kind)

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", repo_info)
    with pytest.raises(ConfigError, match="the hub answers: GatedRepoError"):
        resolve_source("tiny/bert", revision="v1")


@pytest.fixture
def moving(cache, good, monkeypatch):
    """A hub whose main branch moves on at every question; gives what was asked for."""
    asked = []

    def download(name, *, revision, allow_patterns):
        asked.append((revision, allow_patterns))
        commit = revision or f"{len(asked):040x}"
        snapshot = cache / "models--tiny--bert" / "snapshots" / commit
        return os.fspath(shutil.copytree(good, snapshot, dirs_exist_ok=True))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


def test_what_is_downloaded(moving):
    resolve_source("tiny/bert", revision="v1")
    resolve_source("tiny/bert", trust_remote_code=True)
    assert [revision for revision, _ in moving] == ["v1", None]
    assert not any(p.endswith((".bin", ".pt", ".py", "*")) for p in moving[0][1])
    assert "*.py" in moving[1][1]


def test_a_pinned_name_stays_one_commit_while_its_branch_moves(moving):
    assert resolve_source("tiny/bert") != resolve_source("tiny/bert")
    commit = pin("tiny/bert")
    assert commit == f"{3:040x}"
    assert {resolve_source("tiny/bert", revision=commit).name for _ in range(3)} == {commit}
    assert pin("tiny/bert", commit) == commit


@pytest.mark.parametrize("revision", ["../../../out", "a/../../../out", "/tmp/out"])
def test_a_revision_cannot_lead_out_of_the_cache(moving, revision):
    with pytest.raises(ConfigError, match="is for hub names: a branch, tag or commit"):
        pin("tiny/bert", revision)
    assert moving == []


def test_a_folder_has_no_commit(good):
    assert pin(good) == ""
    with pytest.raises(ConfigError, match="is for hub names"):
        pin(good, "v1")
    with pytest.raises(ConfigError, match="neither an existing folder nor a hub name"):
        pin(good / "config.json")


@pytest.mark.parametrize("module", ["transformers", "huggingface_hub", "peft"])
def test_a_missing_library(module, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(ConfigError, match=rf"need {module}.*pip install 'halfstep\[hf\]'"):
        require_library(module)


@pytest.mark.parametrize(
    "version", ["4.57.6", "5.0.0", "5.2.9", "5.3.0", "5.3.0.dev0", "5.23.0", "6.0"]
)
def test_a_transformers_without_the_gate_is_refused(version, monkeypatch):
    found = require_library("transformers")  # a lazy module, which may have replaced itself
    monkeypatch.setattr(found, "__version__", version)
    if version.startswith(("4.", "5.0", "5.2.")):
        with pytest.raises(ConfigError, match=r"5\.3 or newer"):
            require_library("transformers")
    else:
        assert require_library("transformers") is found
