"""Rules for what a cluster is asked for: SLURM's fields, and variables that today's torch and NCCL do not read."""

import difflib
import re
from collections.abc import Iterator, Mapping

from parallel.cluster import Container, SlurmConfig
from parallel.config import Config
from parallel.plan.problems import Fault

RENAMED = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
    "NCCL_DUMP_ON_TIMEOUT": "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "NCCL_AVOID_RECORD_STREAMS": "TORCH_NCCL_AVOID_RECORD_STREAMS",
    "NCCL_USE_COMM_NONBLOCKING": "TORCH_NCCL_USE_COMM_NONBLOCKING",
    "NCCL_HIGH_PRIORITY": "TORCH_NCCL_HIGH_PRIORITY",
    "NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
    "NCCL_DEBUG_INFO_TEMP_FILE": "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "TORCH_FR_DUMP_TEMP_FILE",
    "NCCL_SHARP_DISABLE": "NCCL_COLLNET_ENABLE=0",
    "NCCL_SHARP_ENABLE": "NCCL_COLLNET_ENABLE=1",
    "NCCL_TIMEOUT": "cluster.watch.step_limit_s",
    "NCCL_TIMEOUT_S": "cluster.watch.step_limit_s",
    "NCCL_IB_CUDA_SUPPORT": "NCCL_NET_GDR_LEVEL",
    "NCCL_IB_GDR_LEVEL": "NCCL_NET_GDR_LEVEL",
    "NCCL_TREE_THRESHOLD": "NCCL_ALGO",
    "NCCL_LL_THRESHOLD": "NCCL_PROTO",
    "NCCL_SINGLE_RING_THRESHOLD": "NCCL_ALGO",
    "NCCL_RINGS": "NCCL_GRAPH_FILE",
    "NCCL_MIN_NRINGS": "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NRINGS": "NCCL_MAX_NCHANNELS",
    "NCCL_CHECKS_DISABLE": "NCCL_CHECK_POINTERS=0",
    "NCCL_INTERFACE": "NCCL_SOCKET_IFNAME",
    "GLOO_INTERFACE": "GLOO_SOCKET_IFNAME",
    "PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF",
}
"""Names that circulate, but torch 2.13 and NCCL 2.27 have others: these are no longer read, or soon not."""

