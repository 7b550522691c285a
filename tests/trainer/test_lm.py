"""Fine-tuning language models: against plain loops of transformers, from batches to the model left.

Tolerances of trajectories: fp32 sums in another order differ by some 1e-7, which a few updates of
small models grow to 1e-5 at most.
"""

from __future__ import annotations

import math
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.trainer import lm_folders
from tests.trainer.classifiers import checkpoint_of, start, whole_run as run
from tests.trainer.lm_folders import alpaca, chats, opened, save_base, write
from tests.trainer.models.pretrained_folders import silence
from torch.nn import functional

from halfstep.errors import CheckpointError, ConfigError, PrecisionError
from halfstep.precision.policy.spelling import parse_policy
from halfstep.trainer.config.config import load_config
from halfstep.trainer.config.tasks import Generating, LMConfig
from halfstep.trainer.loop import train
from halfstep.trainer.models.causal_lm import PretrainedLM, add_lora, open_causal_lm
from halfstep.trainer.models.pretrained import quiet
from halfstep.trainer.run import finish_run, resume, with_run_folder
from halfstep.trainer.session import open_session
from halfstep.trainer.tasks.lm import hold_weights_

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
pytestmark = pytest.mark.covering


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Kind, dtype and options to a folder; nobody changes it."""
    made = {}

    def get(kind="Llama", dtype="fp32", **options):
        key = (kind, dtype, *options.items())
        if key not in made:
            folder = tmp_path_factory.mktemp("base") / f"{kind}-{dtype}"
            made[key] = save_base(folder, kind, DTYPES[dtype], **options)
        return made[key]

    return get


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Instructions to train on, others to evaluate on, and conversations."""
    folder = tmp_path_factory.mktemp("data")
    write(folder / "train.jsonl", alpaca(48))
    write(folder / "dev.jsonl", alpaca(11, seed=1))
    write(folder / "chat.jsonl", chats(24))
    return folder


def config_of(base, data, policy="fp32", **changes):
    values = {
        "precision": policy,
        "model.source": str(base),
        "data.train": [str(data / "train.jsonl")],
        "data.dev": [str(data / "dev.jsonl")],
        "data.max_length": lm_folders.POSITIONS,
        "optimizer.learning_rate": 1e-2,
        "run.max_steps": 4,
        "run.batch_size": 6,
        "run.eval_every": 2,
        "run.warmup_ratio": 0.0,
        "run.device": "cpu",
    }
    if policy == "fp16-pure":
        values["optimizer.eps"] = 1e-4  # 1e-8 is 0 in fp16
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    config = load_config("lm-lora", list(values.items()))
    assert isinstance(config, LMConfig)
    return config


def finish(session, folder):
    ticks = list(train(session, Path(folder.name).parent))
    finish_run(session, Path(folder.name).parent)
    folder.close()
    return ticks


def plain_model(base, session):
    """The same model by transformers and peft alone, in fp32, with the session's first adapters."""
    with quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        lora = session.config.model.lora_r
        if lora:
            kind = type(model).__name__.startswith("GPT2")
            settings = peft.LoraConfig(
                task_type="CAUSAL_LM", r=lora, lora_alpha=session.config.model.lora_alpha,
                fan_in_fan_out=kind,
            )  # fmt: skip
            model = peft.get_peft_model(model, settings)
    ours = dict(session.task.model.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(ours[f"model.{name}"])
    return model.train()


def nll(logits, targets):
    return functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )


