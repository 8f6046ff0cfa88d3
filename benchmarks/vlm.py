"""Level `vlm`: inference and gradient of vision-language models, eagerly and compiled: torch_dora,
and PEFT as its users have it.

The models are transformers', at their real dimensions but with fewer layers, so that all variants
run in turns in one process: `layers` of `of_layers`, and about as few layers of the vision tower.
Weights are random and bf16, and all variants share them. Adapters of rank 384 (rsLoRA) are on the
projections of the language model; 4,096 tokens, of which one image takes 256; the loss is on the
last 1,024. For the gradient every layer is checkpointed; a frozen side has inference alone.
Adapters are fp32 by default, under autocast. One line is one variant: the median wall time of a
call and of the host in it, in ms, the largest minus the smallest, the bytes that a call allocates
at most, and the time divided by PEFT's LoRA's, by that of PEFT's DoRA in bf16, and by that of
PEFT's default:

    model                     the published model whose dimensions these are
    device_ms                 of the kernels and copies of one call, without the gaps between them
    peak_bytes                the weights, the adapters, their gradients, and what a call allocates
    cosine_to_peft            of the logits, to those of PEFT's defaults
    cosine_to_fp32            of the logits, to those of PEFT in fp32 with the same numbers
    floor_of_cosine           the cosine of the two farthest positions: 1 says nothing without it
"""

import copy
import functools
import itertools
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.model.protocol import LORA_B_DEVIATION
from benchmarks.results import Row
from benchmarks.torch_decoder import Side, free
from benchmarks.turns import DEFAULT, IN_BF16, LORA, OURS, device_ms, in_turns, with_ratios
from benchmarks.vision_language import MODELS, RULE, VisionLanguageModel
from parity.sides.torch.decoder import adapt, checkpoint_layers
from torch_dora import DoRALayer, freeze
from torch_dora.layers.base import parameter_aliases

EAGER = (LORA, DEFAULT, IN_BF16, OURS[1], OURS[0], OURS[0]._replace(frozen=True))
COMPILED = tuple(side._replace(compiled=True) for side in (LORA, IN_BF16, OURS[0], EAGER[-1]))
SIDES = {"eager": EAGER, "compiled": COMPILED}


class Settings(NamedTuple):
    """The settings of the level.

    Attributes:
      only: the names of the models.
      layers: of the language models; 0 for those of `LAYERS`.
      ranks: of the adapters, one after the other.
      sides: "eager", "compiled" or both. Compiled ones are divided by eager ones of the same run.
      tasks: "inference", "gradient" or both.
    """

    only: tuple[str, ...] = tuple(model.name for model in MODELS)
    layers: int = 0
    ranks: tuple[int, ...] = (384,)
    sides: tuple[str, ...] = ("eager", "compiled")
    tasks: tuple[str, ...] = ("inference", "gradient")
    rounds: int = 5
    tokens: int = 4096
    last: int = 1024
    is_tiny: bool = False


TINY = Settings(ranks=(4,), rounds=1, tokens=48, last=8, is_tiny=True)
# Of the others 4. Gemma's first layer with full attention is the sixth.
LAYERS = {"Qwen3-VL-8B": 8, "InternVL3-14B": 6, "Gemma3-27B": 6}


