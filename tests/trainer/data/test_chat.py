import pytest

from halfstep.errors import DataError, PrecisionError
from halfstep.trainer.data.chat import (
    ChatPart,
    Message,
    Pair,
    Text,
    read_messages,
    read_prompt,
    text_parts,
)
from trainer.data.lm_tokenizers import chatml

SYSTEM, USER, ANSWER = (
    Message("system", "Be brief."),
    Message("user", "Hi: 1+1?"),
    Message("assistant", "2"),
)
MORE = (Message("user", "2+2?"), Message("assistant", "{4}"))


def openai(*messages):
    return [message._asdict() for message in messages]


def joined(parts):
    """The text, learned spans in brackets."""
    return "".join(
        f"[{part.text}{'</s>' * part.ends}]" if part.learned else part.text for part in parts
    )


def test_both_ways_to_write_messages_are_read():
    sharegpt = [{"from": "human", "value": "Hi: 1+1?"}, {"from": "gpt", "value": "2"}]
    assert read_messages(sharegpt) == (USER, ANSWER)
    assert read_messages(openai(SYSTEM, USER, ANSWER, *MORE)) == (SYSTEM, USER, ANSWER, *MORE)
    with_null = [message | {"tool_calls": None} for message in openai(USER, ANSWER)]
    assert read_messages(with_null) == (USER, ANSWER)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("hi", "must be a list of messages, got str 'hi'"),
        ([], r"must be a list of messages, got list \[\]"),
        (["hi"], "turn 1 must be an object, got str"),
        (openai(ANSWER, USER), "turn 1 is by the assistant, but must be by the user"),
        (openai(USER, USER, ANSWER), "turn 2 is by the user, but must be by the assistant"),
        (openai(SYSTEM, ANSWER), "turn 2 is by the assistant, but must be by the user"),
        (openai(USER, ANSWER, ANSWER), "turn 3 is by the assistant, but must be by the user"),
        (openai(USER, SYSTEM, ANSWER), "turn 2 is by the system, but must be by the assistant"),
        (openai(SYSTEM), "no turn of the assistant"),
        (openai(USER), "no turn of the assistant"),
        (openai(SYSTEM, USER), "no turn of the assistant"),
        (openai(USER, ANSWER, USER), "the last turn is by the user.*remove it"),
        (openai(USER, Message("assistant", " \n")), "turn 2: the assistant's content is empty"),
        (openai(Message("user", ""), ANSWER), "turn 1: the user's content is empty"),
        (openai(Message("user", 5), ANSWER), "turn 1: content must be a string, got int 5"),
        (openai(USER, Message("tool", "x")), "role must be one of system, user, human, .* 'tool'"),
        (openai(USER, Message(["user"], "x")), "turn 2: role must be one of"),
        ([{"role": "user"}], "turn 1 has the fields role; allowed are role and content, or from"),
        ([{"role": "user", "value": "x"}], "turn 1 has the fields role, value; allowed"),
        ([{"role": "user", "content": "x", "name": "y"}], "fields content, name, role; allowed"),
        ([{"role": "user", "content": None}], "turn 1 has the fields content, role; allowed"),
    ],
)
def test_a_bad_conversation_names_the_turn(value, why):
    with pytest.raises(DataError, match=why):
        read_messages(value)


def test_a_prompt_is_a_conversation_up_to_the_last_question():
    assert read_prompt(openai(SYSTEM, USER)) == (SYSTEM, USER)
    assert read_prompt(openai(USER, ANSWER, *MORE)) == (USER, ANSWER, MORE[0])
    for value in (openai(SYSTEM), openai(ANSWER)):
        with pytest.raises(DataError, match="turn"):
            read_prompt(value)


def test_alpaca_writes_what_stanford_alpaca_writes():
    # Copied from PROMPT_DICT of its train.py.
    without = (
        "Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{instruction}\n\n### Response:"
    )
    with_input = (
        "Below is an instruction that describes a task, paired with an input that provides further "
        "context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
    )
    assert text_parts(Pair("Add {1}", "", "2"), "alpaca", None) == (
        ChatPart(without.format(instruction="Add {1}"), False),
        ChatPart("2", True, ends=True),
    )
    assert text_parts(Pair("Add", "{prompt} 1", "2"), "alpaca", None) == (
        ChatPart(with_input.format(instruction="Add", input="{prompt} 1"), False),
        ChatPart("2", True, ends=True),
    )


