"""A trained model from a run directory, for the commands that use one: evaluate and generate."""

from dataclasses import dataclass
from pathlib import Path

import torch

from models.decoder import Decoder
from models.errors import ConfigError
from parallel.checkpoint import load
from parallel.config import Config
from parallel.precision import DTYPES
from parallel.retention import find
from recipes.schema import read_config


@dataclass(frozen=True)
class Trained:
    """A decoder with its trained weights, and the config it was trained by."""

    config: Config
    decoder: Decoder
    checkpoint: Path
    device: torch.device


def find_trained(run: str) -> tuple[Config, Path]:
    """Config and newest sound checkpoint of a run directory, or of the checkpoint that `run` itself is.

    Raises ConfigError where there is none. The config is checked like one from the command line.
    """
    if not run:
        raise ConfigError("run is empty; write run=<run directory>, such as the one that training printed.")
    path = Path(run)
    checkpoint = find(path)
    directory = path if (path / "config.yaml").exists() else checkpoint.parent.parent
    return read_config(directory / "config.yaml"), checkpoint


def load_trained(run: str) -> Trained:
    """The model of `find_trained`, on a GPU if there is one and the run was not on a CPU."""
    config, checkpoint = find_trained(run)
    device = torch.device("cuda" if torch.cuda.is_available() and config.cluster.device != "cpu" else "cpu")
    with torch.device("meta"):
        decoder = Decoder(config.model)
    decoder.to(DTYPES[config.precision.master]).to_empty(device=device)
    decoder.tie_weights()
    load(checkpoint, decoder, [])
    decoder.to(DTYPES[config.precision.compute])  # as training computes with them
    return Trained(config, decoder.eval(), checkpoint, device)
