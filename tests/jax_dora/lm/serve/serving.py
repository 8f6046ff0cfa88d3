"""A small model, folders of adapters on it, what each of them answers, and a server in a thread."""

import collections
import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import openai
from flax import nnx
from safetensors.numpy import load_file, save_file

from jax_dora.lm.finetune import tiny
from jax_dora.lm.models import generate, load_model
from jax_dora.lm.serve import Server, Settings
from parity import oracle

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Rank, alpha, rsLoRA, DoRA.
KINDS = ((3, 5.0, False, True), (8, 8.0, True, True), (4, 6.0, False, False), (1, 2.0, False, True))


def write_adapter(model: Path, folder: Path, seed: int, size: float = 0.15) -> None:
    """Writes a PEFT folder without our own writer: of one of the kinds, no magnitude of which is a
    norm, and no lora_b zero."""
    rank, alpha, use_rslora, is_dora = KINDS[seed % len(KINDS)]
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        path, _, leaf = name.rpartition(".")
        if leaf != "weight" or path.rpartition(".")[2] not in PROJECTIONS:
            continue
        out, n_in = weight.shape
        a, b = (rng.standard_normal(one, np.float32) for one in ((rank, n_in), (out, rank)))
        at = f"base_model.model.{path}"
        tensors[f"{at}.lora_A.weight"], tensors[f"{at}.lora_B.weight"] = size * a, size * b
        if is_dora:
            norm = np.linalg.norm(weight, axis=1)
            noise = 1 + 0.2 * rng.standard_normal(norm.shape, np.float32)
            tensors[f"{at}.lora_magnitude_vector"] = norm * noise
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": use_rslora,
        "use_dora": is_dora,
        "target_modules": list(PROJECTIONS),
        "lora_dropout": 0.0,
        "bias": "none",
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))


class Reference:
    """What the decoder's own `generate` answers with W + s·BA materialised in fp64, g on it."""

    def __init__(self, model: Path) -> None:
        self._model = load_model(model)
        self._weights = load_file(model / "model.safetensors")

    def tokens(
        self, adapter: Path | None, prompts: Sequence[Sequence[int]], count: int
    ) -> list[list[int]]:
        return generate(self.model(adapter), [list(one) for one in prompts], count, ends=[256])

    def model(self, adapter: Path | None) -> Any:
        graphdef, state = nnx.split(self._model)
        if adapter is None:
            return self._model
        config = json.loads((adapter / "adapter_config.json").read_text())
        tensors = load_file(adapter / "adapter_model.safetensors")
        root = np.sqrt(config["r"]) if config["use_rslora"] else config["r"]
        flat = dict(nnx.to_flat_state(state))
        for path, variable in flat.items():
            if path[-2] not in PROJECTIONS:
                continue
            layers = []
            for number in range(variable.shape[0]):
                name = ".".join(("model.layers", str(number), *path[2:-1]))
                at = f"base_model.model.{name}"
                a, b = (tensors[f"{at}.lora_{one}.weight"] for one in "AB")
                given = self._weights[f"{name}.weight"], a, b
                scale = config["lora_alpha"] / root
                merged = oracle.direction(*given, scale)
                if config["use_dora"]:
                    m = tensors[f"{at}.lora_magnitude_vector"]
                    merged = oracle.merged_weight(*given, m, scale)
                layers.append(merged.T.astype(np.float32))
            flat[path] = variable.replace(jnp.asarray(np.stack(layers)))
        return nnx.merge(graphdef, nnx.from_flat_state(flat))


def make_model(folder: Path) -> None:
    """Makes the tiny model with weights of a size that gives it something to say."""
    tiny.make_tiny_model(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, value in tensors.items():
        if name.split(".")[-2] in PROJECTIONS:
            tensors[name] = 6 * value
    save_file(tensors, file, metadata={"format": "pt"})


@contextlib.contextmanager
def serving(settings: Settings) -> Iterator[tuple[Server, openai.OpenAI]]:
    """A server in a thread, and a client of it."""
    told: list[str] = []
    server = Server(settings, tell=told.append)
    host, port = server.bind()
    assert host == "127.0.0.1"  # nobody has said otherwise
    thread = threading.Thread(target=server.run)
    thread.start()
    key = settings.api_key or "none"
    url = f"http://127.0.0.1:{port}/v1"
    try:
        with openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60) as client:
            yield server, client
    finally:
        server.stop()
        thread.join(60)
    assert not thread.is_alive()
    assert not server.failed, told


@contextlib.contextmanager
def nothing_compiled() -> Iterator[None]:
    """Fails if JAX traces or compiles anything meanwhile."""
    counted = collections.Counter()

    def count(event: str, *_: Any, **__: Any) -> None:
        counted[event] += 1

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert counted == {}
