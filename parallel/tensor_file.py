"""A safetensors file written one tensor at a time, so that no more than one is ever held whole.

The format (huggingface.co/docs/safetensors): the header's length in 8 bytes, the header as JSON, then the bytes of the
tensors end to end. Reading is the safetensors library's business.
"""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
}
Entry = tuple[str, tuple[int, ...], torch.dtype, Callable[[], Tensor]]
"""Name, whole shape, type, and a function that makes the whole tensor: a collective that every rank calls."""


def write_tensors(path: Path, entries: Iterable[Entry], writes: bool) -> None:
    """Write the entries in their order under another name, sync, rename. All ranks call it; one of them `writes`."""
    entries = list(entries)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file that does not say so
    end = 0
    for name, shape, dtype, _ in entries:
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that tensors lie on multiples of 8 bytes
    partial = path.with_name(f".{path.name}.partial")
    file = partial.open("wb") if writes else None
    try:
        if file is not None:
            file.write(len(text).to_bytes(8, "little") + text)
        for _, shape, dtype, make in entries:
            tensor = make()
            assert tuple(tensor.shape) == shape
            assert tensor.dtype == dtype
            if file is not None:
                file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        if file is not None:
            file.flush()
            os.fsync(file.fileno())
            partial.replace(path)
    finally:
        if file is not None:
            file.close()
            partial.unlink(missing_ok=True)