def plain_trajectory(model, session, steps, accum):
    """Losses and gradient norms of a plain fp32 loop with AdamW on the session's padded batches."""
    numbers = session.config.optimizer
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=numbers.learning_rate, betas=(numbers.beta1, numbers.beta2), eps=numbers.eps,
        weight_decay=0.0, foreach=False,
    )  # fmt: skip
    found = []
    for step in range(steps):
        rows = session.task.batch_size(step)
        ids_BT, targets_BT, positions_BT = session.task.batch(step, range(rows))
        restarts = (positions_BT == 0).cumsum(1)
        count = int((targets_BT != -100).sum())
        total = 0.0
        for part in torch.arange(rows).tensor_split(accum):
            mask = (restarts[part] == 1).long()  # one document a row, then padding
            loss = nll(model(ids_BT[part], attention_mask=mask).logits, targets_BT[part]) / count
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(trained, numbers.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        found.append((total, norm.item()))
    return found


@pytest.mark.parametrize(("kind", "lora", "accum"), [("GPT2", 0, 3), ("Llama", 8, 1)])
def test_a_run_is_a_plain_loop_of_transformers(
    kind, lora, accum, bases, data, tmp_path, monkeypatch
):
    monkeypatch.setattr(PretrainedLM, "keeps_documents_apart", lambda self: False)  # so it pads
    # An eps that counts: else Adam would forget how long gradients are, and clipping with it.
    config = config_of(
        bases(kind), data, model__lora_r=lora, run__grad_accum=accum,
        optimizer__eps=0.1, optimizer__max_norm=0.2, optimizer__learning_rate=0.1,
        schedule__min_ratio=1.0, run__max_steps=6,
    )  # fmt: skip
    session, folder = start(config, tmp_path / "r")
    plain = plain_model(bases(kind), session)
    expected = plain_trajectory(plain, session, 6, accum)
    ticks = finish(session, folder)
    assert [t.record.loss for t in ticks] == pytest.approx([x for x, _ in expected], rel=1e-5)
    assert [t.record.grad_norm for t in ticks] == pytest.approx([n for _, n in expected], rel=1e-4)
    assert min(n for _, n in expected) > 0.2  # all were clipped
    assert expected[-1][0] < expected[0][0] - 0.01
    rows = session.task.data.train_rows
    lengths = [rows.lengths[session.task.batches.indices(step)].sum() for step in range(6)]
    assert ticks[-1].record.tokens == sum(lengths)
    state = checkpoint_of(tmp_path / "r").weights
    wanted = {f"model.{n}": p for n, p in plain.named_parameters() if p.requires_grad}
    assert state.keys() == wanted.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, wanted[name].detach(), rtol=1e-3, atol=1e-5, msg=name)


HELD = {  # (policy, stored): the frozen base's dtype
    ("fp32", "fp32"): "fp32", ("fp32", "fp16"): "fp32", ("fp32", "bf16"): "fp32",
    ("bf16-mixed", "fp32"): "fp32", ("bf16-mixed", "fp16"): "fp32", ("bf16-mixed", "bf16"): "bf16",
    ("fp16-mixed", "fp32"): "fp32", ("fp16-mixed", "fp16"): "fp16", ("fp16-mixed", "bf16"): "fp32",
    ("bf16-master", "bf16"): "bf16", ("fp16-master", "fp16"): "fp16", ("bf16-sr", "bf16"): "bf16",
    ("fp16-mixed,rules=*norm*:fp32", "fp16"): "fp32",
}  # fmt: skip


@pytest.mark.parametrize(("policy", "stored"), HELD)
def test_where_a_frozen_base_is_held(policy, stored, bases):
    chosen = parse_policy(policy)
    model = add_lora(open_causal_lm(bases("Llama", stored)))
    note = hold_weights_(model, chosen)
    held = HELD[policy, stored]
    dtypes = {p.dtype for p in model.parameters() if not p.requires_grad}
    assert dtypes == {DTYPES[held]}
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert bool(note) == (held != stored)
    if note:
        assert f"the frozen base is stored in {stored} and held in fp32, as precision" in note
    for name, tensor in load_file(bases("Llama", stored) / "model.safetensors").items():
        layer = model.core.get_submodule(name.rpartition(".")[0])
        now = getattr(layer, "base_layer", layer).weight
        assert torch.equal(now, tensor.to(now.dtype)), name  # in fp32 exactly, else as stored


def test_a_frozen_base_is_not_rounded(bases, data, tmp_path):
    with pytest.raises(
        PrecisionError,
        match="precision bf16-pure keeps all weights in bf16, and would round the frozen base, "
        "which is stored in fp32; use bf16-mixed, or --lora-r 0",
    ):
        start(config_of(bases("Llama"), data, "bf16-pure"), tmp_path / "r")


ALPACA_INPUT = (  # Source: PROMPT_DICT of tatsu-lab/stanford_alpaca, typed once more
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n### Instruction:\n"
    "{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Response:"
)


