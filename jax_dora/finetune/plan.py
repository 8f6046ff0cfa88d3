"""The plan of a run: all that is known of it before a weight is read."""

import argparse
import dataclasses
import functools
import hashlib
import json
import math
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console

import jax_dora
from jax_dora.finetune import data, estimate, processes, tiny
from jax_dora.finetune.checkpoints import Checkpoints
from jax_dora.finetune.examples import Encoder
from jax_dora.finetune.records import read_records
from jax_dora.models import (
    CausalLM,
    DecoderConfig,
    DecoderSharding,
    abstract_model,
    read_config,
    segments,
)
from jax_dora.models.tokenizer import Texts
from jax_dora.models.weights import fingerprint

EMBEDDING = "model/embed_tokens"
# Flags that a run can only be resumed with as they were; with others its steps would be others.
OF_MODEL = ("length", "dtype", "quantize", "activations")
OF_ADAPTER = ("rank", "alpha", "rslora", "dropout", "target")
OF_OPTIMIZER = ("learning_rate", "schedule", "warmup", "weight_decay", "clip", "seed")
BINDING = OF_MODEL + OF_ADAPTER + OF_OPTIMIZER


class Plan:
    """The inputs of a run, its rows, steps and rules.

    Attributes:
      rows, eval_rows: packed examples; the latter None without --eval-data.
      examples_to_show: some of the latter, or else of the former, that were not cut.
      steps: optimizer steps of the whole run.
      sharding: how the model lies on a mesh; None for one device.
      settings: what a checkpoint must have been made with to go on from it.
      eval_digest: of what evaluation losses were taken on; None without --eval-data.
    """

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self.args, self.console = args, console
        self.checkpoints = Checkpoints(args.output / "checkpoints", args.keep)
        if not args.resume and self.checkpoints.steps():
            raise FileExistsError(
                f"{args.output} holds a run already; pass --resume to go on with it, or another "
                "--output"
            )
        if args.merge is not None:
            _check_merge(args.merge, args.output)
        for flag, value in {"patience": args.patience, "eval-every": args.eval_every}.items():
            if value is not None and args.eval_data is None:
                raise ValueError(f"--{flag} needs --eval-data")
        for name, extra in {"matplotlib": "finetune", "tensorboardX": "tensorboard"}.items():
            if (extra == "finetune" or args.tensorboard) and find_spec(name) is None:
                raise ImportError(f"{name} is missing; expected: pip install 'jax-dora[{extra}]'")
        self.folder, file = self._inputs()
        _refuse_model(self.folder, args.output)
        config = read_config(self.folder)
        self.texts = Texts.of(self.folder, config)
        self.encoder = Encoder(self.texts.tokenizer, self.texts.ends[0], self.texts.template)
        self.changes: dict[str, Any] = {"dtype": args.dtype, "memory": "auto"}
        self.changes["unroll"] = args.unroll
        self.config = DecoderConfig.from_hf(config, **self.changes)
        self.rows, examples = self._read(file)
        self.eval_rows = None
        if args.eval_data is not None:
            self.eval_rows, examples = self._read(args.eval_data)
        self.examples_to_show = examples[: args.samples]
        self.step_rows = (args.accumulate, args.batch)
        self.steps = args.steps or math.ceil(
            args.epochs * len(self.rows.tokens) / math.prod(self.step_rows)
        )
        if args.warmup >= self.steps:
            raise ValueError(f"--warmup {args.warmup} leaves nothing of the {self.steps} steps")
        if jax.default_backend() == "gpu" and self.config.dtype != jnp.float32:
            self.changes |= {"attention": "cudnn", "segments": self._segments()}
        self.sharding: DecoderSharding | None = None
        self.sharding = self._sharding()
        self.config = dataclasses.replace(self.config, sharding=self.sharding)
        self.rules = self._rules()
        self._refuse_to_merge()
        self.settings = {name: getattr(args, name) for name in BINDING} | {
            # The same rows make a step, however many of them are computed at once.
            "rows of a step": math.prod(self.step_rows),
            # What the files hold counts, not where they lie.
            "data": _digest(self.rows),
            "weights": fingerprint(self.folder),
            "config": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
        }
        self.eval_digest = None if self.eval_rows is None else _digest(self.eval_rows)
        processes.compare(self.settings | {"eval_data": self.eval_digest})

    @functools.cached_property
    def schedule(self) -> optax.Schedule:
        """The learning rate of every step."""
        args = self.args
        steps = self.steps - args.warmup
        after = {
            "cosine": optax.cosine_decay_schedule(args.learning_rate, steps),
            "linear": optax.linear_schedule(args.learning_rate, 0.0, steps),
            "constant": optax.constant_schedule(args.learning_rate),
        }[args.schedule]
        # From 1/warmup, not from 0, so that no step is wasted.
        warmup = optax.linear_schedule(
            args.learning_rate / max(1, args.warmup), args.learning_rate, max(1, args.warmup - 1)
        )
        return optax.join_schedules([warmup, after], [args.warmup]) if args.warmup else after

    @functools.cached_property
    def abstract_model(self) -> CausalLM:
        """The adapted model, of shapes alone."""
        base = abstract_model(self.folder, **self.reading)
        graphdef, state = nnx.split(base)
        return nnx.eval_shape(lambda state: self.adapted(nnx.merge(graphdef, state)), state)

    @property
    def reading(self) -> dict[str, Any]:
        """The keyword arguments that `load_model` gets beside the folder."""
        formats = {"quantize": self.args.quantize, "act_qtype": self.args.activations}
        return {"sharding": self.sharding, **formats, **self.changes}

    def adapted(self, model: CausalLM) -> CausalLM:
        """Returns `model` with new adapters, in training."""
        model = jax_dora.apply_dora(model, self.rules, rngs=nnx.Rngs(self.args.seed))
        model.train()
        return model

    def _segments(self) -> int | None:
        """Returns how many texts a row holds at most, in powers of two, if few enough for cuDNN."""
        given = [rows for rows in (self.rows, self.eval_rows) if rows is not None]
        # Padding counts as one more.
        most = 1 << max(int(rows.segment_ids.max()) for rows in given).bit_length()
        return most if most <= segments.MOST else None

    def _sharding(self) -> DecoderSharding | None:
        """Returns how the model lies on the devices; None for one device alone."""
        sizes = self.args.mesh
        if sizes is None and jax.process_count() == 1:
            return None
        if sizes in (None, "auto"):
            # Weights are gathered in every pass where they are in parts.
            fits = estimate.has_room_for_copies(abstract_model(self.folder, **self.reading))
            sizes = {"dp" if fits else "fsdp": jax.device_count()}
        chosen: dict[str, Any] = sizes
        sharding = DecoderSharding.over(**chosen)
        sharding.check(self.config, self.args.batch)
        return sharding

    def _inputs(self) -> tuple[Path, Path]:
        """Returns the model's folder and the data's file."""
        args = self.args
        folder, file = args.model, args.data
        if args.tiny:
            if folder is not None:
                raise ValueError("--model and --tiny are both given; expected one of them")
            folder, file = args.output / tiny.MODEL, file or args.output / tiny.DATA
        if folder is None or file is None:
            raise ValueError("--model or --data is missing; give both, or --tiny, which makes them")
        for name, value in (("data", file), ("eval-data", args.eval_data)):
            if value is not None and not value.exists():
                raise FileNotFoundError(f"--{name} {value} is no file")
        return folder, file

    def _read(self, file: Path) -> tuple[data.Rows, list[data.Example]]:
        examples = list(self.encoder.examples(read_records(file)))
        packed = data.pack(examples, self.args.length)
        largest = max(max(one.tokens) for one in examples if one.tokens)
        if largest >= self.config.vocab_size:
            raise ValueError(
                f"the tokenizer makes token {largest}; expected less than config.json's "
                f"vocab_size {self.config.vocab_size}: it belongs to another model"
            )
        longest = int(packed.rows.positions.max()) + 1
        told = f"{file} has an example of {longest} tokens"
        self.texts.check(longest, told, f": --length {self.texts.most} cuts it")
        full = (packed.rows.segment_ids > 0).mean()
        self.console.print(
            f"{file}: {packed.examples} examples in {len(packed.rows.tokens)} rows, {full:.0%} "
            f"full; {packed.truncated} cut to {self.args.length} tokens, {packed.dropped} dropped "
            "of which nothing to learn was left",
            soft_wrap=True,
            markup=False,
        )
        # A prompt that is longer than any row may take more memory than training does.
        fitting = [one for one in examples if len(one.tokens) <= self.args.length + 1]
        return packed.rows, fitting

    def _rules(self) -> list[jax_dora.DoRARule]:
        """Returns one rule for the projections and, where --target takes it too, one for the
        embedding."""
        args = self.args
        rule = jax_dora.DoRARule(
            args.target,
            rank=args.rank,
            alpha=args.rank / 2 if args.alpha is None else args.alpha,
            use_rslora=args.rslora,
            dropout=args.dropout,
        )
        if not rule.matches(EMBEDDING):
            return [rule]
        embedding = dataclasses.replace(
            rule, path=re.escape(EMBEDDING), dropout=0.0, adapt_attend=False
        )
        model = nnx.eval_shape(lambda: CausalLM(self.config, rngs=nnx.Rngs(0)))
        paths = ("/".join(map(str, path)) for path, _ in nnx.iter_modules(model))
        takes_others = any(rule.matches(path) for path in paths if path != EMBEDDING)
        return [embedding, rule] if takes_others else [embedding]

    def _refuse_to_merge(self) -> None:
        takes_embedding = any(rule.matches(EMBEDDING) for rule in self.rules)
        if self.args.merge is not None and takes_embedding and self.config.tie_word_embeddings:
            raise ValueError(
                f"--merge is given and --target {self.args.target!r} takes the embedding, to which "
                "this model's head is tied; leave out --merge, or the embedding: PEFT leaves the "
                "head as it is, and a merged folder of a tied model has one array for both"
            )


def _refuse_model(folder: Path, output: Path) -> None:
    """Refuses a run that would write between the model's files."""
    if folder.resolve() in _own_folders(output):
        raise ValueError(
            f"--output {output} writes into --model {folder}; expected a folder of the run's own"
        )


def _own_folders(output: Path) -> list[Path]:
    """Returns the folders that a run writes into."""
    names = (".", "adapter", "best", "checkpoints", "tensorboard")
    return [(output / name).resolve() for name in names]


def _check_merge(folder: Path, output: Path) -> None:
    if folder.exists() or folder.resolve() in _own_folders(output):
        raise FileExistsError(
            f"--merge {folder} exists, or is the run's own; expected a folder to be made"
        )
    above = next(one for one in folder.absolute().parents if one.exists())
    if not above.is_dir():
        raise NotADirectoryError(f"--merge {folder} is in {above}, which is a file")


def _digest(rows: data.Rows) -> str:
    digest = hashlib.sha256()
    for array in rows:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
