"""Level `method_comparison`: the time and memory columns of PEFT's own benchmark of that name.

PEFT's LoRA, its DoRA, its DoRA accelerated by `torch_dora.peft.accelerate`, and LoRA once more,
whose ratios say how much of a ratio is the host's, in the two configurations of PEFT's repository,
with random weights, and tokens of the same lengths:

    MetaMathQA   transformers' Llama with the dimensions of Llama-3.2-3B, rank 32 on q_proj and
                 v_proj, 4 × 212 tokens, also with dropout 0.05; and generation for 50 prompts of
                 128 tokens, for DoRA also within PEFT's DoraCaching, which keeps norms
    image        the blocks of FLUX.2-klein-base-4B, rank 64 on 11 projections, checkpointed, 2 ×
                 (1024 latents and 512 tokens of text)

The base is bf16, adapters are fp32, and there is no autocast, as there. A step is the gradient, its
norm clipped to 1, and AdamW. The variants take turns, round by round. One line is one variant of
one task: the median wall time of a call and of the host in it, in ms, the largest minus the
smallest, the fastest call, the peak of allocated memory without the other models and the time of a
step's kernels and copies (on a GPU), and times and peaks divided by those of PEFT's LoRA;
`of_first` is the median of the times divided by LoRA's in the same round. `forward_ms`,
`backward_ms` and `update_ms` are the host's, medians too, of the parts of a step.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from peft.helpers import DoraCaching
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torch_dora
from benchmarks.model.protocol import LLAMA3, QUICK, Protocol
from benchmarks.results import Row, with_ratio
from benchmarks.torch_decoder import free, random_llama
from benchmarks.turns import device_ms, in_turns

KINDS = "PEFT LoRA", "PEFT DoRA", "PEFT DoRA, accelerated", "PEFT LoRA, again"
CACHED = ", DoraCaching"
TARGETS = (
    *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    *("linear_in", "linear_out", "to_qkv_mlp_proj"),
)


class Settings(NamedTuple):
    """The settings of the level.

    Attributes:
      blocks: FLUX's double and single blocks.
      shape: batch and length of a training step of MetaMathQA.
      prompts: batch and length of the prompts, and the number of generated tokens.
      image: batch, latents and tokens of text.
      tasks: some of `TASKS`.
    """

    sizes: Protocol = dataclasses.replace(
        LLAMA3, hidden=3072, intermediate=8192, heads=24, layers=28
    )
    blocks: tuple[int, int] = (5, 20)
    shape: tuple[int, int] = (4, 212)
    prompts: tuple[int, int, int] = (50, 128, 32)
    image: tuple[int, int, int] = (2, 1024, 512)
    tasks: tuple[str, ...] = (
        *("MetaMathQA step", "MetaMathQA generation", "MetaMathQA step, dropout 0.05"),
        "image step",
    )
    rounds: int = 9


TINY = Settings(QUICK, (1, 1), (2, 9), (2, 5, 3), (2, 8, 4), rounds=1)


def refuses(settings: Settings) -> str | None:
    """Returns what is wrong with the settings, or None."""
    if unknown := [task for task in settings.tasks if task not in TASKS]:
        return f"--tasks is {unknown[0]!r}; expected some of {', '.join(map(repr, TASKS))}"
    return None


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row for each task and variant."""
    for task in settings.tasks:
        make, prepare, dropout = TASKS[task]
        models = {kind: _model(kind, make(settings, device), dropout) for kind in KINDS}
        calls = {(kind, False): prepare(model, settings, device) for kind, model in models.items()}
        if prepare is _generate:
            for kind in (kind for kind in KINDS if "DoRA" in kind):
                calls[kind + CACHED, False] = _caching(calls[kind, False])
        first: Row = {}
        for (kind, _), row in in_turns(calls, settings.rounds, device).items():
            weights = sum(p.nbytes for p in models[kind.removesuffix(CACHED)].parameters())
            row = {"task": task, "kind": kind, **row}
            row["peak_bytes"] = weights + row.pop("call_bytes")
            if isinstance(step := calls[kind, False], _Step):
                row |= step.parts()
            if device == "cuda" and prepare is not _generate:
                row["device_ms"] = device_ms(calls[kind, False], False)
            first = first or row
            row = with_ratio(row, first, "over_lora")
            yield with_ratio(row, first, "bytes_over_lora", "peak_bytes")
        del models, calls
        free()


def _model(kind: str, base: Any, dropout: float) -> Any:
    is_text = hasattr(base, "config")
    rank, targets = (32, ("q_proj", "v_proj")) if is_text else (64, TARGETS)
    config = LoraConfig(
        r=rank,
        lora_alpha=64,
        lora_dropout=dropout,
        target_modules=list(targets),
        use_dora="DoRA" in kind,
    )
    with warnings.catch_warnings():
        # PEFT uses a name that the newest transformers has deprecated.
        warnings.filterwarnings("ignore", category=FutureWarning)
        model = get_peft_model(base, config)
    if "accelerated" in kind and (left := torch_dora.peft.accelerate(model).left):
        raise RuntimeError(f"PEFT computes {left}")
    return model


class _Step:
    """Makes one optimizer step in each call, and notes how long the host takes for its parts."""

    def __init__(self, model: Any, loss: Callable[[], Tensor]) -> None:
        model.train()
        self.trained = [one for one in model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4, weight_decay=0.1)
        self.loss, self.times = loss, list[tuple[float, float, float]]()

    def __call__(self) -> None:
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.loss()
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        end = time.perf_counter()
        self.times.append((forward - begin, backward - forward, end - backward))

    def parts(self) -> Row:
        """Returns the medians of the parts, in ms."""
        names = "forward_ms", "backward_ms", "update_ms"
        medians = map(statistics.median, zip(*self.times, strict=True))
        return {name: 1e3 * median for name, median in zip(names, medians, strict=True)}


