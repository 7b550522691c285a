"""What only a GPU can show; skipped, loudly, without one."""

import json
import math
import subprocess
import sys

import pytest
import torch

import halfstep
from halfstep.errors import PrecisionError
from halfstep.formats import BLOCK_FORMATS
from halfstep.precision.casting.autocast import Autocast
from halfstep.precision.low_bit import linear, native
from halfstep.precision.masters.rounding import random_bits
from halfstep.precision.policy.policy import POLICIES
from halfstep.precision.policy.spelling import parse_policy
from halfstep.precision.step import Precision
from halfstep.trainer.config.run import OptimizerConfig
from halfstep.trainer.models.gpt import GPT, GPTConfig
from halfstep.trainer.step import make_optimizer, run_micro_batch
from precision.test_device_steps import KINDS, SCALED, Run, alike
from reference import blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NO GPU: nothing of CUDA was tested"),
]
CUDA = torch.device("cuda", 0)
SHAPE = GPTConfig(n_layer=2, n_head=4, n_embd=128, block_size=64, vocab_size=512)


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(512, (8, 65), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def losses(policy, device, steps=20, compiled=False, **optimizer):
    model = GPT(SHAPE, seed=0).to(device)
    adamw = make_optimizer(model, OptimizerConfig(**optimizer), parse_policy(policy))
    precision = Precision(policy, model, adamw)
    loss_sum = torch.compile(model.loss_sum) if compiled else model.loss_sum
    results = []
    for _ in range(steps):
        run_micro_batch(loss_sum, precision, batch(), batch()[1].numel(), None)
        results.append(precision.step(max_norm=1.0))
    return [result.loss for result in results], results


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "bf16-module"])
def test_every_policy_learns_as_fp32_does(policy):
    optimizer = {"eps": 1e-4} if policy == "fp16-pure" else {}
    ours, results = losses(policy, CUDA, **optimizer)
    reference, _ = losses("fp32", CUDA, **optimizer)
    assert all(r.applied or r.reason for r in results)
    assert ours[-1] < ours[0] - 0.5
    # 16-bit rounding (2^-9 in bf16) of every operand, over 20 steps of one repeated batch
    bound = 0.2 if policy.endswith("pure") else 0.03
    applied = sum(r.applied for r in results)
    if applied == len(results):
        assert ours[-1] == pytest.approx(reference[-1], rel=bound)


def test_fp32_equals_the_cpu():
    on_gpu, _ = losses("fp32", CUDA)
    on_cpu, _ = losses("fp32", torch.device("cpu"))
    # fp32 sums in another order, grown over 20 updates
    assert on_gpu == pytest.approx(on_cpu, rel=1e-3)


def test_fp32_is_ieee_and_tf32_is_not():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(512, 512, generator=generator).to(CUDA) for _ in range(2))
    exact = a.double() @ b.double()
    errors = {}
    for tf32 in (False, True):
        context = Autocast(parse_policy("tf32" if tf32 else "fp32"), None, CUDA)
        with context:
            errors[tf32] = float((a @ b - exact).norm() / exact.norm())
    assert errors[False] < 1e-6  # 2^-24 per product, averaged
    assert 5e-5 < errors[True] < 1e-3  # 2^-11 per operand


def test_simulated_fp16_on_cpu_predicts_the_gpu():
    on_gpu, _ = losses("fp16-mixed", CUDA)
    on_cpu, _ = losses("fp16-mixed", torch.device("cpu"))
    # the same fp16 roundings but for order and attention probabilities
    assert on_gpu == pytest.approx(on_cpu, rel=5e-3)


@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed", "bf16-master"])
def test_compile_gives_the_same_training(policy):
    eager, _ = losses(policy, CUDA, steps=5)
    compiled, _ = losses(policy, CUDA, steps=5, compiled=True)
    # fused kernels keep fp32 where eager rounds to 16 bits
    assert compiled == pytest.approx(eager, rel=1e-2)


OURS = {
    "ours": halfstep.optim.AdamW,
    "ours beside": lambda p: [torch.optim.AdamW(p[:1], fused=True), halfstep.optim.AdamW(p[1:])],
}


@pytest.mark.parametrize("policy", ["bf16-mixed", f"fp16-mixed,{SCALED}", f"bf16-master,{SCALED}"])
@pytest.mark.parametrize("kind", [*KINDS, *OURS])
def test_a_step_never_waits_for_the_device_and_is_the_host_s(kind, policy):
    make = {**KINDS, **OURS}[kind]
    ours, theirs = (Run(policy, make, host=host, device=CUDA) for host in (False, True))
    for run in (ours, theirs):
        results = [run.step(number, max_norm=1e6) for number in range(2)]
        try:
            if run is ours:
                torch.cuda.set_sync_debug_mode("error")
            for number in range(2, 8):
                if "master" in policy and number == 5:
                    run.model[2].bias.data.zero_()  # of which no version tells
                fault = math.inf if SCALED in policy and number == 3 else None
                results.append(run.step(number, fault, max_norm=1e6))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert [r.applied for r in results] == [n != 3 or SCALED not in policy for n in range(8)]
    assert alike(ours.everything(), theirs.everything())


