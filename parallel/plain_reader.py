"""Reading a checkpoint of torch.distributed.checkpoint without ever running what stands in it."""

import io
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata, ReadItem
from torch.distributed.checkpoint._nested_dict import set_element

_METADATA_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}
_METADATA_MODULES = {"torch.distributed.checkpoint.metadata", *(module for module, _ in _METADATA_NAMES)}


class _MetadataUnpickler(pickle.Unpickler):
    """Reads what torch writes as .metadata and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module in _METADATA_MODULES else None
        if isinstance(found, torch.dtype) or (module, name) in _METADATA_NAMES:
            return found
        if module == "torch.distributed.checkpoint.metadata" and isinstance(found, type):
            return found
        raise pickle.UnpicklingError(f".metadata names {module}.{name}, which no checkpoint of ours does")


class PlainReader(FileSystemReader):
    """torch's reader, whose own would unpickle anything that .metadata names."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata


class PlainPlanner(DefaultLoadPlanner):
    """torch's planner, whose own would unpickle anything in entries that are not tensors."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        part = torch.load(value, weights_only=True)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], part)
        else:
            self.state_dict[read_item.dest_index.fqn] = part


@contextmanager
def one_process_is_fine() -> Iterator[None]:
    """Without torch's warning that a checkpoint is read or written by one process alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
