"""Small models and composed configs that many tests start from."""

import copy
from functools import cache
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from models.config import ModelConfig
from models.decoder import Decoder
from parallel.config import Config
from recipes import schema
from recipes.command import CONF, new_run_id

SMALL = ModelConfig(
    name="small",
    vocab_size=97,
    hidden_size=64,
    intermediate_size=112,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
)


def random_decoder(config: ModelConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> Decoder:
    """A decoder whose every parameter, norms and biases included, is random and large enough to matter."""
    draw = torch.Generator().manual_seed(seed)
    decoder = Decoder(config).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            values = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            values = 1 + 0.3 * values if name.endswith("norm.weight") else values * 0.1
            parameter.copy_(values)
    return decoder


def random_tokens(config: ModelConfig, batch: int, length: int, seed: int = 1) -> torch.Tensor:
    """Token ids (batch, length)."""
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def composed(*overrides: str) -> DictConfig:
    """What `python -m recipes.train <overrides>` composes."""
    return copy.deepcopy(_compose(overrides))


@cache
def _compose(overrides: tuple[str, ...]) -> DictConfig:
    OmegaConf.register_new_resolver("run_id", new_run_id, replace=True)
    schema.register()
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides))


@cache
def config(*overrides: str) -> Config:
    """The same as the frozen dataclasses that the program sees."""
    return schema.to_config(composed(*overrides))


def options(group: str) -> list[str]:
    """The options of a config group, by their files."""
    return sorted(path.stem for path in Path(CONF, group).glob("*.yaml") if path.stem != "base")
