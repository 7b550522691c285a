import numpy as np
import pytest

from halfstep.errors import DataError
from halfstep.trainer.data.chat import Message, Pair, Text
from halfstep.trainer.data.instructions import (
    PlacedExample,
    encode_records,
)
from trainer.data.lm_tokenizers import EOS, ChatLetters, Letters, Merging, shown

DIALOGUE = (
    Message("system", "S"),
    Message("user", "a"),
    Message("assistant", "b"),
    Message("user", "c"),
    Message("assistant", "d"),
)


def encoded(examples, tokenizer, template, mask_prompt=True):
    records = [PlacedExample(f"f:{n}", example) for n, example in enumerate(examples)]
    return encode_records(records, tokenizer, template, mask_prompt=mask_prompt)


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
    assert found.endswith("<|im_start|>assistant\n[d][<|im_end|>]")  # no bos, no eos beside it


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
        monkeypatch.setattr("halfstep.trainer.data.corpus.BATCH_BYTES", size)
        parts = encoded(examples, ChatLetters(), "plain")
        assert marked(parts) == marked(whole)
        assert parts.places == whole.places


def test_arrays_have_the_promised_types():
    for examples in ([], [Text(("ab",))]):
        documents = encoded(examples, Letters(), "plain")
        assert documents.ids.dtype == np.int32
        assert documents.learned.dtype == bool
        assert documents.starts.dtype == np.int64
        assert len(documents.starts) == len(documents) + 1 == len(examples) + 1


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


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(DataError, match="f:0: a text holds half a surrogate pair"):
        encoded([Pair("a", "", "\ud800")], Letters(), "plain")
