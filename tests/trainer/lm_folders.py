"""Tiny random language models with a trained tokenizer, and instructions for them."""

from __future__ import annotations

import json

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from halfstep.trainer.config.tasks import Use
from halfstep.trainer.data.instructions import ALPACA_WITH_INPUT, ALPACA_WITHOUT_INPUT
from halfstep.trainer.models.pretrained import quiet
from halfstep.trainer.run import run_config
from halfstep.trainer.tasks.lm import TrainedLM

POSITIONS = 160
SPECIAL = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
PAD, BOS, EOS, START, END = range(5)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ("red", "blue", "green", "seven", "nine", "north", "south", "river", "stone", "window")


def alpaca(count, seed=0, filler=8):
    """Questions whose answers turn two words round; every third has an input, to be repeated."""
    g = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        a, b, *more = (WORDS[i] for i in torch.randint(len(WORDS), (2 + filler,), generator=g))
        more = more[: 1 + int(torch.randint(filler, (1,), generator=g))]
        record = {"instruction": f"turn round: {a} {b}", "output": f"{b} {a}"}
        if number % 3 == 0:
            record |= {"input": " ".join(more), "output": " ".join([b, a, *more])}
        found.append(record)
    return found


def chats(count, seed=0):
    """The same as conversations of one or two rounds."""
    found = []
    for number, record in enumerate(alpaca(count, seed, filler=3)):
        round_ = [
            {"role": "user", "content": record["instruction"]},
            {"role": "assistant", "content": record["output"]},
        ]
        more = [
            {"role": "user", "content": "and again?"},
            {"role": "assistant", "content": "again"},
        ]
        found.append({"messages": round_ + more * (number % 2)})
    return found


def write(path, records):
    """JSONL."""
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def opened(run, precision=""):
    """The trained language model of a run, on the CPU."""
    use = Use(run=str(run), device="cpu", precision=precision)
    return TrainedLM(run, run_config(run)).open(use)


def save_tokenizer(folder, *, eos=True, bos=False, chat=False):
    """A byte-level BPE tokenizer of at most 600 ids, trained on the words above."""
    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=list(SPECIAL), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    texts = [ALPACA_WITH_INPUT, ALPACA_WITHOUT_INPUT] * 9
    engine.train_from_iterator([*texts, *(json.dumps(r) for r in alpaca(50, seed=99))], trainer)
    if bos:
        engine.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=engine, pad_token="<pad>",
        **({"eos_token": "</s>"} if eos else {}), **({"bos_token": "<s>"} if bos else {}),
    )  # fmt: skip
    if chat:
        tokenizer.chat_template = CHATML
    with quiet():
        tokenizer.save_pretrained(folder)


def save_base(
    folder, kind="Llama", dtype=torch.float32, *, seed=0, dropout=0.0, vocab=608, **tokenizer
):
    """A model folder with its tokenizer."""
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    if kind == "GPT2":
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
        config = transformers.GPT2Config(
            vocab_size=vocab, n_embd=32, n_layer=2, n_head=2, n_positions=POSITIONS, **rates, **ids
        )
        make = transformers.GPT2LMHeadModel
    elif kind == "Bloom":
        config = transformers.BloomConfig(
            vocab_size=vocab, hidden_size=32, n_layer=2, n_head=2, **ids
        )
        make = transformers.BloomForCausalLM
    else:
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=POSITIONS, **ids,
        )  # fmt: skip
        make = getattr(transformers, f"{kind}ForCausalLM")
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)
        model = make(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
        model.to(dtype).save_pretrained(folder)
    save_tokenizer(folder, **tokenizer)
    return folder
