"""Whether transformers computes from a published folder what our decoder computes from its own weights."""

from pathlib import Path

import torch

from models.errors import ConfigError, RunError
from parallel.config import Config
from recipes.trained import cast_parameters, load_masters

TOLERANCE = 1e-5
"""Largest difference of two logits in float32, over the largest logit where that is above 1."""


@torch.no_grad()
def verify_logits(config: Config, checkpoint: Path, folder: Path, dtype: torch.dtype | None = None) -> float:
    """Print the largest difference of logits on random tokens, in float32 on the CPU, and return it.

    Ours are those of the checkpoint's own weights, rounded to `dtype` where the folder's are. Raises RunError where the
    difference is above the tolerance, ConfigError where transformers is not installed.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as missing:
        raise ConfigError("verify=true needs the package transformers: pip install transformers==5.24.0.") from missing
    draw = torch.Generator().manual_seed(0)
    length = min(64, config.model.max_position_embeddings)
    tokens = torch.randint(config.model.vocab_size, (2, length), generator=draw)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    expected = theirs(tokens).logits
    decoder = load_masters(config, checkpoint, torch.device("cpu"))
    if dtype is not None:
        cast_parameters(decoder, dtype)
    found = decoder.float()(tokens)
    error = float((found - expected).abs().max())
    limit = TOLERANCE * max(float(expected.abs().max()), 1.0)
    print(f"largest difference from transformers' logits: {error:.2e} (logits up to {float(expected.abs().max()):.2f})")
    if not error <= limit:
        raise RunError(f"{folder}: logits differ by {error:.2e} from those of transformers; {limit:.1e} is allowed.")
    return error
