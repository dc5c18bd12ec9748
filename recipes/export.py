"""Weights in Hugging Face's format: `python -m recipes.export run=<run directory> out=<folder>`.

From any checkpoint, whatever layout wrote it, one tensor at a time: memory is that of the largest. Adapters are written
alone in PEFT's format, or with merge=true into the weights.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from models.errors import ConfigError
from recipes.command import command


@dataclass
class ExportConfig:
    """conf/export.yaml."""

    run: str
    out: str
    dtype: str | None
    shard_gb: float
    merge: bool
    verify: bool


def export(composed: DictConfig) -> None:
    """Write config.json, safetensors and tokenizer files into a new folder, whole or not at all."""
    settings = OmegaConf.to_object(composed)
    assert isinstance(settings, ExportConfig)
    dtypes = ("float32", "bfloat16", "float16", "float64")
    if settings.dtype is not None and settings.dtype not in dtypes:
        raise ConfigError(f"dtype={settings.dtype} is none of {', '.join(dtypes)}, or null for the type as stored.")
    if settings.shard_gb <= 0:
        raise ConfigError(f"shard_gb={settings.shard_gb} must be above 0, such as 5.")
    out = new_folder(settings.out)

    import torch

    from models.hugging_face import config_dict
    from parallel.files import write_whole
    from parallel.stored import StoredWeights, write_adapters, write_published
    from recipes.resume import PUBLISHED
    from recipes.trained import find_trained
    from recipes.verify import verify_logits

    config, checkpoint = find_trained(settings.run)
    dtype = None if settings.dtype is None else getattr(torch, settings.dtype)
    lora = config.model.lora
    if settings.merge and not lora.rank:
        raise ConfigError(f"merge=true: run={settings.run} has no adapters (model.lora.rank=0). Write merge=false.")
    if lora.rank and not settings.merge and (settings.verify or dtype is not None):
        raise ConfigError(
            "verify and dtype are for whole models, and adapters go alone. Write merge=true, or leave them out."
        )
    if lora.rank and settings.verify and dtype is not None:
        raise ConfigError(
            f"verify=true with dtype={settings.dtype}: adapters are merged before they are rounded, so that logits of "
            "the rounded model differ from the run's own. Write dtype=null, or verify=false."
        )
    weights = StoredWeights(checkpoint, lora.alpha / lora.rank if settings.merge else None)
    described = config_dict(config.model)
    described["dtype"] = str(dtype or weights.dtypes["model.norm.weight"]).removeprefix("torch.")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if lora.rank and not settings.merge:
        write_adapters(partial, config.model, weights, config.weights or "")
        os.rename(partial, out)
        print(f"the adapters of {checkpoint}, as PEFT has them, in {out}")
        return
    write_whole(partial / "config.json", json.dumps(described, indent=2) + "\n")
    run = checkpoint.parent.parent
    if (run / PUBLISHED).is_dir():
        shutil.copytree(run / PUBLISHED, partial, dirs_exist_ok=True)
    elif (run / "tokenizer.json").is_file():
        write_tokenizer(run / "tokenizer.json", partial, config.model.max_position_embeddings)
    write_published(partial, config.model, weights, dtype, int(settings.shard_gb * 1e9))
    if settings.verify:
        verify_logits(config, checkpoint, partial, dtype)
    os.rename(partial, out)
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"{checkpoint} as {described['model_type']}, {size / 1e9:.3f} GB in {out}")


def new_folder(name: str) -> Path:
    """A folder that is to be made. Raises ConfigError where it is there already or not named."""
    if not name:
        raise ConfigError("out is empty; write out=<folder>, one that is not there yet.")
    if Path(name).exists():
        raise ConfigError(f"out={name} is there already; name a folder that is not.")
    return Path(name)


def write_tokenizer(tokenizer: Path, folder: Path, longest: int) -> None:
    """tokenizer.json with the description that transformers wants beside it."""
    from recipes.data.tokenizer import DESCRIPTION, load_tokenizer

    ours = load_tokenizer(tokenizer)
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": ours.mark,
        "eos_token": ours.end or ours.mark,
        "model_max_length": longest,
    }
    (folder / DESCRIPTION).write_text(json.dumps(described, indent=2) + "\n")


if __name__ == "__main__":
    command("export", export, ExportConfig)
