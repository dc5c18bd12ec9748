"""Continue text with a trained model: `python -m recipes.generate run=<run directory> prompt="def "`."""

import re
import sys
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from models.errors import ConfigError
from recipes.command import command


@dataclass
class GenerateConfig:
    """conf/generate.yaml."""

    run: str
    prompt: str
    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int


def generate(composed: DictConfig) -> None:
    """Print the prompt and its continuation, token by token as they come."""
    settings = OmegaConf.to_object(composed)
    assert isinstance(settings, GenerateConfig)
    if settings.max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={settings.max_new_tokens} must be at least 1.")
    if settings.temperature < 0.0:
        raise ConfigError(f"temperature={settings.temperature} must be 0 (the likeliest token) or more.")
    if settings.top_k is not None and settings.top_k < 1:
        raise ConfigError(f"top_k={settings.top_k} must be at least 1, or null for no limit.")
    if settings.top_p is not None and not 0.0 < settings.top_p <= 1.0:
        raise ConfigError(f"top_p={settings.top_p} must lie in (0, 1], or null for no limit.")

    import torch

    from models.generate import generate as continuation
    from recipes.data.tokenizer import load_tokenizer
    from recipes.resume import tokenizer_of
    from recipes.trained import load_trained

    trained = load_trained(settings.run)
    tokenizer = load_tokenizer(tokenizer_of(trained.checkpoint))
    prompt = torch.from_numpy(tokenizer.open([settings.prompt])[0].astype("int64")).to(trained.device)
    tokens, shown = prompt[1:].tolist(), 0
    for token in continuation(
        trained.decoder,
        prompt.unsqueeze(0),
        settings.max_new_tokens,
        settings.temperature,
        settings.top_k,
        settings.top_p,
        settings.seed,
    ):
        if int(token) in tokenizer.stops:
            break
        tokens.append(int(token))
        text = tokenizer.decode(tokens)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # the rest of a character may still come
            print(text[shown:], end="", flush=True)
            shown = len(text)
    print(tokenizer.decode(tokens)[shown:])


def quoted(argument: str) -> str:
    """A prompt as Hydra reads it whole: its grammar would trim spaces and take brackets and commas for its own."""
    value = argument.removeprefix("prompt=")
    if value == argument or (len(value) > 1 and value[0] == value[-1] and value[0] in "'\""):
        return argument
    escaped = re.sub(r"(\\*)'", lambda match: match[1] * 2 + "\\'", value)
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    return f"prompt='{escaped}{chr(92) * trailing}'"


if __name__ == "__main__":
    sys.argv[1:] = map(quoted, sys.argv[1:])
    command("generate", generate, GenerateConfig)
