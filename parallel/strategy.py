"""The Lightning strategy: which axis is applied when, and how one optimizer step is carried out. Wiring only.

Lightning's automatic optimisation calls training_step, then zero_grad, then backward. Here training_step does forward
and backward of every microbatch of the step, so it zeroes the gradients itself before, and `backward` afterwards only
runs the hooks: one path, whatever the layout.
"""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from parallel.checkpoint import load, save
from parallel.config import Config
from parallel.layout import Layout
from parallel.loss import valid_tokens
from parallel.precision import DTYPES

Batch = dict[str, Tensor]


class QuintetStrategy(ModelParallelStrategy):
    """Trains the module of recipes/module.py under a layout.

    The module gives `build()`, `token_loss(microbatch, step) -> sum of token losses` and `initialise()`; everything
    about ranks, microbatches and precision happens here.
    """

    is_distributed = True  # Lightning goes by class names; without this, samplers and sync_dist do nothing.

    def __init__(self, config: Config, layout: Layout) -> None:
        super().__init__()
        self.config, self.layout = config, layout

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Parameters are made without memory or values; `setup` gives them both, already split."""
        with torch.device("meta"):
            yield

    def setup_environment(self) -> None:
        self.accelerator.setup_device(self.root_device)

    def setup(self, trainer: Trainer) -> None:
        self.accelerator.setup(trainer)
        module = self.lightning_module
        module.to(dtype=DTYPES[self.config.precision.master])
        module.to_empty(device=self.root_device)
        module.initialise()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def training_step(self, batch: Batch, *_: Any) -> Tensor:
        """Forward and backward of all microbatches; returns the loss per valid token of the whole step."""
        module = self.lightning_module
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        tokens = valid_tokens(batch["labels"])
        loss = torch.zeros((), device=self.root_device, dtype=torch.float64 if self._exact else torch.float32)
        for microbatch in self.microbatches(batch):
            part = module.token_loss(microbatch, self._step) / tokens.clamp_min(1)
            part.backward()
            loss += part.detach()
        module.step_metrics = {"loss": loss, "tokens": tokens}
        return loss

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The gradients are there already; what is left are the hooks of callbacks and precision."""
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    def microbatches(self, batch: Batch) -> list[Batch]:
        """This data rank's batch in pieces of data.micro_batch sequences."""
        size = self.config.data.micro_batch
        count = batch["tokens"].shape[0] // size
        return [{key: value[i * size : (i + 1) * size] for key, value in batch.items()} for i in range(count)]

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        save(Path(filepath), self.lightning_module.decoder, self.optimizers, checkpoint)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        optimizers = self.optimizers if self.lightning_module.trainer.state.fn == TrainerFn.FITTING else []
        state = load(Path(checkpoint_path), self.lightning_module.decoder, optimizers)
        # The loader begins at the first step that is left, so Lightning must not skip batches of it once more.
        state["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"] = dict.fromkeys(
            ("ready", "started", "processed", "completed"), 0
        )
        return state

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: `save_checkpoint` takes the tensors from the decoder, sharded as they are."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing, as above."""
        return {}

    @property
    def _step(self) -> int:
        return self.lightning_module.trainer.global_step

    @property
    def _exact(self) -> bool:
        return self.config.precision.master == "float64"
