"""What is measured: one line per optimizer step in metrics.jsonl, whatever the logger, floats unrounded."""

import json
import math
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from models.counts import training_flops_per_token
from models.errors import RunError
from parallel.balance import padded_length
from parallel.clock import Clock, Recording
from parallel.config import Config, FloatType
from parallel.devices import Device
from parallel.files import write_whole
from parallel.gradients import require_finite
from parallel.layout import Layout
from parallel.plan.timeline import expected_bubble


class MetricsFile:
    """metrics.jsonl. A line is whole or, after a kill or a full disk, cut off when the file is next opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._repair()

    def _repair(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb+") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)

    def rewind(self, step: int) -> None:
        """Drop lines after `step`, which a run that resumed there will write again."""
        if not self.path.exists():
            return
        try:
            lines = self.path.read_text().splitlines(keepends=True)
            kept = [line for line in lines if json.loads(line)["step"] <= step]
        except (ValueError, KeyError) as error:
            raise RunError(
                f"{self.path} is damaged ({error}); mend or remove it, or choose another run.dir."
            ) from error
        write_whole(self.path, "".join(kept))

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Add rows. Raises RunError where the disk is full or the file cannot be written."""
        text = "".join(json.dumps(_finite(row)) + "\n" for row in rows).encode()
        descriptor = None
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            size = os.fstat(descriptor).st_size
            written = os.write(descriptor, text)
            if written < len(text):
                os.ftruncate(descriptor, size)
                raise RunError(f"{self.path}: the disk is full; the run stops since its metrics cannot be kept.")
        except OSError as error:
            raise RunError(f"{self.path}: {error.strerror}; the run stops since its metrics cannot be kept.") from error
        finally:
            if descriptor is not None:
                os.close(descriptor)


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity: null."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}


def _for_logger(row: dict[str, Any]) -> dict[str, float]:
    """Loggers take numbers, and few of them: not those that are there once more for every layer."""
    return {f"train/{key}": value for key, value in row.items() if key != "step" and not isinstance(value, list)}


class StepClock:
    """Seconds between the ends of steps."""

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._marks: list[Any] = [self._clock.mark()]

    def tick(self) -> None:
        """A step ends here."""
        self._marks.append(self._clock.mark())

    def skip(self) -> None:
        """What happened since the last step's end (validation, a save) belongs to no step."""
        self._marks[-1] = self._clock.mark()

    def take(self) -> list[float]:
        """Seconds of each step since the last call."""
        seconds = [self._clock.seconds(a, b) for a, b in pairwise(self._marks)]
        self._marks = self._marks[-1:]
        return seconds


