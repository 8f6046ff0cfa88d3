"""What the server answers is what the model with the adapter alone does, in any company."""

import concurrent.futures
import dataclasses

import numpy as np
import peft
import pytest
import torch
import transformers
from flax import nnx

import jax_dora
import jax_dora.peft
from jax_dora.lm.models import Sampling, generate, load_model
from jax_dora.lm.models.sampling import GREEDY
from jax_dora.lm.serve.answers import TOKEN_ID_PREFIX, Completion
from jax_dora.lm.serve.request import Piece, Token
from tests.jax_dora.lm.models.test_text import byte_fallback_tokenizer

NAMES = ("tiny", "french", "german", "lora", "small")
# Shorter than a piece of a prompt, as long as one, and longer.
PROMPTS = ("12+30=", "a" * 32, "What is a slot, and who pins it? " * 2)
TIE = 1e-3  # logits that near may be told apart by the order of a sum in fp32


def together(requests):
    """Asks all at once."""
    with concurrent.futures.ThreadPoolExecutor(len(requests)) as pool:
        return [one.result() for one in [pool.submit(request) for request in requests]]


def complete(client, model, prompt, **options):
    options = {"max_tokens": 12, "temperature": 0} | options
    return client.completions.create(model=model, prompt=prompt, **options).choices[0]


def drawn_tokens(completion, tokenizer):
    """The tokens of a completion with probabilities, each of which has a byte."""
    names = completion.choices[0].logprobs.tokens
    is_id = [name.startswith(TOKEN_ID_PREFIX) for name in names]
    return [
        int(name.removeprefix(TOKEN_ID_PREFIX)) if known else tokenizer.encode(name).ids[0]
        for name, known in zip(names, is_id, strict=True)
    ]


@pytest.mark.slow
def test_every_adapter_answers_as_it_does_alone(served, adapters, reference):
    """In any company: the same text, and the same probabilities to the last bit."""
    server, client = served
    assert [one.id for one in client.models.list()] == list(NAMES)
    tokenizer = server.service.texts.tokenizer
    asked = [(name, prompt) for prompt in PROMPTS for name in NAMES]

    def request(one):
        return lambda: complete(client, *one, logprobs=1)

    # Twice, each time in other company.
    mixed = together([request(one) for one in asked])
    again = together([request(one) for one in asked[::-1]])[::-1]
    alone = [request(one)() for one in asked]
    for one, two, three, (name, _) in zip(mixed, again, alone, asked, strict=True):
        assert one.text == two.text == three.text, name
        assert one.logprobs.token_logprobs == two.logprobs.token_logprobs, name
        assert one.logprobs.token_logprobs == three.logprobs.token_logprobs, name
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    for name in NAMES:
        answers = reference.tokens(None if name == "tiny" else adapters / name, prompts, 12)
        found = [
            one.text for one, (asked_for, _) in zip(alone, asked, strict=True) if asked_for == name
        ]
        assert found == [tokenizer.decode(answer) for answer in answers], name
    assert len({one.text for one in alone}) > len(asked) // 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["french", "german", "lora"])  # DoRA, also with rsLoRA, and LoRA
def test_it_is_what_peft_and_the_merged_model_answer(served, model, adapters, name):
    """But where their two likeliest tokens are as near as fp32 sums in two orders are."""
    server, client = served
    tokenizer = server.service.texts.tokenizer
    transformers.utils.logging.disable_progress_bar()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model)
    theirs = peft.PeftModel.from_pretrained(theirs, adapters / name).eval()
    merged = jax_dora.merge_dora(jax_dora.peft.load_adapter(load_model(model), adapters / name))
    compared = 0
    for prompt in PROMPTS:
        text = complete(client, name, prompt).text
        tokens = tokenizer.encode(prompt).ids
        given = torch.tensor([tokens])
        config = transformers.GenerationConfig(
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=256,
            pad_token_id=256,
            output_logits=True,
            return_dict_in_generate=True,
        )
        found = theirs.generate(
            input_ids=given, attention_mask=torch.ones_like(given), generation_config=config
        )
        answer = found.sequences[0, len(tokens) :].tolist()
        likeliest = torch.stack(found.logits)[:, 0].topk(2).values.numpy()
        near = np.flatnonzero(likeliest[:, 0] - likeliest[:, 1] < TIE)
        if near.size:
            continue
        compared += 1
        assert text == tokenizer.decode(answer, skip_special_tokens=True)
        assert text == tokenizer.decode(generate(merged, [tokens], 12, ends=[256])[0])
    assert compared >= 2


