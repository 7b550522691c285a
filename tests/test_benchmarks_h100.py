"""The benchmark for one GPU: each part's code runs on a CPU, in tiny sizes."""

import json
import re
import sys
from pathlib import Path

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
@pytest.mark.parametrize("parts", [["0", "A", "D", "E", "F", "C"], ["B"]])
def test_every_part_is_measured(parts, h100, tmp_path, capsys):
    options = "--policies", "bf16-mixed", "--minutes", "60"
    rows = run(h100, tmp_path, *options, "--parts", *parts)
    assert len(capsys.readouterr().out.splitlines()) == len(rows)
    assert [*dict.fromkeys(row["part"] for row in rows)] == parts
    for row in rows:
        text = row.get("text", "")
        assert row["status"] != "failed", row
        if row["status"] == "missing":
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
    found = {(row["part"], row["status"], row["text"]) for row in rows[:-1]}
    assert found == {("B", "missing", "transformers"), ("E", "missing", "transformers")}


def test_what_does_not_fit_is_said_to_be_skipped(h100, tmp_path):
    rows = run(h100, tmp_path, "--parts", "D", "F", "--minutes", "0.001")
    assert {row["status"] for row in rows[:-1]} == {"skipped"}
    assert {row["part"] for row in rows} == {"D", "F"}


def test_pages_say_what_the_file_says_in_both_languages(benchmarks, tmp_path):
    import tables

    file = tmp_path / "h100.jsonl"
    first = {"part": "0", "size": "machine", "variant": "", "environment": {
        "device_name": "NVIDIA H200", "packages": {"torch": "2.11.0"}}}  # fmt: skip
    kinds = ("bare bf16", "bare fp32", "halfstep fp32", "halfstep bf16-mixed", tables.SPLIT8,
             "halfstep bf16-split", "halfstep fp16-mixed", "halfstep bf16-mixed, torch.AdamW",
             "halfstep fp8", "bare bf16, plain head")  # fmt: skip
    sizes = {"gpt2-124m": "AF", "llama-1.1b": "B", "4096x4096": "D", "768x3072": "D",
             "bert-base": "E", "syncs": "0"}  # fmt: skip
    rows, keys = [first], ("ms", "tokens_per_second", "peak_gb", "tail_ms", "dear", "syncs")
    cases = [(part, size, f"{kind}{end}") for size, parts in sizes.items() for part in parts
             for kind in kinds for end in ("", ", compiled")]  # fmt: skip
    for number, case in enumerate(cases, 3):
        figures = dict.fromkeys(keys, number) | {"seconds": [1], "of": [number / 7, "bare"]}
        rows.append(dict(zip(("part", "size", "variant"), case, strict=True)) | figures)
    file.write_text("".join(json.dumps(row | {"status": "ok"}) + "\n" for row in rows))
    for name, texts in tables.TEXTS.items():
        english, chinese = (tables.text_of(name, language, file) for language in ("en", "zh"))
        numbers = [re.findall(r"\d[\d.,]*\d|\d", text) for text in (english, chinese)]
        assert sorted(numbers[0]) == sorted(numbers[1])
        assert len(texts["en"]) == len(texts["zh"])
        assert all(clause.split("{")[0] in english for clause in texts["en"])
        page = tables.filled(f"a <!-- gpu: {name} -->old<!-- /gpu --> b", "en", file)
        assert page == f"a <!-- gpu: {name} of h100.jsonl -->{english}<!-- /gpu --> b"
        assert tables.filled(page, "en", file) == page
    plain = "bare bf16, plain head"
    compiled = [("A", "gpt2-124m", f"{kind}, compiled") for kind in (tables.SPLIT8, plain)]
    split, bare = (cases.index(case) + 3 for case in compiled)
    assert f"makes {split / bare:.2f} times them in" in tables.text_of("readme", "en", file)


def test_regions_hold_what_their_files_say(benchmarks):
    import tables

    for path in tables.PAGES:
        page = path.read_text(encoding="utf-8")
        found = [*tables.REGION.finditer(page)]
        assert page.count("<!-- gpu: ") == len(found) > 0
        for name, file, text in (region.groups() for region in found):
            language = "zh" if path.stem.endswith(".zh") else "en"
            if file:
                assert text == tables.text_of(name, language, Path(tables.FOLDER, "results", file))
