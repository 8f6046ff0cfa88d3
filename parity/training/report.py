"""The verdicts on training runs, as JSON, Markdown and a figure a seed."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from parity.report import environment, finite, markdown_table
from parity.training import adapter as adapters
from parity.training.compare import FULL_PRECISION, PAPER, Difference, Limits, compare
from parity.training.run import Run
from parity.training.settings import Settings
from parity.training.text import text
from parity.training.variants import PAIRINGS, Pairing, Variant

# Of the curves, every so many steps; statistics are over all.
CURVE_EVERY = 10
COLUMNS = (
    "seed",
    "comparison",
    "mean \\|Δloss\\|",
    "worst \\|Δloss\\| (at step)",
    "final eval \\|Δ\\|",
    "gradient norm, median relative Δ",
    "adapters apart / travelled",
    "verdict",
)


@dataclass(frozen=True)
class Judged:
    seed: int
    pairing: Pairing
    difference: Difference
    passed: bool | None  # None: not judged


@dataclass
class Report:
    settings: Settings
    limits: Limits
    environment: dict[str, str]
    pairs: list[Judged] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    curves: dict[int, dict[str, dict[str, list[float]]]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        verdicts = [pair.passed for pair in self.pairs if pair.passed is not None]
        return bool(verdicts) and all(verdicts) and not self.failures

    @classmethod
    def of(
        cls,
        settings: Settings,
        device: str,
        commit: str | None,
        base: Path,
        files: dict[tuple[int, Variant], Path],
        failures: list[str],
    ) -> Report:
        """
        Args:
          base: the folder of the base model.
          files: the runs, by seed and variant.
          failures: what is wrong with the runs that are missing.
        """
        limits = FULL_PRECISION if settings.dtype == "float32" else PAPER
        packages = ("optax", "transformers")
        report = cls(settings, limits, environment(device, commit, packages), failures=failures)
        for seed in sorted({seed for seed, _ in files}):
            # A seed's at a time: an adapter has tens of millions of numbers.
            runs = {v: Run.load(file) for (s, v), file in files.items() if s == seed}
            start = adapters.initial(settings, base, seed)
            for variant, run in runs.items():
                report._add(seed, variant, run, start)
            for pairing in PAIRINGS:
                if pairing.one in runs and pairing.other in runs:
                    found = compare(runs[pairing.one], runs[pairing.other], start)
                    verdict = found.within(limits) if pairing.judged else None
                    report.pairs.append(Judged(seed, pairing, found, verdict))
                    apart = np.abs(runs[pairing.one].losses - runs[pairing.other].losses)
                    curve = report.curves[seed].setdefault(_name(pairing), {})
                    curve["mean_difference"] = [_short(v.mean()) for v in _blocks(apart)]
                    curve["worst_difference"] = [_short(v.max()) for v in _blocks(apart)]
        return report

    def _add(self, seed: int, variant: Variant, run: Run, start: adapters.Adapter) -> None:
        travelled = np.linalg.norm(adapters.flat(run.adapter) - adapters.flat(start))
        self.runs.append(
            {
                "seed": seed,
                "variant": variant.label,
                "seconds": round(run.seconds, 1),
                "first_loss": run.losses[0],
                "last_losses": float(run.losses[-100:].mean()),
                "eval_before": run.eval_before,
                "eval_after": run.eval_after,
                "travelled": float(travelled),
            }
        )
        self.curves.setdefault(seed, {})[variant.label] = {
            "loss": [_short(v) for v in run.losses[::CURVE_EVERY]],
            "gradient_norm": [_short(v) for v in run.gradient_norms[::CURVE_EVERY]],
        }

    def as_dict(self) -> dict[str, Any]:
        return {
            "level": "training",
            "passed": self.passed,
            "environment": self.environment,
            "settings": dataclasses.asdict(self.settings),
            "text": text().facts(),
            "limits": dataclasses.asdict(self.limits),
            "failures": self.failures,
            "pairs": [
                {
                    "seed": pair.seed,
                    "kind": pair.pairing.kind,
                    "one": pair.pairing.one.label,
                    "other": pair.pairing.other.label,
                    "passed": pair.passed,
                    **pair.difference.as_dict(),
                }
                for pair in self.pairs
            ],
            "runs": self.runs,
            "curve_every": CURVE_EVERY,
            "curves": {str(seed): curves for seed, curves in self.curves.items()},
        }

    def write(self, folder: Path) -> None:
        """`training.json`, `training.md` and `training_seed<n>.png` in `folder`."""
        from parity.training.figure import draw

        folder.mkdir(parents=True, exist_ok=True)
        found = finite(self.as_dict())
        # A line a curve: lists of numbers would take a line a number.
        (folder / "training.json").write_text(_json(found) + "\n")
        figures = draw(found, folder)
        (folder / "training.md").write_text(self.markdown([path.name for path in figures]))

    def summary(self) -> str:
        """A line a comparison."""
        lines = [" | ".join(row).replace("\\|", "|") for row in (COLUMNS, *self._rows())]
        lines += [f"FAILED {failure}" for failure in self.failures]
        return "\n".join([*lines, "passed" if self.passed else "FAILED"])

    def markdown(self, figures: list[str]) -> str:
        s = self.settings
        return "\n".join(
            [
                "# Training, JAX beside torch",
                "",
                "Every run is within tolerance." if self.passed else "SOME RUNS FAILED.",
                "",
                *(f"- {name}: {value}" for name, value in self.environment.items()),
                *(f"- text, {name}: {value}" for name, value in text().facts().items()),
                "",
                f"{s.steps} steps of {s.rows * s.length} bytes; {s.dtype} base weights and "
                f"activations, fp32 adapters of rank {s.rank}, alpha {s.alpha}, rsLoRA, on all "
                f"projections of {s.layers} layers {s.hidden} wide; AdamW, peak learning rate "
                f"{s.learning_rate}. Tolerances: mean {self.limits.mean}, worst step "
                f"{self.limits.worst}, final evaluation {self.limits.final}. The rounding floor "
                "is what moving the initial adapter by one unit in the last place does in one "
                "framework; it is not judged.",
                "",
                *markdown_table(COLUMNS, self._rows()),
                "",
                *(f"- FAILED {failure}" for failure in self.failures),
                "",
                "## Runs",
                "",
                *markdown_table(
                    ("seed", "variant", "eval before", "eval after", "travelled", "seconds"),
                    (
                        [
                            str(run["seed"]),
                            run["variant"],
                            f"{run['eval_before']:.5f}",
                            f"{run['eval_after']:.5f}",
                            f"{run['travelled']:.3g}",
                            f"{run['seconds']:.0f}",
                        ]
                        for run in self.runs
                    ),
                ),
                "",
                *(f"![{name}]({name})" for name in figures),
                "",
            ]
        )

    def _rows(self) -> list[list[str]]:
        rows = []
        for pair in self.pairs:
            d = pair.difference
            rows.append(
                [
                    str(pair.seed),
                    _name(pair.pairing),
                    f"{d.mean:.1e}",
                    f"{d.worst:.1e} ({d.worst_step})",
                    f"{d.final:.1e}",
                    f"{d.gradient_norm_median:.1e}",
                    f"{d.relative_drift:.1e}",
                    {True: "pass", False: "FAIL", None: "–"}[pair.passed],
                ]
            )
        return rows


def _name(pairing: Pairing) -> str:
    return f"{pairing.kind}: {pairing.one.label} – {pairing.other.label}"


def _blocks(values: np.ndarray) -> list[np.ndarray]:
    return np.split(values, range(CURVE_EVERY, len(values), CURVE_EVERY))


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _json(report: dict[str, Any]) -> str:
    curves = report.pop("curves")
    lines = json.dumps(report, indent=1, allow_nan=False).removesuffix("\n}")
    parts = []
    for seed, names in curves.items():
        rows = ",\n".join(f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in names.items())
        parts.append(f"  {json.dumps(seed)}: {{\n{rows}\n  }}")
    report["curves"] = curves
    return f'{lines},\n "curves": {{\n' + ",\n".join(parts) + "\n }\n}"
