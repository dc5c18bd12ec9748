"""Continue a sequence of tokens, one at a time, with a key/value cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

from models.attention import KeyValueCache
from models.decoder import Decoder
from models.errors import ConfigError


def choose(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, draw: torch.Generator) -> Tensor:
    """Next tokens (batch,) from logits (batch, vocabulary): the likeliest at temperature 0, else a draw."""
    if temperature == 0.0:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    if top_k is not None:
        floor = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
        logits = logits.masked_fill(logits < floor, float("-inf"))
    if top_p is not None:
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        cut = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before > top_p)
        logits = logits.masked_fill(cut, float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1, generator=draw).squeeze(-1)


@torch.inference_mode()
def generate(
    model: Decoder,
    prompt: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> Iterator[Tensor]:
    """Yield the tokens (batch,) that follow `prompt` (batch, seq), at most `max_new_tokens` of them.

    Raises ConfigError where the prompt is empty or prompt and continuation pass the model's longest position.
    """
    if prompt.shape[1] == 0:
        raise ConfigError("prompt is empty; give at least one token to continue.")
    longest = model.config.max_position_embeddings
    if prompt.shape[1] + max_new_tokens > longest:
        raise ConfigError(
            f"{prompt.shape[1]} prompt tokens + max_new_tokens={max_new_tokens} pass the model's "
            f"max_position_embeddings={longest}; write max_new_tokens={max(longest - prompt.shape[1], 0)} or shorten "
            f"the prompt."
        )
    draw = torch.Generator(device=prompt.device).manual_seed(seed)
    caches = [KeyValueCache() for _ in range(model.config.num_hidden_layers)]
    tokens = prompt
    for _ in range(max_new_tokens):
        logits = model(tokens, caches=caches)[:, -1]
        chosen = choose(logits, temperature, top_k, top_p, draw)
        yield chosen
        tokens = chosen.unsqueeze(-1)
