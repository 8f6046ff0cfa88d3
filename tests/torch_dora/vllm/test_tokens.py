"""Answers of vLLM with the plugin, compared with transformers and PEFT in fp32."""

from types import SimpleNamespace

import pytest
import torch
import transformers

from parity import serving
from parity.report import Report
from tests.torch_dora.vllm import engines
from tests.torch_dora.vllm.engines import (
    ADAPTERS,
    MODELS,
    PROMPTS,
    Zoo,
    check,
    engine,
    generate,
    request,
)

pytestmark = [
    pytest.mark.vllm,
    # vLLM and its dependencies warn of themselves.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("kind", MODELS)
def test_every_adapter_alone_and_in_mixed_batches_answers_as_with_peft(kind, tmp_path):
    zoo, names = Zoo(kind, tmp_path), [None, *ADAPTERS]
    requests = {
        name: request(name, name and zoo.path(name), number) for number, name in enumerate(names)
    }
    pairs = [(name, prompt) for prompt in PROMPTS for name in names]
    expected = [zoo.expected(name, tuple(prompt)) for name, prompt in pairs]
    # The adapters are used, and are not all alike.
    assert len({tuple(tokens) for tokens, _ in expected}) > len(pairs) / 2
    # Chunked: the longest prompt takes several steps, and steps mix prompts and answers.
    with engine(zoo.folder, max_num_batched_tokens=32) as made:
        mixed = generate(
            made, [prompt for _, prompt in pairs], [requests[name] for name, _ in pairs]
        )
        check(mixed, expected)
        alone = [generate(made, [prompt], [requests[name]])[0] for name, prompt in pairs[:7]]
        check(alone, expected[:7])


def test_embeddings_are_those_of_peft(tmp_path):
    zoo, prompt = Zoo("Llama", tmp_path), PROMPTS[2]
    names = [None, "dora", "lora"]
    requests = [request(name, name and zoo.path(name), number) for number, name in enumerate(names)]
    with engine(zoo.folder, max_loras=3, runner="pooling") as made:
        prompts = [{"prompt_token_ids": prompt}] * len(names)
        answers = made.embed(prompts, lora_request=requests, use_tqdm=False)
    for name, answer in zip(names, answers, strict=True):
        with torch.no_grad():
            model = zoo.model(name).get_base_model() if name else zoo.base
            expected = model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
        found = torch.tensor(answer.outputs.embedding)
        torch.testing.assert_close(found, expected / expected.norm(), rtol=0, atol=1e-5)


def test_the_language_model_of_a_multimodal_model_answers_as_with_peft(tmp_path):
    """In vLLM its layers have other names than in PEFT."""
    text = engines._WIDE | {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6]}}
    vision = {"depth": 1, "embed_dim": 64, "hidden_size": 128, "num_heads": 2, "patch_size": 4}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision)
    zoo = Zoo("Qwen2", tmp_path, base=transformers.Qwen2VLForConditionalGeneration(config))
    layers = r".*language_model\.layers.*_proj"
    for name in ("dora", "lora"):
        zoo.add(name, ADAPTERS[name] | {"target_modules": layers}, 70)
    names = [None, "dora", "lora"]
    requests = [request(name, name and zoo.path(name), number) for number, name in enumerate(names)]
    with engine(zoo.folder, limit_mm_per_prompt={"image": 0, "video": 0}) as made:
        found = generate(made, [PROMPTS[0]] * 3, requests)
    check(found, [zoo.expected(name, tuple(PROMPTS[0])) for name in names])


