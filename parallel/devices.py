"""What is known of the chips a run may use."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One accelerator. Peaks are dense, without sparsity, in FLOP/s."""

    name: str
    memory_bytes: int
    bf16_flops: float
    fp32_flops: float
    link_bytes_per_s: float
    """What it can send to the others of its node at once, in one direction."""


_GIB = 1 << 30

DEVICES = {
    # NVIDIA A100 datasheet: 312 TFLOP/s bfloat16, 19.5 TFLOP/s float32; NVLink 600 GB/s both ways together, PCIe 4.0
    # x16 64 GB/s both ways together.
    "a100_40g": Device("a100_40g", 40 * _GIB, 312e12, 19.5e12, 300e9),
    "a100_80g": Device("a100_80g", 80 * _GIB, 312e12, 19.5e12, 300e9),
    "a100_pcie": Device("a100_pcie", 80 * _GIB, 312e12, 19.5e12, 32e9),
    # NVIDIA H100 datasheet (SXM): 989 TFLOP/s bfloat16, 67 TFLOP/s float32; NVLink 900 GB/s both ways together.
    "h100": Device("h100", 80 * _GIB, 989e12, 67e12, 450e9),
    # NVIDIA H200 datasheet (SXM): the H100's chip with 141 GB.
    "h200": Device("h200", 141_000_000_000, 989e12, 67e12, 450e9),
}

_BY_PRODUCT = {
    "A100-SXM4-80GB": "a100_80g",
    "A100 80GB PCIe": "a100_pcie",
    "A100 80GB": "a100_80g",
    "A100": "a100_40g",
    "H200": "h200",
    "H100": "h100",
}


def recognise(product: str) -> Device | None:
    """The device of a product name as the driver gives it, such as "NVIDIA H100 80GB HBM3"; None if it is not known."""
    for part, name in _BY_PRODUCT.items():
        if part in product:
            return DEVICES[name]
    return None
