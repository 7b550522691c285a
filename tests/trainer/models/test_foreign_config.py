"""A stranger's folder names code in every way that transformers would follow: none is followed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from tests.trainer.models.mutated_folders import stub_kernels
from tests.trainer.models.pretrained_folders import (
    edit_json,
    save_classifier,
    save_lm,
    save_tokenizer,
)

from halfstep.errors import CheckpointError, ConfigError
from halfstep.trainer.models.gpt.hf import load_gpt2
from halfstep.trainer.models.pretrained.classifier import open_classifier
from halfstep.trainer.models.pretrained.folder import open_folder
from halfstep.trainer.models.pretrained.lm import open_causal_lm
from halfstep.trainer.models.pretrained.tokenizer import open_tokenizer

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = save_classifier(tmp_path_factory.mktemp("foreign") / "bert")
    return save_tokenizer(folder, model_max_length=32)


@pytest.fixture
def folder(good, tmp_path):
    return shutil.copytree(good, tmp_path / "bert")


@pytest.mark.timeout(900)  # of 500: about 20 s of processor time; minutes under load
@pytest.mark.parametrize("folders", [24, pytest.param(500, marks=pytest.mark.slow)])
def test_mutated_folders_ask_for_no_kernel_and_end_in_no_raw_error(tmp_path, folders):
    version = transformers.utils.import_utils.KERNELS_MIN_VERSION
    stub_kernels(tmp_path, version)
    path = os.pathsep.join([str(ROOT / "src"), str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainer.models.mutated_folders", "20", str(folders)],
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["calls"] == []
    assert found["raw"] == []
    # neither all refused, which would be no answer, nor all opened, which would be no test
    for name, share in (("classifier", 0.1), ("lm", 0.1), ("tokenizer", 0.2)):
        assert found[f"{name} opened"] > share * folders, found
        assert found[f"{name} refused"] > share * folders, found


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_implementation": "evil/kernel"},
        {"_attn_implementation": "kernels-community/flash-attn2"},
        {"_attn_implementation_internal": "paged|evil/kernel@main:forward"},
        {"experts_implementation": {"": "evil/kernel"}},
        {"text_config": {"vision_config": [{"_experts_implementation": "evil/kernel"}]}},
        {"__dict__": {"_attn_implementation_internal": "evil/kernel"}},
    ],
)
def test_a_kernel_of_the_hub_is_refused_by_name(folder, changes):
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ConfigError, match=r"asks to fetch and run code.*remove the key"):
        open_folder(folder, trust_remote_code=True)


@pytest.mark.parametrize("asked", ["flash_attention_2", "flex_attention", "eager", "sdpa", None])
def test_how_a_model_was_trained_does_not_choose_how_it_is_computed(folder, asked):
    edit_json(folder / "config.json", attn_implementation=asked, use_kernels=True)
    found = open_folder(folder).config
    assert found._attn_implementation is None
    assert not hasattr(found, "use_kernels")
    assert open_classifier(folder, ["a", "b"]).model.config._attn_implementation == "sdpa"


def test_a_key_cannot_have_another_name(folder):
    renamed = {"harmless": "_attn_implementation_internal"}
    edit_json(folder / "config.json", attribute_map=renamed, harmless="evil/kernel")
    found = open_folder(folder).config
    assert found._attn_implementation is None
    assert found.attribute_map == type(found).attribute_map


def test_labels_may_be_called_anything(folder):
    labels = {"0": "update", "1": "attn_implementation"}
    edit_json(
        folder / "config.json", id2label=labels, label2id={v: int(k) for k, v in labels.items()}
    )
    assert open_folder(folder).config.id2label == {0: "update", 1: "attn_implementation"}


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_no_other_file_is_read_in_place_of_the_checked_one(folder, file):
    shutil.copy(folder / "config.json", folder / "config.4.0.0.json")
    edit_json(folder / file, configuration_files=["config.4.0.0.json"])
    with pytest.raises(ConfigError, match="configuration_files"):
        open_tokenizer(folder)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("custom_pipelines", {"x": {"impl": "m.C"}}, "custom_pipelines asks to run"),
        ("text_config", {"auto_map": {"AutoModel": "m.C"}}, "auto_map asks to run"),
        ("text_config", {"quantization_config": {"quant_method": "mxfp4"}}, "quantized"),
        ("compression_config", {"format": "x"}, "quantized"),
        ("vision_config", {"architecture": "hf-hub:evil/model"}, "in another place"),
    ],
)
def test_code_is_found_on_every_level(folder, key, value, message):
    edit_json(folder / "config.json", **{key: value})
    with pytest.raises(ConfigError, match=message):
        open_folder(folder)


@pytest.mark.parametrize("name", ["BertModel", "AutoModelForCausalLM", "RagTokenizer", 7])
def test_only_a_tokenizer_is_made_as_tokenizer(folder, name):
    edit_json(folder / "config.json", tokenizer_class=name)
    assert open_tokenizer(folder).encode_plain(["the cat"]) == [[4, 5]]
    edit_json(folder / "tokenizer_config.json", tokenizer_class=name)
    with pytest.raises((CheckpointError, ConfigError), match=r"tokenizer has no|has no tokenizer"):
        open_tokenizer(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers does not fit"),
        ({"text_config": {"n_layers": 10**4000}}, "n_layers does not fit"),
        ({"num_labels": 10**9}, "num_labels does not fit"),
        ({"num_hidden_layers": 40}, "lacks .* weights of the model"),
        ({"vocab_size": 10**8}, "means a model of"),
        ({"hidden_size": 10**8, "num_attention_heads": 1}, "means a model of"),
    ],
)
def test_a_model_far_larger_than_its_weights_is_refused_before_it_is_built(
    folder, changes, message
):
    edit_json(folder / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        open_classifier(folder, ["a", "b"])


def test_a_gpt2_of_far_more_layers_than_its_weights_is_refused_before_it_is_built(tmp_path):
    folder = save_lm(tmp_path / "gpt2", "GPT2")
    edit_json(folder / "config.json", n_layer=10**30)
    with pytest.raises(CheckpointError, match="no weights of 1000"):
        load_gpt2(folder)


@pytest.mark.parametrize(
    "changes",
    [{"hidden_act": "nonsense"}, {"hidden_size": 33}, {"layer_norm_eps": "x"}],
)
def test_a_network_that_cannot_be_is_our_error(folder, changes):
    edit_json(folder / "config.json", **changes)
    with pytest.raises((CheckpointError, ConfigError), match="bert"):
        open_classifier(folder, ["a", "b"])


def test_generation_settings_cannot_replace_a_method(tmp_path):
    folder = save_lm(tmp_path / "gpt2", "GPT2")
    edit_json(folder / "generation_config.json", validate="x", __class__="x", temperature=0.5)
    lm = open_causal_lm(folder)
    assert callable(lm.model.generation_config.validate)
    lm.save_(tmp_path / "out", {})
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())
