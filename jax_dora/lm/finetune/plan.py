"""Plans a run: checks its inputs and packs its data, before any weight is read."""

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console

from dora_common.peft.folder import TENSORS
from jax_dora.lm.finetune import adapter, estimate, packing, processes
from jax_dora.lm.finetune.checkpoints import Checkpoints
from jax_dora.lm.finetune.encoding import Encoder
from jax_dora.lm.finetune.output import check_merge, check_output
from jax_dora.lm.finetune.records import read_records
from jax_dora.lm.finetune.reply_ends import learned_ends
from jax_dora.lm.finetune.settings import Settings
from jax_dora.lm.finetune.training import make_schedule
from jax_dora.lm.models import CausalLM, DecoderConfig, DecoderSharding, abstract_model, read_config
from jax_dora.lm.models.attention import MAX_SEGMENTS
from jax_dora.lm.models.tensor_files import fingerprint
from jax_dora.lm.models.tokenizer import TextSettings

# Settings that must not change when a run is resumed, since they change its steps.
FIXED = (
    *("length", "dtype", "quantize", "act_qtype", "bwd_qtype"),
    *("method", "rank", "alpha", "use_rslora", "dropout", "target", "layers", "modules_to_save"),
    *("learning_rate", "optimizer", "schedule", "final_rate", "warmup", "weight_decay", "clip"),
    "seed",
)


