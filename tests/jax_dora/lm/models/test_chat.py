"""Chat templates, held to transformers."""

import json

import pytest
import transformers

from jax_dora.lm.finetune import tiny
from jax_dora.lm.models.chat import ChatTemplate
from jax_dora.lm.models.tokenizer import TextSettings
from tests.jax_dora.lm.chat_templates import (
    CALLS,
    CHATML,
    EMPTY_THOUGHT,
    MISTRAL,
    NEMO,
    R1,
    R1_FIRST,
    SWITCHED,
    TALK,
    THINKING,
    THOUGHT,
    folder_of,
)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.byte_level_tokenizer()


@pytest.mark.parametrize("where", ["tokenizer_config.json", "chat_template.jinja", "a list"])
@pytest.mark.parametrize("template", [CHATML, THINKING, tiny.CHAT_TEMPLATE])
def test_templates_render_as_by_transformers(where, template, tmp_path, tokenizer):
    settings = {"chat_template": template}
    if where == "a list":
        settings = {"chat_template": [{"name": "default", "template": template}]}
    folder = folder_of(tmp_path, tokenizer, **({} if where.endswith("jinja") else settings))
    if where.endswith("jinja"):
        (folder / where).write_text(template)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = ChatTemplate.of(folder)
    for reply in (False, True):
        expected = theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=reply)
        assert ours.render(TALK, reply=reply) == expected


@pytest.mark.parametrize("given", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
def test_variables_of_a_template_are_those_of_transformers(given, tmp_path, tokenizer):
    folder = folder_of(tmp_path, tokenizer, chat_template=SWITCHED)
    texts = TextSettings.of(folder, {})
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(TALK[:2], add_generation_prompt=True, **given)
    assert texts.chat_tokens(TALK[:2], given) == expected["input_ids"]
    for name in ("thinking", "messages", "eos_token"):
        with pytest.raises(ValueError, match=f"has '{name}', which .*; expected some of enable_th"):
            texts.chat_tokens(TALK[:2], {name: 1})


@pytest.mark.parametrize("where", ["files", "a list"])
def test_tools_and_fields_of_messages_render_as_by_transformers(where, tmp_path, tokenizer):
    sources = {
        "default": "{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{% endfor %}"
        "{% if tools is not none or documents is not none %}undefined{% endif %}",
        "tool_use": "{{ tools | tojson(ensure_ascii=False) }}{{ tools | tojson(indent=1) }}",
    }
    if where == "files":
        folder = folder_of(tmp_path, tokenizer)
        (folder / "chat_template.jinja").write_text(sources["default"])
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(sources["tool_use"])
    else:
        named = [{"name": name, "template": source} for name, source in sources.items()]
        folder = folder_of(tmp_path, tokenizer, chat_template=named)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = ChatTemplate.of(folder)
    talk = [
        {"role": "user", "content": "a", "reasoning_content": None},
        {"role": "assistant", "content": None, "reasoning": "so"},
    ]
    for tools in (None, [{"type": "function", "function": {"name": "ü"}}]):
        expected = theirs.apply_chat_template(talk, tools=tools, tokenize=False)
        assert ours.render(talk, tools=tools) == expected


@pytest.mark.parametrize(
    ("template", "replies", "learned"),
    [
        (R1, [THOUGHT, THOUGHT], ["t\n</think>\n\na<|end|>"] * 2),
        (R1, ["<think>t</think>a", "a"], ["t</think>a<|end|>", "a<|end|>"]),
        (R1_FIRST, [THOUGHT, "a"], [THOUGHT + "<|end|>", "a<|end|>"]),
        (MISTRAL, ["yes ", "no"], [" yes<|end|>", " no<|end|>"]),
        (MISTRAL, [None, "no"], [f"[TOOL_CALLS]{json.dumps(CALLS)}<|end|>", " no<|end|>"]),
        (NEMO, ["yes", "[INST] so?"], ["yes<|end|>", "[INST] so?<|end|>"]),
        (EMPTY_THOUGHT, ["yes", "no"], ["yes<|im_end|>\n", "no<|im_end|>\n"]),
    ],
)
def test_replies_that_a_template_changes(template, replies, learned, tmp_path, tokenizer, caplog):
    """Learned whole, after the prompts of transformers."""
    folder = folder_of(tmp_path, tokenizer, bos_token="<s>", chat_template=template)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = ChatTemplate.of(folder)
    first, second = (
        {"role": "assistant", "content": reply}
        if reply is not None
        else {"role": "assistant", "tool_calls": CALLS}
        for reply in replies
    )
    talk = [*TALK[:2], first, TALK[3], second]
    if template in (R1, R1_FIRST):
        del talk[0]
    for count in (len(talk) - 2, len(talk)):
        *before, (reply, is_learned) = ours.turns(talk[:count])[-1]
        assert is_learned
        assert reply == learned[count == len(talk)]
        expected = theirs.apply_chat_template(
            talk[: count - 1], tokenize=False, add_generation_prompt=True
        )
        assert "".join(text for text, _ in before) == expected
    assert caplog.text.count("The chat template renders replies in another way") == 1


def test_what_a_template_leaves_out_of_a_reply_is_said(caplog):
    with_reasoning = CHATML.replace("m.content", "(m.thinking or '') + m.content")
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    for template, field, told in (
        (with_reasoning, {"reasoning": "so"}, None),
        (CHATML, {"reasoning": "so"}, "leaves out the reasoning of replies"),
        (CHATML, {"tool_calls": CALLS}, None),
        (MISTRAL, {"tool_calls": CALLS}, "leaves out the content of replies that call tools"),
    ):
        caplog.clear()
        talk = [TALK[1], TALK[2] | field]
        [[_, (reply, _), *_]] = ChatTemplate(template, special).turns([*talk, *talk])
        assert len(caplog.messages) == (told is not None)
        assert (told or "") in caplog.text
        if template == MISTRAL:
            assert reply == f"[TOOL_CALLS]{json.dumps(CALLS)}</s>"


def test_marks_of_generation_say_nothing():
    template = "{% generation %}{{ messages[0].content }}{% endgeneration %}{% break %}"
    with pytest.raises(ValueError, match="is not valid jinja2"):
        ChatTemplate("{% if %}", {})
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    assert ChatTemplate(template + "{% break %}{% endfor %}", {}).render(TALK) == " S "