def test_plain_adds_nothing_but_an_empty_line_before_a_context():
    assert joined(text_parts(Pair("1+1=", "", "2"), "plain", None)) == "1+1=[2</s>]"
    assert joined(text_parts(Text(("one ", "two")), "plain", None)) == "[one ][two</s>]"
    asked = text_parts(Pair("Who?", "Ann came.", None), "plain", None)
    assert joined(asked) == "Who?\n\nAnn came."
    assert text_parts(Pair("Who?", "Ann came.", "Ann"), "plain", None) == (
        *asked,
        ChatPart("Ann", True, ends=True),
    )
    for template in ("plain", "alpaca", "vicuna", "tokenizer"):
        for answer in (None, "Ann"):
            text = joined(text_parts(Pair("Who?", "{At 9} Ann", answer), template, chatml))
            assert "{At 9} Ann" in text


def test_vicuna_writes_what_fastchat_writes():
    # Written from Conversation.get_prompt of fastchat/conversation.py, ADD_COLON_TWO with the
    # separators " " and "</s>": system + " ", then "ROLE: message" + separator for each message.
    system = (
        "A chat between a curious user and an artificial intelligence assistant. The assistant "
        "gives helpful, detailed, and polite answers to the user's questions."
    )
    turns = "USER: Hi: 1+1? ASSISTANT:[ 2</s>]USER: 2+2? ASSISTANT:[ {4}</s>]"
    assert joined(text_parts((USER, ANSWER, *MORE), "vicuna", None)) == f"{system} {turns}"
    found = joined(text_parts((SYSTEM, USER, ANSWER, *MORE), "vicuna", None))
    assert found == f"Be brief. {turns}"
    pair = joined(text_parts(Pair("Add", "1, 1", "2"), "vicuna", None))
    assert pair == f"{system} USER: Add\n\n1, 1 ASSISTANT:[ 2</s>]"


def test_the_spans_of_a_chat_template_are_the_answers_and_their_end():
    parts = text_parts((SYSTEM, USER, ANSWER, *MORE), "tokenizer", chatml)
    assert joined(parts) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi: 1+1?<|im_end|>\n"
        "<|im_start|>assistant\n[2<|im_end|>]\n<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n[{4}<|im_end|>]"
    )
    assert not any(part.ends for part in parts)  # the template's own end, and no other


@pytest.mark.parametrize("answer", [">", "e", "<|im_end|>", "user", "\n2\n", " 2 "])
def test_an_answer_that_looks_like_the_template_is_found(answer):
    parts = text_parts((USER, Message("assistant", answer), *MORE), "tokenizer", chatml)
    assert [part.text for part in parts if part.learned] == [
        f"{answer}<|im_end|>",
        "{4}<|im_end|>",
    ]


def test_an_answer_that_the_template_strips_is_found():
    def stripping(messages, prompt):
        return chatml([m | {"content": m["content"].strip()} for m in messages], prompt)

    parts = text_parts((USER, Message("assistant", "\n 2 ")), "tokenizer", stripping)
    assert parts[-1] == ChatPart("2<|im_end|>", True)


@pytest.mark.parametrize("template", ["vicuna", "tokenizer"])
@pytest.mark.parametrize("system", [(), (SYSTEM,)])
def test_what_stands_before_an_answer_is_what_generation_gets(template, system):
    dialogue = (*system, USER, ANSWER, *MORE)
    parts = text_parts(dialogue, template, chatml)
    answers = [number for number, part in enumerate(parts) if part.learned]
    assert len(answers) == 2
    for answer, turn in zip(answers, (len(system) + 1, len(system) + 3), strict=True):
        assert text_parts(dialogue[:turn], template, chatml) == parts[:answer]


def test_a_pair_without_answer_is_its_prompt():
    for template in ("plain", "alpaca", "vicuna", "tokenizer"):
        full = text_parts(Pair("Add", "", "2"), template, chatml)
        assert text_parts(Pair("Add", "", None), template, chatml) == full[:-1]


