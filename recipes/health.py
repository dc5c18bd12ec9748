"""What `recipes.doctor` looks at on one rank, and which nodes it then calls bad. Each check is one function.

A rank brings facts (values that all nodes should share, or share nearly) and faults of its own. `bad_nodes` compares
the facts of all ranks: a pure function, so that it can be tried on reports that are made up.
"""

import importlib.metadata
import os
import platform
import re
import shutil
import statistics
import subprocess
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from models.counts import parameter_count
from parallel.config import Config
from parallel.plan.rules.cluster import variable_faults

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
STATE_BYTES_PER_PARAMETER = 12
"""A checkpoint with AdamW: weights and two moments in float32."""
MINIMUM = {"h100": {"nccl": (2, 18), "cuda": (11, 8)}, "h200": {"nccl": (2, 18), "cuda": (11, 8)}}
"""Oldest versions by device: NCCL 2.18 tunes for the H100's NVLink, CUDA 11.8 is the first to know its chip."""
SLOW = {"cuda": 1.2, "cpu": 3.0}
"""How many times slower than the median of all ranks is a fault. CPU ranks share processors."""
SKEW_S = 5.0
MEMORY_SHARE = 0.8
"""A rank with less than this share of the others' free memory is a fault."""


@dataclass
class Report:
    """What one rank has found."""

    rank: int
    node: str
    equal: dict[str, str] = field(default_factory=dict)
    """Must be the same everywhere: versions, the kind of GPU, how many."""
    more_is_better: dict[str, float] = field(default_factory=dict)
    """Must be nearly the same everywhere: free memory in GiB, TFLOP/s, GB/s."""
    clock: float = 0.0
    """Seconds since 1970, read when all ranks had arrived."""
    faults: list[str] = field(default_factory=list)


def versions(config: Config, report: Report) -> None:
    """Package by package: found, and what pyproject.toml wants. The strategy uses private parts of Lightning."""
    for line in tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]:
        package, _, wanted = line.partition("==")
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found = "not installed"
        report.equal[package] = found
        if found.partition("+")[0] == wanted:
            continue
        if package != "torch" or not (2, 11) <= _numbers(found) < (2, 15):
            report.faults.append(f"{package} {found} is installed, {wanted} is wanted")
    report.equal["python"] = platform.python_version()


def gpus(config: Config, report: Report) -> None:
    """Kind, number, driver, CUDA and NCCL versions, free memory, and what the driver reports of ECC and clocks."""
    if config.cluster.device == "cpu" or not torch.cuda.is_available():
        if config.cluster.device not in ("cpu", "auto"):
            report.faults.append(f"cluster.device={config.cluster.device}, but torch {torch.__version__} sees no GPU")
        return
    count, device = torch.cuda.device_count(), torch.cuda.current_device()
    nccl, cuda = torch.cuda.nccl.version(), torch.version.cuda or "0"
    report.equal |= {"gpus": str(count), "gpu": torch.cuda.get_device_name(device), "cuda": cuda}
    report.equal["nccl"] = ".".join(map(str, nccl))
    oldest = MINIMUM.get(config.cluster.device, {})
    for name, version in (("nccl", nccl), ("cuda", _numbers(cuda))):
        if name in oldest and tuple(version) < oldest[name]:
            wanted = f"{config.cluster.device} needs {'.'.join(map(str, oldest[name]))}"
            report.faults.append(f"{name} {report.equal[name]} is too old: {wanted}")
    free, total = torch.cuda.mem_get_info(device)
    report.more_is_better["free GPU memory, GiB"] = free / 2**30
    if free < 0.9 * total:
        report.faults.append(f"GPU {device}: {(total - free) / 2**30:.1f} GiB are taken by another process")
    _nvidia_smi(report)


def _nvidia_smi(report: Report) -> None:
    keys = ("driver_version", "ecc.errors.uncorrected.volatile.total", "clocks_throttle_reasons.hw_slowdown")
    try:
        asked = ["nvidia-smi", f"--query-gpu=index,{','.join(keys)}", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        report.faults.append(f"nvidia-smi does not answer: {error}")
        return
    for line in done.stdout.splitlines():
        index, driver, ecc, slowdown = (part.strip() for part in line.split(","))
        report.equal["driver"] = driver
        if ecc.isdigit() and int(ecc):
            report.faults.append(f"GPU {index}: {ecc} uncorrected ECC errors since the driver was loaded")
        if slowdown == "Active":
            report.faults.append(f"GPU {index}: clocks are held down by the hardware (heat or power)")
    if xids := _xids():
        report.faults.append(f"the driver's log has Xid {', '.join(sorted(xids))}: look with dmesg")


def _xids() -> set[str]:
    """Faults that the driver has logged, where this user may read the kernel's log. 13, 31 and 43 are programs' own."""
    try:
        log = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return set()
    return set(re.findall(r"NVRM: Xid \([^)]*\): (\d+)", log.stdout)) - {"13", "31", "43"}


def memory(config: Config, report: Report) -> None:
    """The host's memory that is still to be had."""
    found = (
        re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text()) if os.path.exists("/proc") else None
    )
    if found:
        report.more_is_better["free host memory, GiB"] = int(found[1]) / 2**20


