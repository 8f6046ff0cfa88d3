"""The level encoder: a pretrained sentence encoder, adapted and trained in both frameworks.

The same initial adapter is trained on the same batch in Flax, in torch and, as dense weights, in
fp64. The adapter that torch trained is then loaded into all of them, and their embeddings and
gradients are compared.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from parity import minilm, oracle, tolerances
from parity.compare import Score, add_sides, peak_of
from parity.minilm import Adapter, Evaluation
from parity.report import Report
from parity.sides import SIDES, Backend
from parity.sides.jax.operators import interpreted
from parity.sides.torch import encoder as torch_encoder

CASE = "encoder all-MiniLM-L6-v2"
STEPS = {"cpu": 6, "cuda": 100}
PAIRS = {"cpu": 4, "cuda": None}  # None: all
QUICK_STEPS = 2

Names = Mapping[Backend, str]
PLAIN: Names = {name: side.plain for name, side in SIDES.items()}
KERNELS: Names = {name: side.kernels for name, side in SIDES.items()}


def run_encoder(report: Report, device: str, *, quick: bool) -> None:
    """Adds all comparisons to the report, and facts about the training."""
    steps = QUICK_STEPS if quick else STEPS[device]
    pairs = minilm.sentence_pairs()[: 2 if quick else PAIRS[device]]
    batch = minilm.batch(pairs)
    start = minilm.initial_adapter()
    native = device == "cuda"
    names = KERNELS if native else PLAIN

    # In fp32: Adam's first steps are the signs of gradients, and in bf16 many of those are noise.
    losses: dict[str, list[float]] = {}
    losses["fp64"], _ = torch_encoder.train(dense(start, device), batch, steps)
    trained = start
    for name, side in SIDES.items():  # the last side is torch: its adapter is used below
        ours = side.encoder.adapted(start, "float32", names[name], device)
        losses[name], trained = side.encoder.train(ours, batch, steps)
    _add_training(report, names, {name: np.array(each) for name, each in losses.items()})

    for dtype in ("float32", "bfloat16"):
        # Without bf16 hardware, bf16 gradients would take most of the time.
        gradients = native or dtype == "float32"
        evaluate = functools.partial(_evaluate_sides, trained, dtype, device, batch, gradients)
        # The fp64 reference uses weights rounded to the dtype, so that this rounding is no error.
        exact = torch_encoder.evaluate(dense(trained, device, dtype), batch, gradients)
        plain = evaluate(dict.fromkeys(SIDES, "plain"))
        for implementations in (PLAIN, KERNELS) if native else (PLAIN,):
            compare(report, dtype, implementations, exact, evaluate(implementations), plain)
    if not native:
        # Interpreted kernels take seconds: use one sentence pair, and kernels in one projection
        # only.
        evaluate = functools.partial(
            _evaluate_sides, trained, "float32", device, minilm.batch(pairs[:1]), False
        )
        first = minilm.projection_names()[0]
        exact = torch_encoder.evaluate(dense(trained, device), minilm.batch(pairs[:1]), False)
        plain = evaluate(dict.fromkeys(SIDES, "plain"))
        with interpreted():
            ours = evaluate({side: {first: name} for side, name in KERNELS.items()})
        compare(report, "float32", KERNELS, exact, ours, plain)

    change = np.concatenate([np.abs(_g(name, values) - 1) for name, values in trained.items()])
    for fact, value in {
        "steps": steps,
        "loss before training, fp64": losses["fp64"][0],
        "loss after training, fp64": losses["fp64"][-1],
        "|g - 1| after training, largest": float(change.max()),
        "|g - 1| after training, median": float(np.median(change)),
    }.items():
        report.add(CASE, fact, value=value)


def _add_training(report: Report, names: Names, losses: Mapping[str, np.ndarray]) -> None:
    for quantity, statistic, limit in (
        ("mean |Δloss|", np.mean, tolerances.caps.TRAINING_MEAN_LOSS_DIFFERENCE),
        ("worst |Δloss|", np.max, tolerances.caps.TRAINING_WORST_LOSS_DIFFERENCE),
    ):

        def distance(first: str, second: str, statistic=statistic) -> float:
            return float(statistic(np.abs(losses[first] - losses[second])))

        scores = {
            side: Score(name, distance(side, "fp64"), 0.0, limit) for side, name in names.items()
        }
        facts = {"dtype": "float32", "peak": float(losses["fp64"].max())}
        difference = distance("jax", "torch")
        add_sides(report, CASE, quantity, scores, difference=difference, limit=limit, **facts)


def compare(
    report: Report,
    dtype: str,
    names: Names,
    exact: Evaluation,
    ours: Mapping[Backend, Evaluation],
    plain: Mapping[Backend, Evaluation],
) -> None:
    """Adds embeddings and gradients of both sides, judged with flash-attention's rule against the
    plain computations.

    Args:
      names: the implementation of each side.
      exact: the fp64 results.
      ours: the packages' results.
      plain: the results of the frameworks' plain operations.
    """

    def judge(
        quantity: str,
        part: Callable[[Evaluation], torch.Tensor],
        distance: Callable[[torch.Tensor, torch.Tensor], float],
        peak: float,
        floor: float = 0.0,
    ) -> None:
        want, scores = part(exact), {}
        for side, implementation in names.items():
            plain_error, error = (distance(part(r[side]), want) for r in (plain, ours))
            bound = tolerances.flash_rule(plain_error, peak, dtype, floor)
            scores[side] = Score(implementation, error, plain_error, bound)
        difference = distance(part(ours["jax"]), part(ours["torch"]))
        limit = floor or sum(score.bound for score in scores.values())
        facts = {"dtype": dtype, "peak": peak}
        add_sides(report, CASE, quantity, scores, difference=difference, limit=limit, **facts)

    def embeddings(result: Evaluation) -> torch.Tensor:
        return result.embeddings

    judge("embeddings", embeddings, lambda a, b: peak_of(a - b), peak_of(exact.embeddings))
    floor = 1 - tolerances.caps.EMBEDDING_COSINE[dtype]
    judge("embeddings, 1 - cosine", embeddings, _cosine_distance, 0.0, floor)
    for name, want in exact.gradients.items():

        def relative(a: torch.Tensor, b: torch.Tensor, want=want) -> float:
            return float((a - b).norm() / want.norm())

        judge(f"d_{name}, relative", lambda r, name=name: r.gradients[name], relative, 1.0)


def _cosine_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns `1 - cosine` of the worst pair, computed without cancellation as `|a - b|² / 2` of
    unit vectors."""
    a, b = (v / v.norm(dim=-1, keepdim=True) for v in (a, b))
    return float(((a - b) ** 2).sum(-1).max() / 2)


def _evaluate_sides(
    adapter: Adapter,
    dtype: str,
    device: str,
    batch: minilm.Batch,
    gradients: bool,
    implementations: Mapping[Backend, Any],
) -> dict[Backend, Evaluation]:
    results = {}
    for name, side in SIDES.items():
        model = side.encoder.adapted(adapter, dtype, implementations[name], device)
        results[name] = side.encoder.evaluate(model, batch, gradients)
    return results


def dense(adapter: Adapter, device: str, stored: str = "float32") -> torch_encoder.Encoder:
    """Returns the fp64 encoder with dense adapted weights; base weights are first rounded to
    `stored`."""
    return torch_encoder.adapted(adapter, "float64", "dense", device, stored)


def _g(name: str, values: dict[str, torch.Tensor]) -> np.ndarray:
    """Returns a projection's g, computed by the oracle."""
    lora_a, lora_b, magnitude = (values[key].numpy() for key in minilm.ADAPTER)
    norm = oracle.norm(minilm.weights()[f"{name}.weight"], lora_a, lora_b, minilm.SCALE)
    return oracle.magnitude_scale(magnitude, norm, "float32")
