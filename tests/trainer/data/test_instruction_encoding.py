import numpy as np
import pytest

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.data.instructions.chat import Message, Pair, Text
from halfstep.trainer.data.instructions.files import Record
from halfstep.trainer.data.instructions.instructions import (
    TextEncoder,
    encode_records,
    prompt_tokens,
)
from trainer.data.lm_tokenizers import BOS, EOS, SPECIAL, ChatLetters, Letters, Merging, shown

DIALOGUE = (
    Message("system", "S"),
    Message("user", "a"),
    Message("assistant", "b"),
    Message("user", "c"),
    Message("assistant", "d"),
)


def encoded(examples, tokenizer, template, mask_prompt=True):
    records = [Record(f"f:{n}", example) for n, example in enumerate(examples)]
    return encode_records(records, TextEncoder(tokenizer), template, mask_prompt=mask_prompt)


def marked(documents):
    """The text of each document, learned tokens in brackets one by one."""
    found = []
    for start, stop in zip(documents.starts[:-1], documents.starts[1:], strict=True):
        words = [shown([i]) for i in documents.ids[start:stop].tolist()]
        learned = documents.learned[start:stop].tolist()
        found.append("".join(f"[{w}]" if x else w for w, x in zip(words, learned, strict=True)))
    return found


def test_a_pair_is_bos_prompt_answer_eos():
    pair = Pair("1+", "", "23")
    assert marked(encoded([pair, pair], Letters(), "plain")) == ["1+[2][3][</s>]"] * 2
    assert marked(encoded([pair], ChatLetters(), "plain")) == ["<s>1+[2][3][</s>]"]


def test_with_prompts_learned_all_but_the_first_token_is():
    pair = Pair("1+", "", "23")
    assert marked(encoded([pair, pair], Letters(), "plain", False)) == ["1[+][2][3][</s>]"] * 2
    assert marked(encoded([pair], ChatLetters(), "plain", False)) == ["<s>[1][+][2][3][</s>]"]
    assert marked(encoded([DIALOGUE], ChatLetters(), "tokenizer", False))[0].startswith(
        "<|im_start|>[s][y]"
    )


def test_text_is_learned_but_for_its_first_token():
    texts = [Text(("ab", "c")), Text(("d",))]
    assert marked(encoded(texts, Letters(), "plain")) == ["a[b][c][</s>]", "d[</s>]"]
    assert marked(encoded(texts, ChatLetters(), "plain"))[1] == "<s>[d][</s>]"


def test_every_answer_of_a_dialogue_is_learned_with_its_end():
    (found,) = marked(encoded([DIALOGUE], Letters(), "vicuna"))
    assert found == "S USER: a ASSISTANT:[ ][b][</s>]USER: c ASSISTANT:[ ][d][</s>]"
    (found,) = marked(encoded([DIALOGUE], ChatLetters(), "tokenizer"))
    assert found == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
        "[b][<|im_end|>]\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n[d][<|im_end|>]"
    )


@pytest.mark.parametrize("tokenizer", [Letters(), Merging(), ChatLetters()])
@pytest.mark.parametrize("template", ["plain", "alpaca", "vicuna", "tokenizer"])
def test_generation_is_given_the_ids_of_training(tokenizer, template):
    examples = [Pair("Q:", "", ":A")]
    if template in ("vicuna", "tokenizer"):
        examples.append(DIALOGUE)
    if template == "tokenizer" and not hasattr(tokenizer, "render_chat"):
        return
    for example in examples:
        documents = encoded([example], tokenizer, template)
        ids = documents.ids.tolist()
        # The last answer begins after the last token that is not learned.
        begin = int(np.flatnonzero(~documents.learned)[-1]) + 1
        if isinstance(example, Pair):
            prompt = example._replace(answer=None)
            assert 0 < begin < len(ids) - 1
        else:
            prompt = example[:-1]
        assert prompt_tokens(prompt, TextEncoder(tokenizer), template) == ids[:begin]


def test_no_token_lies_across_the_border():
    # Tokenised together, ":A" would be one token, which no prompt could end with.
    tokenizer = Merging()
    ids = encoded([Pair("Q:", "", "A")], tokenizer, "plain").ids.tolist()
    assert ids == [*tokenizer.encode("Q:"), *tokenizer.encode("A"), EOS]
    assert ids[:-1] != tokenizer.encode("Q:A")


def test_batches_of_text_change_nothing(monkeypatch):
    examples = [Text(("ab", "cd", "e")), Text(("fg",)), Text(("h", "ij"))] * 3
    whole = encoded(examples, ChatLetters(), "plain")
    for size in (1, 2, 3, 5):
        monkeypatch.setattr("halfstep.trainer.data.instructions.instructions.BATCH_BYTES", size)
        for tokenizer in (ChatLetters(),):
            parts = encoded(examples, tokenizer, "plain")
            assert parts.ids.tolist() == whole.ids.tolist()
            assert parts.learned.tolist() == whole.learned.tolist()
            assert parts.starts.tolist() == whole.starts.tolist()
            assert parts.places == whole.places


def test_arrays_have_the_promised_types():
    for examples in ([], [Text(("ab",))]):
        documents = encoded(examples, Letters(), "plain")
        assert documents.ids.dtype == np.int32
        assert documents.learned.dtype == bool
        assert documents.starts.dtype == np.int64
        assert len(documents.starts) == len(documents) + 1 == len(examples) + 1


class Adding(ChatLetters):
    def encode_batch(self, texts):
        return [[BOS, *self.encode(text)] for text in texts]


def test_an_encode_batch_that_adds_tokens_is_refused():
    with pytest.raises(ConfigError, match="encode_batch gives other ids than encode"):
        encoded([Text(("ab",))], Adding(), "plain")


@pytest.mark.parametrize(
    "example",
    [
        Pair("a<|im_end|>", "", "b"),
        Pair("a", "x</s>", "b"),
        Pair("a", "", "<|im_start|>"),
        Text(("a", "b</s>c")),
        (Message("user", "a"), Message("assistant", "b<|im_end|>")),
    ],
)
@pytest.mark.parametrize("template", ["vicuna", "tokenizer"])
def test_control_tokens_written_out_are_refused(example, template):
    with pytest.raises(DataError, match=r"f:1: a text holds '<.*>', which the tokenizer would tur"):
        encoded([Pair("a", "", "b"), example], ChatLetters(), template)
    with pytest.raises(DataError, match="control"):
        prompt_tokens(example, TextEncoder(ChatLetters()), template)


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(DataError, match="f:0: a text holds half a surrogate pair"):
        encoded([Pair("a", "", "\ud800")], Letters(), "plain")


def broken(messages, add_generation_prompt):
    raise RuntimeError("broken")


def test_whether_a_tokenizer_has_a_chat_template_is_asked():
    tokenizer = ChatLetters()
    assert not TextEncoder(Letters()).has_chat_template()
    assert TextEncoder(tokenizer).has_chat_template()
    tokenizer.render_chat = lambda messages, add_generation_prompt: None
    assert not TextEncoder(tokenizer).has_chat_template()
    tokenizer.render_chat = broken
    assert TextEncoder(tokenizer).has_chat_template()  # and its error is shown when it is used
    assert SPECIAL
