"""A pretrained tokenizer as the data of a language model wants it."""

from __future__ import annotations

from collections.abc import Sequence

from halfstep.errors import ConfigError
from halfstep.models.pretrained_tokenizer import PretrainedTokenizer


class InstructionTokenizer:
    """An adapter to :class:`~halfstep.data.instruction_encoding.LMTokenizer`."""

    def __init__(self, tokenizer: PretrainedTokenizer, source: str) -> None:
        """Take it over.

        Raises:
            ConfigError: If it has no end-of-text token.
        """
        if tokenizer.eos_id is None:
            raise ConfigError(
                f"model.source={source}: its tokenizer has no end-of-text token (eos_token in "
                "tokenizer_config.json), so a tuned model could not learn to stop; set one"
            )
        self.wrapped = tokenizer
        self.eos_id: int = tokenizer.eos_id
        self.bos_id = tokenizer.bos_id
        self.special_tokens: Sequence[str] = tokenizer.special_tokens

    def encode(self, text: str) -> list[int]:
        """Ids without special ones."""
        return self.wrapped.encode_plain([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Each as ``encode`` would."""
        return self.wrapped.encode_plain(texts)

    def render_chat(
        self, messages: list[dict[str, str]], add_generation_prompt: bool
    ) -> str | None:
        """A chat in the tokenizer's own template; None if it has none."""
        if not self.wrapped.has_chat_template:
            return None
        return self.wrapped.chat(messages, add_generation_prompt)

    def end_of_turn(self) -> list[int]:
        """The ids with which the chat template ends an answer; empty if it has none."""
        text = self.render_chat(
            [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}], False
        )
        return [] if text is None else self.encode(text.rpartition("!")[2].rstrip())
