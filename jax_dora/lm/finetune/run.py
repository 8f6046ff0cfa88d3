"""Runs fine-tuning: steps, evaluation, checkpoints, and the export of the adapter."""

import json
import shutil
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import jax_dora
import jax_dora.peft
from dora_common.replacement import replace_text, replaced_file
from jax_dora.lm.finetune import adapter, estimate, packing, processes, results, training
from jax_dora.lm.finetune.log import Callback, Line, Log, reporting
from jax_dora.lm.finetune.output import locked_output
from jax_dora.lm.finetune.plan import FIXED, Plan
from jax_dora.lm.finetune.report import report
from jax_dora.lm.finetune.results import Result
from jax_dora.lm.finetune.settings import Settings
from jax_dora.lm.finetune.stopping import DivergenceCheck, Interruption
from jax_dora.lm.models import CausalLM, activations, load_model, read_config, save_model
from jax_dora.lm.models.decoder import step_options
from jax_dora.lm.models.sharding import to_host


def run(
    settings: Settings, *, console: Console | None = None, callback: Callback | None = None
) -> Result:
    """Fine-tunes a model, as the command `jax-dora finetune` does.

    Args:
      settings: the settings.
      console: where to print the progress; standard output by default.
      callback: is called after each step with its line of metrics.jsonl, {"step": 1, "loss": ...}.
        An error that it raises ends the run.

    Raises:
      ValueError, TypeError, NotImplementedError, ImportError, OSError: a setting, file or folder is
        wrong, or another run uses the output folder.
      DivergedError: the loss has diverged. The last checkpoint is kept.
    """
    console = console or Console(quiet=not processes.is_first())
    with locked_output(settings.output):
        plan = Plan(settings, console)
        console.print(report(plan))
        return Run(plan).train(*[] if callback is None else [callback])


