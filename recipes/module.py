"""The Lightning module: a decoder, its loss, its optimizer. How it is split over ranks is the strategy's business."""

from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from models.decoder import Decoder
from parallel.config import Config
from parallel.context import Batch
from parallel.gradients import guard_update
from parallel.pipeline import build_decoder
from parallel.step import ParallelModel, clip, evaluate
from parallel.strategy import QuintetStrategy
from recipes.optimizers import make_optimizer, make_schedule
from recipes.validation import batch_sums, means


class LanguageModel(LightningModule):
    """Next-token prediction on packed windows."""

    decoder: Decoder

    def __init__(self, config: Config, pp_rank: int, bytes_per_token: Tensor | None) -> None:
        """`pp_rank` says which layers are here; `bytes_per_token` is int64 (vocabulary,), or None without text."""
        super().__init__()
        self.config, self.pp_rank = config, pp_rank
        self.bytes_per_token = bytes_per_token
        self.step_metrics: dict[str, Tensor] = {}
        """Scalars of the last optimizer step, on the device; fetched together at the logging interval."""
        self.validation: dict[str, float] = {}
        """Means of the last validation, in full precision; the same on every rank."""
        self._validation = torch.zeros(3)

    def configure_model(self) -> None:
        """Build the decoder; called inside the strategy's context, and again by `validate` after `fit`."""
        if not hasattr(self, "decoder"):
            self.decoder = build_decoder(self.config.model, self.config.parallelism, self.pp_rank)

    @property
    def parallel(self) -> ParallelModel:
        """The decoder as the strategy has split it."""
        model = cast(QuintetStrategy, self.trainer.strategy).parallel
        assert model is not None
        return model

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        """The strategy's: it alone knows the microbatches of a step and the ranks that share it."""
        return self.trainer.strategy.training_step(batch, batch_idx)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Nothing: the strategy zeroes the gradients before the step, and they are there now."""

    def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Clip by the norm of the whole model, stop if it is not finite, and keep norm and factor as metrics."""
        result = clip(self.parallel)
        guard_update(self.decoder, optimizer, result.norm)
        self.step_metrics |= {"grad_norm": result.norm.to(self.device), "clip_factor": result.factor.to(self.device)}

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.config.optimizer, self.decoder)
        schedule = make_schedule(self.config, optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_validation_epoch_start(self) -> None:
        self._validation = torch.zeros(3, dtype=torch.float64, device=self.device)
        if self.bytes_per_token is not None:
            self.bytes_per_token = self.bytes_per_token.to(self.device)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        batch = self.parallel.own_part(batch)
        loss = evaluate(self.parallel, batch)
        if loss is not None:
            self._validation += batch_sums(loss, batch["labels"], self.bytes_per_token)

    def on_validation_epoch_end(self) -> None:
        sums = self.parallel.sum_of_parts(self._validation)
        self.validation = {f"val/{name}": value for name, value in means(sums).items()}
        self.log_dict(self.validation)
