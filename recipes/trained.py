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
    checkpoint = find(path, "run")
    directory = path if (path / "config.yaml").exists() else checkpoint.parent.parent
    return read_config(directory / "config.yaml"), checkpoint


def load_trained(run: str) -> Trained:
    """The model of `find_trained`, on a GPU if there is one and the run was not on a CPU.

    Parameters are in the type that training computes in. Buffers stay as they are kept: the biases by which a router
    chooses experts are compared with one another, and rounded they would choose others.
    """
    config, checkpoint = find_trained(run)
    device = torch.device("cuda" if torch.cuda.is_available() and config.cluster.device != "cpu" else "cpu")
    decoder = load_masters(config, checkpoint, device)
    cast_parameters(decoder, DTYPES[config.precision.compute])
    return Trained(config, decoder, checkpoint, device)


def load_masters(config: Config, checkpoint: Path, device: torch.device) -> Decoder:
    """The decoder in evaluation mode with its weights as the optimizer keeps them."""
    with torch.device("meta"):
        decoder = Decoder(config.model)
    decoder.to(DTYPES[config.precision.master]).to_empty(device=device)
    decoder.tie_weights()
    load(checkpoint, decoder, [])
    return decoder.eval()


def cast_parameters(decoder: Decoder, dtype: torch.dtype) -> None:
    """Parameters, and not buffers, in another type."""
    for parameter in decoder.parameters():
        parameter.data = parameter.data.to(dtype)
