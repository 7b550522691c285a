"""``halfstep contract`` on unchanged programs: their output, their code, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
RANKS = TESTS / "distributed" / "contract_programs.py"
PROGRAM = """
import sys, torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
{model}
optimizer = torch.optim.AdamW(model.parameters())
for step in range({steps}):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(8, 4)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("it has ended")
print("and warned", file=sys.stderr)
sys.exit({code})
"""


@pytest.fixture
def contract(tmp_path):
    """Runs the command in a folder of its own."""

    def call(*words, **environment):
        command = [sys.executable, "-m", "halfstep", "contract", *map(str, words)]
        variables = os.environ | {"OMP_NUM_THREADS": "1"} | environment
        return subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)

    def program(name="train.py", model="", steps=3, code=0):
        (tmp_path / name).write_text(PROGRAM.format(model=model, steps=steps, code=code))
        return ["--", sys.executable, name]

    call.program = program
    return call


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["record"], "no program is given; write it after --"),
        (["check", "--"], "no program is given"),
        (["check", "--file", "none.json", "--", "true"], "none.json: No such file"),
        (["record", "--", "no-such-program"], "no-such-program: No such file"),
        (["record", "--", "true"], "nothing was recorded of true: it took no optimizer step"),
        (["record", "--steps", "-1", "--", "true"], "steps=-1"),
        (["record", "--file", "none/x.json", "--", "true"], "give another --file"),
        (["recrod", "--", "true"], "unknown COMMAND"),
    ],
)
def test_bad_input_is_one_line_and_code_2(halfstep, words, text):
    done = halfstep("contract", *words)
    assert done.returncode == 2
    assert text in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_program_that_fails_before_a_step_keeps_its_code(halfstep):
    done = halfstep("contract", "record", "--", "sh", "-c", "exit 7")
    assert (done.returncode, done.stdout) == (7, "")
    assert done.stderr == "halfstep: nothing was recorded: it ended with code 7\n"


@pytest.mark.slow
def test_a_programs_output_and_code_pass_through(contract, tmp_path):
    done = contract("record", *contract.program(code=5))
    assert done.returncode == 5
    assert done.stdout.splitlines()[0] == "it has ended"
    assert done.stderr == "and warned\n"
    done = contract("check", *contract.program(steps=5))
    assert (done.returncode, done.stderr) == (0, "and warned\n")
    assert "0 of " in done.stdout
    done = contract("check", "--stop", *contract.program(model="model.bfloat16()"))
    assert done.returncode == 1
    assert "it has ended" not in done.stdout
    assert " parameters\n  - *.bias: fp32\n  + *.bias: bf16\n" in done.stdout
    done = contract("check", "--json", *contract.program(model="model.bfloat16()"))
    findings = json.loads(done.stdout)["findings"]
    assert {"parameters", "gradients", "states", "operations"} <= {one["name"] for one in findings}
    assert "it has ended" in done.stderr


@pytest.mark.slow
def test_a_sitecustomize_of_the_user_is_run_as_well(contract, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('mine')")
    done = contract("record", *contract.program(), PYTHONPATH=os.pathsep.join(
        [str(tmp_path), os.environ.get("PYTHONPATH", "")]))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("mine") == 2  # of the command itself, and of the program


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_of_torchrun_and_the_sum_over_tp(contract):
    def launched(n, *words):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", n]
        return ["--", *torchrun, RANKS, *words]

    done = contract("record", *launched(4, "2d", 4))
    assert done.returncode == 1, done.stderr
    assert "fault reduced_below_asked: gradients are reduced over tp in bf16" in done.stdout
    assert done.stdout.count("has ended") == 4
    assert contract("record", *launched(2, "fsdp", 3)).returncode == 0
    done = contract("check", "--stop", *launched(2, "fsdp_reduce", 9))
    assert done.returncode == 1, done.stderr
    row = "backward  dp  reduce_scatter  gradients"  # the mesh is the world: the default group
    assert f"  - {row}: fp32\n  + {row}: bf16" in done.stdout
    assert "has ended" not in done.stdout
    done = contract("check", *launched(1, "fsdp", 3))
    assert "note: 1 of 2 ranks ran, without dp" in done.stdout
    assert done.returncode == 0, done.stdout
    assert contract("record", "--nproc", 2, "--", sys.executable, RANKS, "hand", 3).returncode == 0
    done = contract("check", *launched(2, "thread_bf16", 3))
    assert "  + outside  world  all_reduce  values: bf16" in done.stdout


STRANGERS = {
    "transformers": """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
import sys, torch
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32,
                                   bos_token_id=0, eos_token_id=0))
ids = [{"input_ids": torch.arange(16), "labels": torch.arange(16)} for _ in range(32)]
options = TrainingArguments("out", max_steps=3, use_cpu=True, bf16=BF16, report_to=[],
    save_strategy="no", per_device_train_batch_size=SIZE, gradient_accumulation_steps=EVERY)
Trainer(model, options, train_dataset=ids).train()
""",
    "lightning": """
import lightning, torch
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    def training_step(self, batch, i):
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
if __name__ == "__main__":
    data = torch.utils.data.TensorDataset(torch.randn(64, 8))
    loader = torch.utils.data.DataLoader(data, SIZE)
    lightning.Trainer(max_steps=3, accelerator="cpu", precision="bf16-mixed" if BF16 else "32",
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        accumulate_grad_batches=EVERY).fit(Model(), loader)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STRANGERS)
def test_programs_of_others(contract, tmp_path, name):
    pytest.importorskip(name)

    def program(file, **values):
        text = STRANGERS[name]
        for key, value in values.items():
            text = text.replace(key, str(value))
        (tmp_path / file).write_text(text)
        return ["--", sys.executable, file]

    done = contract("record", *program("sound.py", BF16=True, SIZE=4, EVERY=1))
    assert done.returncode == 0, done.stderr
    done = contract("check", *program("other.py", BF16=True, SIZE=1, EVERY=2))
    assert done.returncode == 0, done.stdout
    done = contract("check", *program("fp32.py", BF16=False, SIZE=4, EVERY=1))
    assert done.returncode == 1
    assert "matmul: bf16 -> bf16" in done.stdout
