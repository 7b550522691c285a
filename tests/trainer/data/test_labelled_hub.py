"""``datasets:`` inputs: local folders of the library, and what is said without a network."""

import subprocess
import sys

import pytest

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.data.config import LabelledConfig
from halfstep.trainer.data.labelled import _read, read_labelled

datasets = pytest.importorskip("datasets")

TEXTS = [f"text {i}" for i in range(8)]
NUMBERS = [0, 1, 1, 0, 1, 0, 0, 1]
NAMES = ["ham", "spam"]
EXPECTED = list(zip(TEXTS, [NAMES[n] for n in NUMBERS], strict=True))


@pytest.fixture(autouse=True)
def own_datasets_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def dataset(numbers=NUMBERS, texts=TEXTS):
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=NAMES)}
    )
    return datasets.Dataset.from_dict({"text": texts, "label": numbers}, features=features)


def read(given, role="train"):
    found = _read((given,), LabelledConfig(train=(given,)), role, [])
    return [(text, label) for _, text, label in found]


def refusal(given, role="train"):
    with pytest.raises((DataError, ConfigError)) as error:
        read(given, role)
    return str(error.value)


def test_splits_are_the_usual_ones_or_by_name(tmp_path):
    parts = {
        "train": dataset(),
        "validation": dataset().select([3, 1]),
        "test": dataset().select([2]),
    }
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "d")
    given = f"datasets:{tmp_path}/d"
    assert read(given) == EXPECTED
    assert read(given, "dev") == [EXPECTED[3], EXPECTED[1]]
    assert read(f"{given}@test") == read(given, "test") == EXPECTED[2:3]
    assert "cannot be loaded: KeyError('x'); check the name, and the split" in refusal(f"{given}@x")
    data = read_labelled(LabelledConfig(train=(given,), dev=(given,)), 0)
    assert (data.names, data.dev.labels) == (("ham", "spam"), [0, 1])
    del parts["validation"]  # a test split is never taken unasked
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "e")
    assert "cannot be loaded: KeyError('validation')" in refusal(f"datasets:{tmp_path}/e", "dev")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_parquet_files_are_read(tmp_path):
    (tmp_path / "d").mkdir()
    dataset().to_parquet(tmp_path / "d" / "train.parquet")
    dataset().select([4]).to_parquet(tmp_path / "d" / "validation.parquet")
    assert read(f"datasets:{tmp_path}/d", "dev") == EXPECTED[4:5]
    assert read(f"{tmp_path}/d/train.parquet") == EXPECTED


def test_plain_columns_are_taken_and_rows_without_a_label_are_refused(tmp_path):
    columns = {"tweet": ["x", "y"], "target": [True, False], "other": [[1], [2]]}
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "d")
    assert read(f"datasets:{tmp_path}/d") == [("x", "true"), ("y", "false")]
    dataset([0, -1], ["x", "y"]).save_to_disk(tmp_path / "e")
    assert "row 2: the label must be a string" in refusal(f"datasets:{tmp_path}/e")


def test_what_cannot_be_loaded_says_what_to_do(tmp_path):
    message = refusal("datasets:owner/name@train")
    assert message.startswith("owner/name@train: cannot be loaded")
    assert "give datasets:FOLDER with what save_to_disk wrote elsewhere" in message
    dataset().save_to_disk(tmp_path / "e")
    next((tmp_path / "e").glob("*.arrow")).write_bytes(b"damaged")
    assert "cannot be loaded" in refusal(f"datasets:{tmp_path}/e")


def test_the_library_is_never_imported_without_need():
    code = "import sys, halfstep.trainer.data.labelled; sys.exit('datasets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
