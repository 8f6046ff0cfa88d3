"""The level `vllm`: PEFT folders in an engine of vLLM, and in everything else that reads them.

A small Llama and adapters that PEFT writes: DoRA, rsLoRA with DoRA, with patterns, LoRA; and the
base alone. transformers with PEFT in fp64 chooses tokens greedily. Each side has to give these
tokens the same log-probabilities in fp32: at most twice as far from fp64 as PEFT in fp32 is. vLLM,
with torch_dora's plugin, answers all requests in one mixed batch, and has to choose the tokens
itself; torch_dora's bank and jax_dora's compute the rows of a mixed batch; PEFT has one model for
each adapter.

Needs vLLM, which the plugin finds through its entry point (`make setup-vllm`).
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import peft
import torch
import transformers

import torch_dora
from parity import tolerances
from parity.report import Report

CASE = "a mixed batch"
TOKENS = 10
PROMPTS = ([5, 6, 7, 8, 9], [100, 3, 3, 17])
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}
ADAPTERS: Mapping[str, dict[str, Any]] = {
    "DoRA": {"r": 16, "lora_alpha": 24, "use_dora": True},
    "DoRA, rsLoRA": {"r": 3, "lora_alpha": 7, "use_dora": True, "use_rslora": True},
    "DoRA, patterns": {
        "r": 4,
        "lora_alpha": 8,
        "use_dora": True,
        "rank_pattern": {"q_proj": 8},
        "alpha_pattern": {"v_proj": 3},
    },
    "LoRA": {"r": 8, "lora_alpha": 16},
}


class Problem(NamedTuple):
    """The rows of a mixed batch: the adapter of each, None for the base, and its prompt."""

    model: Path
    adapters: Mapping[str, Path]
    rows: Sequence[str | None]
    prompts: Sequence[list[int]]


class Answers(NamedTuple):
    """The answers of all rows.

    Attributes:
      logprobs: f64[rows, TOKENS], of the tokens that fp64 chooses.
      tokens: i64[rows, TOKENS], of a side that chooses itself.
    """

    logprobs: np.ndarray
    tokens: np.ndarray | None = None


def run(report: Report, device: str) -> None:
    """Adds a line for every side and kind of adapter."""
    with tempfile.TemporaryDirectory() as root:
        problem = write(Path(root))
        exact = peft_answers(problem, torch.float64)
        assert exact.tokens is not None
        chosen = exact.tokens
        found: dict[str, Answers] = {"peft": peft_answers(problem, torch.float32, chosen)}
        for side, answer in (
            ("torch", torch_answers),
            ("jax", jax_answers),
            ("vllm", vllm_answers),
        ):
            try:
                found[side] = answer(problem, chosen, device)
            except Exception as error:
                note = f"{type(error).__name__}: {error}"
                report.add(CASE, "log-probability", side=side, ok=False, note=note)
    plain = np.abs(found["peft"].logprobs - exact.logprobs)
    peak = float(np.abs(exact.logprobs).max())
    bound = tolerances.flash_rule(float(plain.max()), peak, "float32")
    for side, answers in found.items():
        for kind in dict.fromkeys(problem.rows):
            is_kind = np.array([name == kind for name in problem.rows])
            error = float(np.abs(answers.logprobs - exact.logprobs)[is_kind].max())
            quantity = f"log-probability, {kind or 'the base'}"
            values = {"error": error, "bound": bound, "ok": error <= bound}
            report.add(
                CASE, quantity, side=side, **({"error": error} if side == "peft" else values)
            )
        if answers.tokens is not None:
            differ = int((answers.tokens != chosen).sum())
            report.add(CASE, "tokens that differ", side=side, error=differ, bound=0, ok=not differ)


def write(root: Path) -> Problem:
    """Writes the model and its adapters, with random values that make them answer differently."""
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    randomize(base, 1)
    base.save_pretrained(root / "model")
    folders = {}
    for number, (name, options) in enumerate(ADAPTERS.items()):
        config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=PROJECTIONS, **options)
        adapted = peft.get_peft_model(copy.deepcopy(base), config)
        randomize(adapted, 10 + number)
        folders[name] = root / str(number)
        adapted.save_pretrained(folders[name])
    names = [None, *ADAPTERS]
    rows = [name for _ in PROMPTS for name in names]
    return Problem(root / "model", folders, rows, [one for one in PROMPTS for _ in names])


def peft_answers(problem: Problem, dtype: torch.dtype, chosen: np.ndarray | None = None) -> Answers:
    """Returns what transformers with PEFT answers, greedily or with the chosen tokens."""
    logprobs, tokens = [], []
    for number, (name, prompt) in enumerate(zip(problem.rows, problem.prompts, strict=True)):
        model: Any = _base(problem)
        if name is not None:
            model = peft.PeftModel.from_pretrained(model, str(problem.adapters[name]))
        model.to(dtype).eval()
        answer: list[int] = []
        for step in range(TOKENS):
            if chosen is not None:
                answer.append(int(chosen[number, step]))
                continue
            with torch.no_grad():
                answer.append(int(model(torch.tensor([prompt + answer])).logits[0, -1].argmax()))
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits
        tokens.append(answer)
        logprobs.append(_chosen(logits.double().numpy()[0], len(prompt), answer))
    return Answers(np.array(logprobs), np.array(tokens) if chosen is None else None)


def torch_answers(problem: Problem, chosen: np.ndarray, device: str) -> Answers:
    """Returns what torch_dora's bank computes."""
    model = _base(problem).to(device).eval()
    bank = torch_dora.AdapterBank(model, slots=len(ADAPTERS), max_rank=16)
    for slot, folder in enumerate(problem.adapters.values()):
        bank.load(slot, folder)
    tokens, slots = _batch(problem, chosen)
    with torch.no_grad():
        served = torch_dora.with_bank(model, bank, slots)
        logits = served(torch.tensor(tokens, device=device)).logits
    return _answers(problem, chosen, logits.double().cpu().numpy())


