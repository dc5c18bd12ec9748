"""What a CPU cannot show: kernels against float64 references, full-width layers, training in bfloat16 on a device."""

import sys
import time
from dataclasses import is_dataclass, replace
from enum import EnumType
from pathlib import Path
from typing import Any, get_type_hints

import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from models.attention import attend, attend_alone
from models.config import ModelConfig
from models.counts import active_parameters_per_layer
from models.decoder import Decoder, DecoderLayer
from models.loss import linear_cross_entropy
from models.mask import AttentionMask, Block
from models.moe import ExpertLinear
from models.rotary import rotary_tables
from parallel.layout import Layout
from parallel.ranks import Ranks, start_process_group
from parallel.step import clip, forward_backward, make_mesh, parallelize

CONF = Path(__file__).resolve().parents[2] / "conf" / "model"
BF16 = 2.0**-8  # relative spacing of bfloat16


def say(what: str, error: float, limit: float) -> None:
    """Print one figure; stop at the first that is not within its limit."""
    print(f"{what:<58} {error:9.2e}  (limit {limit:.0e})", flush=True)
    if not error <= limit:
        sys.exit(f"FAILED: {what}")


def relative(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm."""
    expected = expected.detach().double().cpu()
    return float((found.detach().double().cpu() - expected).norm() / expected.norm())


def check_attention(device: torch.device) -> None:
    """Outputs and gradients of every mask, grouped heads included."""
    length = 512
    documents = (torch.arange(length, device=device) // 100).unsqueeze(0)
    for name, window, document_ids in (
        ("causal", None, None),
        ("window", 96, None),
        ("documents", None, documents),
        ("window and documents", 96, documents),
    ):
        for heads, groups in ((8, 8), (8, 2), (8, 1)):
            exact = [torch.randn(1, count, length, 64, dtype=torch.float64) for count in (heads, groups, groups)]
            inputs = [x.to(device, torch.bfloat16).requires_grad_() for x in exact]
            references = [x.detach().double().cpu().requires_grad_() for x in inputs]
            for tensors, ids in (
                (inputs, document_ids),
                (references, None if document_ids is None else documents.cpu()),
            ):
                mask = AttentionMask.of_sequence(length, length, window, ids)
                out = attend_alone(*tensors, mask)
                out.backward(torch.ones_like(out))
                if tensors is inputs:
                    found = out
            say(f"attention, {name}, {heads}:{groups}, output", relative(found, out), 2 * BF16)
            worst = max(relative(a.grad, b.grad) for a, b in zip(inputs, references, strict=True))
            say(f"attention, {name}, {heads}:{groups}, gradients", worst, 6 * BF16)


def check_rectangle(device: torch.device) -> None:
    """Many queries on few keys that lie before them, some beyond the window: what ranks of a ring see."""
    every = slice(None)
    mask = AttentionMask((), (Block(every, slice(0, 330), every, slice(0, 64), shift=64, window=340),))
    exact = [torch.randn(1, 8, length, 64, dtype=torch.float64) for length in (330, 64, 64)]
    inputs = [x.to(device, torch.bfloat16).requires_grad_() for x in exact]
    references = [x.detach().double().cpu().requires_grad_() for x in inputs]
    found, expected = (attend(*tensors, mask)[0] for tensors in (inputs, references))
    for out in (found, expected):
        out.backward(torch.ones_like(out))
    say("attention, a rectangle and a window, output", relative(found, expected), 2 * BF16)
    worst = max(relative(a.grad, b.grad) for a, b in zip(inputs, references, strict=True))
    say("attention, a rectangle and a window, gradients", worst, 6 * BF16)


def check_loss(device: torch.device) -> None:
    """The chunked loss and its gradients, chunks smaller than the batch."""
    hidden, weight = torch.randn(1000, 256) * 0.5, torch.randn(4099, 256) * 0.05
    labels = torch.randint(4099, (1000,))
    labels[::7] = -100
    outcomes = []
    for place, dtype in ((device, torch.bfloat16), (torch.device("cpu"), torch.float64)):
        h, w = (x.to(torch.bfloat16).to(place, dtype).requires_grad_() for x in (hidden, weight))
        loss = linear_cross_entropy(h, w, labels.to(place), chunk=300)
        loss.backward()
        outcomes.append((loss.detach().reshape(1), h.grad, w.grad))
    for what, found, expected in zip(("value", "hidden gradient", "weight gradient"), *outcomes, strict=True):
        say(f"loss, {what}", relative(found, expected), 4 * BF16)


def check_experts(device: torch.device) -> None:
    """Products of experts with uneven rows, some with none: the kernel of `ExpertLinear` on this device."""
    counts = torch.tensor([0, 70, 1, 0, 57])
    rows, weight = torch.randn(128, 64), torch.randn(5, 96, 64) * 0.1
    outcomes = []
    for place, dtype in ((device, torch.bfloat16), (torch.device("cpu"), torch.float64)):
        with torch.device(place):
            layer = ExpertLinear(5, 64, 96).to(dtype)
        layer.weight.data.copy_(weight.to(torch.bfloat16))
        x = rows.to(torch.bfloat16).to(place, dtype).requires_grad_()
        out = layer(x, counts.to(place))
        out.backward(torch.ones_like(out))
        outcomes.append((out, x.grad, layer.weight.grad))
    for what, found, expected in zip(("output", "row gradients", "weight gradients"), *outcomes, strict=True):
        say(f"experts, {what}", relative(found, expected), 4 * BF16)


def preset(name: str) -> dict[str, Any]:
    """The values of a preset of conf/model laid over those of its base; ${model.key} stands for another value."""
    values: dict[str, Any] = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    bases = [entry for entry in values.pop("defaults") if entry not in ("schema", "_self_")]
    merged: dict[str, Any] = preset(bases[0]) if bases else {}
    for key, value in values.items():
        merged[key] = merged.get(key, {}) | value if isinstance(value, dict) else value
    return merged


def load_model(name: str) -> ModelConfig:
    """A preset of conf/model without Hydra, which the machine may not have."""
    values = preset(name)

    def made(kind: Any, given: dict[str, Any]) -> Any:
        chosen = {}
        for key, value in given.items():
            if isinstance(value, str) and value.startswith("${model."):
                value = values[value.removeprefix("${model.").removesuffix("}")]
            of = get_type_hints(kind)[key]
            chosen[key] = made(of, value) if is_dataclass(of) else of(value) if isinstance(of, EnumType) else value
        return kind(**chosen)

    return made(ModelConfig, values)


def check_layer(config: ModelConfig, device: torch.device, length: int) -> None:
    """Forward and backward of one layer at full width: finite, and how fast."""
    with torch.device(device):
        layer = DecoderLayer(config, 0).to(torch.bfloat16)
        for parameter in layer.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.02)
        x = torch.randn(1, length, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        rotary = rotary_tables(config.rope, config.head_dim, torch.arange(length).unsqueeze(0), torch.bfloat16)
    mask = AttentionMask.of_sequence(length, length, config.sliding_window)
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        layer(x, rotary, mask).float().square().mean().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    assert all(torch.isfinite(parameter.grad).all() for parameter in layer.parameters())
    best = min(seconds)
    speed = 6 * active_parameters_per_layer(config)[0] * length / best / 1e12
    print(f"layer of {config.name:<12} {length} tokens  {best * 1e3:8.1f} ms  {speed:6.1f} TFLOP/s", flush=True)


def check_training(device: torch.device) -> None:
    """The default model in bfloat16 on one batch again and again, by the path of every layout: it must learn."""
    from recipes.data.windows import StepOrder, SyntheticWindows, TrainBatches
    from recipes.optimizers import make_optimizer
    from tests.distributed.cases import make_config

    config = make_config(
        precision="bf16", optimizer="adamw", data={"seq_len": 256, "global_batch": 8, "micro_batch": 4}
    )
    config = replace(config, model=load_model("tiny"))
    start_process_group(Ranks(), device)
    with torch.device("meta"):
        decoder = Decoder(config.model)
    model = parallelize(decoder, config, Layout(), make_mesh(config, Layout(), device.type))
    windows = SyntheticWindows(config.data, 0, "train")
    batch = TrainBatches(windows, StepOrder(len(windows), 8, 0), 0, 1, None)[0]
    batch = {key: value.to(device) for key, value in batch.items()}
    optimizer = make_optimizer(config.optimizer, decoder)
    losses = []
    for step in range(20):
        optimizer.zero_grad()
        loss, _ = forward_backward(model, batch, step)
        clip(model)
        optimizer.step()
        losses.append(float(loss))
    dist.destroy_process_group()
    say("training: last loss over first", losses[-1] / losses[0], 0.9)


def main() -> None:
    kind = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"torch {torch.__version__} on {name}")
    torch.manual_seed(0)
    check_attention(device)
    check_rectangle(device)
    check_loss(device)
    check_experts(device)
    check_training(device)
    if device.type == "cuda":
        for path in sorted(CONF.glob("*.yaml")):
            check_layer(load_model(path.stem), device, 2048 if "tiny" not in path.stem else 512)
            torch.cuda.empty_cache()
    else:
        for small in ("tiny", "tiny_moe"):
            check_layer(load_model(small), device, 512)
        print("full-width layers: not run on a CPU")


if __name__ == "__main__":
    main()
