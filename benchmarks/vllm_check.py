"""The check of level `serve --vllm`: an engine's tokens, judged by transformers with PEFT.

A small random Llama in bf16 is served with DoRA and LoRA adapters and without one, in one batch and
each request alone, compiled and with CUDA graphs. PEFT computes the log-probabilities of the same
tokens in fp32. Where its largest is not the engine's token, it has to be as close as the bound.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from benchmarks.results import Row

# Differences of log-probabilities between bf16 in the engine and fp32 in PEFT; without g they are
# larger than 1.
BOUND = 0.25
TOKENS = 24
# Batches with the longest have the large tiles of the kernels.
LENGTHS = 3, 17, 300
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "DoRA, rank 16": {"r": 16, "lora_alpha": 24, "use_dora": True, "target_modules": PROJECTIONS},
    "DoRA, rank 3, rsLoRA": {
        "r": 3,
        "lora_alpha": 5,
        "use_dora": True,
        "use_rslora": True,
        "target_modules": PROJECTIONS,
    },
    "DoRA, some layers": {
        "r": 8,
        "lora_alpha": 8,
        "use_dora": True,
        "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj"],
    },
    "DoRA, patterns": {
        "r": 4,
        "lora_alpha": 8,
        "use_dora": True,
        "target_modules": PROJECTIONS,
        "rank_pattern": {"k_proj": 9},
        "alpha_pattern": {"down_proj": 3},
    },
    "LoRA": {"r": 8, "lora_alpha": 16, "target_modules": PROJECTIONS},
}


def check(folder: Path, layout: dict[str, Any]) -> Iterator[Row]:
    """Yields the row of an engine, then that of the same engine after it has slept."""
    model, adapters = _write(folder)
    yield from served(model, adapters, layout)


def served(
    model: Path, adapters: dict[str, Path], layout: dict[str, Any], oracle: Path | None = None
) -> Iterator[Row]:
    """Yields the rows of an engine. ``oracle`` is the model that PEFT gets, if not the same."""
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    memory: dict[str, Any] = {}
    if torch.cuda.is_available():  # Other engines may start on the same device.
        memory = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2**30}
        memory["enable_sleep_mode"] = True
    engine = LLM(
        model=str(model),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_batched_tokens=1024,
        max_num_seqs=32,
        enable_lora=True,
        max_loras=len(adapters) + 1,
        max_lora_rank=16,
        enable_prefix_caching=False,
        disable_log_stats=True,
        **memory,
        **layout,
    )
    names = [None, *adapters]
    requests = [
        LoRARequest(name, 1 + i, str(path)) for i, (name, path) in enumerate(adapters.items())
    ]
    generator = torch.Generator().manual_seed(0)
    pairs, prompts = [], []
    for name, request in zip(names, [None, *requests], strict=True):
        for length in LENGTHS:
            pairs.append((name, request))
            prompts.append(torch.randint(0, 512, (length,), generator=generator).tolist())
    sampling = SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=1
    )

    given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    lora = [request for _, request in pairs]

    def generate() -> list[Any]:
        return engine.generate(given, sampling, lora_request=lora, use_tqdm=False)

    mixed = generate()
    alone = [
        engine.generate([one], sampling, lora_request=[request], use_tqdm=False)[0]
        for one, request in zip(given, lora, strict=True)
    ]
    oracle, worst, wrong, without = oracle or model, 0.0, 0, []
    for (name, _), prompt, answer, single in zip(pairs, prompts, mixed, alone, strict=True):
        for one in (answer, single):
            error, missed = _judge(oracle, adapters.get(name or ""), prompt, one.outputs[0])
            worst, wrong = max(worst, error), wrong + missed
        if name and name.startswith("DoRA"):
            without.append(_judge(oracle, None, prompt, answer.outputs[0])[0])
    passed = worst <= BOUND and wrong == 0 and min(without) > 2 * BOUND
    yield {
        "requests": len(prompts),
        "same_alone": _same(mixed, alone),
        "error": worst,
        "wrong": wrong,
        "error_without_adapter": min(without),
        "check": {"passed": passed, "bound": BOUND},
        "tokens": _tokens(mixed),
    }
    if not memory:
        return
    sys.stdin.readline()  # vLLM's sleep fails while other engines take memory.
    levels = (1, 2) if layout.get("tensor_parallel_size", 1) == 1 else (1,)
    for level in levels:
        weights = []
        if level == 2:  # It forgets the weights, which then are written in place.
            core: Any = engine.llm_engine.engine_core
            runner = core.engine_core.model_executor.driver_worker.worker.model_runner
            named = runner.get_model().named_parameters()
            weights = [(name, one.detach().cpu().clone()) for name, one in named]
        engine.sleep(level)
        engine.wake_up()
        if level == 2:
            how = {"weights_iterator": weights, "is_checkpoint_format": False}
            with torch.no_grad():  # vLLM copies into parameters.
                engine.collective_rpc("reload_weights", kwargs=how)
        same = _same(mixed, generate())
        passed = same == len(prompts)
        yield {"after_sleep": level, "same": same, "check": {"passed": passed, "bound": 0}}


def _tokens(answers: list[Any]) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in answers]


def _same(answers: list[Any], others: list[Any]) -> int:
    return sum(a == b for a, b in zip(_tokens(answers), _tokens(others), strict=True))


def _judge(model: Path, adapter: Path | None, prompt: list[int], answer: Any) -> tuple[float, int]:
    """Returns the largest difference of a token's log-probability, and how many tokens PEFT would
    not have chosen, by more than the bound."""
    oracle = _oracle(model, adapter)
    tokens = list(answer.token_ids)
    with torch.no_grad():
        logits = oracle(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    expected = logits.float().log_softmax(-1)
    chosen = expected[torch.arange(len(tokens)), torch.tensor(tokens)]
    found = torch.tensor(
        [given[token].logprob for given, token in zip(answer.logprobs, tokens, strict=True)]
    )
    missed = int((expected.max(-1).values - chosen > BOUND).sum())
    return float((found - chosen).abs().max()), missed


_ORACLES: dict[tuple[Path, Path | None], Any] = {}


def _oracle(model: Path, adapter: Path | None) -> Any:
    if (model, adapter) not in _ORACLES:
        base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        found = peft.PeftModel.from_pretrained(base, str(adapter)) if adapter else base
        _ORACLES[model, adapter] = found.eval()
    return _ORACLES[model, adapter]


def _write(folder: Path) -> tuple[Path, dict[str, Path]]:
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(config).bfloat16()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in base.parameters():
            width = parameter.shape[-1] ** 0.5 if parameter.ndim == 2 else 4.0
            parameter.add_(torch.randn(parameter.shape, generator=generator) / width)
    base.save_pretrained(folder / "model")
    paths = {}
    for number, (name, options) in enumerate(ADAPTERS.items()):
        base = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype="float32")
        adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **options))
        with torch.no_grad():
            for key, parameter in adapted.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if "magnitude" in key:
                    parameter.mul_(1 + 0.3 * noise)
                elif "lora_" in key:
                    parameter.copy_((parameter + 0.02 * noise).bfloat16())
        paths[name] = folder / f"adapter-{number}"
        adapted.save_pretrained(paths[name])
    return folder / "model", paths
