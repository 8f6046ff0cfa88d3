"""A run: steps, checkpoints and evaluation, adapter out."""

import json
import shutil
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import jax_dora
import jax_dora.peft
from jax_dora.finetune import data, estimate, processes, results, training
from jax_dora.finetune.guard import Interruption, LossGuard
from jax_dora.finetune.log import Line, Log
from jax_dora.finetune.plan import Plan
from jax_dora.models import activations, load_model, read_config, save_model
from jax_dora.models.sharding import whole

INTERRUPTED = 130


class Run:
    """A model with its adapter, as far as it is trained.

    Attributes:
      done: steps.
      saved: steps that a checkpoint in the run's folder has, 0 if there is none.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.args, self.console = plan, plan.args, plan.console
        options = {"clip": plan.args.clip, "weight_decay": plan.args.weight_decay}
        self.optimizer = training.make_optimizer(plan.schedule, **options)
        reading: dict[str, Any] = plan.reading
        if jax.process_count() > 1:
            # Every process compiles the same program, whatever its device has free.
            reading["memory"] = estimate.free_memory(plan) / activations.GIB
        model = plan.adapted(load_model(plan.folder, **reading))
        self.parts = training.Parts.of(model)
        self.state = self.optimizer.init(self.parts.adapters)
        if plan.sharding is not None:
            self.parts = self.parts._replace(moving=plan.sharding.placed(self.parts.moving))
            self.state = plan.sharding.placed(self.state)
        self.done = self.saved = 0
        self.guard = LossGuard()
        self.eval_data = plan.eval_digest  # that these are of
        self.best: float | None = None  # evaluation loss
        self.worse = 0  # evaluations since then

    def take_up(self) -> None:
        """Goes back to the last sound checkpoint, if there is one; names the others."""
        if not self.args.resume:
            return
        checkpoints = self.plan.checkpoints
        step = self._last_sound()
        if step is None:
            self._tell(f"--resume: {self.args.output} has no checkpoint; starting at step 1")
            return
        facts = checkpoints.facts(step)
        self._check_settings(facts["settings"])
        self._check_steps(step, facts["steps"])
        adapters, self.state, counts = checkpoints.restore(step, self._kept())
        moving = nnx.merge_state(self.parts.moving, counts)
        self.parts = self.parts._replace(adapters=adapters, moving=moving)
        self.done = self.saved = step
        self.guard = LossGuard(facts["mean_loss"])
        if self.eval_data in (None, facts["eval_data"]):
            self.best, self.worse = facts["best"], facts["worse"]
            self.eval_data = facts["eval_data"]
        elif facts["best"] is not None:
            self._tell("--resume: --eval-data is another; losses on the one before count no more")
        self._tell(f"--resume: going on after step {step} of {self.plan.steps}")

    def train(self) -> int:
        """Trains, saves and exports; returns the exit status."""
        args, plan = self.args, self.plan
        folder = args.output if processes.is_first() else None  # which writes for all
        with (
            Interruption() as interruption,
            Log(folder, self.done, tensorboard=args.tensorboard) as log,
            self._progress() as progress,
        ):
            is_short = not log.lines or log.lines[-1]["step"] != self.done
            if self.done and is_short:
                self._tell(f"metrics.jsonl was damaged, and has lines up to {len(log.lines)} only")
            task = progress.add_task("", total=plan.steps, completed=self.done, told="compiling")
            while self.done < plan.steps and not self._is_out_of_patience():
                step = self.done + 1
                start = time.perf_counter()
                rows = data.batch(plan.rows, step - 1, plan.step_rows, args.seed)
                metrics = self._step(rows)
                self.guard.check(step, metrics, lambda rows=rows: self._base_loss(rows))
                self.done = step
                speed = (rows.segment_ids > 0).sum() / (time.perf_counter() - start)
                loss = float(metrics.loss)
                told = f"loss {loss:.4f} {speed:,.0f} tokens/s"
                progress.update(task, advance=1, told=told)
                line: Line = {
                    "step": step,
                    "loss": loss,
                    "gradient_norm": float(metrics.gradient_norm),
                    "learning_rate": float(jax.device_get(plan.schedule(step - 1))),
                    "tokens_per_second": round(speed, 1),
                }
                interrupted, last = processes.anywhere(interruption.requested), step == plan.steps
                # Not for an interruption, which is to leave no trace in the result.
                if plan.eval_rows is not None and (last or step % (args.eval_every or 50) == 0):
                    line["eval_loss"] = self._evaluate(step)
                    last = last or self._is_out_of_patience()
                log.add(line)
                if last or interrupted or step % args.checkpoint_every == 0:
                    self._save()
                if interrupted and step < plan.steps:
                    self.console.print(f"Interrupted after step {step}; {self.way_on()}")
                    return INTERRUPTED
            if self.done < plan.steps:
                self._tell(f"--patience: {self.worse} evaluations without a lower loss; stopping")
        self._export(log.lines)
        return 0

    def way_on(self) -> str:
        """Says how to go on with the run after it has stopped."""
        if not self.saved:
            return "Nothing is saved yet: the same command starts again"
        return f"Step {self.saved} is saved: the same command with --resume goes on from there"

    def _last_sound(self) -> int | None:
        checkpoints = self.plan.checkpoints
        for left in checkpoints.unfinished():
            self._tell(f"--resume: {left} is a checkpoint that was not finished")
        for step in reversed(checkpoints.steps()):
            damage = checkpoints.damage(step)
            if damage is None:
                return step
            self._tell(f"--resume: {damage}")
        if checkpoints.steps():
            raise ValueError(
                f"--resume: none of the checkpoints in {checkpoints.folder} is sound; start again "
                "with another --output"
            )
        return None

    def _step(self, rows: data.Rows) -> training.Metrics:
        if self.plan.sharding is not None:
            rows = rows.placed(self.plan.sharding.micro_batches)
        loss, gradients, moving = training.accumulate(*self.parts, rows)
        adapters, self.state, metrics = training.update(
            self.optimizer, self.parts.adapters, self.state, gradients, loss
        )
        self.parts = self.parts._replace(adapters=adapters, moving=moving)
        return jax.device_get(metrics)

    def _kept(self) -> tuple[nnx.State, optax.OptState, nnx.State]:
        """Returns the contents of a checkpoint. Everything else follows from it, or from the
        settings."""
        counts = nnx.filter_state(self.parts.moving, nnx.RngCount)
        return self.parts.adapters, self.state, counts

    def _save(self) -> None:
        facts = {
            "settings": self.plan.settings,
            "steps": self.plan.steps,
            "mean_loss": self.guard.mean,
            "best": self.best,
            "worse": self.worse,
            "eval_data": self.eval_data,
        }
        kept, save = jax.tree.map(whole, self._kept()), self.plan.checkpoints.save
        processes.first_does(lambda: save(self.done, kept, facts))
        self.saved = self.done

    def _evaluate(self, step: int) -> float:
        assert self.plan.eval_rows is not None
        loss = training.evaluate(self.parts.model(), self.plan.eval_rows, self.args.batch)
        told = ""
        if self.best is None or loss < self.best:
            self.best, self.worse, told = loss, 0, ", the lowest so far"
            self._save_adapter("best")
        else:
            self.worse += 1
        self._tell(f"step {step}: evaluation loss {loss:.4f}{told}")
        return loss

    def _is_out_of_patience(self) -> bool:
        return self.args.patience is not None and self.worse >= self.args.patience

    def _base_loss(self, rows: data.Rows) -> float:
        rows = data.Rows(*(np.reshape(array, (-1, array.shape[-1])) for array in rows))
        base = jax_dora.remove_dora(self.parts.model())
        return training.evaluate(base, rows, self.args.batch)

    def _export(self, lines: list[Line]) -> None:
        args, folder = self.args, self.plan.folder
        adapter, model = args.output / "adapter", self.parts.model()
        model.eval()
        self._save_adapter("adapter")
        samples = results.take_samples(self.plan, model)
        if lines and processes.is_first():
            results.draw_losses(lines, args.output / "loss.svg")
            shutil.copy(args.output / "loss.svg", adapter)
            results.write_card(self.plan, lines, samples, adapter / "README.md")
        for one in samples:
            self._tell(f"{one.prompt!r}: {one.generated!r}, where the data has {one.expected!r}")
        self._tell(f"The adapter is in {adapter}")
        if self.best is not None:
            best = args.output / "best"
            self._tell(f"The one of the lowest evaluation loss, {self.best:.4f}, is in {best}")
        if args.merge is not None:
            merged, report = jax_dora.merge_dora(model, return_report=True)
            save_model(merged, args.merge, read_config(folder), tokenizer_from=folder)
            self._tell(f"The merged model is in {args.merge}; what rounding cost:")
            self._tell(str(report))

    def _save_adapter(self, name: str) -> None:
        parts = self.parts
        if jax.process_count() > 1:
            # The adapter alone is read: the rest stays where it is.
            parts = parts._replace(
                adapters=jax.tree.map(lambda x: jnp.asarray(whole(x)), parts.adapters)
            )

        def save() -> None:
            jax_dora.peft.save_adapter(
                parts.model(),
                self.args.output / name,
                base_model_name_or_path=str(self.plan.folder),
                task_type="CAUSAL_LM",
                overwrite=True,
            )

        processes.first_does(save)

    def _check_settings(self, saved: dict[str, Any]) -> None:
        now = json.loads(json.dumps(self.plan.settings))
        changed = {name for name in now | saved if now.get(name) != saved.get(name)}
        if changed:
            told = [f"{n} was {saved.get(n)!r} and is {now.get(n)!r}" for n in sorted(changed)]
            raise ValueError(f"--resume goes on with the same run only, but {', '.join(told)}")

    def _check_steps(self, done: int, before: int) -> None:
        now = self.plan.steps
        if now < done:
            raise ValueError(
                f"--resume: the run is at step {done}, after the last of {now}; expected more "
                "--steps or --epochs"
            )
        if now != before:
            self._tell(
                f"--resume: the run had {before} steps and has {now}; from step {done + 1} on the "
                f"{self.args.schedule} schedule is that of {now}"
            )

    def _tell(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _progress(self) -> Progress:
        told = TextColumn("{task.fields[told]}")
        columns = (BarColumn(), MofNCompleteColumn(), told, TimeRemainingColumn())
        return Progress(*columns, console=self.console)
