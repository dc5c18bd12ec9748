"""The named nodes that may stand under `callbacks` and `logger`: what each takes, with its type.

A node of the user's own needs no schema: `+callbacks.mine._target_=recipes.callbacks.Mine`.
"""

from dataclasses import dataclass, field


@dataclass
class Progress:
    """A progress bar on a terminal, plain lines elsewhere."""

    _target_: str = "recipes.callbacks.Progress"


@dataclass
class SampleText:
    """Text continued from `prompt`, printed when training ends."""

    _target_: str = "recipes.callbacks.SampleText"
    prompt: str = "def "
    max_new_tokens: int = 200
    temperature: float = 0.8


@dataclass
class Gradients:
    """gradients-step{n}.safetensors in the run directory: every gradient and value, whole, for `recipes.compare`."""

    _target_: str = "recipes.callbacks.Gradients"
    steps: list[int] = field(default_factory=lambda: [1, 2, 3])
    """Optimizer steps, counted from 1."""


@dataclass
class ExpertLoad:
    """How often each expert of each layer was chosen: expert_load.jsonl, and a histogram to W&B."""

    _target_: str = "recipes.callbacks.ExpertLoad"
    every_n_steps: int = 50


@dataclass
class Wandb:
    """Weights & Biases; offline until told otherwise."""

    _target_: str = "recipes.loggers.wandb_logger"
    offline: bool = True
    project: str = "quintet"
    entity: str | None = None
    group: str | None = None
    tags: list[str] | None = None


@dataclass
class Csv:
    """metrics.csv in the run directory."""

    _target_: str = "recipes.loggers.csv_logger"


CALLBACKS: dict[str, type] = {
    "progress": Progress,
    "sample_text": SampleText,
    "gradients": Gradients,
    "expert_load": ExpertLoad,
}
LOGGERS: dict[str, type] = {"wandb": Wandb, "csv": Csv}
