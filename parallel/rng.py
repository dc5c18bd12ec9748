"""The state of a process's random number generators, as tensors.

Nothing of ours draws from them (models/random.py); what a user adds may.
"""

import random

import numpy as np
import torch
from torch import Tensor


def capture() -> dict[str, Tensor]:
    """The generators of Python, NumPy, torch and, where there is one, this process's GPU."""
    version, words, gauss = random.getstate()
    numpy_state = np.random.get_state()
    assert isinstance(numpy_state, tuple)
    _, keys, position, has_gauss, cached = numpy_state
    state = {
        "python": torch.tensor([version, *words]),
        "python_gauss": torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss]),
        "numpy_gauss": torch.tensor(cached, dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def restore(state: dict[str, Tensor]) -> None:
    """Put the generators where `capture` found them."""
    version, *words = state["python"].tolist()
    has_gauss, gauss = state["python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss if has_gauss else None))
    *keys, position, has_gauss = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_gauss, state["numpy_gauss"].item()))
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
