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

# Differences of log-probabilities between bf16 in the engine and fp32 in PEFT; without the
# adapter they are larger than 1.
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


def check(folder: Path, layout: dict[str, Any], *, lora_only: bool, sleeps: bool) -> Iterator[Row]:
    """Yields the row of an engine, then, if it ``sleeps``, that of the same engine after it has
    slept. Without the plugin it gets LoRA only."""
    model, adapters = _write(folder)
    if lora_only:
        adapters = {name: path for name, path in adapters.items() if not _is_dora(name)}
    oracle = _rounded(model, folder) if "quantization" in layout else None
    yield from served(model, adapters, layout, oracle, sleeps=sleeps)


def served(
    model: Path,
    adapters: dict[str, Path],
    layout: dict[str, Any],
    oracle: Path | None = None,
    *,
    sleeps: bool = False,
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
        max_loras=len(ADAPTERS) + 1,
        max_lora_rank=16,
        enable_prefix_caching=False,
        disable_log_stats=True,
        **memory,
        **layout,
    )
    names = [None, *ADAPTERS]
    requests = {
        name: LoRARequest(name, 1 + i, str(adapters[name])) for i, name in enumerate(adapters)
    }
    generator = torch.Generator().manual_seed(0)
    pairs = [
        (name, torch.randint(0, 512, (length,), generator=generator).tolist())
        for name in names
        for length in LENGTHS
    ]
    pairs = [(name, prompt) for name, prompt in pairs if name is None or name in adapters]
    sampling = SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=1
    )

    def generate(some: list[tuple[str | None, list[int]]]) -> list[Any]:
        given: Any = [{"prompt_token_ids": prompt} for _, prompt in some]
        lora: Any = [name and requests[name] for name, _ in some]
        return engine.generate(given, sampling, lora_request=lora, use_tqdm=False)

    mixed = generate(pairs)
    alone = [generate([pair])[0] for pair in pairs]
    judge = oracle or model

    def judged(some: list[tuple[str | None, list[int]]], answers: list[Any]) -> tuple[float, int]:
        found = [
            _judge(judge, adapters.get(name or ""), prompt, answer.outputs[0])
            for (name, prompt), answer in zip(some, answers, strict=True)
        ]
        return max(error for error, _ in found), sum(missed for _, missed in found)

    # Where all tokens have adapters, prompts are multiplied by another kernel.
    adapted = [pair for pair in pairs if pair[0] is not None]
    found = judged(pairs, mixed), judged(pairs, alone), judged(adapted, generate(adapted))
    worst, wrong = max(error for error, _ in found), sum(missed for _, missed in found)
    without = [
        _judge(judge, None, prompt, answer.outputs[0])[0]
        for (name, prompt), answer in zip(pairs, mixed, strict=True)
        if _is_dora(name)
    ]
    passed = worst <= BOUND and wrong == 0 and all(one > 2 * BOUND for one in without)
    row = {"requests": len(pairs), "same_alone": _same(mixed, alone), "error": worst}
    repeated = _same(mixed, generate(pairs))
    row |= {"same_again": repeated}
    row |= {"wrong": wrong, "check": {"passed": passed, "bound": BOUND}}
    row |= {"error_without_adapter": min(without)} if without else {}
    plain = [(name, prompt) for name, prompt in pairs if not _is_dora(name)]
    answers: dict[str, list[Any]] = {"all": _tokens(mixed)}
    again: dict[str, int] = {}
    for (name, _), *pair in zip(plain, generate(plain), generate(plain), strict=True):
        bits, others = ([*_tokens([one]), _numbers(one.outputs[0])] for one in pair)
        answers.setdefault(name or "base", []).append(bits)
        again[name or "base"] = again.get(name or "base", 0) + (bits == others)
    yield row | {"bits_again": again, "answers": answers}
    if not sleeps or not memory:
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
        later = generate(pairs)
        worst, wrong = judged(pairs, later)
        same = _same(mixed, later)
        # An engine whose answers repeat keeps every token.
        passed = worst <= BOUND and wrong == 0 and same >= repeated
        row = {"after_sleep": level, "same": same, "error": worst, "wrong": wrong}
        yield row | {"check": {"passed": passed, "bound": BOUND}}


def _is_dora(name: str | None) -> bool:
    return name is not None and name.startswith("DoRA")


def _numbers(completion: Any) -> list[float]:
    """Returns the log-probability of each token."""
    pairs = zip(completion.logprobs, completion.token_ids, strict=True)
    return [given[token].logprob for given, token in pairs]


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
    found = torch.tensor(_numbers(answer))
    missed = int((expected.max(-1).values - chosen > BOUND).sum())
    return float((found - chosen).abs().max()), missed


_ORACLES: dict[tuple[Path, Path | None], Any] = {}


def _oracle(model: Path, adapter: Path | None) -> Any:
    if (model, adapter) not in _ORACLES:
        base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        found = peft.PeftModel.from_pretrained(base, str(adapter)) if adapter else base
        _ORACLES[model, adapter] = found.eval()
    return _ORACLES[model, adapter]


def _rounded(model: Path, folder: Path) -> Path:
    """Writes the model with its projections' weights as vLLM has bitsandbytes round them."""
    from bitsandbytes import functional

    found = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    for name, parameter in found.named_parameters():
        if name.split(".")[-2] in PROJECTIONS:
            options: Any = {"compress_statistics": True, "quant_type": "nf4"}
            codes, state = functional.quantize_4bit(parameter.detach().cuda(), **options)
            parameter.data = functional.dequantize_4bit(codes, state).to(parameter)
    found.save_pretrained(folder / "rounded")
    return folder / "rounded"


def _write(folder: Path) -> tuple[Path, dict[str, Path]]:
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
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