def test_the_kernels_answer_as_peft(tmp_path, monkeypatch):
    """Interpreted, in place of Punica. Qwen2 has biases."""
    monkeypatch.setenv("TORCH_DORA_VLLM_PUNICA", "0")
    monkeypatch.setattr(engines, "TOKENS", 3)
    zoo, names = Zoo("Qwen2", tmp_path), [None, "rslora", "some", "lora"]
    requests = {
        name: request(name, name and zoo.path(name), number) for number, name in enumerate(names)
    }
    prompts = [[7, 8, 9], [5, 6], [*range(1, 8)], [100, 3]]
    with engine(zoo.folder, max_num_batched_tokens=32, max_loras=4) as made:
        found = generate(made, prompts, [requests[name] for name in names])
        check(found, [zoo.expected(name, tuple(p)) for name, p in zip(names, prompts, strict=True)])
        # In other slots, with other ranks, after the first ones were removed.
        for name in ("rslora", "some"):
            made.llm_engine.remove_lora(requests[name].lora_int_id)
        found = generate(made, prompts[:2], [request("dora", zoo.path("dora"), 9), None])
        expected = [zoo.expected("dora", tuple(prompts[0])), zoo.expected(None, tuple(prompts[1]))]
        check(found, expected)
        # vLLM's deepest sleep forgets all but buffers. Its CPU build does not sleep.
        worker = engines.worker_of(made)
        model = worker.model_runner.get_model()
        kept = {buffer: one.clone() for buffer, one in model.named_buffers()}
        for layer in worker.model_runner.lora_manager._adapter_manager.modules.values():
            products = getattr(layer, "slot_products", None)
            own = products.buffers() if products else ()
            for one in (*layer.lora_a_stacked, *layer.lora_b_stacked, *own):
                one.fill_(7)
        for buffer, one in model.named_buffers():
            one.copy_(kept[buffer])
        found = generate(made, prompts[:2], [request("dora", zoo.path("dora"), 9), None])
        check(found, expected)


def test_punica_computes_what_is_left_to_it_for_the_adapters_that_have_it(tmp_path, monkeypatch):
    """In Llama the embedding and the head, unless --lora-target-modules names others."""
    from vllm.lora.punica_wrapper.punica_cpu import (  # pyright: ignore[reportMissingImports]
        PunicaWrapperCPU,
    )

    from torch_dora.vllm import punica

    monkeypatch.setenv("TORCH_DORA_VLLM_PUNICA", "0")
    monkeypatch.setattr(engines, "TOKENS", 2)
    meta, batches = SimpleNamespace(no_lora_flag_cpu=torch.tensor([False])), []

    def metas(wrapper):
        """As on a GPU, where Punica can rest."""
        meta._reset = lambda: setattr(wrapper, "no_lora", True)
        return [meta, meta]

    def update(self, mapping, *others, original=PunicaWrapperCPU.update_metadata):
        batches.append({*mapping.index_mapping})
        original(self, mapping, *others)

    monkeypatch.setattr(punica, "_metas", metas)
    monkeypatch.setattr(PunicaWrapperCPU, "update_metadata", update)
    zoo, prompts = Zoo("Llama", tmp_path), [[7, 8, 9], [5, 6]]
    zoo.add("head", ADAPTERS["lora, some"] | {"target_modules": ["q_proj", "lm_head"]}, 71)
    numbers = {"dora": 1, "head": 2, None: 0}
    with engine(zoo.folder, max_num_batched_tokens=32, max_loras=3) as made:
        for names in (("dora", None), ("head", None), ("dora", "head"), (None, "dora")):
            batches.clear()
            found = generate(made, prompts, [
                request(name, name and zoo.path(name), numbers[name]) for name in names
            ])  # fmt: skip
            pairs = zip(names, prompts, strict=True)
            check(found, [zoo.expected(name, tuple(prompt)) for name, prompt in pairs])
            assert len(batches) == (2 if "head" in names else 0)
            assert all(numbers["head"] in batch for batch in batches)
        manager = engines.manager_of(made)
        (wrapper,) = manager.punica_wrapper_mapping.values()
        assert wrapper.rests
        manager.dora.renew()
        assert not wrapper.rests
        assert manager._last_mapping is None


def test_the_parity_level_passes():
    report = Report(None, "vllm", {})
    serving.run(report, "cpu")
    failed = [row for row in report.rows if row["ok"] is False]
    assert not failed, str(failed)
    judged = {row["side"] for row in report.rows if row["ok"] is not None}
    assert judged == {"torch", "jax", "vllm"}


def test_speculative_decoding_answers_as_peft(tmp_path):
    """Tokens that are guessed from the prompt are verified by the row's own adapter.

    Last, since vLLM imports numba for it, and its CPU build then starts no other engine in the
    process: it looks for "kernel" in all modules' objects, and llvmlite's have no such dictionary.
    """
    zoo, names = Zoo("Llama", tmp_path), [None, "dora", "lora"]
    requests = [request(name, name and zoo.path(name), number) for number, name in enumerate(names)]
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9] * 6, [*range(1, 9)]]
    guess = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    with engine(zoo.folder, max_loras=3, speculative_config=guess) as made:
        assert made.llm_engine.vllm_config.speculative_config.num_speculative_tokens == 3
        found = generate(made, prompts, requests)
    pairs = zip(names, prompts, strict=True)
    check(found, [zoo.expected(name, tuple(prompt)) for name, prompt in pairs])
