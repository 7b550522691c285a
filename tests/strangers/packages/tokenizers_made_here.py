"""A tokenizer of a few words, for packages that want one and would fetch it."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
_TEXT = """
a the cat dog bird fish sees hears likes hates runs sleeps red blue green small large
is was here there now then why because and or not one two three
"""
WORDS = _TEXT.split()
# Of a cat, of a dog and so on; each line means nearly what its neighbour does.
PAIRS = [
    (f"the {what} {animal} {does}", f"a {what} {animal} {does} now")
    for animal in ("cat", "dog", "bird", "fish")
    for what, does in (("red", "runs"), ("small", "sleeps"), ("large", "is here"))
]


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate((*SPECIAL, *WORDS))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]", eos_token="[SEP]", bos_token="[CLS]",
    )  # fmt: skip