def matmul(config: Config, report: Report) -> None:
    """A product of small whole numbers, which float32 holds exactly; and how fast the device makes it."""
    on_gpu = config.cluster.device != "cpu" and torch.cuda.is_available()
    device, size = torch.device("cuda" if on_gpu else "cpu"), 4096 if on_gpu else 256
    index = torch.arange(size, device=device)
    a = ((index[:, None] * 3 + index) % 5).float()
    b = ((index[:, None] + index * 2) % 7).float()
    product, best = a @ b, float("inf")
    for _ in range(10):
        _finish(device)
        started = time.perf_counter()
        product = a @ b
        _finish(device)
        best = min(best, time.perf_counter() - started)
    report.more_is_better["matmul, TFLOP/s"] = 2 * size**3 / best / 1e12
    row = torch.randint(size, (8,)).tolist()
    expected = a[row].cpu().to(torch.int64) @ b.cpu().to(torch.int64)
    if not torch.equal(product[row].cpu().to(torch.int64), expected):
        report.faults.append("a product of whole numbers came out wrong: the processor or its memory is broken")


def disk(config: Config, report: Report) -> None:
    """Room for checkpoints in the run directory and for temporary files on the node, and that both can be written."""
    state = parameter_count(config.model) * STATE_BYTES_PER_PARAMETER
    run_root = Path(config.run.dir).absolute()
    while not run_root.exists():
        run_root = run_root.parent
    needed = state * (config.checkpoint.keep + 1)
    for folder, least in ((run_root, needed), (Path(tempfile.gettempdir()), 16 << 20)):
        free = shutil.disk_usage(folder).free
        if free < least:
            report.faults.append(f"{folder}: {free / 1e9:.3f} GB free, {least / 1e9:.3f} GB are needed")
            continue
        try:
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
                file.write(bytes(1 << 20))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            report.faults.append(f"{folder} cannot be written: {error.strerror}")


def variables(config: Config, report: Report) -> None:
    """Variables of this process that neither torch nor NCCL goes by any more."""
    chosen = {name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "TORCH_NCCL_"))}
    for fault in variable_faults(chosen):
        report.faults.append(fault.message.replace("cluster.environment.", "the environment has ", 1))


CHECKS: tuple[Callable[[Config, Report], None], ...] = (versions, gpus, memory, matmul, disk, variables)
"""What every rank looks at by itself; the collectives of each axis come after them (recipes/doctor.py)."""


def bad_nodes(reports: list[Report], device: str) -> dict[str, list[str]]:
    """Nodes and what is wrong with each: its own faults, and where it is not as the others are."""
    bad: dict[str, list[str]] = {}

    def blame(report: Report, what: str) -> None:
        reasons = bad.setdefault(report.node, [])
        if what not in reasons:
            reasons.append(what)

    for report in reports:
        for fault in report.faults:
            blame(report, fault)
    for name in sorted({name for report in reports for name in report.equal}):
        values = [report.equal.get(name, "missing") for report in reports]
        usual = Counter(values).most_common(1)[0][0]
        # Half against half: those without a fault of their own are the measure.
        healthy = [report.equal.get(name, "missing") for report in reports if not report.faults]
        if 2 * values.count(usual) <= len(values) and healthy:
            usual = Counter(healthy).most_common(1)[0][0]
        for report, value in zip(reports, values, strict=True):
            if value != usual:
                blame(report, f"{name} is {value}, on the other nodes {usual}")
    for name in sorted({name for report in reports for name in report.more_is_better}):
        usual_size = statistics.median_high(report.more_is_better.get(name, 0.0) for report in reports)
        least = usual_size * MEMORY_SHARE if "memory" in name else usual_size / SLOW[device]
        for report in reports:
            size = report.more_is_better.get(name, 0.0)
            if size < least:
                blame(report, f"{name}: {size:.3g} on rank {report.rank}, usual is {usual_size:.3g}")
    usual_clock = statistics.median(report.clock for report in reports)
    for report in reports:
        if abs(report.clock - usual_clock) > SKEW_S:
            blame(report, f"its clock is {report.clock - usual_clock:+.0f} s off the others'")
    return bad


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
