"""What public clients get of the server: evaluations, chains, streams and load."""

import dataclasses
import json
import subprocess
import sys

import pytest

from tests.jax_dora.lm.serve import serving
from tests.jax_dora.lm.serve.test_answers import complete

# The clients warn about their own dependencies.
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
CHOICES = ("12+30=42", "The capital of France is Paris", "a slot holds an adapter")
TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_choice": ["42", " Paris", " an adapter, and is pinned by its requests"],
        "doc_to_target": "target",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "answers": {
        "output_type": "generate_until",
        "doc_to_target": "answer",
        "generation_kwargs": {"until": ["\n", "b"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "question",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
}


@pytest.fixture(scope="module")
def served(settings):
    changed = dataclasses.replace(settings, max_length=160, body_bytes=1 << 20)
    with serving.serving(changed) as both:
        yield both


@pytest.fixture
def evaluate(tmp_path):
    """A function that evaluates a model of lm-eval on the tasks of `TASKS`."""
    import lm_eval  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    data = tmp_path / "data.jsonl"
    records = [
        {"question": question, "target": number % 3, "answer": "42"}
        for number, question in enumerate((*CHOICES, "x" * 70, "q"))
    ]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    for name, options in TASKS.items():
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {
                "data_files": {"test": str(data)},
                "cache_dir": str(tmp_path / "cache"),
            },
            "test_split": "test",
            "doc_to_text": "{{question}}",
            **options,
        }
        (tmp_path / f"{name}.yaml").write_text(json.dumps(task))
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)

    def run(model, arguments=None):
        found = lm_eval.simple_evaluate(
            model, model_args=arguments, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0
        )
        samples = {
            name: [
                one["resps"] for one in sorted(found["samples"][name], key=lambda s: s["doc_id"])
            ]
            for name in TASKS
        }
        return samples, found["results"]

    return run


@pytest.mark.parametrize("name", ["tiny", "french"])
@pytest.mark.parametrize("tokenized", [True, False])
def test_lm_eval_measures_what_it_measures_of_transformers(
    served, evaluate, model, adapters, name, tokenized
):
    import peft
    import transformers
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

    _, client = served
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model)
    if name != "tiny":
        theirs = peft.PeftModel.from_pretrained(theirs, adapters / name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    options = {"max_length": 160, "add_bos_token": False, "batch_size": 2}
    expected, _ = evaluate(HFLM(pretrained=theirs, tokenizer=tokenizer, **options))
    arguments = {
        "base_url": f"{client.base_url}completions",
        "model": name,
        "tokenizer": str(model),
        "tokenizer_backend": "huggingface",
        "tokenized_requests": tokenized,
        "batch_size": 3 if tokenized else 1,
        "max_length": 160,
    }
    found, results = evaluate("local-completions", arguments)
    assert len(found["choices"]) == len(expected["choices"]) == 5
    for ours, known in zip(found["choices"], expected["choices"], strict=True):
        for [(likelihood, is_greedy)], [(other, known_greedy)] in zip(ours, known, strict=True):
            assert likelihood == pytest.approx(other, abs=5e-3)
            assert is_greedy == known_greedy
    assert found["answers"] == expected["answers"]
    assert any(text for [[text]] in found["answers"])
    for [[ours]], [[known]] in zip(found["perplexity"], expected["perplexity"], strict=True):
        assert ours == pytest.approx(known, abs=5e-3)
    assert 0 <= results["choices"]["acc,none"] <= 1


def test_langchain_s_batch(served):
    """Of chats, one a request, and of texts, all in one request."""
    from langchain_openai import ChatOpenAI, OpenAI  # pyright: ignore[reportMissingImports]

    _, client = served
    options = {"base_url": str(client.base_url), "api_key": "none", "model": "french"}
    options |= {"temperature": 0, "max_tokens": 6}
    texts = [*CHOICES, "1"]
    chats = [
        client.chat.completions.create(
            model="french",
            messages=[{"role": "user", "content": text}],
            temperature=0,
            max_tokens=6,
        )
        for text in texts
    ]
    chat = ChatOpenAI(**options)
    chat.invoke(texts[0])  # LangChain's threads would all write its first call's fields.
    found = chat.batch(texts)
    assert [one.content for one in found] == [one.choices[0].message.content for one in chats]
    assert [one.usage_metadata["total_tokens"] for one in found] == [
        one.usage.total_tokens for one in chats
    ]
    found = OpenAI(**options, n=2, best_of=1).generate(texts)
    expected = [complete(client, "french", text, max_tokens=6).text for text in texts]
    assert [[one.text for one in pair] for pair in found.generations] == [[e, e] for e in expected]


@pytest.mark.parametrize("provider", ["hosted_vllm", "openai"])
def test_litellm_s_stream(served, provider):
    import litellm  # pyright: ignore[reportMissingImports]

    _, client = served
    messages = [{"role": "user", "content": "12+30="}]
    options = {"temperature": 0, "max_tokens": 9, "n": 1, "presence_penalty": 0.5}
    whole = client.chat.completions.create(model="german", messages=messages, **options)
    stream = litellm.completion(
        f"{provider}/german",
        messages,
        api_base=str(client.base_url),
        api_key="none",
        stream=True,
        stream_options={"include_usage": True},
        **options,
    )
    *events, last = stream
    text = "".join(one.choices[0].delta.content or "" for one in events if one.choices)
    assert text == whole.choices[0].message.content
    assert last.usage.total_tokens == whole.usage.total_tokens
    with pytest.raises(litellm.BadRequestError, match="vLLM with the plugin"):
        litellm.completion(
            f"{provider}/german",
            messages,
            api_base=str(client.base_url),
            api_key="none",
            tools=[{"type": "function", "function": {"name": "f"}}],
        )


def test_guidellm_s_load(served, model, tmp_path):
    """Every request is answered with as many tokens as it asks for."""
    _, client = served
    data = {"kind": "synthetic_text", "prompt_tokens": 20, "output_tokens": 8}
    command = [
        *(sys.executable, "-m", "guidellm", "run", "--disable-console"),
        "--backend",
        f"kind=openai_http,target={str(client.base_url).removesuffix('/v1/')},model=french",
        *("--profile", "kind=concurrent,streams=[6]", "--constraint", "kind=max_requests,count=18"),
        *("--tokenizer", f"kind=huggingface_auto,model={model}"),
        *("--data", ",".join(f"{key}={value}" for key, value in data.items())),
        *("--output", f"kind=json,path={tmp_path / 'report.json'}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    [benchmark] = report["benchmarks"]
    totals, tokens = (
        benchmark["metrics"][name] for name in ("request_totals", "output_token_count")
    )
    assert totals == {"successful": 18, "errored": 0, "incomplete": 0, "total": 18}
    assert tokens["successful"]["min"] == tokens["successful"]["max"] == 8
