"""What happens beside training: progress, text samples, gradients, profiles."""

import json
import logging
import sys
import time
from functools import partial
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger

from models.counts import adapter_shapes, parameter_shapes
from models.generate import generate
from parallel.files import write_whole
from parallel.precision import DTYPES
from parallel.tensor_file import Entry, write_tensors
from recipes.data.tokenizer import Tokenizer
from recipes.metrics import Metrics, MetricsFile

log = logging.getLogger("quintet")


class Progress(Callback):
    """A bar with loss, tokens/s and time left on a terminal; a plain line every logging interval elsewhere."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self._bar: Any = None
        self._shown = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started, self._first = time.monotonic(), trainer.global_step
        self._shown = trainer.global_step
        if not trainer.is_global_zero or not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[speed]} tokens/s  left"),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True),
            transient=True,
        )
        self._bar.start()
        self._task = self._bar.add_task("", total=trainer.max_steps, completed=self._first, loss="...", speed="...")

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        row = self.metrics.latest
        if self._bar is not None:
            fields = {"loss": f"{row['loss']:.4f}", "speed": f"{row['tokens_per_s']:,.0f}"} if row else {}
            self._bar.update(self._task, completed=trainer.global_step, **fields)
        elif trainer.is_global_zero and row and row["step"] > self._shown:
            self._shown = int(row["step"])
            done = trainer.global_step - self._first
            left = (time.monotonic() - self._started) / done * (trainer.max_steps - trainer.global_step)
            log.info(
                "step %d/%d  loss %.4f  grad norm %.3f  %s tokens/s  %s left",
                *(row["step"], trainer.max_steps, row["loss"], row["grad_norm"], f"{row['tokens_per_s']:,.0f}"),
                f"{int(left) // 60}:{int(left) % 60:02d}",
            )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        values = trainer.callback_metrics
        per_byte = f"  {float(values['val/loss_per_byte']):.4f} nats per byte" if "val/loss_per_byte" in values else ""
        log.info("step %d  validation loss %.4f%s", trainer.global_step, float(values["val/loss"]), per_byte)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class SampleText(Callback):
    """Prints text continued from a prompt when training ends, so that a person sees what was learned."""

    def __init__(self, tokenizer: Tokenizer | None, prompt: str, max_new_tokens: int, temperature: float) -> None:
        self.tokenizer, self.prompt = tokenizer, prompt
        self.max_new_tokens, self.temperature = max_new_tokens, temperature

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self.tokenizer is None:
            return
        if trainer.world_size > 1:
            if trainer.is_global_zero:
                log.info("no sample: the model is split over ranks; use python -m recipes.generate on this run")
            return
        tokens = torch.tensor(self.tokenizer.open([self.prompt])[0].astype("int64"), device=pl_module.device)
        room = pl_module.config.model.max_position_embeddings - len(tokens)
        new = generate(
            pl_module.decoder, tokens.unsqueeze(0), min(self.max_new_tokens, room), temperature=self.temperature
        )
        text = self.tokenizer.decode([*tokens[1:].tolist(), *(int(token) for token in new)])
        log.info("a sample, continued from %r:\n%s", self.prompt, text)


class Gradients(Callback):
    """Writes every trained parameter's gradient (before clipping) and value at given steps, whole, from any layout.

    gradients-step{n}.safetensors holds `gradient/<name>` and `value/<name>` (the value before the update of step n).
    """

    def __init__(self, run_dir: Path, steps: list[int]) -> None:
        self.run_dir, self.steps = run_dir, steps

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        step = trainer.global_step + 1
        if step not in self.steps:
            return
        model = pl_module.parallel
        dtype = DTYPES[model.config.precision.master]
        entries: list[Entry] = []
        trained = adapter_shapes(model.config.model) or parameter_shapes(model.config.model)
        for name, shape in trained.items():
            gradient = partial(model.whole_everywhere, name, attrgetter("grad"))
            value = partial(model.whole_everywhere, name, methodcaller("detach"))
            entries += [(f"gradient/{name}", shape, dtype, gradient), (f"value/{name}", shape, dtype, value)]
        write_tensors(self.run_dir / f"gradients-step{step}.safetensors", entries, trainer.is_global_zero)


class Timeline(Callback):
    """timeline.json: when each action of the last step ran, on every rank of the pipeline that rank 0 is in.

    Times are seconds: on a CPU from the earliest rank's beginning of the step, by the clock that the ranks of a machine
    share; on GPUs each rank's from its own beginning, which follows a collective of all ranks.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        pipeline = pl_module.parallel.pipeline
        spans = [(str(action), start, end) for action, start, end in pipeline.recording.spans()]
        ranks: list[Any] = [None] * pipeline.group.size()
        torch.distributed.all_gather_object(ranks, (pipeline.recording.begin, spans), group=pipeline.group)
        if not trainer.is_global_zero:
            return
        first = min(begin for begin, _ in ranks)
        shifted = [
            [(action, begin - first + start, begin - first + end) for action, start, end in spans]
            for begin, spans in ranks
        ]
        timeline = {"step": trainer.global_step, "world": trainer.world_size, "ranks": shifted}
        write_whole(self.run_dir / "timeline.json", json.dumps(timeline))


class ExpertLoad(Callback):
    """How often each expert of each layer was chosen, every n steps: expert_load.jsonl, and a histogram to W&B.

    The histogram is over all experts of all layers, of loads relative to their layer's mean: 1 is even.
    """

    def __init__(self, run_dir: Path, every_n_steps: int) -> None:
        self.file, self.every_n_steps = MetricsFile(run_dir / "expert_load.jsonl"), every_n_steps

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.file.rewind(trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step, routing = trainer.global_step, pl_module.parallel.routing
        if routing is None or step % self.every_n_steps or not trainer.is_global_zero:
            return
        load = routing.load()
        self.file.append([{"step": step, "load": load.long().tolist()}])
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                import wandb

                relative = (load / load.mean(1, keepdim=True)).flatten().cpu().numpy()
                logger.experiment.log({"train/expert_load": wandb.Histogram(relative), "trainer/global_step": step})


class Profile(Callback):
    """A torch profiler trace of steps 5 to 7 (chrome://tracing) in the run directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        schedule = torch.profiler.schedule(wait=3, warmup=1, active=3, repeat=1)
        path = self.folder / f"trace-rank{trainer.global_rank}.json"
        self._profiler = torch.profiler.profile(
            schedule=schedule, on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path))
        )
        self._profiler.start()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._profiler.step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._profiler.stop()