@pytest.mark.ci
def test_sampled_is_what_generate_samples(served, model):
    server, client = served
    tokenizer, prompts = server.service.texts.tokenizer, PROMPTS[:3]
    options = {"temperature": 1.2, "top_p": 0.9, "seed": 2**40 + 5}
    more = {"top_k": 50, "min_p": 0.001}
    tokens = [tokenizer.encode(one).ids for one in prompts]
    expected = generate(load_model(model), tokens, 12, Sampling(**options, **more), ends=[256])
    for prompt, answer in zip(prompts, expected, strict=True):
        text = complete(client, "tiny", prompt, extra_body=more, **options).text
        assert text == tokenizer.decode(answer)


# Of each kind, with values that change what is said, and that let the end come when it may.
PROCESSED = (
    Sampling(repetition_penalty=3.0),
    Sampling(1.1, seed=3, frequency_penalty=1.5, presence_penalty=0.5),
    Sampling(min_tokens=5, logit_bias={256: 100.0, 97: 2.0}),
    Sampling(0.8, 20, 0.9, 0.01, 5, 1.2, -0.5, -1.0, 3, {98: -100.0}),
)


@pytest.mark.ci
def test_processed_is_what_generate_says(served, model):
    """In company of requests without such settings, which change nothing in their own answers."""
    server, client = served
    prompt = PROMPTS[2]
    tokens = server.service.texts.tokenizer.encode(prompt).ids
    answers = generate(load_model(model), [tokens] * 4, 12, PROCESSED, ends=[256])

    def request(one):
        fields = dataclasses.asdict(one) | {"model": "tiny", "prompt": prompt, "max_tokens": 12}
        return lambda: client.post("/completions", body=fields, cast_to=dict)["choices"][0]["text"]

    plain = complete(client, "tiny", prompt).text
    found = together([request(one) for one in (*PROCESSED, GREEDY)])
    expected = [server.service.texts.tokenizer.decode(answer) for answer in answers]
    assert found == [*expected, plain]
    assert len(answers[2]) == 5
    assert plain not in expected
    assert complete(client, "tiny", prompt).text == plain


def test_a_stop_string_waits_for_min_tokens(served):
    _, client = served
    whole = complete(client, "french", "12+30=", max_tokens=20).text
    for least in (3, 9):
        found = complete(
            client,
            "french",
            "12+30=",
            max_tokens=20,
            stop=list(whole[1:3]),
            logprobs=0,
            extra_body={"min_tokens": least},
        )
        assert len(found.logprobs.tokens) > least
        assert whole.startswith(found.text)


@pytest.mark.parametrize("name", ["tiny", "french"])
def test_echo_gives_the_likelihoods_of_transformers(served, model, adapters, name):
    """Of texts and of tokens, several at once, shorter and longer than a piece of a prompt."""
    server, client = served
    tokenizer = server.service.texts.tokenizer
    transformers.utils.logging.disable_progress_bar()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model)
    if name != "tiny":
        theirs = peft.PeftModel.from_pretrained(theirs, adapters / name)
    texts = [*PROMPTS, "a"]
    prompts = [tokenizer.encode(text).ids for text in texts]
    options = {"model": name, "temperature": 0, "logprobs": 3}
    scored = client.completions.create(**options, prompt=prompts, max_tokens=0, echo=True)
    answered = client.completions.create(**options, prompt=texts, max_tokens=2, echo=True)
    assert scored.usage.completion_tokens == 0
    assert answered.usage.completion_tokens == 2 * len(prompts)
    assert scored.usage.prompt_tokens == answered.usage.prompt_tokens == sum(map(len, prompts))
    streamed = client.completions.create(
        **options, prompt=texts, max_tokens=2, echo=True, stream=True
    )
    tokens = [[] for _ in prompts]
    for event in streamed:
        tokens[event.choices[0].index] += event.choices[0].logprobs.token_logprobs
    assert tokens == [one.logprobs.token_logprobs for one in answered.choices]
    for number, prompt in enumerate(prompts):
        with torch.no_grad():
            expected = torch.log_softmax(theirs(torch.tensor([prompt])).logits[0], -1).numpy()
        alone, more = scored.choices[number], answered.choices[number]
        assert (alone.text, alone.finish_reason) == (texts[number], "length")
        plain = complete(client, name, prompt, max_tokens=2, logprobs=3)
        assert more.text == texts[number] + plain.text
        logprobs = more.logprobs.token_logprobs
        assert logprobs == alone.logprobs.token_logprobs + plain.logprobs.token_logprobs
        assert more.logprobs.text_offset[: len(prompt)] == list(range(len(prompt)))
        assert (logprobs[0], more.logprobs.top_logprobs[0]) == (None, None)
        known = expected[np.arange(len(prompt) - 1), prompt[1:]]
        np.testing.assert_allclose(logprobs[1 : len(prompt)], known, rtol=0, atol=TIE)
        for place, top in enumerate(more.logprobs.top_logprobs[1 : len(prompt)]):
            three = np.sort(expected[place])[:-4:-1]
            np.testing.assert_allclose(list(top.values()), three, rtol=0, atol=TIE)


