"""Writes a prompt and its answers as parts of text, each of which is either learned or only read.

A part is tokenised by itself, so that no token spans the border of a prompt and its answer: what
the model sees before an answer in training is, id by id, what generation will give it. Both come
from ``text_parts``. (Tokenised together, "Response:" and "Yes" could share a token with which no
prompt ends.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from halfstep.errors import DataError, HalfstepError
from halfstep.trainer.data.config import ALPACA, PLAIN, VICUNA

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
ROLES = {"system": SYSTEM, "user": USER, "human": USER, "assistant": ASSISTANT, "gpt": ASSISTANT}
"""Names of roles in files. **Source:** OpenAI's chat format, and ShareGPT's human and gpt."""
MESSAGE_KEYS = (("role", "content"), ("from", "value"))
"""The two ways to write a message: OpenAI's and ShareGPT's."""
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{prompt}\n\n### Input:\n{context}\n\n### Response:"
)
ALPACA_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{prompt}\n\n### Response:"
)
"""**Source:** ``PROMPT_DICT`` of ``train.py`` in tatsu-lab/stanford_alpaca."""
VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions."
)
"""**Source:** ``vicuna_v1.1`` of ``fastchat/conversation.py`` in lm-sys/FastChat."""


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str
    """``system``, ``user`` or ``assistant``."""
    content: str


class Pair(NamedTuple):
    """A prompt and its answer."""

    prompt: str
    context: str
    """Alpaca's input; empty where there is none."""
    answer: str | None
    """None where the answer is to be generated."""


class Text(NamedTuple):
    """Plain text without a prompt, in pieces that join to the document."""

    pieces: tuple[str, ...]


Dialogue: TypeAlias = tuple[Message, ...]
Example: TypeAlias = Pair | Text | Dialogue

RenderChat: TypeAlias = Callable[[list[dict[str, str]], bool], str | None]
"""(messages, add_generation_prompt) to text, or None where the tokenizer has no chat template."""


class ChatPart(NamedTuple):
    """Text that is tokenised by itself."""

    text: str
    learned: bool
    ends: bool = False
    """Whether the end-of-text id follows; it is learned if the text is."""


def read_messages(value: object) -> Dialogue:
    """Checks the messages of a conversation to learn from.

    They are ``{"role", "content"}`` or ``{"from", "value"}``: an optional system message, then user
    and assistant by turns, the assistant last. DataErrors name the turn, counted from 1, but no
    file.
    """
    messages = _messages(value)
    if all(message.role != ASSISTANT for message in messages):
        raise DataError("the conversation has no turn of the assistant to learn from; add one")
    if messages[-1].role == USER:
        raise DataError("the last turn is by the user, so nobody learns from it; remove it")
    return messages


def read_prompt(value: object) -> Dialogue:
    """Checks the messages of a conversation to be answered; an answer already there is left out."""
    messages = _messages(value)
    messages = messages[:-1] if messages[-1].role == ASSISTANT else messages
    if not messages or messages[-1].role != USER:
        raise DataError("the conversation has no turn of the user to answer; add one")
    return messages


def text_parts(example: Example, template: str, render: RenderChat | None) -> tuple[ChatPart, ...]:
    """Writes out an example in the words of a template that can write it; answers are learned.

    An example without a last answer gives the parts that stand before that answer in training.
    ``render`` is the tokenizer's chat template. DataErrors name no file.
    """
    if isinstance(example, Text):
        pieces = [ChatPart(piece, True) for piece in example.pieces]
        return (*pieces[:-1], pieces[-1]._replace(ends=True))
    if isinstance(example, Pair):
        prompt, context, answer = example
        question = f"{prompt}\n\n{context}" if context else prompt
        if template == ALPACA:
            words = ALPACA_WITH_INPUT if context else ALPACA_WITHOUT_INPUT
            question = words.format(prompt=prompt, context=context)
        if template in (PLAIN, ALPACA):
            learned = () if answer is None else (ChatPart(answer, True, ends=True),)
            return (ChatPart(question, False), *learned)
        answers = () if answer is None else (Message(ASSISTANT, answer),)
        example = (Message(USER, question), *answers)
    return _vicuna(example) if template == VICUNA else _rendered(example, render)


def _messages(value: object) -> Dialogue:
    if not isinstance(value, list) or not value:
        raise DataError(f"the conversation must be a list of messages, got {_shown(value)}")
    messages = tuple(_message(message, number) for number, message in enumerate(value, 1))
    first = 1 if messages[0].role == SYSTEM else 0
    for place, message in enumerate(messages[first:]):
        expected = ASSISTANT if place % 2 else USER
        if message.role != expected:
            raise DataError(
                f"turn {first + place + 1} is by the {message.role}, but must be by the "
                f"{expected}, after an optional system message; put it right or leave it out"
            )
    return messages


