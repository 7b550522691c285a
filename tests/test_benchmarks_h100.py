"""The benchmark for one GPU: each part's code runs on a CPU, in tiny sizes."""

import json
import sys

import pytest

# torch warns as torch.compile traces, and optimizers of tiny models of moments in few bits
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def h100(benchmarks):
    import h100

    return h100


def run(h100, folder, *words):
    file = h100.main(["--device", "cpu", "--tiny", "--out", str(folder), *words])
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("parts", [["0", "A", "C", "D", "E", "F"], ["B"]])
def test_every_part_is_measured(parts, h100, tmp_path, capsys):
    options = "--policies", "bf16-mixed", "--minutes", "60"
    rows = run(h100, tmp_path, *options, "--parts", *parts)
    assert len(capsys.readouterr().out.splitlines()) == len(rows)
    assert [*dict.fromkeys(row["part"] for row in rows)] == parts
    for row in rows:
        text = row.get("text", "")
        if row["status"] == "failed":  # what cannot be one graph says why
            assert row["size"] == "fullgraph"
            assert row["variant"] in ("fp16-mixed", "fp8,simulate=yes", "a whole step")
        elif row["status"] == "missing":
            assert text.startswith(("torchao", "liger_kernel", "transformers"))
        elif row["status"] == "skipped":
            assert text == "needs a CUDA device"
    measured = {row["variant"]: row for row in rows if row["status"] == "ok"}
    ours = measured["halfstep bf16-mixed, compiled"]
    assert (ours["breaks"], ours["recompiles"]) == (0, 0)
    assert ours["of"][1] == "bare bf16, compiled"
    assert len(ours["seconds"]) == 2


def test_a_missing_package_is_a_row(h100, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    rows = run(h100, tmp_path, "--parts", "B", "E")
    assert [(row["status"], row["text"]) for row in rows[:-1]] == [("missing", "transformers")] * 2


def test_what_does_not_fit_is_said_to_be_skipped(h100, tmp_path):
    rows = run(h100, tmp_path, "--parts", "D", "F", "--minutes", "0.001")
    assert {row["status"] for row in rows[:-1]} == {"skipped"}
    assert {row["part"] for row in rows} == {"D", "F"}