def _text_step(model: Any, settings: Settings, device: str) -> Callable[[], None]:
    tokens = torch.randint(settings.sizes.vocabulary, settings.shape, device=device)
    mask = torch.ones_like(tokens)
    return _Step(model, lambda: model(input_ids=tokens, attention_mask=mask, labels=tokens).loss)


def _generate(model: Any, settings: Settings, device: str) -> Callable[[], Any]:
    *shape, new = settings.prompts
    tokens = torch.randint(settings.sizes.vocabulary, shape, device=device)
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "use_cache": True}
    mask = torch.ones_like(tokens)
    model.eval()

    def generate() -> None:
        model.generate(input_ids=tokens, attention_mask=mask, pad_token_id=0, **options)

    return torch.no_grad()(generate)


def _caching(generate: Callable[[], Any]) -> Callable[[], None]:
    """Returns a function that generates with norms that are kept from token to token."""

    def call() -> None:
        with DoraCaching():
            generate()

    return call


def _image_step(model: Any, settings: Settings, device: str) -> Callable[[], None]:
    batch, *lengths = settings.image
    options = {"device": device, "dtype": torch.bfloat16}
    image, text = (
        torch.randn(batch, length, settings.sizes.hidden, **options) for length in lengths
    )
    target = torch.randn_like(image)
    return _Step(model, lambda: F.mse_loss(model(image, text).float(), target.float()))


def _llama(settings: Settings, device: str) -> Any:
    return random_llama(settings.sizes, settings.sizes.layers, device, use_cache=True)


def _flux(settings: Settings, device: str) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        return _Flux(settings).to(torch.bfloat16).requires_grad_(False)


TASKS: dict[str, tuple[Any, Any, float]] = {
    "MetaMathQA step": (_llama, _text_step, 0.0),
    "MetaMathQA generation": (_llama, _generate, 0.0),
    "MetaMathQA step, dropout 0.05": (_llama, _text_step, 0.05),
    "image step": (_flux, _image_step, 0.0),
}
"""What makes the model and the call of a task, and the adapters' dropout."""


class _Flux(nn.Module):
    """The blocks of FLUX.2's transformer, without embeddings, the rotation and the last layer."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        double, single = settings.blocks
        sizes = settings.sizes.hidden, settings.sizes.heads
        self.double_blocks: Any = nn.ModuleList(_DoubleBlock(*sizes) for _ in range(double))
        self.single_blocks: Any = nn.ModuleList(_SingleBlock(*sizes) for _ in range(single))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        run = functools.partial(checkpoint, use_reentrant=False)
        for block in self.double_blocks:
            image, text = run(block, image, text)
        x = torch.cat([text, image], 1)
        for block in self.single_blocks:
            x = run(block, x)
        return x[:, text.shape[1] :]


class _Modulated(nn.Module):
    """A block with the shift, scale and gate that FLUX computes once for all blocks."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.hidden, self.heads = hidden, heads
        self.modulation = nn.Buffer(0.1 * torch.randn(3, hidden))

    def normed(self, x: Tensor) -> Tensor:
        shift, scale = self.modulation[0], self.modulation[1]
        return (1 + scale) * F.layer_norm(x, (self.hidden,)) + shift

    def gated(self, x: Tensor, change: Tensor) -> Tensor:
        return x + self.modulation[2] * change

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        q, k = (F.rms_norm(t, t.shape[-1:]) for t in (q, k))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class _FeedForward(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear_in = nn.Linear(hidden, 6 * hidden, bias=False)
        self.linear_out = nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.linear_in(x).chunk(2, -1)
        return self.linear_out(F.silu(gate) * up)


class _DoubleBlock(_Modulated):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__(hidden, heads)
        for name in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"):
            self.add_module(name, nn.Linear(hidden, hidden, bias=False))
        self.to_out: Any = nn.ModuleList([nn.Linear(hidden, hidden, bias=False)])
        self.to_add_out = nn.Linear(hidden, hidden, bias=False)
        self.ff, self.ff_context = _FeedForward(hidden), _FeedForward(hidden)

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self.normed(image), self.normed(text)
        pairs: Any = (
            (self.add_q_proj, self.to_q),
            (self.add_k_proj, self.to_k),
            (self.add_v_proj, self.to_v),
        )
        both = self.attention(*(torch.cat([of_y(y), of_x(x)], 1) for of_y, of_x in pairs))
        text = self.gated(text, self.to_add_out(both[:, : text.shape[1]]))
        image = self.gated(image, self.to_out[0](both[:, text.shape[1] :]))
        image = self.gated(image, self.ff(self.normed(image)))
        return image, self.gated(text, self.ff_context(self.normed(text)))


class _SingleBlock(_Modulated):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__(hidden, heads)
        self.to_qkv_mlp_proj = nn.Linear(hidden, 9 * hidden, bias=False)
        self.to_out = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        sizes = [self.hidden] * 3 + [3 * self.hidden] * 2
        q, k, v, gate, up = self.to_qkv_mlp_proj(self.normed(x)).split(sizes, -1)
        change = torch.cat([self.attention(q, k, v), F.silu(gate) * up], -1)
        return self.gated(x, self.to_out(change))
