"""Weights as they are published: safetensors files under Hugging Face's names, read slice by slice, from any layout."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from models.config import ModelConfig
from models.counts import parameter_shapes
from models.decoder import Decoder
from models.errors import ConfigError
from models.hugging_face import config_from, published_names
from parallel.sharded import local, offset

_TIED = "lm_head.weight"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Published:
    """The tensors of a folder; nothing is read but the slices that are asked for."""

    def __init__(self, folder: Path, key: str, allow_pickle: bool = False) -> None:
        """`folder` is the value of the setting `key`.

        Raises ConfigError where there are no weights, or only pickle files and these are not allowed. Even an allowed
        pickle file is read with weights_only=True: tensors, and nothing that could run.
        """
        self.folder, self.key = folder, key
        self._open = ExitStack()
        self._files: dict[str, Any] = {}
        self._pickled: dict[str, Tensor] = {}
        safe, pickled = sorted(folder.glob("*.safetensors")), sorted(folder.glob("pytorch_model*.bin"))
        if not safe and not pickled:
            raise ConfigError(f"{key}={folder} has no .safetensors file, so there are no weights to read.")
        if not safe and not allow_pickle:
            raise ConfigError(
                f"{key}={folder} has its weights only as pickle files ({pickled[0].name}), which can run code when "
                f"they are read. Get the model as .safetensors, or convert it: python -m recipes.import_hf "
                f"path={folder} out=<run directory> allow_pickle=true."
            )
        for path in safe:
            try:
                file = self._open.enter_context(safe_open(path, "pt"))
            except Exception as error:
                raise ConfigError(f"{key}: {path} is not a safetensors file, or is cut off: {error}") from error
            self._files |= dict.fromkeys(file.keys(), file)
        for path in pickled if not safe else []:
            self._pickled |= torch.load(path, weights_only=True, mmap=True, map_location="cpu")
        self._check_index()

    def config(self) -> ModelConfig:
        """What config.json describes. Raises ConfigError where it is missing or cannot be computed here."""
        try:
            content = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError) as error:
            raise ConfigError(f"{self.key}: {self.folder / 'config.json'}: {error}") from error
        return config_from(content, self.folder.resolve().name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor by its published name."""
        return tuple(
            self._pickled[name].shape if name in self._pickled else self._files[name].get_slice(name).get_shape()
        )

    def dtype(self, name: str) -> torch.dtype:
        """The type of a tensor by its published name."""
        if name in self._pickled:
            return self._pickled[name].dtype
        return _DTYPES[self._files[name].get_slice(name).get_dtype()]

    def check(self, config: ModelConfig) -> None:
        """Raise ConfigError, naming tensors, unless these are all the weights of this decoder and no others."""
        expected: dict[str, tuple[int, ...]] = {}
        for name, shape in parameter_shapes(config).items():
            published = published_names(config, name)
            expected |= dict.fromkeys(published, shape if len(published) == 1 else shape[1:])
        held = {*self._files, *self._pickled}
        wrong = [f"{name} is missing" for name in sorted(expected.keys() - held)]
        spare = held - expected.keys() - ({_TIED} if config.tie_word_embeddings else set())
        wrong += [f"{name} is not part of the model" for name in sorted(spare) if "rotary_emb.inv_freq" not in name]
        for name in sorted(expected.keys() & held):
            if self.shape(name) != expected[name]:
                wrong.append(f"{name} has shape {self.shape(name)} instead of {expected[name]}")
        if wrong:
            shown = "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")
            raise ConfigError(f"{self.key}={self.folder} does not hold the weights of model={config.name}: {shown}.")

    def read(self, name: str, slices: Sequence[slice]) -> Tensor:
        """A part of a tensor, as it is on disk."""
        if name in self._pickled:
            return self._pickled[name][tuple(slices)]
        return self._files[name].get_slice(name)[tuple(slices)]

    def block(self, config: ModelConfig, name: str, first: Sequence[int], shape: Sequence[int]) -> Tensor:
        """A block of one of our parameters: for a stack of experts, the slices of those that are in it."""
        slices = [slice(start, start + size) for start, size in zip(first, shape, strict=True)]
        published = published_names(config, name)
        if len(published) == 1:
            return self.read(published[0], slices)
        return torch.stack([self.read(expert, slices[1:]) for expert in published[slices[0]]])

    def close(self) -> None:
        """Close the files."""
        self._open.close()

    def _check_index(self) -> None:
        path = self.folder / "model.safetensors.index.json"
        if not self._files or not path.exists():
            return
        listed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        missing = sorted({file for name, file in listed.items() if name not in self._files})
        if missing:
            raise ConfigError(
                f"{self.key}={self.folder}: {', '.join(missing)} is missing or has lost tensors that {path.name} lists."
            )


@torch.no_grad()
def fill_from_published(decoder: Decoder, published: Published) -> None:
    """Fill this rank's blocks of a decoder's parameters, reading only these from the files."""
    published.check(decoder.config)
    shapes = parameter_shapes(decoder.config)
    for name, parameter in decoder.named_parameters():
        block = local(parameter)
        if name in shapes and block.numel():
            block.copy_(published.block(decoder.config, name, offset(parameter), block.shape))
