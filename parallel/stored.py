"""The weights of a checkpoint without a model: one tensor at a time, and from there to safetensors files."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from models.config import ModelConfig
from models.counts import adapter_shapes, parameter_shapes
from models.hugging_face import published_names
from models.lora import PREFIX, peft_config
from parallel.files import write_whole
from parallel.plain_reader import PlainPlanner, PlainReader, one_process_is_fine
from parallel.tensor_file import Entry, write_tensors


class StoredWeights:
    """Reads parameters of a checkpoint, whatever layout wrote it, and holds no more than one of them."""

    def __init__(self, checkpoint: Path, adapter_scale: float | None = None) -> None:
        """With `adapter_scale` (alpha / rank) weights are given with their adapters merged into them."""
        self._adapter_scale = adapter_scale
        self._reader = PlainReader(checkpoint)
        held = {
            name.removeprefix("model."): entry
            for name, entry in self._reader.read_metadata().state_dict_metadata.items()
            if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
        }
        self.shapes = {name: tuple(entry.size) for name, entry in held.items()}
        self.dtypes = {name: entry.properties.dtype for name, entry in held.items()}
        self._latest: tuple[str, Tensor] | None = None

    def read(self, name: str) -> Tensor:
        """The whole of a parameter, as it was stored."""
        if self._latest is None or self._latest[0] != name:
            self._latest = None  # freed before the next is made
            self._latest = (name, self._merged(name) if self._adapter_scale is not None else self._load(name))
        return self._latest[1]

    def _load(self, name: str) -> Tensor:
        tensor = torch.empty(self.shapes[name], dtype=self.dtypes[name])
        with one_process_is_fine():
            dcp.load({"model": {name: tensor}}, storage_reader=self._reader, planner=PlainPlanner(), no_dist=True)
        return tensor

    def _merged(self, name: str) -> Tensor:
        weight, layer = self._load(name), name.removesuffix(".weight")
        if f"{layer}.lora_A.weight" not in self.shapes:
            return weight
        assert self._adapter_scale is not None
        a, b = (self._load(f"{layer}.lora_{part}.weight").double() for part in "AB")
        return (weight.double() + self._adapter_scale * b @ a).to(weight.dtype)


def write_published(
    folder: Path, config: ModelConfig, weights: StoredWeights, dtype: torch.dtype | None, shard_bytes: int
) -> None:
    """Write a model's weights as safetensors of at most `shard_bytes` each (but for a larger tensor), with an index.

    A type of None keeps the stored ones.
    """
    entries = list(_entries(config, weights, dtype))
    shards: list[list[Entry]] = [[]]
    room = shard_bytes
    for entry in entries:
        size = torch.Size(entry[1]).numel() * entry[2].itemsize
        if size > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(entry)
        room -= size
    if len(shards) == 1:
        write_tensors(folder / "model.safetensors", shards[0], True)
        return
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(folder / name, shard, True)
        where |= dict.fromkeys((entry[0] for entry in shard), name)
    total = sum(torch.Size(shape).numel() * kind.itemsize for _, shape, kind, _ in entries)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    write_whole(folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")


def write_adapters(folder: Path, config: ModelConfig, weights: StoredWeights, base: str) -> None:
    """Write the adapters alone as PEFT has them: adapter_model.safetensors and adapter_config.json."""
    entries: list[Entry] = [
        (PREFIX + name, shape, weights.dtypes[name], partial(weights.read, name))
        for name, shape in adapter_shapes(config).items()
    ]
    write_tensors(folder / "adapter_model.safetensors", entries, True)
    write_whole(folder / "adapter_config.json", json.dumps(peft_config(config, base), indent=2) + "\n")


def _entries(config: ModelConfig, weights: StoredWeights, dtype: torch.dtype | None) -> Iterator[Entry]:
    for name, shape in parameter_shapes(config).items():
        published = published_names(config, name)
        kind = dtype or weights.dtypes[name]
        if len(published) == 1:
            yield published[0], shape, kind, partial(_whole, weights, name, kind)
            continue
        for expert, own in enumerate(published):
            yield own, shape[1:], kind, partial(_expert, weights, name, expert, kind)


def _whole(weights: StoredWeights, name: str, dtype: torch.dtype) -> Tensor:
    return weights.read(name).to(dtype)


def _expert(weights: StoredWeights, name: str, expert: int, dtype: torch.dtype) -> Tensor:
    return weights.read(name)[expert].to(dtype)