def test_several_answers_are_those_of_single_requests(served):
    """In the order of the prompts, whole and streamed, and each with a seed of its own."""
    _, client = served
    options = {"temperature": 1.5, "max_tokens": 6}
    prompts = list(PROMPTS[:2])
    alone = [
        complete(client, "german", prompt, seed=seed, **options).text
        for prompt in prompts
        for seed in (4, 5, 6)
    ]
    asked = {"model": "german", "prompt": prompts, "n": 3, "seed": 4, **options}
    answer = client.completions.create(**asked)
    assert [(one.index, one.text) for one in answer.choices] == list(enumerate(alone))
    assert len(set(alone)) == 6
    assert answer.usage.prompt_tokens == len(prompts[0]) + len(prompts[1])
    texts = [""] * 6
    usage = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = client.completions.create(**asked, stream=True, stream_options=usage)
    for one in events:
        texts[one.choices[0].index] += one.choices[0].text
    assert texts == alone
    assert last.usage == answer.usage == events[-1].usage
    assert events[0].usage.completion_tokens < answer.usage.completion_tokens
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "n": 2, **options}
    answer = client.chat.completions.create(**chat, seed=1)
    roles = [
        one.choices[0].index
        for one in client.chat.completions.create(**chat, stream=True)
        if one.choices[0].delta.role
    ]
    assert roles == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content


@pytest.mark.slow
def test_draws_depend_on_the_seed_alone(served):
    _, client = served

    def request(seed, **more):
        options = {"temperature": 1.5, "top_p": 0.9, "seed": seed} | more
        return lambda: complete(client, "german", "12", **options).text

    alone = [request(seed)() for seed in (1, 2, -1)]
    company = [request(9, temperature=0.7, top_p=1.0), request(8, temperature=0)]
    mixed = together([request(1), *company, request(2), request(-1)])
    assert [mixed[0], *mixed[3:]] == alone
    assert len(set(alone)) == 3
    assert request(None)() != request(None)()


@pytest.mark.slow
def test_streamed_is_the_same(served):
    _, client = served
    whole = complete(client, "french", "12+30=", logprobs=3)
    options = {"max_tokens": 12, "temperature": 0, "logprobs": 3}
    events = list(
        client.completions.create(
            model="french",
            prompt="12+30=",
            stream=True,
            stream_options={"include_usage": True},
            **options,
        )
    )
    *events, last = events
    assert "".join(one.choices[0].text for one in events) == whole.text
    told = [value for one in events for value in one.choices[0].logprobs.token_logprobs]
    assert told == whole.logprobs.token_logprobs
    offsets = [value for one in events for value in one.choices[0].logprobs.text_offset]
    assert offsets == whole.logprobs.text_offset
    assert [one.choices[0].finish_reason for one in events][-1] == whole.finish_reason
    assert (last.choices, last.usage.prompt_tokens, last.usage.completion_tokens) == ([], 6, 12)


@pytest.mark.slow
def test_chat(served, adapters, reference):
    server, client = served
    messages = [
        {"role": "system", "content": "S"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "1+1"}, {"type": "text", "text": "="}],
        },
    ]
    tokenizer = server.service.texts.tokenizer
    prompt = tokenizer.encode("system: S\nuser: 1+1=\n").ids
    [tokens] = reference.tokens(adapters / "german", [prompt], 9)
    options = {"model": "german", "messages": messages, "temperature": 0, "max_tokens": 9}
    answer = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == tokenizer.decode(tokens)
    content = choice.logprobs.content
    assert len(content) == len(tokens) == answer.usage.completion_tokens
    for one in content:
        # Greedy: the likeliest is the one drawn.
        assert one.top_logprobs[0].logprob == one.logprob
        assert one.top_logprobs[0].logprob >= one.top_logprobs[1].logprob
        assert one.bytes is None or bytes(one.bytes).decode() == one.token
    events = list(client.chat.completions.create(**options, stream=True))
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(one.choices[0].delta.content or "" for one in events) == choice.message.content
    # Without a limit the answer goes on to the end of its row.
    del options["max_tokens"]
    usage = client.chat.completions.create(**options).usage
    assert usage.total_tokens <= 96


