"""One engine of vLLM for level `serve --vllm`, in a process of its own. Prints a line "ROW {json}"
for each row; an engine that is measured first prints "READY", and then a row for each line that it
reads, which is the JSON of a `serve_vllm.Work`. This package's own server has its rows at once.

    python -m benchmarks.vllm_engine KIND FOLDER SETTINGS
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.results import Row
from benchmarks.serve_vllm import OWN, PUNICA, QUANTISED, WITHOUT, Settings, Work, checks_of

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FILES = 8  # different files of tensors; further adapters are links to them


def main(kind: str, folder: Path, settings: Settings) -> None:
    if kind != OWN:
        register_model()
    if kind in (checks := checks_of(settings)):
        from benchmarks import vllm_check

        lora_only, sleeps = kind == WITHOUT, kind not in (WITHOUT, PUNICA, QUANTISED)
        for row in vllm_check.check(folder, checks[kind], lora_only=lora_only, sleeps=sleeps):
            report({"kind": kind} | row)
        print("READY", flush=True)
        return
    if kind == OWN:
        for row in own(settings):
            report({"kind": kind} | row)
        print("READY", flush=True)
        return
    model = write_model(folder / "model", settings)
    measure(kind, model, folder, settings)


def register_model() -> None:
    """Gives vLLM the model's class, to inspect which it would import everything once more, in
    another process."""
    from vllm import ModelRegistry  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.models import llama  # pyright: ignore[reportMissingImports]

    ModelRegistry.register_model("LlamaForCausalLM", llama.LlamaForCausalLM)


def report(row: Row) -> None:
    print("ROW " + json.dumps(row), flush=True)


def own(settings: Settings) -> Iterator[Row]:
    """Yields the rows of `jax-dora serve`: of the base, and of each number of adapters."""
    from benchmarks import serve
    from jax_dora.lm.models import DecoderConfig

    given = serve.Settings(
        DecoderConfig.from_hf(model_fields(settings)),
        *(settings.rows, settings.prompt, settings.answer),
        slots=settings.slots,
        ranks=(settings.rank,),
        qtypes=("bf16",),
        adapters=settings.adapters,
        only=("base", "DoRA"),
        rounds=settings.rounds,
    )
    for row in serve.measure(given, settings.device):
        found = {name: row[name] for name in ("adapters", "rows", "layers", "tokens_per_s")}
        yield found | {"prompt": settings.prompt, "slots": settings.slots, "gpus": 1}


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
    rows = max(settings.rows, settings.wide)
    longest = max(settings.prompt, settings.long) + settings.answer
    if settings.device == "cuda":
        # Its own memory for keys and values, since vLLM would measure that of other engines too.
        sizes = (rows, settings.prompt), (settings.rows, settings.long)
        tokens = max(many * (length + settings.answer + 16) for many, length in sizes)
        features = settings.key_heads * settings.width // settings.heads // settings.gpus
        options["kv_cache_memory_bytes"] = 4 * settings.layers * features * tokens
        options["gpu_memory_utilization"] = 0.2
        options["tensor_parallel_size"] = settings.gpus
        captured = sorted({1, settings.rows, rows})  # the sizes of all batches without prompts
        graphs = {"compilation_config": {"cudagraph_capture_sizes": captured}}
        options |= {"enforce_eager": True} if settings.eager else graphs
    begin = time.monotonic()
    engine = LLM(
        model=str(model),
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=longest,
        max_num_seqs=rows,
        max_num_batched_tokens=max(2048, settings.rows * settings.prompt),
        enable_prefix_caching=False,
        disable_log_stats=True,
        seed=0,
        **options,
    )
    started = time.monotonic() - begin
    most = max(settings.adapters) if count else 0
    folders = write_adapters(folder, settings, most, dora=kind == "DoRA")
    adapters = [_request(kind, i, one) for i, one in enumerate(folders)]
    other = None
    if kind == "DoRA":
        [lora] = write_adapters(folder, settings, 1, dora=False)
        other = _request("LoRA", most, lora)
    sampling = SamplingParams(
        temperature=0, max_tokens=settings.answer, ignore_eos=True, detokenize=False
    )

    def served(work: Work) -> Row:
        number, rng = work.rows, random.Random(0)
        prompts: list[Any] = [
            {"prompt_token_ids": [rng.randrange(settings.vocabulary) for _ in range(work.prompt)]}
            for _ in range(number)
        ]
        requests: list[Any] = [None] * number
        if work.is_mixed:
            requests = [(None, other, adapters[0], adapters[-1])[i % 4] for i in range(number)]
        elif work.adapters:
            shares = np.arange(1, work.adapters + 1) ** -1.5
            drawn = np.random.default_rng(0).choice(work.adapters, number, p=shares / shares.sum())
            requests = [adapters[i] for i in drawn]

        def answer() -> int:
            answers = engine.generate(prompts, sampling, lora_request=requests, use_tqdm=False)
            return sum(len(one.outputs[0].token_ids) for one in answers)

        if work.is_first:
            for one in {one.lora_int_id: one for one in requests if one}.values():
                engine.llm_engine.add_lora(one)
            answer()
        begin = time.monotonic()
        return {"tokens_per_s": answer() / (time.monotonic() - begin)}

    def loaded(work: Work) -> Row:
        times = []
        for one in adapters[:FILES]:
            begin = time.monotonic()
            engine.llm_engine.add_lora(one)
            times.append(1e3 * (time.monotonic() - begin))
        return {"first_load_ms": times[0], "load_ms": statistics.median(times[1:] or times)}

    print("READY", flush=True)
    for line in sys.stdin:
        work = Work(*json.loads(line))
        row = {"kind": "base, LoRA and DoRA" if work.is_mixed else kind}
        row |= {"adapters": work.adapters, "rows": work.rows, "prompt": work.prompt}
        row |= {"layers": settings.layers, "slots": count, "gpus": settings.gpus}
        row |= {"start_s": started}
        report(row | (loaded(work) if work.adapters is None else served(work)))


def _request(kind: str, number: int, folder: Path) -> Any:
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    return LoRARequest(f"{kind} {number}", 1 + number, str(folder))


def write_model(folder: Path, settings: Settings) -> Path:
    """Writes the configuration of a Llama."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model_fields(settings)))
    return folder


def model_fields(settings: Settings) -> dict[str, Any]:
    return {
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