def thinking(messages, prompt):
    """Like Qwen3: a block of thought stands in the last answer only."""
    last = len(messages) - 1
    shown = [
        m | {"content": "<think>\n\n</think>\n\n" + m["content"]}
        if m["role"] == "assistant" and number == last
        else m
        for number, m in enumerate(messages)
    ]
    return chatml(shown, prompt)


def test_a_template_that_rewrites_earlier_turns_is_refused():
    one = text_parts((USER, ANSWER), "tokenizer", thinking)
    assert one[-1] == ChatPart("<think>\n\n</think>\n\n2<|im_end|>", True)
    with pytest.raises(DataError, match=r"same turns in two ways \('<think>.*template vicuna"):
        text_parts((USER, ANSWER, *MORE), "tokenizer", thinking)


def refusing(error):
    def render(messages, prompt):
        raise error

    return render


@pytest.mark.parametrize(
    ("render", "why"),
    [
        (lambda m, p: chatml(m, p).replace("<|im_end|>", ""), "writes no end-of-turn token"),
        (lambda m, p: chatml(m, p).replace("2<", "two<"), "does not write the answer '2' as it"),
        (lambda m, p: chatml(m[-1:], p), "same turns in two ways"),
        (refusing(RuntimeError("No system")), r"refuses the conversation \(No system\)"),
        (lambda m, p: None, "has no chat template"),
        (None, "has no chat template"),
    ],
)
def test_a_template_without_exact_answers_is_refused_with_a_way_out(render, why):
    with pytest.raises(DataError, match=f"(?s){why}.*vicuna"):
        text_parts((USER, ANSWER, *MORE), "tokenizer", render)


def test_our_own_errors_pass_through():
    with pytest.raises(PrecisionError, match="ours"):
        text_parts((USER, ANSWER), "tokenizer", refusing(PrecisionError("ours")))


TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + "
        "'<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    # Llama 2: the system message goes into the first question, and there is no generation prompt.
    "llama2": (
        "{% if messages[0]['role'] == 'system' %}{% set s = '<<SYS>>\\n' + messages[0]['content'] "
        "+ '\\n<</SYS>>\\n\\n' %}{% set rest = messages[1:] %}{% else %}{% set s = '' %}"
        "{% set rest = messages %}{% endif %}{% for m in rest %}{% if m['role'] == 'user' %}"
        "{{ '<s>[INST] ' + (s if loop.first else '') + m['content'].strip() + ' [/INST]' }}"
        "{% else %}{{ ' ' + m['content'].strip() + ' </s>' }}{% endif %}{% endfor %}"
    ),
    # Gemma: an assistant is called model, and a system message is refused.
    "gemma": (
        "{{ '<bos>' }}{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}"
        "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' + "
        "m['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
    ),
}
ANSWERS = {
    "chatml": ["2<|im_end|>", "{4}<|im_end|>"],
    "llama2": [" 2 </s>", " {4} </s>"],
    "gemma": ["2<end_of_turn>", "{4}<end_of_turn>"],
}


@pytest.fixture(scope="module")
def jinja():
    """What transformers makes of a template."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("jinja2")
    tokenizers = pytest.importorskip("tokenizers")
    engine = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=engine)

    def render_with(template):
        def render(messages, add_generation_prompt):
            return tokenizer.apply_chat_template(
                messages,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )

        return render

    return render_with


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_as_transformers_renders_them(jinja, name):
    render = jinja(TEMPLATES[name])
    dialogue = (USER, ANSWER, *MORE)
    parts = text_parts(dialogue, "tokenizer", render)
    assert [part.text for part in parts if part.learned] == ANSWERS[name]
    whole = render([message._asdict() for message in dialogue], False)
    assert "".join(part.text for part in parts) == whole.rstrip()
    if name == "gemma":
        with pytest.raises(DataError, match="System role not supported"):
            text_parts((SYSTEM, *dialogue), "tokenizer", render)
    else:
        parts = text_parts((SYSTEM, *dialogue), "tokenizer", render)
        assert [part.text for part in parts if part.learned] == ANSWERS[name]
        assert "Be brief." in parts[0].text
