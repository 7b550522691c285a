"""Tokenizers small enough to check by hand."""

EOS, BOS = 1, 2
SPECIAL = {"<|im_start|>": 3, "<|im_end|>": 4, "</s>": EOS}


class Letters:
    """An id for every character; written-out control tokens become control ids, as in practice."""

    bos_id = None
    special_tokens = ()

    def encode(self, text):
        ids = []
        while text:
            word = next((word for word in SPECIAL if text.startswith(word)), text[0])
            ids.append(SPECIAL.get(word, ord(word[0]) + 10))
            text = text[len(word) :]
        return ids

    def encode_plain(self, texts):
        return [self.encode(text) for text in texts]

    def end_of_text(self):
        return EOS


class Merging(Letters):
    """Letters, but a colon and the character after it are one token, as BPE would have it."""

    def encode(self, text):
        ids, at = [], 0
        while at < len(text):
            width = 2 if text[at] == ":" and at + 1 < len(text) else 1
            ids.append(sum((ord(c) + 10) << 12 * i for i, c in enumerate(text[at : at + width])))
            at += width
        return ids


class ChatLetters(Letters):
    """Letters with a chat template and control tokens."""

    bos_id = BOS
    special_tokens = tuple(SPECIAL)

    def chat(self, messages, add_generation_prompt):
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        return text + "<|im_start|>assistant\n" * add_generation_prompt


def shown(ids):
    """Turns ids of Letters back into text, control ids too."""
    names = {number: word for word, number in SPECIAL.items()} | {BOS: "<s>"}
    return "".join(names[i] if i in names else chr(i - 10) for i in ids)