_NAMES = """
    NCCL_ALGO NCCL_BUFFSIZE NCCL_CHECK_POINTERS NCCL_COLLNET_ENABLE NCCL_COLLNET_NODE_THRESHOLD NCCL_COMM_BLOCKING
    NCCL_CONF_FILE NCCL_CROSS_NIC NCCL_CUMEM_ENABLE NCCL_CUMEM_HOST_ENABLE NCCL_DEBUG NCCL_DEBUG_FILE
    NCCL_DEBUG_SUBSYS NCCL_DMABUF_ENABLE NCCL_GRAPH_FILE NCCL_GRAPH_MIXING_SUPPORT NCCL_GRAPH_REGISTER NCCL_HOSTID
    NCCL_IB_ADAPTIVE_ROUTING NCCL_IB_AR_THRESHOLD NCCL_IB_DATA_DIRECT NCCL_IB_DISABLE NCCL_IB_FIFO_TC
    NCCL_IB_GID_INDEX NCCL_IB_HCA NCCL_IB_MERGE_NICS NCCL_IB_MERGE_VFS NCCL_IB_PCI_RELAXED_ORDERING
    NCCL_IB_QPS_PER_CONNECTION NCCL_IB_RETRY_CNT NCCL_IB_ROCE_VERSION_NUM NCCL_IB_SL NCCL_IB_SPLIT_DATA_ON_QPS
    NCCL_IB_TC NCCL_IB_TIMEOUT NCCL_IGNORE_CPU_AFFINITY NCCL_LAUNCH_MODE NCCL_LOCAL_REGISTER NCCL_MAX_CTAS
    NCCL_MAX_NCHANNELS NCCL_MAX_P2P_NCHANNELS NCCL_MIN_CTAS NCCL_MIN_NCHANNELS NCCL_MIN_P2P_NCHANNELS
    NCCL_MNNVL_ENABLE NCCL_NCHANNELS_PER_NET_PEER NCCL_NET NCCL_NET_GDR_C2C NCCL_NET_GDR_LEVEL NCCL_NET_GDR_READ
    NCCL_NET_PLUGIN NCCL_NET_SHARED_BUFFERS NCCL_NET_SHARED_COMMS NCCL_NSOCKS_PERTHREAD NCCL_NTHREADS NCCL_NVB_DISABLE
    NCCL_NVLS_ENABLE NCCL_OOB_NET_ENABLE NCCL_OOB_NET_IFNAME NCCL_P2P_DIRECT_DISABLE NCCL_P2P_DISABLE NCCL_P2P_LEVEL
    NCCL_P2P_LL_THRESHOLD NCCL_P2P_NET_CHUNKSIZE NCCL_P2P_PXN_LEVEL NCCL_PROFILER_PLUGIN NCCL_PROTO NCCL_PXN_DISABLE
    NCCL_RAS_ADDR NCCL_RAS_ENABLE NCCL_RAS_TIMEOUT_FACTOR NCCL_RUNTIME_CONNECT NCCL_SET_STACK_SIZE
    NCCL_SET_THREAD_NAME NCCL_SHM_DISABLE NCCL_SOCKET_FAMILY NCCL_SOCKET_IFNAME NCCL_SOCKET_NTHREADS
    NCCL_SOCKET_RETRY_CNT NCCL_SOCKET_RETRY_SLEEP_MSEC NCCL_TOPO_DUMP_FILE NCCL_TOPO_FILE NCCL_TUNER_PLUGIN
    NCCL_WORK_ARGS_BYTES TORCH_FR_BUFFER_SIZE TORCH_FR_CPP_STACK TORCH_FR_DUMP_DYNAMIC_FILE_NAME
    TORCH_FR_DUMP_TEMP_FILE TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_AVOID_RECORD_STREAMS TORCH_NCCL_BLOCKING_WAIT
    TORCH_NCCL_CUDA_EVENT_CACHE TORCH_NCCL_DESYNC_DEBUG TORCH_NCCL_DUMP_ON_TIMEOUT TORCH_NCCL_ENABLE_MONITORING
    TORCH_NCCL_ENABLE_TIMING TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC TORCH_NCCL_HIGH_PRIORITY
    TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN TORCH_NCCL_NAN_CHECK TORCH_NCCL_NONBLOCKING_TIMEOUT
    TORCH_NCCL_PROPAGATE_ERROR TORCH_NCCL_RANKS_PER_ROOT TORCH_NCCL_RETHROW_CUDA_ERRORS
    TORCH_NCCL_USE_COMM_NONBLOCKING TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC
    TORCH_NCCL_COORD_CHECK_MILSEC
"""
KNOWN = frozenset(_NAMES.split())
"""NCCL's own (its documentation, "Environment Variables", to 2.27) and those of torch's process group."""

_LONGEST_LEAD_S = 65535
_TIME = r"\d+|(\d+:)?\d+:\d\d|\d+-\d+(:\d\d){0,2}"
_TEXTS = ("job_name", "account", "partition", "qos", "constraint", "reservation", "gres", "python", "container_image")
_LISTS = ("include", "exclude", "options", "modules", "container_mounts")


def variables(config: Config) -> Iterator[Fault]:
    """Names that torch and NCCL do not read, in what every rank gets."""
    yield from variable_faults(config.cluster.environment)


def variable_faults(environment: Mapping[str, str]) -> Iterator[Fault]:
    """What is wrong with variables' names: old ones, and slips that nothing would ever read."""
    for name, value in environment.items():
        key = f"cluster.environment.{name}"
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            yield Fault("variable-name", f"{key} is not a variable's name: write letters, digits and '_' only.")
        elif "\0" in value:
            yield Fault("variable-name", f"{key} holds a NUL character, which no variable can.")
        elif name in RENAMED:
            yield Fault(
                "variable-renamed",
                f"{key}={value}: torch 2.13 and NCCL do not go by this name. Write {RENAMED[name]} instead.",
            )
        elif name not in KNOWN and name.startswith(("NCCL_", "TORCH_NCCL_", "TORCH_FR_")):
            near = difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.85)
            if near:
                yield Fault(
                    "variable-unknown", f"{key}: neither torch nor NCCL reads this name. Did you mean {near[0]}?"
                )


def watch(config: Config) -> Iterator[Fault]:
    """The limits after which a run is taken for dead."""
    limits = config.cluster.watch
    for key in ("step_limit_s", "start_limit_s", "save_limit_s"):
        if getattr(limits, key) < 0:
            yield Fault(
                "watch-limit",
                f"cluster.watch.{key}={getattr(limits, key)} must be 0 (no limit) or more.",
                {f"cluster.watch.{key}": [0.0]},
            )
    if limits.straggler_factor <= 1.0:
        yield Fault(
            "straggler-factor",
            f"cluster.watch.straggler_factor={limits.straggler_factor} must be above 1.",
            {"cluster.watch.straggler_factor": [1.5]},
        )