class Plan:
    """The inputs, data, steps and rules of a run.

    Attributes:
      settings: the settings, with those of the adapter that `adapter.complete` fills in.
      folder: the folder of the base model.
      texts: the text settings of the adapted model: the base model's, and the tokens that end the
        learned replies.
      started: when the run was first started. A chat template that writes the time writes this one,
        so that a resumed run has the same data.
      encoder: turns records into examples.
      config: the config of the decoder.
      changes: the fields of `config` that are not taken from config.json, except the sharding.
      rules: the rules for `apply_dora`.
      checkpoints: the checkpoints of the run.
      rows: the packed examples to train on.
      eval_rows: the packed examples to evaluate on, or None.
      examples_to_show: the first examples that fit into a row, of `eval_rows` if given.
      step_rows: the rows of a step, (accumulate, batch).
      steps: the number of optimizer steps of the whole run.
      sharding: the sharding of the model on a mesh; None for one device.
      fixed: the settings and checksums that must not change when the run is resumed.
      eval_digest: a checksum of `eval_rows`, or None.
    """

    def __init__(self, settings: Settings, console: Console) -> None:
        """
        Raises:
          ValueError, TypeError, NotImplementedError, ImportError, OSError: a setting, file or
            folder is wrong.
        """
        processes.check_equal(dataclasses.asdict(settings))
        self.settings = settings = adapter.complete(settings)
        self.console = console
        self.checkpoints = Checkpoints(settings.output / "checkpoints", settings.keep)
        if not settings.resume and self.checkpoints.steps():
            raise FileExistsError(
                f"output={settings.output}: it already contains a run; pass resume=True to "
                "continue it, or choose another `output`"
            )
        if (merge := settings.merge) is not None:
            processes.run_on_first(lambda: check_merge(merge, settings.output))
        needed = {"matplotlib": "'jax-dora[finetune]'"}
        if (name := settings.report_to) is not None:
            needed |= {"tensorboardX" if name == "tensorboard" else name: f"'jax-dora[{name}]'"}
        for name, extra in needed.items():
            if find_spec(name) is None:
                raise ImportError(f"{name} is not installed; run: pip install {extra}")
        for name in ("data", "eval_data"):
            if missing := [file for file in getattr(settings, name) if not file.exists()]:
                raise FileNotFoundError(f"{name}={missing[0]}: expected a file; it does not exist")
        self.folder = settings.model
        check_output(settings.output, self.folder)
        config = read_config(self.folder)
        # What the adapter was trained with, so that its answers go on as they were.
        self.texts = TextSettings.of(
            self.folder, config, adapter=settings.from_adapter, end_tokens=settings.end_tokens
        )
        if self.texts.own:
            self._print(f"Note: using the {self.texts.own} in {settings.from_adapter}")
        columns = settings.columns or {}
        texts = self.texts
        self.started = self._started()
        if texts.template is not None:
            texts.template.now = self.started
        self.encoder = Encoder(texts.tokenizer, texts.end_tokens, texts.template, columns)
        self.changes: dict[str, Any] = {"dtype": settings.dtype, "memory": "auto"}
        self.changes["unroll"] = settings.unroll
        self.config = DecoderConfig.from_hf(config, **self.changes)
        self.rows, examples = self._read(settings.data)
        self.eval_rows = None
        if settings.eval_data:
            self.eval_rows, examples = self._read(settings.eval_data)
        self.examples_to_show = examples[: settings.samples]
        self.step_rows = (settings.accumulate, settings.batch)
        epochs = 1.0 if settings.epochs is None else settings.epochs
        self.steps = settings.steps or math.ceil(
            epochs * len(self.rows.tokens) / math.prod(self.step_rows)
        )
        if settings.warmup >= self.steps:
            raise ValueError(
                f"warmup={settings.warmup}: expected less than the run's {self.steps} steps"
            )
        # cuDNN has no sliding window within packed texts.
        is_short = self.config.dtype != jnp.float32 and self.config.sliding_window is None
        if jax.default_backend() == "gpu" and is_short:
            self.changes |= {"attention": "cudnn", "segments": self._segments()}
        self.sharding: DecoderSharding | None = None
        self.sharding = self._sharding()
        self.config = dataclasses.replace(self.config, sharding=self.sharding)
        base = abstract_model(self.folder, **self.load_options)
        self.rules = adapter.rules(settings, base)
        self.fixed = {name: getattr(settings, name) for name in FIXED} | {
            # The split of a step into micro-batches can change, but not its number of rows.
            "rows of a step": math.prod(self.step_rows),
            # The contents of the files count, not their paths.
            "data": _digest(self.rows),
            "weights": fingerprint(self.folder),
            "config": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
        }
        if settings.from_adapter is not None:
            tensors = (settings.from_adapter / TENSORS).read_bytes()
            self.fixed["from_adapter"] = hashlib.sha256(tensors).hexdigest()
        self.eval_digest = None if self.eval_rows is None else _digest(self.eval_rows)
        processes.check_equal(self.fixed | {"eval_data": self.eval_digest})

    @functools.cached_property
    def schedule(self) -> optax.Schedule:
        """The learning rate as a function of the step, from 0."""
        return make_schedule(self.settings, self.steps)

    @functools.cached_property
    def abstract_model(self) -> CausalLM:
        """The adapted model, with shapes and dtypes instead of arrays."""
        base = abstract_model(self.folder, **self.load_options)
        graphdef, state = nnx.split(base)

        def adapt(state: nnx.State) -> CausalLM:
            model = nnx.merge(graphdef, state)
            return adapter.adapt(model, self.settings, self.rules, is_abstract=True)

        return nnx.eval_shape(adapt, state)

    @property
    def load_options(self) -> dict[str, Any]:
        """The keyword arguments of `load_model`."""
        names = ("quantize", "act_qtype", "bwd_qtype")
        formats = {name: getattr(self.settings, name) for name in names}
        return {"sharding": self.sharding, **formats, **self.changes}

    def adapt(self, model: CausalLM) -> CausalLM:
        """Returns `model` with the adapter that training starts from, in training mode."""
        return adapter.adapt(model, self.settings, self.rules)

    def _started(self) -> datetime.datetime:
        # A checkpoint may be damaged, and all have the same time.
        for step in self.checkpoints.steps():
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                return datetime.datetime.fromisoformat(self.checkpoints.facts(step)["started"])
        return datetime.datetime.now()

    def _segments(self) -> int | None:
        """Returns the maximum number of texts in a row, rounded up to a power of two.

        Returns None if there are too many texts for cuDNN.
        """
        packed = [rows for rows in (self.rows, self.eval_rows) if rows is not None]
        # Padding counts as one more text.
        count = 1 << max(int(rows.segment_ids.max()) for rows in packed).bit_length()
        return count if count <= MAX_SEGMENTS else None

    def _sharding(self) -> DecoderSharding | None:
        """Returns the sharding of the model; None for a single device."""
        sizes: Any = self.settings.mesh
        if sizes is None and jax.process_count() == 1:
            return None
        if sizes in (None, "auto"):
            # Replicated weights are faster: sharded weights are gathered in every pass.
            model = abstract_model(self.folder, **self.load_options)
            axis = "dp" if estimate.can_replicate(model) else "fsdp"
            sizes = {axis: jax.device_count()}
        sharding = DecoderSharding.over(**sizes)
        sharding.check(batch=self.settings.batch)
        return sharding

    def _read(self, files: Sequence[Path]) -> tuple[packing.Rows, list[packing.Example]]:
        """Returns the rows of data files, and their examples that fit into a row."""
        records = itertools.chain.from_iterable(map(read_records, files))
        examples = list(self.encoder.examples(records))
        names = ", ".join(map(str, files))
        self._add_learned_ends(names, examples)
        length, kind = self.settings.length, self.settings.split
        splits = {"text": lambda one: one.is_text, "all": lambda _: True, "none": lambda _: False}
        parts = [packing.split(one, length) if splits[kind](one) else [one] for one in examples]
        packed = packing.pack([*itertools.chain.from_iterable(parts)], length)
        largest = max(max(example.tokens) for example in examples if example.tokens)
        if largest >= self.config.vocab_size:
            raise ValueError(
                f"the tokenizer in {self.texts.tokenizer_folder} returns token {largest}; expected "
                f"less than config.json's vocab_size {self.config.vocab_size}: is it the tokenizer "
                "of another model, or of one whose vocabulary was resized?"
            )
        longest = int(packed.rows.positions.max()) + 1
        self.texts.check_length(
            longest,
            f"{names} has an example of {longest} tokens",
            f": pass length={self.texts.max_tokens} to split or truncate it",
        )
        full = (packed.rows.segment_ids > 0).mean()
        self._print(
            f"{names}: {packed.examples} examples in {len(packed.rows.tokens)} rows, {full:.0%} "
            f"full; {sum(len(one) > 1 for one in parts)} split into rows, {packed.truncated} "
            f"truncated to {length} tokens, {packed.dropped} dropped because nothing to learn was "
            "left"
        )
        # Generating from a prompt longer than a row could need more memory than training.
        fitting = [example for example in examples if len(example.tokens) <= length + 1]
        return packed.rows, fitting

    def _add_learned_ends(self, names: str, examples: list[packing.Example]) -> None:
        """Adds the tokens that end the learned replies to those that end a text.

        Warns about replies that end in no such token.
        """
        texts = self.texts
        special, others = learned_ends(examples, texts.tokenizer, texts.end_tokens)
        self.texts = texts.with_end_tokens([*texts.end_tokens, *special])
        if special:
            shown = ", ".join(f"{texts.tokenizer.id_to_token(one)!r} ({one})" for one in special)
            self._print(f"{names}: replies end in {shown}, which therefore ends answers, too")
        if others:
            [(token, _)] = others.most_common(1)
            shown = texts.tokenizer.decode([token], skip_special_tokens=False)
            self._print(
                f"Warning: {others.total()} learned replies of {names} end in no token that ends "
                f"an answer, most of them in {shown!r} ({token}), so answers may not end; expected "
                "a chat template that writes such a token after every reply, or `end_tokens` with "
                "the one that it writes"
            )

    def _print(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False)


def _digest(rows: packing.Rows) -> str:
    digest = hashlib.sha256()
    for array in rows:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
