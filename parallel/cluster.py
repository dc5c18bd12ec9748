"""The machines: what they are, what SLURM is asked for, and how long a run may seem dead. No torch."""

from dataclasses import dataclass, field
from enum import StrEnum


class Container(StrEnum):
    none = "none"
    pyxis = "pyxis"
    apptainer = "apptainer"


@dataclass(frozen=True)
class SlurmConfig:
    """What `python -m recipes.submit` asks SLURM for. None leaves it to the cluster's defaults."""

    job_name: str | None = None
    """None is the recipe's name."""
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    include: list[str] = field(default_factory=list)
    """Nodes that must be among the job's."""
    exclude: list[str] = field(default_factory=list)
    """Nodes that must not."""
    time: str | None = None
    """minutes, hh:mm:ss or days-hh:mm:ss."""
    gres: str | None = None
    """How the cluster calls its GPUs: `gpu` asks for `gpu:8` with 8 devices per node, `gpu:h100` for `gpu:h100:8`."""
    cpus_per_task: int | None = None
    mem: str | None = None
    """Memory per node, such as 900G; 0 is all of it."""
    exclusive: bool = False
    """No other job on the nodes."""
    options: list[str] = field(default_factory=list)
    """Any other option of sbatch, such as --mail-type=FAIL."""
    modules: list[str] = field(default_factory=list)
    """What `module load` loads before anything runs."""
    python: str | None = None
    """The interpreter on the nodes; None is the one that submits."""
    container: Container = Container.none
    container_image: str | None = None
    container_mounts: list[str] = field(default_factory=list)
    """HOST:CONTAINER pairs; the checkout's snapshot and the run directory are always mounted."""
    signal_lead_s: int = 180
    """Seconds before the time limit at which the run is told to save and end. More than two steps and a save."""
    requeue: bool = True
    """Go on after a preemption, the time limit or a failure, until there is DONE."""
    max_restarts: int = 50
    """Restarts of the job in all."""
    max_failures: int = 3
    """Restarts in a row that come to an end without a new checkpoint, and not because they were told to."""
    backoff_s: int = 60
    """Wait before the restart after such a failure; doubles with each."""
    health_gate: bool = True
    """`recipes.doctor` on every node before training; a bad node ends the job before its first step."""
    exclude_bad_nodes: bool = False
    """Requeue without the nodes that the health gate has found bad, instead of ending the job."""


@dataclass(frozen=True)
class WatchConfig:
    """When a run is taken for dead, and a rank for slow. Seconds of each rank's own monotonic clock."""

    step_limit_s: float = 600.0
    """From one sign of life to the next: a step, a batch of validation. 0 never takes a run for dead."""
    start_limit_s: float = 3600.0
    """Until the first step has ended, compiling and the reading of a checkpoint included."""
    save_limit_s: float = 1800.0
    """A checkpoint."""
    straggler_factor: float = 1.5
    """A rank is called slow when it works so many times as long per step as the median of its place along pp."""

    def longest_s(self) -> float:
        """When torch itself gives a collective up: later than the watch, which says more."""
        limits = (self.step_limit_s, self.start_limit_s, self.save_limit_s)
        return 2.0 * max(limits) if min(limits) > 0.0 else 7 * 86400.0


@dataclass(frozen=True)
class ClusterConfig:
    """The machines."""

    name: str
    device: str
    """`auto` (GPUs where there are any), `cpu`, `cuda`, or a device of `parallel/devices.py` such as `h100`."""
    nodes: int = 1
    devices_per_node: int | None = None
    """None: every GPU that is seen, or one process on a CPU."""
    network_gb_per_s: float | None = None
    """Between nodes, what one device can send in a second, in gigabytes (10^9 bytes); for `plan`. None: not known."""
    threads: int | None = None
    """CPU threads per process; None leaves torch's choice."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that every rank of a submitted job gets: NCCL's, the network's."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