def slurm(config: Config) -> Iterator[Fault]:
    """What sbatch could not read, or would read as something else."""
    asked = config.cluster.slurm
    yield from _texts(asked)
    yield from _numbers(asked)
    yield from _container(asked)


def _texts(asked: SlurmConfig) -> Iterator[Fault]:
    texts = [(key, getattr(asked, key)) for key in (*_TEXTS, "time", "mem")]
    texts += [(key, text) for key in _LISTS for text in getattr(asked, key)]
    for key, text in texts:
        if text is not None and (not text or not text.isprintable()):
            yield Fault(
                "slurm-text",
                f"cluster.slurm.{key}={text!r} must be text without line ends or control characters, or null.",
            )
    for key in ("include", "exclude"):
        for node in getattr(asked, key):
            if not re.fullmatch(r"[\w.\[\],-]+", node, re.ASCII):
                yield Fault(
                    "slurm-nodes",
                    f"cluster.slurm.{key}: {node!r} is not a node's name, or several as in node[01-08].",
                )
    for option in asked.options:
        if not option.startswith("--"):
            yield Fault(
                "slurm-option",
                f"cluster.slurm.options: {option!r} is not an option of sbatch. Write it as --name=value.",
            )
    if asked.mem is not None and not re.fullmatch(r"\d+[KMGT]?", asked.mem):
        yield Fault(
            "slurm-memory",
            f"cluster.slurm.mem={asked.mem} is not an amount of memory, such as 900G; 0 is all of a node.",
            {"cluster.slurm.mem": ["0"]},
        )
    if asked.gres is not None and re.search(r":\d+$", asked.gres):
        yield Fault(
            "slurm-gres",
            f"cluster.slurm.gres={asked.gres}: the number comes from cluster.devices_per_node.",
            {"cluster.slurm.gres": [asked.gres.rpartition(":")[0]]},
        )


def _numbers(asked: SlurmConfig) -> Iterator[Fault]:
    least = {"cpus_per_task": 1, "signal_lead_s": 0, "max_restarts": 0, "max_failures": 0, "backoff_s": 0}
    for key, smallest in least.items():
        value = getattr(asked, key)
        if value is not None and value < smallest:
            yield Fault(
                "slurm-number",
                f"cluster.slurm.{key}={value} must be at least {smallest}.",
                {f"cluster.slurm.{key}": [smallest]},
            )
    if asked.signal_lead_s > _LONGEST_LEAD_S:
        yield Fault(
            "slurm-lead",
            f"cluster.slurm.signal_lead_s={asked.signal_lead_s}: sbatch takes at most {_LONGEST_LEAD_S} seconds.",
            {"cluster.slurm.signal_lead_s": [180]},
        )
    if asked.time is None:
        return
    if not re.fullmatch(_TIME, asked.time):
        yield Fault(
            "slurm-time",
            f"cluster.slurm.time={asked.time} is not a time limit: minutes, hh:mm:ss or days-hh:mm:ss.",
            {"cluster.slurm.time": ["24:00:00"]},
        )
    elif seconds(asked.time) <= asked.signal_lead_s:
        yield Fault(
            "slurm-lead",
            f"cluster.slurm.signal_lead_s={asked.signal_lead_s} leaves nothing of cluster.slurm.time={asked.time} "
            f"({seconds(asked.time)} s).",
            {"cluster.slurm.signal_lead_s": [180, seconds(asked.time) // 4], "cluster.slurm.time": ["24:00:00"]},
        )


def _container(asked: SlurmConfig) -> Iterator[Fault]:
    if (asked.container == Container.none) != (asked.container_image is None):
        yield Fault(
            "slurm-container",
            f"cluster.slurm.container={asked.container} with container_image={asked.container_image}: write both or "
            f"neither, such as container=pyxis and container_image=/images/train.sqsh.",
        )
    if asked.container == Container.none and asked.container_mounts:
        yield Fault(
            "slurm-container",
            f"cluster.slurm.container_mounts={asked.container_mounts} without a container.",
            {"cluster.slurm.container_mounts": [[]]},
        )
    for mount in asked.container_mounts:
        if ":" not in mount or "," in mount:
            yield Fault(
                "slurm-container",
                f"cluster.slurm.container_mounts: {mount!r} must be HOST:CONTAINER, without commas.",
            )


def seconds(limit: str) -> int:
    """A time limit as sbatch reads it: m, m:s, h:m:s, d-h, d-h:m or d-h:m:s."""
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, rest_s = [*parts, 0, 0][:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + rest_s
    units = {1: (60,), 2: (60, 1), 3: (3600, 60, 1)}[len(parts)]
    return sum(part * unit for part, unit in zip(parts, units, strict=True))