def refuses(settings: Settings) -> str | None:
    """Returns what is wrong with the settings, or None."""
    names = [model.name for model in MODELS]
    if unknown := [name for name in settings.only if name not in names]:
        return f"--only is {unknown[0]}; expected one of {', '.join(names)}"
    if unknown := [name for name in settings.sides if name not in SIDES]:
        return f"--sides is {unknown[0]}; expected eager, compiled or both"
    if unknown := [name for name in settings.tasks if name not in CALLS]:
        return f"--tasks is {unknown[0]}; expected inference, gradient or both"
    return None


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row for each model, rank, each of inference and gradient, and each side; the
    compiled sides come last."""
    models = [model for model in MODELS if model.name in settings.only]
    parts = [(model, SIDES[name]) for name in SIDES if name in settings.sides for model in models]
    timed: dict[tuple[str, int], dict[str, dict[Any, Row]]] = {}
    for (model, sides), rank in itertools.product(parts, settings.ranks):
        earlier = timed.setdefault((model.name, rank), {})
        try:
            yield from _measure(model, sides, rank, settings, device, earlier)
        except Exception as error:  # Out of memory, in one model of many.
            failed = f"{type(error).__name__}: {error}"[-600:]
            yield {"model": model.name, "kind": sides[0].name, "rank": rank, "failed": failed}
        free()


def _measure(
    full: VisionLanguageModel,
    sides: tuple[Side, ...],
    rank: int,
    settings: Settings,
    device: str,
    timed: dict[str, dict[Any, Row]],
) -> Iterator[Row]:
    """Yields the rows of some sides of a model. `timed` has the times of earlier ones by task, to
    which these are added."""
    chosen = full.cut(settings.layers or LAYERS.get(full.name, 4))
    chosen = chosen.tiny() if settings.is_tiny else chosen
    base = chosen.make(device)
    inputs = chosen.inputs(base, settings.tokens, device)
    models = {(side, side.wide): _adapted(side, base, rank, device) for side in sides}
    cosines = _cosines(base, models, inputs, rank, settings.last, device)
    for task in settings.tasks:
        calls = {
            key: functools.partial(CALLS[task], model, inputs, settings.last)
            for key, model in models.items()
            if task == "inference" or not key[0].frozen
        }
        found = timed.setdefault(task, {})
        found |= in_turns(calls, settings.rounds, device)
        for key in calls:
            (side, autocast), model = key, models[key]
            row = with_ratios(found, side, autocast)
            if device == "cuda":
                row["device_ms"] = device_ms(calls[key], autocast)
            yield {
                "model": full.name,
                "kind": side.name + ", autocast" * autocast,
                "task": task,
                "rank": rank,
                "tokens": settings.tokens,
                "image_tokens": int((inputs["input_ids"] == chosen.sizes.vocabulary - 1).sum()),
                "layers": chosen.sizes.layers,
                "of_layers": full.sizes.layers,
                "vision_layers": chosen.sizes.vision_layers,
                "rounds": settings.rounds,
                **row,
                "peak_bytes": row["call_bytes"] + _held(model),
                **cosines.get(key, {}),
            }


def _adapted(side: Side, base: Any, rank: int, device: str) -> Any:
    """Returns a copy of the base with the adapters of a side, on the same weights. Its adapters are
    those of every other side: numbers that bf16 holds."""
    model = copy.deepcopy(base, parameter_aliases(base))
    dtype = torch.float32 if side.wide else torch.bfloat16
    package, is_dora = "peft" if side.package == "PEFT" else None, side.method == "DoRA"
    with torch.device(device):
        adapt(model, package, dtype, rank, rank // 2, use_dora=is_dora, rule=RULE)
    set_adapters(model)
    if side.frozen:
        freeze(model)
    if side.compiled:
        # Compiled layer by layer, so that all layers share one program.
        backend = "inductor" if device == "cuda" else "aot_eager"
        # A program for each package, task and kind of attention.
        torch._dynamo.config.recompile_limit = 32
        for layer in model.model.language_model.layers:
            layer.compile(backend=backend)
    return model.eval()


@torch.no_grad()
def set_adapters(model: Any, deviation: float = LORA_B_DEVIATION) -> None:
    """Moves the adapters of a model, torch_dora's or PEFT's, from where they begin, to the same
    numbers for the same names."""
    for name, module in model.named_modules():
        if isinstance(module, DoRALayer):
            a, b, magnitude = module.lora_a, module.lora_b, module.magnitude
            weight = module.weight
        elif hasattr(module, "lora_A"):
            a, b = (getattr(module, part)["default"].weight for part in ("lora_A", "lora_B"))
            magnitude, weight = module.lora_magnitude_vector, module.base_layer.weight
            magnitude = magnitude["default"].weight if magnitude else None
        else:
            continue
        generator = torch.Generator(a.device).manual_seed(zlib.crc32(name.encode()))
        draw = functools.partial(
            torch.randn, generator=generator, device=a.device, dtype=torch.float32
        )
        a.copy_((draw(a.shape) / a[0].numel() ** 0.5).bfloat16())
        b.copy_((deviation * draw(b.shape)).bfloat16())
        if magnitude is not None:
            norms = weight.float().flatten(1).norm(dim=1)
            moved = norms * (1 + 0.05 * draw(norms.shape))
            magnitude.copy_(moved.bfloat16().reshape(magnitude.shape))


def _inference(model: Any, inputs: dict[str, Tensor], last: int) -> Tensor:
    with torch.no_grad():
        return model(**inputs, logits_to_keep=last, use_cache=False).logits


def _gradient(model: Any, inputs: dict[str, Tensor], last: int) -> None:
    if not model.training:
        checkpoint_layers(model)
        model.train()
    logits = model(**inputs, logits_to_keep=last, use_cache=False).logits
    targets = inputs["input_ids"][0, -last:]
    F.cross_entropy(logits.flatten(0, 1).float(), targets).backward()


CALLS = {"inference": _inference, "gradient": _gradient}


def _held(model: Any) -> int:
    """Returns the bytes of a model's parameters and of their gradients."""
    tensors = [*model.parameters()]
    tensors += [one.grad for one in tensors if one.grad is not None]
    return sum(one.numel() * one.element_size() for one in tensors)


def _cosines(
    base: Any,
    models: dict[Any, Any],
    inputs: dict[str, Tensor],
    rank: int,
    last: int,
    device: str,
) -> dict[Any, Row]:
    """Returns the cosines of the logits of each side to PEFT's and to fp32; none for a model that
    does not fit the GPU in fp32."""
    if device == "cuda" and 3 * _held(base) > torch.cuda.mem_get_info()[0]:
        return {}
    exact = copy.deepcopy(base).float()
    with torch.device(device):
        adapt(exact, "peft", torch.float32, rank, rank // 2, rule=RULE)
    set_adapters(exact)
    wide = {name: one.float() if one.is_floating_point() else one for name, one in inputs.items()}
    exact = _inference(exact.eval(), wide, last)[0]
    default: Any = (DEFAULT, True)
    others = {} if default in models else {default: _adapted(DEFAULT, base, rank, device)}
    found = {}
    for key, model in (models | others).items():
        with torch.autocast(device, torch.bfloat16, enabled=key[1]):
            found[key] = _inference(model, inputs, last)[0].float()

    def cosine(one: Tensor, other: Tensor) -> float:
        return float(F.cosine_similarity(one.double(), other.double(), dim=1).min())

    floor = float((F.normalize(exact, dim=1) @ F.normalize(exact, dim=1).mT).min())
    return {
        key: {}
        if key[0].method == "LoRA"
        else {
            "cosine_to_peft": cosine(found[key], found[default]),
            "cosine_to_fp32": cosine(found[key], exact),
            "floor_of_cosine": floor,
        }
        for key in models
    }