def _message(value: object, number: int) -> Message:
    if not isinstance(value, dict):
        raise DataError(f"turn {number} must be an object, got {_shown(value)}")
    present = {key for key, held in value.items() if held is not None}
    keys = next((keys for keys in MESSAGE_KEYS if present == set(keys)), None)
    if keys is None:
        raise DataError(
            f"turn {number} has the fields {', '.join(sorted(map(str, value))) or 'none'}; allowed "
            f"are role and content, or from and value"
        )
    role, content = (value[key] for key in keys)
    if not isinstance(role, str) or role not in ROLES:
        raise DataError(
            f"turn {number}: {keys[0]} must be one of {', '.join(ROLES)}; got {_shown(role)}"
        )
    if not isinstance(content, str):
        raise DataError(f"turn {number}: {keys[1]} must be a string, got {_shown(content)}")
    if not content.strip() and ROLES[role] != SYSTEM:
        raise DataError(
            f"turn {number}: the {ROLES[role]}'s {keys[1]} is empty; leave the record out"
        )
    return Message(ROLES[role], content)


def _shown(value: object) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _vicuna(dialogue: Dialogue) -> tuple[ChatPart, ...]:
    parts: list[ChatPart] = []
    system = dialogue[0].content if dialogue[0].role == SYSTEM else VICUNA_SYSTEM
    before = f"{system} "
    for message in dialogue:
        if message.role == USER:
            parts.append(ChatPart(f"{before}USER: {message.content} ASSISTANT:", False))
            before = ""
        elif message.role == ASSISTANT:
            parts.append(ChatPart(f" {message.content}", True, ends=True))
    return tuple(parts)


def _rendered(dialogue: Dialogue, render: RenderChat | None) -> tuple[ChatPart, ...]:
    """Finds the answers in what the tokenizer's chat template writes.

    For each answer i: ``before`` is the text of the turns before it with the generation prompt,
    ``after`` the text of the turns up to it. ``after`` must start with ``before``, and what is left
    is the answer and its end; the next ``before`` must start with that. So the text of a
    conversation only ever grows, and every ``before`` is what generation would be given.
    """
    parts: list[ChatPart] = []
    done = ""
    for number, message in enumerate(dialogue):
        if message.role != ASSISTANT:
            continue
        before = _render(dialogue[:number], True, render)
        after = _render(dialogue[: number + 1], False, render)
        parts.append(ChatPart(_grown(done, before), False))
        answer = _grown(before, after)
        answer = answer[: _end_of_turn(answer, message.content)]
        parts.append(ChatPart(answer, True))
        done = before + answer
    if dialogue[-1].role != ASSISTANT:
        parts.append(ChatPart(_grown(done, _render(dialogue, True, render)), False))
    return tuple(parts)


def _render(turns: Sequence[Message], prompt: bool, render: RenderChat | None) -> str:
    try:
        text = render([turn._asdict() for turn in turns], prompt) if render else None
    except HalfstepError:
        raise
    except Exception as error:  # a template raises what it likes: jinja2's errors, or its own
        raise DataError(
            f"the tokenizer's chat template refuses the conversation ({error}); change the record, "
            f"or use the template {VICUNA}"
        ) from None
    if text is None:
        raise DataError(f"the tokenizer has no chat template; use the template {VICUNA}")
    return text


def _grown(start: str, text: str) -> str:
    if text.startswith(start):
        return text[len(start) :]
    pairs = enumerate(zip(start, text, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(start), len(text)))
    raise DataError(
        f"the tokenizer's chat template writes the same turns in two ways "
        f"({start[at : at + 20]!r} and {text[at : at + 20]!r} after character {at}), so answers "
        f"cannot be told from prompts; use the template {VICUNA}, or one answer a record"
    )


def _end_of_turn(answer: str, content: str) -> int:
    """Finds where an answer and its end-of-turn token end; blanks after it belong to the next."""
    for words in (content, content.strip()):
        at = answer.find(words)
        if at >= 0:
            end = len(answer.rstrip())
            if end > at + len(words.rstrip()):
                return end
            raise DataError(
                f"the tokenizer's chat template writes no end-of-turn token after an answer, so a "
                f"model could not learn where to stop; use the template {VICUNA}"
            )
    raise DataError(
        f"the tokenizer's chat template does not write the answer {content[:40]!r} as it stands "
        f"(it may take out <think> blocks); use the template {VICUNA}, or change the record"
    )