def jax_answers(problem: Problem, chosen: np.ndarray, device: str) -> Answers:
    """Returns what jax_dora's bank computes."""
    # Not at the top: the tests of vLLM use this module, and JAX must not be in processes that fork.
    import jax.numpy as jnp
    from flax import nnx

    import jax_dora
    from jax_dora.lm.models import load_model

    model = load_model(problem.model, dtype=jnp.float32)
    bank = jax_dora.AdapterBank(model, slots=len(ADAPTERS), max_rank=16)
    for slot, folder in enumerate(problem.adapters.values()):
        bank = bank.load(slot, folder)
    tokens, slots = _batch(problem, chosen)
    graphdef, state = nnx.split(model)
    served = jax_dora.with_bank(nnx.merge(graphdef, state), bank, jnp.array(slots))
    return _answers(problem, chosen, np.asarray(served(jnp.array(tokens)), np.float64))


def vllm_answers(problem: Problem, chosen: np.ndarray, device: str) -> Answers:
    """Returns what vLLM answers to all requests at once."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    if device == "cpu":
        os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.distributed import (  # pyright: ignore[reportMissingImports]
        cleanup_dist_env_and_memory,
    )
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    engine = LLM(
        model=str(problem.model),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=len(problem.rows),
        enable_lora=True,
        max_loras=len(ADAPTERS) + 1,
        max_lora_rank=16,
        disable_log_stats=True,
        **({"gpu_memory_utilization": 0.2} if device == "cuda" else {}),
    )
    loras = {None: None} | {
        name: LoRARequest(name, 1 + number, str(folder))
        for number, (name, folder) in enumerate(problem.adapters.items())
    }
    sampling = SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=1
    )
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in problem.prompts]
    requests = [loras[name] for name in problem.rows]
    try:
        outputs = engine.generate(prompts, sampling, lora_request=requests, use_tqdm=False)
    finally:  # Another engine may follow in this process.
        engine.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
    tokens, logprobs = [], []
    for row, output in enumerate(outputs):
        answer = output.outputs[0]
        tokens.append(list(answer.token_ids))
        steps = zip(answer.logprobs, chosen[row].tolist(), strict=True)
        # A token that it has not chosen has no log-probability here.
        logprobs.append([one[t].logprob if t in one else -np.inf for one, t in steps])
    return Answers(np.array(logprobs), np.array(tokens))


def _base(problem: Problem) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(problem.model, dtype=torch.float32)


def _batch(problem: Problem, chosen: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Returns the tokens of all rows, padded at the end, and their slots."""
    slots = [-1 if name is None else list(ADAPTERS).index(name) for name in problem.rows]
    texts = [[*prompt, *row] for prompt, row in zip(problem.prompts, chosen.tolist(), strict=True)]
    longest = max(map(len, texts))
    return np.array([text + [0] * (longest - len(text)) for text in texts]), slots


def _answers(problem: Problem, chosen: np.ndarray, logits: np.ndarray) -> Answers:
    rows = zip(logits, problem.prompts, chosen, strict=True)
    return Answers(np.array([_chosen(one, len(prompt), row) for one, prompt, row in rows]))


def _chosen(logits: np.ndarray, begin: int, answer: Sequence[int]) -> np.ndarray:
    """Returns the log-probabilities of an answer that begins after `begin` tokens."""
    steps = logits[begin - 1 :][: len(answer)]
    shifted = steps - steps.max(-1, keepdims=True)
    return (shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))[range(len(answer)), answer]


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Sets what requires a gradient so that answers differ, and magnitudes are no norms."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if "magnitude" in name:
                parameter.mul_(1 + 0.3 * noise)
            elif "lora_" in name:
                parameter.add_(0.1 * noise)
            else:
                width = parameter.shape[-1] ** 0.5 / 1.5 if parameter.ndim == 2 else 4.0
                parameter.add_(noise / width)
