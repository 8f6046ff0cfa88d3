"""Chat templates in miniature, conversations, and folders that have them."""

import json

from jax_dora.lm.finetune import tiny

CHATML = (
    "{%- for m in messages %}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content | trim + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# As Qwen3's: an empty thought before the last reply only.
THINKING = (
    "{%- for m in messages %}"
    "{{- '<' + m.role + '>' }}"
    "{%- if m.role == 'assistant' and loop.last %}{{- '[thought]' }}{%- endif %}"
    "{{- m.content + eos_token }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<assistant>' }}{%- endif %}"
)
TALK = [
    {"role": "system", "content": " S "},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "so?"},
    {"role": "assistant", "content": "no"},
]
# As DeepSeek-R1's: messages lose their thoughts, and a prompt begins one. The first one of them did
# not.
R1_FIRST = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '<User>' + m.content }}{% endif %}"
    "{% if m.role == 'assistant' %}"
    "{{ '<Assistant>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<Assistant>' }}{% endif %}"
)
R1 = R1_FIRST.replace("{{ '<Assistant>' }}", "{{ '<Assistant><think>\\n' }}")
# As Mistral's: the system message stands before the last message, if that is the user's.
MISTRAL = (
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}"
    "{%- set messages = messages[1:] %}{%- endif %}{{- bos_token }}{%- for m in messages %}"
    "{%- if m.role == 'user' %}{{- '[INST] ' }}"
    "{%- if loop.last and system is defined %}{{- system + '\n\n' }}{%- endif %}"
    "{{- m.content + '[/INST]' }}"
    "{%- elif m.tool_calls is defined %}{{- '[TOOL_CALLS]' + m.tool_calls | tojson + eos_token }}"
    "{%- else %}{{- ' ' + m.content | trim + eos_token }}{%- endif %}{%- endfor %}"
)
NEMO = MISTRAL.replace("' ' + m.content | trim", "m.content")
# As Qwen3's without thinking: a prompt has an empty thought, which messages lack.
EMPTY_THOUGHT = CHATML.replace("assistant\\n' }}", "assistant\\n<think>\\n\\n</think>\\n\\n' }}")
# As Qwen3's: an empty thought if a request wants none.
SWITCHED = (
    CHATML + "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
)
CALLS = [{"name": "f", "arguments": {}}]
THOUGHT = "<think>\nt\n</think>\n\na"


def folder_of(tmp_path, tokenizer, **settings):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tiny.END}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path
