"""The Lightning module: a decoder, its loss, its optimizer. How it is split over ranks is the strategy's business."""

from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from models.decoder import Decoder
from parallel.config import Config
from parallel.gradients import guard_update
from parallel.step import Batch, ParallelModel, clip
from parallel.strategy import QuintetStrategy
from recipes.optimizers import make_optimizer, make_schedule
from recipes.validation import batch_sums, means


class LanguageModel(LightningModule):
    """Next-token prediction on packed windows."""

    decoder: Decoder

    def __init__(self, config: Config, bytes_per_token: Tensor | None) -> None:
        """`bytes_per_token` is int64 (vocabulary,), or None for data that is not text."""
        super().__init__()
        self.config = config
        self.bytes_per_token = bytes_per_token
        self.step_metrics: dict[str, Tensor] = {}
        """Scalars of the last optimizer step, on the device; fetched together at the logging interval."""
        self._validation = torch.zeros(3)

    def configure_model(self) -> None:
        """Build the decoder; called inside the strategy's context, and again by `validate` after `fit`."""
        if not hasattr(self, "decoder"):
            self.decoder = Decoder(self.config.model)

    @property
    def _parallel(self) -> ParallelModel:
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
        result = clip(self._parallel)
        guard_update(self.decoder, optimizer, result.norm)
        self.step_metrics |= {"grad_norm": result.norm, "clip_factor": result.factor}

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.config.optimizer, self.decoder)
        schedule = make_schedule(self.config, optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_validation_epoch_start(self) -> None:
        self._validation = torch.zeros(3, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._validation += batch_sums(self.decoder, batch, self.config, self.bytes_per_token)

    def on_validation_epoch_end(self) -> None:
        sums = self._parallel.sum_over_data(self._validation)
        self.log_dict({f"val/{name}": value for name, value in means(sums).items()})