class Metrics(Callback):
    """Collects each step's scalars on the device, fetches them together every `log_interval` steps, and hands them on.

    TFLOP/s and MFU count the model's operations (models/counts.py), not recomputed ones, with causal attention.
    """

    def __init__(self, config: Config, file: MetricsFile | None, device: Device | None, layout: Layout) -> None:
        self.config, self.file, self.layout = config, file, layout
        self._bubble_expected = expected_bubble(config, layout)
        missing = padded_length(config.data.seq_len, config.parallelism) - config.data.seq_len
        self._padding = {"padding_tokens": config.data.global_batch * missing} if missing else {}
        self.latest: dict[str, float] = {}
        """The row written last."""
        self._flops_per_token = training_flops_per_token(config.model, config.data.seq_len, causal=True)
        self._peak = None
        if device is not None and config.precision.compute != FloatType.float64:
            self._peak = device.bf16_flops if config.precision.compute == FloatType.bfloat16 else device.fp32_flops
        self._saved = False
        self._pending: list[tuple[int, float, dict[str, Tensor]]] = []
        self._recordings: list[Recording] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.file is not None:
            self.file.rewind(trainer.global_step)
        self._clock = StepClock(pl_module.device)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._lr = trainer.optimizers[0].param_groups[0]["lr"]
        if self._saved:
            self._clock.skip()
            self._saved = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._clock.tick()
        self._pending.append((trainer.global_step, self._lr, dict(pl_module.step_metrics)))
        if self.layout.pp > 1:
            self._recordings.append(pl_module.parallel.pipeline.recording)
        if trainer.global_step % self.config.trainer.log_interval == 0:
            self.flush(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or not trainer.training:
            return
        self.flush(trainer)
        self._clock.skip()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Nothing is saved whose steps are not written, or turn out to have had a bad gradient."""
        self.flush(trainer)
        self._saved = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.flush(trainer)

    def _pipeline_times(self, pp_rank: int) -> Tensor:
        """float64, a row per pending step: seconds in which this rank computed; and how long its step was, in the
        column of its pipeline rank. Without a pipeline there are no columns."""
        if self.layout.pp == 1:
            return torch.zeros((len(self._pending), 0), dtype=torch.float64)
        times = torch.zeros((len(self._pending), 1 + self.layout.pp), dtype=torch.float64)
        for row, recording in zip(times, self._recordings, strict=True):
            row[0], row[1 + pp_rank] = recording.busy_and_length()
        self._recordings.clear()
        return times

    def _bubble(self, times: list[float]) -> dict[str, float]:
        """From a row of `_pipeline_times` summed over ranks: the share of the longest rank's step spent idling."""
        if not times:
            return {}
        busy, *lengths = times
        return {"bubble": 1.0 - busy / len(lengths) / max(lengths), "bubble_expected": self._bubble_expected}

    def flush(self, trainer: Any) -> None:
        """Fetch, write and pass on what is pending: one transfer for all of it."""
        if not self._pending:
            return
        # The loss is each rank's part of it; all that is pending is summed in one reduction. The rest is global.
        parts = torch.stack([step[2]["loss"].double() for step in self._pending])
        times = self._pipeline_times(trainer.lightning_module.pp_rank).to(parts.device)
        summed = trainer.strategy.parallel.sum_of_parts(torch.cat((parts, times.flatten())))
        names = [name for name in self._pending[0][2] if name != "loss"]
        others = [step[2][name].double() for step in self._pending for name in names]
        values = torch.cat((summed, *(other.flatten() for other in others))).tolist()
        left = iter(values[len(summed) :])
        rows = []
        for index, ((step, lr, found), seconds) in enumerate(zip(self._pending, self._clock.take(), strict=True)):
            # A metric by layer is a list.
            scalars = {n: [next(left) for _ in found[n]] if found[n].dim() else next(left) for n in names}
            first, width = len(parts) + index * times.shape[1], times.shape[1]
            row = self._row(step, lr, seconds, scalars | {"loss": values[index]})
            rows.append(row | self._bubble(values[first : first + width]))
        self._pending.clear()
        if self.file is not None:
            self.file.append(rows)
        for row in rows:
            require_finite(trainer.lightning_module.decoder, row["grad_norm"], row["step"])
        self.latest = rows[-1]
        for logger in trainer.loggers:
            for row in rows:
                logger.log_metrics(_for_logger(row), row["step"])
        trainer.callback_metrics["train/loss"] = torch.tensor(self.latest["loss"])

    def _row(self, step: int, lr: float, seconds: float, scalars: dict[str, Any]) -> dict[str, Any]:
        processed = self.config.data.global_batch * self.config.data.seq_len
        flops = processed * self._flops_per_token / seconds / self.layout.world
        row = {
            "step": step,
            "loss": scalars["loss"],
            "grad_norm": scalars["grad_norm"],
            "clip_factor": scalars["clip_factor"],
            "lr": lr,
            "tokens": int(scalars["tokens"]),
            "step_time_s": seconds,
            "tokens_per_s": processed / seconds,
            "tflops_per_device_causal": flops / 1e12,
        }
        row |= self._padding | {name: value for name, value in scalars.items() if name not in row}
        return row if self._peak is None else row | {"mfu_causal": flops / self._peak}
