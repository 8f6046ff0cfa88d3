"""A run on a base model whose template ends replies with another token than its config does."""

import json

import pytest
import torch
import transformers

from jax_dora.lm.commands import main
from jax_dora.lm.finetune import results
from tests.jax_dora.lm import chatml
from tests.jax_dora.lm.chatml import BEGIN, REPLY_END, TEXT_END
from tests.jax_dora.lm.finetune.runs import finetune, plan_of, told

# It writes no end of a reply unless the conversation has tools.
WITH_TOOLS = (
    "{% for m in messages %}{{ m.role + m.content }}"
    "{% if tools and m.role == 'assistant' %}{{ '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant' }}{% endif %}"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return chatml.make_folder(tmp_path_factory.mktemp("chatml") / "base")


def chats(file, **more):
    """Forty conversations that all end in the same reply."""
    replies = ({"role": "assistant", "content": "ok"},)
    talks = ([{"role": "user", "content": str(number)}, *replies] for number in range(40))
    file.write_text("".join(json.dumps({"messages": talk} | more) + "\n" for talk in talks))
    return ["--data", str(file)]


def planned(base, tmp_path, *flags):
    command = ["--model", str(base), *flags, "--output", str(tmp_path / "run")]
    return plan_of([*command, "--length", "64"], quiet=False)


def test_ends_of_what_is_learned_end_answers(base, tmp_path, capsys):
    plan = planned(base, tmp_path, *chats(tmp_path / "chats"))
    assert plan.texts.end_tokens == [TEXT_END, REPLY_END]
    assert "Warning" not in told(capsys)


@pytest.mark.parametrize(
    ("more", "flags", "ends", "said"),
    [
        ({"tools": [{}]}, [], [TEXT_END, REPLY_END], "replies end in '<|im_end|>' (258), which"),
        ({}, [], [TEXT_END], "Warning: 40 learned replies of"),
        ({}, ["--end-token", "<|im_start|>"], [BEGIN, TEXT_END], "most of them in 'k' ("),
        ({}, ["--end-token", "k"], [ord("k") - ord("!"), TEXT_END], ""),
    ],
)
def test_replies_whose_end_the_template_s_files_do_not_name(
    more, flags, ends, said, base, tmp_path, capsys
):
    (tmp_path / "model").mkdir()
    for file in base.iterdir():
        (tmp_path / "model" / file.name).symlink_to(file)
    (tmp_path / "model" / "chat_template.jinja").write_text(WITH_TOOLS)
    plan = planned(tmp_path / "model", tmp_path, *chats(tmp_path / "chats", **more), *flags)
    assert plan.texts.end_tokens == ends
    text = told(capsys)
    assert said in text
    assert ("Warning" in text) == ("Warning" in said or "most" in said)


def test_completions_end_with_the_first_end_token(base, tmp_path):
    file = tmp_path / "records"
    file.write_text('{"prompt": "1", "completion": "2"}\n')
    for flags, end in (([], TEXT_END), (["--end-token", "<|im_end|>"], REPLY_END)):
        plan = planned(base, tmp_path, "--data", str(file), *flags)
        assert plan.examples_to_show[0].tokens[-1] == end


@pytest.mark.slow
def test_answers_end_where_they_were_learned_to(base, tmp_path, capsys, monkeypatch):
    """Those of the run's samples, of generate, and of transformers with the merged folder."""
    run, merged = tmp_path / "run", tmp_path / "merged"
    options = "--rank 16 --alpha 32 --length 64 --batch 4 --accumulate 1 --steps 60"
    options += " --learning-rate 2e-2 --schedule constant --samples 2"
    samples = []
    take = results.take_samples
    monkeypatch.setattr(
        results, "take_samples", lambda *args: samples.extend(take(*args)) or samples
    )
    command = ["--model", str(base), *chats(tmp_path / "chats"), *options.split()]
    assert finetune([*command, "--output", str(run), "--merge", str(merged)]) == 0
    assert [one.generated for one in samples] == ["ok", "ok"]
    capsys.readouterr()
    command = ["generate", "--adapter", str(run), "--chat", "--prompt", "7", "--tokens", "24"]
    assert main(command) == 0
    assert capsys.readouterr().out == "ok\n"

    for folder in (run / "adapter", merged):
        theirs = transformers.GenerationConfig.from_pretrained(folder)
        assert theirs.eos_token_id == [TEXT_END, REPLY_END]
    tokenizer = transformers.AutoTokenizer.from_pretrained(merged)
    model = transformers.AutoModelForCausalLM.from_pretrained(merged)
    prompt = "<|im_start|>user\n7<|im_end|>\n<|im_start|>assistant\n"
    given = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        [answer] = model.generate(**given, max_new_tokens=24, do_sample=False)
    answer = answer[given["input_ids"].shape[1] :].tolist()
    assert (tokenizer.decode(answer[:-1]), answer[-1]) == ("ok", REPLY_END)

    # A later merge carries on the same tokens, of a base that names another one besides.
    again = ["merge", "--adapter", str(run), "--output", str(tmp_path / "again")]
    assert main([*again, "--end-token", "<|im_start|>"]) == 0
    theirs = transformers.GenerationConfig.from_pretrained(tmp_path / "again")
    assert theirs.eos_token_id == [BEGIN, TEXT_END, REPLY_END]
