"""Loss and perplexity of a trained model on its validation split: `python -m recipes.evaluate run=<run directory>`."""

import json
from dataclasses import dataclass, replace

from omegaconf import DictConfig, OmegaConf

from models.errors import ConfigError
from recipes.command import command


@dataclass
class EvaluateConfig:
    """conf/evaluate.yaml."""

    run: str
    sequences: int | None


def evaluate(composed: DictConfig) -> None:
    """Print one JSON object: loss in nats per token, perplexity, and for text nats per byte."""
    settings = OmegaConf.to_object(composed)
    assert isinstance(settings, EvaluateConfig)
    if settings.sequences is not None and settings.sequences < 1:
        raise ConfigError(f"sequences={settings.sequences} must be at least 1, or null for all.")

    import torch

    from parallel.step import token_loss
    from recipes.data.module import Data
    from recipes.trained import load_trained
    from recipes.validation import batch_sums, means

    trained = load_trained(settings.run)
    config = replace(trained.config, trainer=replace(trained.config.trainer, val_sequences=settings.sequences))
    data = Data(config)
    data.load()
    lengths = None if data.tokenizer is None else torch.from_numpy(data.tokenizer.bytes_per_token()).to(trained.device)
    sums = torch.zeros(3, dtype=torch.float64)
    with torch.inference_mode():
        for batch in data.val_dataloader():
            on_device = {key: value.to(trained.device) for key, value in batch.items()}
            loss = token_loss(trained.decoder, on_device, config)
            sums += batch_sums(loss, on_device["labels"], lengths).cpu()
    print(json.dumps({"checkpoint": str(trained.checkpoint), **means(sums)}, indent=2))


if __name__ == "__main__":
    command("evaluate", evaluate, EvaluateConfig)