def answers(base, records, bos=()):
    """(ids, number of the prompt's) of every record, by the tokenizer itself."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    for record in records:
        words = (ALPACA_INPUT if "input" in record else ALPACA).format(**record)
        prompt, answer = (
            tokenizer.encode(t, add_special_tokens=False) for t in (words, record["output"])
        )
        prompt = [*bos, *prompt]
        yield [*prompt, *answer, lm_folders.EOS], len(prompt)


def nll_of_answers(model, base, records, bos=()):
    """Summed over all answers, one record at a time; and their tokens."""
    total = count = 0
    with torch.no_grad():
        for ids, prompt in answers(base, records, bos):
            x = torch.tensor([ids])
            logits = model.eval()(x).logits[:, prompt - 1 : -1].float()
            total += nll(logits, x[:, prompt:]).item()
            count += len(ids) - prompt
    return total, count


@pytest.mark.parametrize(
    ("kind", "bos", "packing"), [("Llama", True, True), ("Bloom", False, False)]
)
def test_perplexity_is_that_of_the_answers_alone(kind, bos, packing, bases, data, tmp_path):
    """The folder left behind, measured by transformers on prompts written by hand."""
    base = bases(kind, bos=bos)
    config = config_of(base, data, model__lora_r=0, run__max_steps=5, run__eval_every=1)
    session, ticks = run(config, tmp_path / "r")
    assert (len(session.task.data.dev_rows) < 11) == packing
    with quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "r" / "model")
    before = [lm_folders.BOS] if bos else []
    total, count = nll_of_answers(model, base, alpaca(11, seed=1), before)
    found = ticks[session.best.step - 1].evaluation
    assert found.targets == count
    # fp32 sums over other shapes
    assert found.loss == pytest.approx(total / count, rel=1e-5)
    assert f"perplexity {math.exp(found.loss):.3f} " in found.text
    assert found.text.endswith(f"on {count:,} tokens in fp32")


def test_answers_come_through_the_template(bases, data, tmp_path):
    """Greedy, by hand: the training's prompt, then the likeliest id until the end of text."""
    base = bases("GPT2")
    # so long that it knows how to answer, and to stop
    config = config_of(base, data, model__lora_r=0, run__max_steps=60, run__eval_every=60)
    run(config, tmp_path / "r")
    tuned = opened(tmp_path / "r")
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "r" / "model")
    question = "turn round: red stone"
    prompt = tokenizer.encode(ALPACA.format(instruction=question), add_special_tokens=False)
    ids, ended = list(prompt), False
    for _ in range(30):
        with torch.no_grad():
            likeliest = int(model(torch.tensor([ids])).logits[0, -1].argmax())
        if likeliest == lm_folders.EOS:
            ended = True
            break
        ids.append(likeliest)
    assert ended
    assert len(ids) > len(prompt)
    with silence():
        asked = Generating(run="r", prompt=question, max_new_tokens=30, temperature=0, device="cpu")
        found = tuned.generate(asked)
    assert found == tokenizer.decode(ids[len(prompt) :]).strip()


@pytest.mark.parametrize(
    ("stored", "policy", "held"),
    [("bf16", "bf16-pure", "bf16"), ("fp16", "bf16-mixed", "fp32")],
)
def test_a_tuned_model_is_used_as_it_was_trained(stored, policy, held, bases, data, tmp_path):
    """The same dtypes, and the same logits to the bit."""
    config = config_of(bases("Llama", stored), data, policy)
    session, _ = run(config, tmp_path / "r")
    tuned = opened(tmp_path / "r")
    frozen = {p.dtype for n, p in tuned.model.named_parameters() if ".lora_" not in n}
    assert frozen == {DTYPES[held]}
    assert {p.dtype for n, p in tuned.model.named_parameters() if ".lora_" in n} == {
        parse_policy(policy).param_dtype
    }
    assert session.best.step == 4  # what is in memory is what was left
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad(), tuned.around():
        assert torch.equal(tuned.model.logits(ids), session.task.model.eval().logits(ids))


def test_a_changed_base_is_noticed(data, tmp_path):
    base = save_base(tmp_path / "base")
    config = config_of(base, data, run__save_every=2)
    session, _ = run(config, tmp_path / "r")
    save_base(base, seed=5)
    with pytest.raises(ConfigError, match=r"the base model .*base has changed since the run"):
        opened(tmp_path / "r")
    session = open_session(with_run_folder(config, tmp_path / "r"))
    with pytest.raises(CheckpointError, match="made with another base model"):
        resume(session, tmp_path / "r" / "checkpoints")


def test_what_cannot_be_tuned_is_refused_before_a_folder_exists(bases, data, tmp_path):
    no_end = save_base(tmp_path / "base", eos=False)
    small = save_base(tmp_path / "small", vocab=100)
    for base, changes, words in (
        (bases(), {"run__batch_size": 999, "run__grad_accum": 333}, "too small for"),
        ("./nowhere", {}, "nowhere"),
        (no_end, {}, "has no end-of-text token"),
        (small, {}, "tokenizer and weights are of different models"),
    ):
        with pytest.raises(ConfigError, match=words):
            start(config_of(base, data, **changes), tmp_path / "r")
    assert not (tmp_path / "r").exists()
