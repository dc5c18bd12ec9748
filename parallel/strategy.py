"""The Lightning strategy: it hands Lightning's calls to the code of the axes. Wiring only.

Lightning's automatic optimisation calls training_step, then zero_grad, then backward. Here training_step does forward
and backward of every microbatch of the step (parallel/step.py), so it zeroes the gradients itself before, and
`backward` afterwards only runs the hooks: one path, whatever the layout.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from models.decoder import Decoder
from parallel import rng
from parallel.checkpoint import load
from parallel.config import Config
from parallel.context import Batch
from parallel.layout import Layout
from parallel.ranks import Ranks, start_process_group
from parallel.saver import SaveError, Saver
from parallel.step import ParallelModel, forward_backward, make_mesh, parallelize


class Trainable(Protocol):
    """What the strategy needs of the Lightning module (recipes/module.py)."""

    decoder: Decoder
    step_metrics: dict[str, Tensor]
    trainer: Trainer


class QuintetStrategy(ModelParallelStrategy):
    """Trains a module's decoder under a layout."""

    is_distributed = True  # Lightning goes by class names; without this, sync_dist and the like silently do nothing.

    def __init__(self, config: Config, layout: Layout, ranks: Ranks, about: Callable[[], dict[str, Any]]) -> None:
        """`about` gives what a checkpoint says of the run in its run.json."""
        super().__init__()
        self.config, self.layout, self.ranks, self.about = config, layout, ranks, about
        self.parallel: ParallelModel | None = None
        self.start: Callable[[Decoder], None] | None = None
        """Gives a new run other weights than random ones."""
        self.saver: Saver | None = None
        """Writes this run's checkpoints; there from `setup` on."""
        self._generators: dict[str, Tensor] = {}

    @property
    def module(self) -> Trainable:
        """The Lightning module."""
        return cast(Trainable, self.lightning_module)

    @property
    def root_device(self) -> torch.device:
        """This rank's device: the GPU of its local number, or the only one that it can see."""
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[self.ranks.local_rank if len(devices) > 1 else 0]

    def set_world_ranks(self) -> None:
        """They are what the launcher says (RanksEnvironment); only Lightning's own printing must be told."""
        cast(Any, rank_zero_only).rank = self.ranks.rank

    def setup_environment(self) -> None:
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        self.set_world_ranks()
        start_process_group(self.ranks, self.root_device)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Parameters are made without memory or values; `setup` gives them both, already split."""
        with torch.device("meta"):
            yield

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        quiet_signals(trainer)
        if self.parallel is None:  # `validate` after `fit` comes here again with the model that was trained
            mesh = make_mesh(self.config, self.layout, self.root_device.type)
            self.parallel = parallelize(self.module.decoder, self.config, self.layout, mesh)
            if self.start is not None:
                self.start(self.module.decoder)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            self.saver = Saver()
        self.setup_precision_plugin()

    def batch_to_device(self, batch: Batch, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Everything but what only the host reads: documents, which masks are made of, and the sequences' numbers.

        To ask a GPU for them would make the host wait.
        """
        tensors = {name: tensor for name, tensor in batch.items() if name not in ("document_ids", "ids")}
        return batch | super().batch_to_device(tensors, device, dataloader_idx)

    def training_step(self, batch: Batch, *_: Any) -> Tensor:
        """Forward and backward of the whole step; returns this data rank's part of the loss."""
        assert self.parallel is not None
        if self._generators:  # not before: making loaders draws from them
            rng.restore(self._generators)
            self._generators = {}
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss, tokens = forward_backward(self.parallel, batch, self.module.trainer.global_step)
        routing = {} if self.parallel.routing is None else self.parallel.routing.metrics()
        self.module.step_metrics = {"loss": loss, "tokens": tokens, **routing}
        return loss

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The gradients are there already; what is left are the hooks of callbacks and precision."""
        assert self.lightning_module is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: dict[str, Any] | None = None
    ) -> None:
        """Write a checkpoint and wait for it, as Lightning's own callbacks expect.

        `storage_options` of ours: `asynchronous` (do not wait), `metrics` (known at this step), `then` (see Saver), and
        `failed`, which is told if the save before this one, which is waited for, has failed.
        """
        options = storage_options or {}
        assert self.saver is not None
        try:
            self.saver.wait()
        except SaveError as error:
            if "failed" not in options:
                raise
            options["failed"](error)
        about = {"step": checkpoint["global_step"], "metrics": options.get("metrics", {})}
        about |= {"layout": asdict(self.layout), "zero": self.config.parallelism.zero, **self.about()}
        decoder = self.module.decoder
        self.saver.start(Path(filepath), decoder, self.optimizers, checkpoint, about, options.get("then"))
        if not options.get("asynchronous", False):
            self.saver.wait()

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        optimizers = self.optimizers if self.module.trainer.state.fn == TrainerFn.FITTING else []
        state, self._generators = load(Path(checkpoint_path), self.module.decoder, optimizers)
        # The loader begins at the first step that is left, so Lightning must not skip batches of it once more. A save
        # in on_train_batch_end has one batch processed but not completed; Lightning completes it when it restarts.
        progress = state["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        not_completed = progress["total"]["processed"] - progress["total"]["completed"]
        progress["current"] = {"ready": 0, "started": 0, "processed": 0, "completed": -not_completed}
        return state

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: `save_checkpoint` takes the tensors from the decoder, split as they are."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing, as above."""
        return {}


def quiet_signals(trainer: Any) -> None:
    """Take out two private pieces of Lightning 2.6.6 that deal with SIGTERM.

    One broadcasts a flag and reads it on the host at every step, so that a GPU is waited for; the other broadcasts from
    inside a signal handler, among whatever collectives are under way.
    """
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
    trainer._signal_connector.register_signal_handlers = lambda: None


class RanksEnvironment(ClusterEnvironment):
    """Tells Lightning who this process is; the processes exist already, whoever started them."""

    creates_processes_externally = True
    main_address, main_port = "", 0  # the process group is started by parallel/ranks.py, which needs neither from here

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self.ranks.world

    def global_rank(self) -> int:
        return self.ranks.rank

    def local_rank(self) -> int:
        return self.ranks.local_rank

    def node_rank(self) -> int:
        return self.ranks.rank // self.ranks.local_world

    def set_world_size(self, size: int) -> None:
        assert size == self.ranks.world

    def set_global_rank(self, rank: int) -> None:
        assert rank == self.ranks.rank
