"""Small models, their PEFT folders, what transformers with PEFT generates, and engines of vLLM.

vLLM is imported in functions only, so that tests without it can be collected everywhere.
"""

import contextlib
import copy
import functools
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import tokenizers
import torch
import transformers

from parity.serving import randomize

TOKENS = 12
VOCABULARY = 128
PROMPTS = ([5, 6, 7, 8, 9], [100, 3, 3, 17], [*range(1, 20)], [77, 78])
LAYERS = 2
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
# Qwen2's heads have hidden_size / num_attention_heads features, and vLLM's CPU build needs 32.
_WIDE = _SIZES | {"hidden_size": 128}
# vLLM's CPU build has no soft caps in attention.
_GEMMA = _SIZES | {
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 32,
    "sliding_window": 64,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}
MODELS = {
    "Llama": ("LlamaConfig", _SIZES),
    "Qwen2": ("Qwen2Config", _WIDE),
    "Qwen3": ("Qwen3Config", _SIZES),
    "Mistral": ("MistralConfig", _SIZES | {"sliding_window": None}),
    "Gemma2": (
        "Gemma2Config",
        _GEMMA | {"final_logit_softcapping": None, "attn_logit_softcapping": None},
    ),
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "dora": {"r": 16, "lora_alpha": 24, "use_dora": True, "target_modules": ALL},
    "rslora": {
        "r": 3,
        "lora_alpha": 7,
        "use_dora": True,
        "use_rslora": True,
        "target_modules": ALL,
    },
    "some": {
        "r": 2,
        "lora_alpha": 2,
        "use_dora": True,
        "target_modules": ["q_proj", "v_proj", "up_proj", "o_proj"],
    },
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "use_dora": True,
        "target_modules": ALL,
        "rank_pattern": {"q_proj": 8, "layers.1.mlp.down_proj": 2},
        "alpha_pattern": {"v_proj": 3, "k_proj": 5},
    },
    "lora": {"r": 8, "lora_alpha": 16, "target_modules": ALL},
    "lora, some": {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]},
}
DORA = tuple(name for name, options in ADAPTERS.items() if options.get("use_dora"))

Answer = tuple[list[int], list[float]]  # tokens and their log-probabilities


class Zoo:
    """A model and its adapters, in a folder and in PEFT."""

    def __init__(self, kind: str, root: Path, seed: int = 1, base: Any = None) -> None:
        self.root = root
        self.folder = root / "model"
        config, sizes = MODELS[kind]
        torch.manual_seed(0)
        self.base = base or transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, config)(**sizes), dtype=torch.float32
        )
        self.base.eval()
        randomize(self.base, seed)
        if self.base.config.tie_word_embeddings:  # Otherwise every token answers itself.
            self.base.get_input_embeddings().weight.data.mul_(0.2)
        self.base.save_pretrained(self.folder)
        tokenizer().save_pretrained(self.folder)
        self.models: dict[str | None, Any] = {None: self.base}

    def path(self, name: str) -> Path:
        """Returns the folder of an adapter, which is written the first time."""
        self.model(name)
        return self.root / name

    def model(self, name: str | None) -> Any:
        if name not in self.models:
            assert name is not None
            self.models[name] = self.add(name, ADAPTERS[name], 10 + list(ADAPTERS).index(name))
        return self.models[name]

    def add(self, name: str, options: dict[str, Any], seed: int) -> Any:
        """Writes an adapter and returns its model."""
        config = peft.LoraConfig(task_type="CAUSAL_LM", **options)
        adapted = peft.get_peft_model(copy.deepcopy(self.base), config)
        randomize(adapted, seed)
        adapted.eval().save_pretrained(self.root / name)
        self.models[name] = adapted
        return adapted

    @functools.cache  # noqa: B019
    def expected(self, name: str | None, prompt: tuple[int, ...]) -> Answer:
        """Returns the greedy answer of transformers with PEFT."""
        return greedy(self.model(name), prompt)


def greedy(model: Any, prompt: tuple[int, ...]) -> Answer:
    tokens, chosen = [], []
    for _ in range(TOKENS):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
        tokens.append(int(logits.argmax()))
        chosen.append(float(logits.log_softmax(-1)[tokens[-1]]))
    return tokens, chosen


def tokenizer() -> Any:
    """One word for each token."""
    words = {f"t{i}": i for i in range(VOCABULARY)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, unk_token="t0")


@contextlib.contextmanager
def engine(model: Path, **options: Any) -> Iterator[Any]:
    """Runs an engine in fp32 without compiling; adapters up to rank 16."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM  # pyright: ignore[reportMissingImports]
    from vllm.distributed import (  # pyright: ignore[reportMissingImports]
        cleanup_dist_env_and_memory,
    )

    given = {"max_loras": len(ADAPTERS) + 1, "max_lora_rank": 16} | options
    made = LLM(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=32,
        enable_lora=True,
        disable_log_stats=True,
        **given,
    )
    try:
        yield made
    finally:
        made.llm_engine.engine_core.shutdown()
        del made
        gc.collect()
        cleanup_dist_env_and_memory()


def worker_of(made: Any) -> Any:
    return made.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def manager_of(made: Any) -> Any:
    return worker_of(made).model_runner.lora_manager._adapter_manager


def request(name: str | None, folder: Path | None, number: int, **options: Any) -> Any:
    """Returns vLLM's description of an adapter, or None for the base."""
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    return None if name is None else LoRARequest(name, number, str(folder), **options)


def generate(made: Any, prompts: list[list[int]], requests: list[Any]) -> list[Answer]:
    """Returns the greedy answers of one batch."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    sampling = SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=1, detokenize=False
    )
    given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = made.generate(given, sampling, lora_request=requests, use_tqdm=False)
    answers = []
    for one in outputs:
        tokens = list(one.outputs[0].token_ids)
        found = one.outputs[0].logprobs
        answers.append(
            (tokens, [given[token].logprob for given, token in zip(found, tokens, strict=True)])
        )
    return answers


def check(found: list[Answer], expected: list[Answer], bound: float = 1e-4) -> None:
    """Raises AssertionError unless the tokens are the same, and the log-probabilities close."""
    for (tokens, chosen), (right, near) in zip(found, expected, strict=True):
        assert tokens == right
        torch.testing.assert_close(torch.tensor(chosen), torch.tensor(near), rtol=0, atol=bound)