def test_a_gpu_without_bf16_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    model = torch.nn.Linear(2, 2, device=CUDA)
    with pytest.raises(PrecisionError, match="nearest that can is fp16-mixed"):
        Precision("bf16-mixed", model, torch.optim.SGD(model.parameters(), lr=1.0))


@pytest.mark.distributed
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NO SECOND GPU: NCCL was not tested")
@pytest.mark.parametrize("layout", ["data=2", "shard=2", "tensor=2"])
@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "fp16-mixed", "bf16-split"])
def test_two_gpus_train_as_one_does(layout, policy, corpus, tmp_path):
    command = [
        sys.executable,
        "-m",
        "halfstep",
        "train",
        "--config",
        "gpt-tiny",
        "--device",
        "cuda",
    ]
    command += ["--data", str(corpus), "--tokenizer", "bytes", "--precision", policy]
    command += ["--max-steps", "20", "--schedule.warmup_steps", "5", "--save-every", "0"]
    found = []
    for name, extra in (
        ("one", ["--grad-accum", "2"]),
        ("two", ["--nproc", "2", "--parallel", layout]),
    ):
        where = tmp_path / name
        subprocess.run([*command, *extra, "--output-dir", str(where)], check=True, timeout=300)
        lines = (where / "metrics.jsonl").read_text().splitlines()
        found.append([json.loads(line)["loss"] for line in lines])
    # sums in another order, and in 16 bits rounding of partial sums, grown over 20 updates
    assert found[1] == pytest.approx(found[0], rel=1e-3 if policy == "fp32" else 3e-2)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_block_formats_have_the_same_bits_on_the_device(name):
    form = BLOCK_FORMATS[name]
    for piece in blocks.PIECES:
        x = torch.from_numpy(blocks.piece(piece, 256))
        for bits in (None, random_bits(0, 1, x.shape, stream=17)):
            there = form.quantize(x.to(CUDA), bits=None if bits is None else bits.to(CUDA))
            here = form.quantize(x, bits=bits)
            assert torch.equal(there.codes.cpu().view(torch.uint8), here.codes.view(torch.uint8))
            assert torch.equal(there.scales.cpu().float(), here.scales.float())
        there = random_bits(0, 1, x.shape, stream=17, device=CUDA)
        assert torch.equal(there.cpu(), random_bits(0, 1, x.shape, stream=17))


@pytest.mark.parametrize("scheme", ["fp8", "fp8-block", "mxfp8", "nvfp4"])
def test_a_product_below_16_bits_is_its_simulation(scheme, monkeypatch):
    """Forward, gradient of the input and of the weight, of one layer."""
    why = native.why_not_native(scheme, CUDA)
    if why:
        pytest.skip(f"NOT ON THIS GPU: {why}")
    found = []
    for simulated in (False, True):
        if simulated:
            monkeypatch.setattr(linear, "why_not_native", lambda name, device: "simulated")
        torch.manual_seed(0)
        layer = torch.nn.Linear(512, 384, device=CUDA)
        sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
        precision = Precision(f"bf16-mixed,rules=*:{scheme}", layer, sgd)
        x = torch.randn(200, 512, device=CUDA).requires_grad_()
        with precision.autocast():
            y = layer(x)
        y.backward(torch.randn(200, 384, device=CUDA))
        found.append([t.detach().double() for t in (y, x.grad, layer.weight.grad)])
    for a, b in zip(*found, strict=True):
        # bf16 rounds both results, and tensor cores cut numbers of a group off after 13 bits
        assert (a - b).norm() <= 2.0**-8 * b.norm()


@pytest.mark.parametrize("scheme", ["fp8", "fp8-block", "mxfp8", "nvfp4"])
def test_a_recipe_learns_as_bf16_does(scheme):
    why = native.why_not_native(scheme, CUDA)
    policy = f"bf16-mixed,rules=*:{scheme}" + (",simulate=yes" if why else "")
    ours, results = losses(policy, CUDA)
    reference, _ = losses("bf16-mixed", CUDA)
    assert all(result.applied for result in results)
    assert ours[-1] < ours[0] - 0.5
    # 20 steps on one batch, with codes of 2 to 4 bits: an fp4 layer is off by about 10 %
    assert abs(ours[-1] - reference[-1]) < 0.1 * reference[0]
