"""The Lightning data module: which loader a data rank reads, from which step on."""

import logging
import os
import signal
from pathlib import Path

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from models.errors import ConfigError
from parallel.config import Config, SyntheticData
from parallel.ranks import end_with_parent
from recipes.data.store import open_split, open_tokenizer, prepare
from recipes.data.tokenizer import Tokenizer
from recipes.data.windows import PackedWindows, StepOrder, SyntheticWindows, TrainBatches, ValidationBatches, Windows

log = logging.getLogger("quintet.data")


class Data(LightningDataModule):
    """Prepared data of a config, cut into the part of one data rank."""

    def __init__(self, config: Config, data_rank: int = 0, data_ranks: int = 1) -> None:
        super().__init__()
        self.config, self.data_rank, self.data_ranks = config, data_rank, data_ranks
        self.tokenizer: Tokenizer | None = None
        """None for synthetic data, which has no text."""
        self.first_step = 0
        """Step of the data (consumed samples over global_batch) that the loader begins at."""
        self.trained_steps = 0
        """Optimizer steps done when the loader begins; other than first_step where global_batch has changed."""
        self._windows: dict[str, Windows] = {}

    def load(self) -> None:
        """Prepare what is not prepared, and open it. Raises ConfigError for data that cannot be used."""
        data = self.config.data
        if isinstance(data, SyntheticData):
            self._windows = {
                split: SyntheticWindows(data, self.config.seed, split) for split in ("train", "validation")
            }
            return
        folder = prepare(data)
        self.tokenizer = open_tokenizer(folder)
        if self.tokenizer.vocab_size > self.config.model.vocab_size:
            raise ConfigError(
                f"model.vocab_size={self.config.model.vocab_size} is smaller than the {self.tokenizer.vocab_size} "
                f"tokens of the prepared data. Write model.vocab_size={self.tokenizer.vocab_size} or more."
            )
        self._windows = {
            split: PackedWindows(open_split(folder, split), data.seq_len, data.document_mask, split)
            for split in ("train", "validation")
        }

    def save_tokenizer(self, run_directory: Path) -> None:
        """Leave the tokenizer in the run directory, so that its text can be made again anywhere."""
        if self.tokenizer is not None:
            self.tokenizer.save(run_directory / "tokenizer.json")

    def state_dict(self) -> dict[str, int]:
        """How far the data has been read: with the seed, all there is to know."""
        assert self.trainer is not None
        steps = self.first_step + self.trainer.global_step - self.trained_steps
        return {"consumed_samples": steps * self.config.data.global_batch, "trained_steps": self.trainer.global_step}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on after the samples consumed. Raises ConfigError where another global_batch makes that no whole step."""
        consumed, batch = state_dict["consumed_samples"], self.config.data.global_batch
        if consumed % batch:
            raise ConfigError(
                f"data.global_batch={batch}: the checkpoint has consumed {consumed} samples, not a whole number of "
                f"steps of {batch}. Write a divisor of {consumed}."
            )
        self.first_step, self.trained_steps = consumed // batch, state_dict["trained_steps"]
        if self.first_step != self.trained_steps:
            log.info("data.global_batch has changed to %d: going on after %d samples", batch, consumed)

    def train_dataloader(self) -> DataLoader:
        windows = self._windows["train"]
        order = StepOrder(len(windows), self.config.data.global_batch, self.config.seed)
        batches = TrainBatches(windows, order, self.data_rank, self.data_ranks, self.config.debug.overfit_steps)
        left = self.config.trainer.max_steps - self.trained_steps
        steps = range(self.first_step, self.first_step + left)
        return self._loader(batches, steps)

    def val_dataloader(self) -> DataLoader:
        windows = self._windows["validation"]
        count = min(len(windows), self.config.trainer.val_sequences or len(windows))
        batches = ValidationBatches(windows, count, self.config.data.micro_batch, self.data_rank, self.data_ranks)
        return self._loader(batches, range(len(batches)))

    def _loader(self, batches: Dataset, order: range) -> DataLoader:
        workers = self.config.data.workers
        return DataLoader(
            batches,
            batch_size=None,
            sampler=order,
            num_workers=workers,
            persistent_workers=workers > 0,
            worker_init_fn=_stand_apart,
        )


def _stand_apart(_: int) -> None:
    """A data worker serves its rank until that ends: what tells the rank's process group to end is not for it.

    A worker that died of such a signal would take the rank with it, before the rank could save.
    """
    os.setpgid(0, 0)
    end_with_parent()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
