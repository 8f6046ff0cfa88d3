"""A run: model and data in, steps, checkpoints and evaluation, adapter out."""

import argparse
import dataclasses
import hashlib
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

import jax_dora
import jax_dora.peft
from jax_dora.finetune import data, tiny, training
from jax_dora.finetune.checkpoints import Checkpoints
from jax_dora.finetune.guard import Interruption, LossGuard
from jax_dora.models import CausalLM, DecoderConfig, load_model, read_config, save_model

INTERRUPTED = 130
EMBEDDING = "model/embed_tokens"
# A run may be taken up with other values of these.
FREE = ("output", "resume", "checkpoint_every", "keep", "eval_every", "eval_data", "merge", "model")


class Run:
    """A model with its adapter, the packed data, and a folder of checkpoints."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self.args, self.console = args, console
        self.checkpoints = args.output / "checkpoints"
        if self.checkpoints.exists() and not args.resume:
            raise FileExistsError(
                f"{args.output} holds a run already; pass --resume to go on with it, or another "
                "--output"
            )
        if args.merge is not None and args.merge.exists():
            raise FileExistsError(f"--merge {args.merge} exists; expected a folder to be made")
        args.output.mkdir(parents=True, exist_ok=True)
        self.folder, file = self._inputs()
        config, tokenizer_file = read_config(self.folder), self.folder / "tokenizer.json"
        if not tokenizer_file.is_file():
            raise FileNotFoundError(
                f"{tokenizer_file} is missing: expected the tokenizer's fast form there"
            )
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self.rows = self._read(file, tokenizer, config)
        self.eval_rows = None
        if args.eval_data is not None:
            self.eval_rows = self._read(args.eval_data, tokenizer, config)
        self.step_rows = (args.accumulate, args.batch)
        self.steps = args.steps or math.ceil(
            args.epochs * len(self.rows.tokens) / math.prod(self.step_rows)
        )
        self.settings = {name: value for name, value in vars(args).items() if name not in FREE}
        # What the files hold counts, not where they lie.
        described = json.dumps(config, sort_keys=True).encode()
        self.settings["data"] = hashlib.sha256(file.read_bytes()).hexdigest()
        self.settings["config"] = hashlib.sha256(described).hexdigest()
        self.schedule = self._schedule()
        options = {"clip": args.clip, "weight_decay": args.weight_decay}
        self.optimizer = training.make_optimizer(self.schedule, **options)
        self.parts = training.take_apart(self._adapted_model())
        self.state = self.optimizer.init(self.parts.adapters)
        self.done = 0  # steps
        self.guard = LossGuard()

    def take_up(self) -> None:
        """Goes back to the last checkpoint, if there is one."""
        with Checkpoints(self.checkpoints, self.args.keep) as checkpoints:
            if (latest := checkpoints.latest()) is None:
                return
            facts = checkpoints.facts(latest)
            self._check_settings(facts["settings"])
            adapters, self.state, counts = checkpoints.restore(latest, self._kept())
            moving = nnx.merge_state(self.parts.moving, counts)
            self.parts = self.parts._replace(adapters=adapters, moving=moving)
            self.done, self.guard = latest, LossGuard(facts["mean_loss"])

    def train(self) -> int:
        """Trains, saves and exports; returns the exit status."""
        args, first = self.args, self.done
        with (
            Checkpoints(self.checkpoints, args.keep) as checkpoints,
            Interruption() as interruption,
        ):
            with self._metrics_file(first) as log, self._progress() as progress:
                task = progress.add_task("", total=self.steps, completed=first, speed="", loss="")
                for step in range(first + 1, self.steps + 1):
                    start = time.perf_counter()
                    rows = data.batch(self.rows, step - 1, self.step_rows, args.seed)
                    metrics = self._step(rows)
                    self.guard.check(step, metrics)
                    speed = (rows.segment_ids > 0).sum() / (time.perf_counter() - start)
                    shown: dict = {
                        "loss": f"loss {float(metrics.loss):.4f}",
                        "speed": f"{speed:,.0f} tokens/s",
                    }
                    progress.update(task, advance=1, **shown)
                    line = {
                        "step": step,
                        "loss": float(metrics.loss),
                        "gradient_norm": float(metrics.gradient_norm),
                        "learning_rate": float(jax.device_get(self.schedule(step - 1))),
                        "tokens_per_second": round(speed, 1),
                    }
                    last = step == self.steps or interruption.requested
                    if self.eval_rows is not None and (last or step % args.eval_every == 0):
                        line["eval_loss"] = self._evaluate(step)
                    log.write(json.dumps(line) + "\n")
                    log.flush()
                    if last or step % args.checkpoint_every == 0:
                        facts = {"settings": self.settings, "mean_loss": self.guard.mean}
                        checkpoints.save(step, self._kept(), facts)
                    if interruption.requested and step < self.steps:
                        self.console.print(
                            f"Interrupted after step {step} of {self.steps}, and saved: the same "
                            "command with --resume goes on from there."
                        )
                        return INTERRUPTED
        self._export()
        return 0

    def _step(self, rows: data.Rows) -> training.Metrics:
        loss, gradients, moving = training.accumulate(*self.parts, rows)
        adapters, self.state, metrics = training.update(
            self.optimizer, self.parts.adapters, self.state, gradients, loss
        )
        self.parts = self.parts._replace(adapters=adapters, moving=moving)
        return jax.device_get(metrics)

    def _kept(self) -> tuple[nnx.State, optax.OptState, nnx.State]:
        """Returns what a checkpoint holds. Everything else follows from it, or from the
        settings."""
        counts = nnx.filter_state(self.parts.moving, nnx.RngCount)
        return self.parts.adapters, self.state, counts

    def _evaluate(self, step: int) -> float:
        assert self.eval_rows is not None
        loss = training.evaluate(self.parts.model(), self.eval_rows, self.args.batch)
        self.console.print(f"step {step}: evaluation loss {loss:.4f}")
        return loss

    def _export(self) -> None:
        args = self.args
        model = self.parts.model()
        jax_dora.peft.save_adapter(
            model,
            args.output / "adapter",
            base_model_name_or_path=str(self.folder),
            task_type="CAUSAL_LM",
            overwrite=True,
        )
        self.console.print(f"The adapter is in {args.output / 'adapter'}")
        if args.merge is not None:
            merged, report = jax_dora.merge_dora(model, return_report=True)
            save_model(merged, args.merge, read_config(self.folder), tokenizer_from=self.folder)
            self.console.print(f"The merged model is in {args.merge}; what rounding cost:")
            self.console.print(str(report), markup=False, soft_wrap=True)

    def _inputs(self) -> tuple[Path, Path]:
        """The model's folder and the data's file, made if they are to be."""
        args = self.args
        folder, file = args.model, args.data
        if args.tiny:
            if folder is not None:
                raise ValueError("--model and --tiny are both given; expected one of them")
            folder = args.output / "tiny-model"
            if not folder.exists():
                tiny.make_tiny_model(folder, args.seed)
            if file is None:
                file = args.output / "tiny.jsonl"
                tiny.make_tiny_data(file, args.seed)
        if folder is None or file is None:
            raise ValueError("--model or --data is missing; give both, or --tiny, which makes them")
        for name, value in (("data", file), ("eval-data", args.eval_data)):
            if value is not None and not value.is_file():
                raise FileNotFoundError(f"--{name} {value} is no file; expected JSONL")
        return folder, file

    def _read(self, file: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> data.Rows:
        end = config.get("eos_token_id")
        end = end[0] if isinstance(end, list) and end else end
        if not isinstance(end, int):
            raise ValueError(
                f"config.json has eos_token_id {end!r}; expected the number of a token"
            )
        packed = data.pack(list(data.read_examples(file, tokenizer, end)), self.args.length)
        if packed.rows.tokens.max() >= config["vocab_size"]:
            raise ValueError(
                f"the tokenizer makes token {packed.rows.tokens.max()}; expected less than "
                f"config.json's vocab_size {config['vocab_size']}: it belongs to another model"
            )
        full = (packed.rows.segment_ids > 0).mean()
        self.console.print(
            f"{file}: {packed.examples} examples in {len(packed.rows.tokens)} rows, {full:.0%} "
            f"full; {packed.truncated} cut to {self.args.length} tokens, {packed.dropped} dropped "
            "whose prompt alone is longer",
            soft_wrap=True,
        )
        return packed.rows

    def _schedule(self) -> optax.Schedule:
        args = self.args
        steps = max(1, self.steps - args.warmup)
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

    def _adapted_model(self) -> CausalLM:
        args = self.args
        changes: dict[str, Any] = {"dtype": jnp.dtype(args.dtype)} if args.dtype else {}
        config = DecoderConfig.from_hf(read_config(self.folder), **changes)
        if jax.default_backend() == "gpu" and config.dtype != jnp.float32:
            changes["attention"] = "cudnn"
        model = load_model(self.folder, **changes)
        rules = self._rules(model)
        takes_embedding = any(rule.matches(EMBEDDING) for rule in rules)
        if args.merge is not None and takes_embedding and config.tie_word_embeddings:
            raise ValueError(
                f"--merge is given and --target {args.target!r} takes the embedding, to which this "
                "model's head is tied; expected the head to stay as it is, as in PEFT, which no "
                "merged folder of a tied model can say: leave out --merge, or the embedding"
            )
        model = jax_dora.apply_dora(model, rules, rngs=nnx.Rngs(args.seed))
        model.train()
        return model

    def _rules(self, model: CausalLM) -> list[jax_dora.DoRARule]:
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
        paths = ("/".join(map(str, path)) for path, _ in nnx.iter_modules(model))
        takes_others = any(rule.matches(path) for path in paths if path != EMBEDDING)
        return [embedding, rule] if takes_others else [embedding]

    def _check_settings(self, saved: dict[str, Any]) -> None:
        now = json.loads(json.dumps(self.settings, default=str))
        changed = {name for name in now | saved if now.get(name) != saved.get(name)}
        if changed:
            told = [f"{n} was {saved.get(n)!r} and is {now.get(n)!r}" for n in sorted(changed)]
            raise ValueError(f"--resume goes on with the same run only, but {', '.join(told)}")

    def _metrics_file(self, step: int) -> Any:
        """metrics.jsonl without what was written after `step`, open for more."""
        file = self.args.output / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if step and file.exists() else []
        file.write_text("".join(line for line in lines if json.loads(line)["step"] <= step))
        return file.open("a")

    def _progress(self) -> Progress:
        told = (TextColumn("{task.fields[loss]}"), TextColumn("{task.fields[speed]}"))
        columns = (BarColumn(), MofNCompleteColumn(), *told, TimeRemainingColumn())
        return Progress(*columns, console=self.console)
