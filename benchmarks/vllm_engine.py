"""One engine of vLLM for level `serve --vllm`, in a process of its own. Prints a line "ROW {json}"
for each row; an engine that is measured first prints "READY" and waits for a line.

    python -m benchmarks.vllm_engine KIND FOLDER SETTINGS
"""

import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.results import Row
from benchmarks.serve_vllm import Settings

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FILES = 8  # different files of tensors; further adapters are links to them


def main(kind: str, folder: Path, settings: Settings) -> None:
    if kind == "check":
        from benchmarks import vllm_check

        for row in vllm_check.check(folder / "check", settings.device):
            report(row)
        return
    model = write_model(folder / "model", settings)
    measure(kind, model, folder, settings)


def report(row: Row) -> None:
    print("ROW " + json.dumps(row), flush=True)


def measure(kind: str, model: Path, folder: Path, settings: Settings) -> None:
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    count = 0 if kind == "base" else settings.slots
    options: dict[str, Any] = {}
    if count:
        options = {
            "enable_lora": True,
            "max_loras": count,
            "max_cpu_loras": 2 * count,
            "max_lora_rank": settings.rank,
            "lora_target_modules": list(PROJECTIONS),
        }
    if settings.device == "cuda":
        # Its own memory for keys and values, since vLLM would measure that of other engines too.
        tokens = 2 * settings.rows * (settings.prompt + settings.answer)
        features = settings.key_heads * settings.width // settings.heads
        options["kv_cache_memory_bytes"] = 4 * settings.layers * features * tokens
        options["gpu_memory_utilization"] = 0.2
    begin = time.monotonic()
    engine = LLM(
        model=str(model),
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=2 * (settings.prompt + settings.answer),
        max_num_seqs=settings.rows,
        max_num_batched_tokens=max(2048, settings.rows * settings.prompt),
        enable_prefix_caching=False,
        disable_log_stats=True,
        seed=0,
        **options,
    )
    started = time.monotonic() - begin
    row = {"rows": settings.rows, "layers": settings.layers, "slots": count, "start_s": started}
    rng, number = random.Random(0), 4 * settings.rows
    prompts: Any = [
        {"prompt_token_ids": [rng.randrange(settings.vocabulary) for _ in range(settings.prompt)]}
        for _ in range(number)
    ]
    sampling = SamplingParams(
        temperature=0, max_tokens=settings.answer, ignore_eos=True, detokenize=False
    )

    def served(requests: list[Any] | None) -> Row:
        first = requests and requests[: settings.rows]
        engine.generate(prompts[: settings.rows], sampling, lora_request=first, use_tqdm=False)
        rates = []
        for _ in range(settings.rounds):
            begin = time.monotonic()
            answers = engine.generate(prompts, sampling, lora_request=requests, use_tqdm=False)
            tokens = sum(len(one.outputs[0].token_ids) for one in answers)
            rates.append(tokens / (time.monotonic() - begin))
        return {"tokens_per_s": max(rates), "rates": rates}

    most = max(settings.adapters) if count else 0
    adapters = write_adapters(folder, settings, most, dora=kind == "DoRA")
    lora = write_adapters(folder, settings, 1, dora=False) if kind == "DoRA" else []
    print("READY", flush=True)
    sys.stdin.readline()
    report({"kind": kind, "adapters": 0} | row | served(None))
    if not count:
        return
    requests = [_request(kind, i, adapter) for i, adapter in enumerate(adapters)]
    times = []
    for one in requests[:FILES]:
        begin = time.monotonic()
        engine.llm_engine.add_lora(one)
        times.append(1e3 * (time.monotonic() - begin))
    loading = {"first_load_ms": times[0], "load_ms": statistics.median(times[1:] or times)}
    report({"kind": kind} | row | loading)
    for adapters_used in settings.adapters:
        shares = np.arange(1, adapters_used + 1) ** -1.5
        drawn = np.random.default_rng(0).choice(adapters_used, number, p=shares / shares.sum())
        measured = served([requests[i] for i in drawn])
        report({"kind": kind, "adapters": adapters_used} | row | measured)
    if kind == "DoRA":
        other = _request("LoRA", most, lora[0])
        mixed = [(None, other, requests[0], requests[-1])[i % 4] for i in range(number)]
        report({"kind": "base, LoRA and DoRA", "adapters": 3} | row | served(mixed))


def _request(kind: str, number: int, folder: Path) -> Any:
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    return LoRARequest(f"{kind} {number}", 1 + number, str(folder))


def write_model(folder: Path, settings: Settings) -> Path:
    """Writes the configuration of a Llama."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": settings.width,
        "intermediate_size": settings.inner,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.key_heads,
        "head_dim": settings.width // settings.heads,
        "vocab_size": settings.vocabulary,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def write_adapters(folder: Path, settings: Settings, count: int, *, dora: bool) -> list[Path]:
    """Writes PEFT folders for the model with dummy weights."""
    keys = settings.width // settings.heads * settings.key_heads
    sizes = dict.fromkeys(PROJECTIONS, (settings.width, settings.width))
    sizes |= dict.fromkeys(("k_proj", "v_proj"), (settings.width, keys))
    sizes |= dict.fromkeys(("gate_proj", "up_proj"), (settings.width, settings.inner))
    sizes["down_proj"] = (settings.inner, settings.width)
    device = "cuda" if settings.device == "cuda" else "cpu"
    found = []
    for number in range(count):
        path = folder / f"{'dora' if dora else 'lora'}-{number}"
        found.append(path)
        path.mkdir(exist_ok=True)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": settings.rank,
            "lora_alpha": 2 * settings.rank,
            "use_dora": dora,
            "target_modules": list(PROJECTIONS),
        }
        (path / "adapter_config.json").write_text(json.dumps(config))
        file = path / "adapter_model.safetensors"
        if number >= FILES:
            file.symlink_to(found[number % FILES] / file.name)
            continue
        torch.manual_seed(number)
        tensors = {}
        for layer in range(settings.layers):
            for name, (inputs, outputs) in sizes.items():
                module = "self_attn" if name[0] in "qkvo" else "mlp"
                key = f"base_model.model.model.layers.{layer}.{module}.{name}"
                a = torch.randn(settings.rank, inputs, device=device) / inputs**0.5
                b = torch.randn(outputs, settings.rank, device=device) * 1e-4
                tensors[f"{key}.lora_A.weight"] = a.bfloat16().cpu()
                tensors[f"{key}.lora_B.weight"] = b.bfloat16().cpu()
                if dora:  # dummy weights are uniform in ±1e-3
                    norm = 1e-3 * (inputs / 3) ** 0.5
                    m = norm * (1 + 0.1 * torch.randn(outputs))
                    tensors[f"{key}.lora_magnitude_vector"] = m
        save_file(tensors, file)
    return found


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Settings(**json.loads(sys.argv[3])))