class Run:
    """The state of a run: the model with its adapter, the optimizer, and the progress.

    Attributes:
      done: the number of finished steps.
      saved: the step of the latest checkpoint; 0 if there is none.
    """

    def __init__(self, plan: Plan) -> None:
        """Loads the model and, if the run is resumed, the latest valid checkpoint.

        Raises:
          ValueError: all checkpoints are damaged, or the settings of the run have changed.
        """
        self.plan, self.settings, self.console = plan, plan.settings, plan.console
        settings = self.settings
        self.optimizer = training.make_optimizer(
            settings.optimizer,
            plan.schedule,
            clip=settings.clip,
            weight_decay=settings.weight_decay,
        )
        options: dict[str, Any] = plan.load_options
        if jax.process_count() > 1:
            # All processes must compile the same program, whatever memory their devices have free.
            sizes = settings.batch, settings.length
            free = estimate.free_memory(plan.abstract_model, *sizes)
            options["memory"] = free / activations.GIB
        model = plan.adapt(load_model(plan.folder, **options))
        self.trained = adapter.trained_magnitudes(model, settings.method)
        self.accumulate = training.accumulate_with(step_options(model))
        self.parts = training.Parts.of(model)
        self.state = self.optimizer.init(self.parts.adapters)
        if plan.sharding is not None:
            self.parts = self.parts._replace(streams=plan.sharding.placed(self.parts.streams))
            self.state = plan.sharding.placed(self.state)
        self.done = self.saved = 0
        self.divergence = DivergenceCheck()
        self.best: float | None = None  # the lowest evaluation loss
        self.worse = 0  # evaluations since the lowest loss
        self.eval_data = plan.eval_digest  # of the data that `best` and `worse` refer to
        if settings.resume:
            self._restore()

    def _restore(self) -> None:
        """Restores the latest valid checkpoint, if there is one."""
        checkpoints = self.plan.checkpoints
        step = self._last_valid_step()
        if step is None:
            self._print(f"{self.settings.output} has no checkpoint; starting at step 1")
            return
        facts = checkpoints.facts(step)
        self._check_settings(facts["settings"])
        self._check_steps(step, facts["steps"])
        adapters, self.state, counts = checkpoints.restore(step, self._checkpoint_arrays())
        streams = nnx.merge_state(self.parts.streams, counts)
        self.parts = self.parts._replace(adapters=adapters, streams=streams)
        self.done = self.saved = step
        self.divergence = DivergenceCheck(facts["mean_loss"])
        if self.eval_data in (None, facts["eval_data"]):
            self.best, self.worse = facts["best"], facts["worse"]
            self.eval_data = facts["eval_data"]
        elif facts["best"] is not None:
            self._print("The evaluation data have changed; earlier evaluation losses are ignored")
        self._print(f"Continuing after step {step} of {self.plan.steps}")

    def train(self, *callbacks: Callback) -> Result:
        """Trains, saves and exports.

        After each step, `callbacks` are called with its metrics.

        An error gets a note on how to resume the run.
        """
        try:
            return self._train(*callbacks)
        except (Exception, KeyboardInterrupt) as error:
            error.add_note(self.how_to_resume())
            raise

    def _train(self, *callbacks: Callback) -> Result:
        settings, plan = self.settings, self.plan
        folder = settings.output if processes.is_first() else None  # only the first process writes
        reporter = None if folder is None else settings.report_to
        with (
            Interruption() as interruption,
            reporting(reporter, settings.output, self.done, plan.fixed) as more,
            Log(folder, self.done, *callbacks, *more) as log,
            self._progress() as progress,
        ):
            is_short = not log.lines or log.lines[-1]["step"] != self.done
            if self.done and is_short:
                self._print(
                    f"metrics.jsonl was damaged; only its first {len(log.lines)} lines remain"
                )
            task = progress.add_task("", total=plan.steps, completed=self.done, status="compiling")
            while self.done < plan.steps and not self._is_out_of_patience():
                step = self.done + 1
                start = time.perf_counter()
                rows = packing.batch(plan.rows, step - 1, plan.step_rows, settings.seed)
                metrics = self._step(rows)
                self.divergence.check(step, metrics, lambda rows=rows: self._base_loss(rows))
                self.done = step
                speed = (rows.segment_ids > 0).sum() / (time.perf_counter() - start)
                loss = float(metrics.loss)
                status = f"loss {loss:.4f} {speed:,.0f} tokens/s"
                progress.update(task, advance=1, status=status)
                line: Line = {
                    "step": step,
                    "loss": loss,
                    "gradient_norm": float(metrics.gradient_norm),
                    "learning_rate": float(jax.device_get(plan.schedule(step - 1))),
                    "tokens_per_second": round(speed, 1),
                }
                interrupted = processes.any_process(interruption.requested)
                last = step == plan.steps
                # An interruption does not evaluate, so that it does not change the result.
                if plan.eval_rows is not None and (last or step % (settings.eval_every or 50) == 0):
                    line["eval_loss"] = self._evaluate(step)
                    last = last or self._is_out_of_patience()
                log.add(line)
                if last or interrupted or step % settings.checkpoint_every == 0:
                    self._save()
                if interrupted and step < plan.steps:
                    self._print(f"Interrupted after step {step}. {self.how_to_resume()}")
                    return self._result(log.lines, is_interrupted=True)
            if self.done < plan.steps:
                self._print(f"Stopping after {self.worse} evaluations without a lower loss")
        self._export(log.lines)
        return self._result(log.lines)

    def _result(self, lines: list[Line], *, is_interrupted: bool = False) -> Result:
        output = self.settings.output
        exported = None if is_interrupted else output / "adapter"
        best = None if self.best is None else output / "best"
        return Result(lines, exported, best, is_interrupted)

    def how_to_resume(self) -> str:
        """Returns a sentence on how to continue the run after it has stopped."""
        if not self.saved:
            return "Nothing is saved yet; start the run again"
        return f"Step {self.saved} is saved; start the run again with resume=True to continue"

    def _last_valid_step(self) -> int | None:
        """Returns the step of the latest valid checkpoint, and prints which ones are not valid."""
        checkpoints = self.plan.checkpoints
        for folder in checkpoints.unfinished():
            self._print(f"{folder} is an incomplete checkpoint; ignoring it")
        for step in reversed(checkpoints.steps()):
            damage = checkpoints.damage(step)
            if damage is None:
                return step
            self._print(f"{damage}; ignoring checkpoint {step}")
        if checkpoints.steps():
            raise ValueError(
                f"resume=True: expected a valid checkpoint, but none of the checkpoints in "
                f"{checkpoints.folder} is valid; start again with another `output`"
            )
        return None

    def _step(self, rows: packing.Rows) -> training.Metrics:
        if self.plan.sharding is not None:
            rows = rows.placed(self.plan.sharding.micro_batches)
        loss, gradients, streams = self.accumulate(*self.parts, rows, self.trained)
        adapters, self.state, metrics = training.update(
            self.optimizer, self.parts.adapters, self.state, gradients, loss
        )
        self.parts = self.parts._replace(adapters=adapters, streams=streams)
        return jax.device_get(metrics)

    def _checkpoint_arrays(self) -> tuple[nnx.State, optax.OptState, nnx.State]:
        """Returns the arrays of a checkpoint. All other state follows from the settings."""
        counts = nnx.filter_state(self.parts.streams, nnx.RngCount)
        return self.parts.adapters, self.state, counts

    def _save(self) -> None:
        facts = {
            "settings": self.plan.fixed,
            "started": self.plan.started.isoformat(),
            "steps": self.plan.steps,
            "mean_loss": self.divergence.mean,
            "best": self.best,
            "worse": self.worse,
            "eval_data": self.eval_data,
        }
        arrays = jax.tree.map(to_host, self._checkpoint_arrays())
        processes.run_on_first(lambda: self.plan.checkpoints.save(self.done, arrays, facts))
        self.saved = self.done

    def _model(self, parts: training.Parts) -> CausalLM:
        """Returns the model to evaluate and to save."""
        return adapter.finished(parts.model(), self.trained)

    def _evaluate(self, step: int) -> float:
        assert self.plan.eval_rows is not None
        loss = training.evaluate(self._model(self.parts), self.plan.eval_rows, self.settings.batch)
        note = ""
        if self.best is None or loss < self.best:
            self.best, self.worse, note = loss, 0, " (best so far)"
            self._save_adapter("best")
        else:
            self.worse += 1
        self._print(f"step {step}: evaluation loss {loss:.4f}{note}")
        return loss

    def _is_out_of_patience(self) -> bool:
        return self.settings.patience is not None and self.worse >= self.settings.patience

    def _base_loss(self, rows: packing.Rows) -> float:
        rows = packing.Rows(*(np.reshape(array, (-1, array.shape[-1])) for array in rows))
        base = jax_dora.remove_dora(self.parts.model())
        return training.evaluate(base, rows, self.settings.batch)

    def _export(self, lines: list[Line]) -> None:
        settings, folder = self.settings, self.plan.folder
        exported, model = settings.output / "adapter", self._model(self.parts)
        model.eval()
        self._save_adapter("adapter")
        samples = results.take_samples(self.plan, model)
        if lines and processes.is_first():
            results.draw_losses(lines, settings.output / "loss.svg")
            with replaced_file(exported / "loss.svg") as file:
                shutil.copy(settings.output / "loss.svg", file)
            results.write_card(self.plan, lines, samples, exported / "README.md")
        for one in samples:
            self._print(f"{one.prompt!r} -> {one.generated!r} (expected {one.expected!r})")
        self._print(f"Saved the adapter to {exported}")
        if self.best is not None:
            best = settings.output / "best"
            self._print(f"Saved the best adapter (evaluation loss {self.best:.4f}) to {best}")
        if settings.merge is not None:
            merged, report = jax_dora.merge_dora(model, return_report=True)
            config = read_config(folder)
            files = self.plan.texts.files(config)
            save_model(merged, settings.merge, config, tokenizer_from=folder, files=files)
            self._print(f"Saved the merged model to {settings.merge}. Rounding errors of merging:")
            self._print(str(report))

    def _save_adapter(self, name: str) -> None:
        parts = self.parts
        if jax.process_count() > 1:
            # Only the adapter is gathered, since the other arrays are not saved.
            parts = parts._replace(
                adapters=jax.tree.map(lambda x: jnp.asarray(to_host(x)), parts.adapters)
            )

        def save() -> None:
            folder = self.settings.output / name
            folder.mkdir(parents=True, exist_ok=True)
            # Before the adapter, so that there is no adapter without its files for text.
            for file, text in self.plan.texts.files(read_config(self.plan.folder)).items():
                path = folder / file
                if text is not None and not (path.is_file() and path.read_text("utf-8") == text):
                    path.parent.mkdir(exist_ok=True)
                    replace_text(path, text)
            jax_dora.peft.save_adapter(
                self._model(parts),
                folder,
                use_dora=self.settings.method == "dora",
                modules_to_save=self.settings.modules_to_save,
                layers_to_transform=self.settings.layers,
                base_model_name_or_path=str(self.plan.folder),
                task_type="CAUSAL_LM",
                overwrite=True,
            )

        processes.run_on_first(save)

    def _check_settings(self, saved: dict[str, Any]) -> None:
        now = json.loads(json.dumps(self.plan.fixed))
        changed = {name for name in now | saved if now.get(name) != saved.get(name)}
        if changed:
            changes = [
                f"{f'`{name}`' if name in FIXED else name} was {saved.get(name)!r} and is "
                f"{now.get(name)!r}"
                for name in sorted(changed)
            ]
            raise ValueError(
                f"resume=True: expected the settings of the checkpoint, but {', '.join(changes)}; "
                "use the same settings, or another `output`"
            )

    def _check_steps(self, done: int, before: int) -> None:
        now = self.plan.steps
        if now < done:
            raise ValueError(
                f"resume=True: expected more `steps` or `epochs`; the run is at step {done}, after "
                f"the last of {now} steps"
            )
        if now != before:
            self._print(
                f"The run had {before} steps and now has {now}; from step {done + 1} on, "
                f"it uses the {self.settings.schedule} schedule for {now} steps"
            )

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _progress(self) -> Progress:
        status = TextColumn("{task.fields[status]}")
        columns = (BarColumn(), MofNCompleteColumn(), status, TimeRemainingColumn())
        return Progress(*columns, console=self.console)
