"""The settings of a fine-tuning run."""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from jax_dora.lm import domains
from jax_dora.lm.domains import Domain, integers, one_of
from jax_dora.lm.models.sharding import AXES
from jax_dora.quantisation import BWD_QTYPES, FORMATS, QTYPE

Split = Literal["text", "all", "none"]
Dtype = Literal["bfloat16", "float32"]
Schedule = Literal["cosine", "linear", "polynomial", "exponential", "constant"]
# Names in optax. The first ones have weight decay.
DECAYING = ("adamw", "adan", "lamb", "lion", "nadamw")
OPTIMIZERS = (
    *DECAYING,
    "adabelief",
    "adafactor",
    "adam",
    "nadam",
    "radam",
    "rmsprop",
    "sgd",
    "yogi",
)
Method = Literal["dora", "lora"]
Reporter = Literal["tensorboard", "wandb", "trackio"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run.

    Attributes:
      model: the Hugging Face folder of the base model.
      data: the files of examples to train on, read one after the other.
      output: the folder of the run.
      eval_data: the files of examples to evaluate on; none by default.
      columns: the names of fields in the data, by the names that the forms of records have for
        them, such as prompt=question,completion=answer; other fields are not read then.
      length: the number of tokens in a packed row.
      split: which records continue in further rows if they are longer than a row: those with
        "text", all, or none; others are truncated.
      dtype: the dtype of the base model; config.json's by default.
      quantize: the format to quantise the base model's projections to on loading; none by default.
      act_qtype: the format to quantise the inputs of projections to; it needs weights in the same
        format.
      bwd_qtype: the format to quantise gradients to for their products with the weights; it needs
        `act_qtype`.
      end_tokens: the text or id of each further token that ends an answer; learned completions end
        with the first.
      mesh: the devices to use, as sizes of the axes dp, fsdp and tp, or auto for all of them; one
        device by default, and auto with several processes.
      from_adapter: the PEFT folder, or the folder of a run, with the adapter to train further; the
        settings of the adapter are those of the folder then, and the optimizer starts anew.
      method: the kind of adapter; lora has no magnitudes. It is dora by default.
      rank: the rank of the adapter; 64 by default.
      alpha: the numerator of the scale alpha/rank; rank/2 by default.
      use_rslora: use the scale alpha/sqrt(rank) instead.
      dropout: the dropout rate of adapter inputs; an embedding's adapter has none. It is 0 by
        default.
      target: the regular expression for the paths of layers to adapt; model/layers/.*_proj by
        default.
      layers: the indices of the only layers to adapt, from 0; all by default.
      modules_to_save: the ends of the names of modules to train whole, such as lm_head, or norm for
        all norms; tied ones stay tied.
      steps: the number of optimizer steps; set by `epochs` by default.
      epochs: the number of passes over the data; 1 by default.
      batch: the number of rows in a micro-batch, on all devices together.
      accumulate: the number of micro-batches in a step.
      learning_rate: the peak learning rate.
      optimizer: the optimizer of optax.
      schedule: the learning rate after warmup; polynomial is quadratic.
      final_rate: the learning rate of the last step, as a share of the peak.
      warmup: the number of warmup steps.
      weight_decay: the weight decay of A and B; magnitudes have none.
      clip: the maximum norm of the gradient.
      unroll: unroll the layers: faster steps, longer compilation.
      seed: the random seed of the adapter, data order and dropout.
      resume: continue from the latest checkpoint in `output`.
      checkpoint_every: the number of steps between checkpoints.
      keep: the number of checkpoints to keep.
      eval_every: the number of steps between evaluations; 50 by default.
      patience: the number of evaluations without a lower loss after which the run stops.
      samples: the number of prompts of the data to complete at the end.
      report_to: a package to which the metrics of each step also go.
      merge: the folder to write the merged model to; none by default.

    Raises:
      ValueError: a setting has no valid value, or needs another one. The message begins with
        "name=value: ".
    """

    model: Path
    data: Sequence[Path]
    output: Path = Path("finetuned")
    eval_data: Sequence[Path] = ()
    columns: Mapping[str, str] | None = None
    length: int = 1024
    split: Split = "text"
    dtype: Dtype | None = None
    quantize: str | None = None
    act_qtype: str | None = None
    bwd_qtype: str | None = None
    end_tokens: Sequence[str] = ()
    mesh: Mapping[str, int] | Literal["auto"] | None = None
    from_adapter: Path | None = None
    method: Method | None = None
    rank: int | None = None
    alpha: float | None = None
    use_rslora: bool = False
    dropout: float | None = None
    target: str | None = None
    layers: Sequence[int] = ()
    modules_to_save: Sequence[str] = ()
    steps: int | None = None
    epochs: float | None = None
    batch: int = 1
    accumulate: int = 8
    learning_rate: float = 1e-4
    optimizer: str = "adamw"
    schedule: Schedule = "cosine"
    final_rate: float = 0.0
    warmup: int = 0
    weight_decay: float = 0.0
    clip: float = 1.0
    unroll: bool = False
    seed: int = 0
    resume: bool = False
    checkpoint_every: int = 50
    keep: int = 3
    eval_every: int | None = None
    patience: int | None = None
    samples: int = 3
    report_to: Reporter | None = None
    merge: Path | None = None

    DOMAINS: ClassVar[Mapping[str, Domain]] = {
        "length": integers(1, 2**24),
        "split": one_of(*get_args(Split)),
        "dtype": one_of(*get_args(Dtype)),
        "quantize": one_of(*FORMATS),
        "act_qtype": one_of(QTYPE),
        "bwd_qtype": one_of(*BWD_QTYPES),
        "method": one_of(*get_args(Method)),
        **dict.fromkeys(("rank", "batch", "accumulate"), integers(1, 2**20)),
        **dict.fromkeys(("alpha", "epochs", "learning_rate", "clip"), domains.POSITIVE),
        "dropout": domains.RATE,
        **dict.fromkeys(("steps", "checkpoint_every", "keep"), integers(1)),
        **dict.fromkeys(("eval_every", "patience"), integers(1)),
        "optimizer": one_of(*OPTIMIZERS),
        "schedule": one_of(*get_args(Schedule)),
        "final_rate": domains.RATE,
        "report_to": one_of(*get_args(Reporter)),
        **dict.fromkeys(("warmup", "samples"), integers(0)),
        "weight_decay": domains.NOT_NEGATIVE,
        "seed": integers(0, 2**32 - 1),
    }

    def __post_init__(self) -> None:
        for name in ("model", "output", "merge", "from_adapter"):
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, _path(name, path))
        for name in ("data", "eval_data"):
            if isinstance(files := getattr(self, name), str | os.PathLike):
                raise ValueError(f"{name}={str(files)!r}: expected a list of files")
            object.__setattr__(self, name, tuple(_path(name, file) for file in files))
        if not self.data:
            raise ValueError("data=(): expected a file of examples, or several")
        domains.check(self, self.DOMAINS)
        for name, kind, words in (("layers", int, "indices"), ("modules_to_save", str, "names")):
            values = getattr(self, name)
            is_list = isinstance(values, Sequence) and not isinstance(values, str)
            if not is_list or not all(type(one) is kind for one in values):
                raise ValueError(f"{name}={values!r}: expected a list of {words}")
            object.__setattr__(self, name, tuple(sorted(set(values))))
        if "" in self.modules_to_save or any(one < 0 for one in self.layers):
            raise ValueError("layers, modules_to_save: expected indices from 0, and names")
        try:
            re.compile(self.target or "")
        except re.error as error:
            raise ValueError(
                f"target={self.target!r}: expected a regular expression: {error}"
            ) from error
        if isinstance(self.mesh, Mapping):
            is_valid = self.mesh and all(
                axis in AXES and size >= 1 for axis, size in self.mesh.items()
            )
        else:
            is_valid = self.mesh in (None, "auto")
        if not is_valid:
            raise ValueError(
                f"mesh={self.mesh!r}: expected 'auto', or sizes of {', '.join(AXES)} of at least 1"
            )
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"epochs={self.epochs}: expected `steps` or `epochs`, not both")
        if self.weight_decay and self.optimizer not in DECAYING:
            raise ValueError(
                f"weight_decay={self.weight_decay}: expected 0, since optimizer={self.optimizer!r} "
                f"has no weight decay; {', '.join(DECAYING)} have"
            )
        if self.final_rate == 0 and self.schedule == "exponential":
            raise ValueError("schedule='exponential': expected a `final_rate` above 0")
        if self.final_rate and self.schedule == "constant":
            raise ValueError(f"final_rate={self.final_rate}: expected 0 for schedule='constant'")
        for name in ("patience", "eval_every"):
            if (value := getattr(self, name)) is not None and not self.eval_data:
                raise ValueError(f"{name}={value}: expected `eval_data` as well")


def _path(name: str, value: Any) -> Path:
    """Returns a path. An empty one would mean the current folder."""
    if not isinstance(value, str | os.PathLike) or not str(value):
        raise ValueError(f"{name}={value!r}: expected a path, such as . for the current folder")
    return Path(value)