@pytest.mark.slow
def test_probabilities_are_the_model_s(served, adapters, reference):
    server, client = served
    ours = nnx.jit(lambda model, tokens: model(tokens))
    prompt = server.service.texts.tokenizer.encode("12+30=").ids
    answer = complete(client, "german", prompt, max_tokens=1, logprobs=5)
    found = ours(reference.model(adapters / "german"), np.array([prompt]))
    logits = np.asarray(found)[0, -1].astype(np.float64)
    expected = np.sort(logits - np.log(np.sum(np.exp(logits))))[::-1][:5]
    found = sorted(answer.logprobs.top_logprobs[0].values(), reverse=True)
    np.testing.assert_allclose(found, expected[: len(found)], rtol=0, atol=TIE)


@pytest.mark.slow
def test_stop_strings(served):
    _, client = served
    whole = complete(client, "french", "12+30=", max_tokens=20).text
    for stop in (whole[3:6], [whole[7], "never"], ["\x00never", whole[2:4], whole[9:11]]):
        stops = [stop] if isinstance(stop, str) else stop
        expected = whole[: min(place for one in stops if (place := whole.find(one)) >= 0)]
        answer = complete(client, "french", "12+30=", max_tokens=20, stop=stop)
        assert (answer.text, answer.finish_reason) == (expected, "stop")


def test_tokens_that_end_an_answer_count_but_have_no_text(served):
    server, client = served
    tokenizer = server.service.texts.tokenizer
    options = {"model": "french", "prompt": "12+30=", "temperature": 0, "max_tokens": 12}
    whole = client.completions.create(**options, logprobs=0)
    assert whole.usage.completion_tokens == 12
    tokens = drawn_tokens(whole, tokenizer)
    before = tokens.index(tokens[7])
    more = {"stop_token_ids": [tokens[7]], "ignore_eos": True}
    answer = client.completions.create(**options, extra_body=more)
    assert answer.choices[0].text == tokenizer.decode(tokens[:before])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == before + 1
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = client.completions.create(**options, **usage, extra_body=more)
    assert last.usage == answer.usage


def test_tokens_have_their_spaces_and_names_of_their_own():
    """Of a tokenizer as Llama 2's, whose texts lose their first space, and which has bytes too."""
    drawn = [
        Token(256, -1.0, (Token(256, -1.0), Token(98, -2.0), Token(257, -3.0))),
        Token(32, 0.0),
    ]
    writer = Completion(0, byte_fallback_tokenizer(), has_logprobs=True)
    told = writer.whole([Piece(" a ", tuple(drawn), "length")])["logprobs"]
    assert told["tokens"] == [" a", " "]
    assert told["text_offset"] == [0, 2]
    assert told["top_logprobs"][0] == {" a": -1.0, "b": -2.0, "token_id:257": -3.0}


def test_parts_of_a_letter_stand_where_it_does():
    """And a byte that is no letter takes the place of one."""
    tokens = [257, *"😀".encode(), 257, 0xB7, 257]
    writer = Completion(0, byte_fallback_tokenizer(), has_logprobs=True)
    pieces = [Piece("b😀b\ufffdb", tuple(Token(one, 0.0) for one in tokens), "length")]
    told = writer.whole(pieces)["logprobs"]
    assert told["text_offset"] == [0, 1, 1, 1, 1, 2, 3, 4]


def test_special_tokens_take_no_place_in_the_text():
    tokenizer = byte_fallback_tokenizer()
    tokenizer.add_special_tokens(["<think>"])
    tokens = [257, tokenizer.token_to_id("<think>"), 257]
    pieces = [Piece("bb", tuple(Token(one, 0.0) for one in tokens), "length")]
    told = Completion(0, tokenizer, has_logprobs=True).whole(pieces)["logprobs"]
    assert told["tokens"][1] == "<think>"
    assert told["text_offset"] == [0, 1, 1]
