"""Start the processes of a run on this machine, one per rank, and see to it that they end together."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from models.errors import ConfigError, RunError
from parallel.ranks import STORE_VARIABLE

ERROR_VARIABLE = "QUINTET_ERROR_FILE"
"""Where a process that our launcher started leaves why it failed."""
_GRACE_S = 3.0  # between asking the others to end and ending them


def run_on_ranks(module: str, overrides: list[str], world: int, run_id: str) -> None:
    """Run `python -m module overrides` as `world` processes and wait for them.

    The children get the overrides of this one job, never --multirun, so that they do not repeat a sweep. If one fails
    the others are ended, and RunError (or ConfigError, if it refused its config) says which rank it was, with its own
    traceback. An interrupt ends them all. Every process dies with this one.
    """
    fail_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="quintet-") as folder:
        ranks = [_start(module, overrides, rank, world, run_id, Path(folder)) for rank in range(world)]
        try:
            failed = _wait_for_failures(ranks)
        finally:
            _end(ranks)
        if failed:
            _raise(failed, Path(folder))


def fail_on_sigterm() -> None:
    """Let SIGTERM end this process by an exception, so that it ends its ranks and leaves FAILED."""
    signal.signal(signal.SIGTERM, _terminated)


def _terminated(*_: object) -> None:
    raise RunError("asked to end (SIGTERM)")


def _start(
    module: str, overrides: list[str], rank: int, world: int, run_id: str, folder: Path
) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "QUINTET_RUN_ID": run_id,
        STORE_VARIABLE: str(folder / "store"),
        ERROR_VARIABLE: str(folder / f"error-{rank}.json"),
        # Ranks share the processors; more threads than processors only get in each other's way.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // world, 1))),
    }
    output = None if rank == 0 else (folder / f"output-{rank}").open("wb")
    # A session of its own keeps the terminal's Ctrl-C from the children: this process passes it on in order.
    return subprocess.Popen(
        [sys.executable, "-m", module, *overrides],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        preexec_fn=_die_with_parent,
        process_group=0,
    )


def _die_with_parent() -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _wait_for_failures(ranks: list[subprocess.Popen[bytes]]) -> dict[int, int]:
    """Wait until all have ended well, or one has not: exit codes of those that failed, by rank."""
    while any(process.poll() is None for process in ranks):
        if any(process.poll() for process in ranks):
            time.sleep(0.2)  # the first to fail may be noticed last
            break
        time.sleep(0.05)
    codes = {rank: process.poll() for rank, process in enumerate(ranks)}
    return {rank: code for rank, code in codes.items() if code}


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in ranks:
            if process.poll() is None:
                process.send_signal(number)
        deadline = time.monotonic() + _GRACE_S
        for process in ranks:
            try:
                process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                continue


def _raise(failed: dict[int, int], folder: Path) -> None:
    """Report the rank that failed first: others may fail after it only because it is gone.

    One that was ended by a signal left no report, and is the cause of those that did.
    """
    errors = [json.loads(path.read_text()) for path in folder.glob("error-*.json")]
    # A rank that aborts (SIGABRT) does so because a peer is gone; these it does not send itself.
    killed = [rank for rank, code in failed.items() if -code in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)]
    if errors and not killed:
        error = min(errors, key=lambda error: error["time"])
        if error["refused"]:
            raise ConfigError(error["message"])
        raise RunError(f"rank {error['rank']} failed:\n{error['message']}")
    rank = killed[0] if killed else min(failed)
    output = folder / f"output-{rank}"
    said = output.read_text(errors="replace")[-4000:] if output.exists() else ""
    code = failed[rank]
    reason = f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    raise RunError(f"rank {rank} {reason}.\n{said}".rstrip())


@contextmanager
def error_reported(rank: int) -> Iterator[None]:
    """In a process that our launcher started: leave an exception where the launcher finds it, and end quietly."""
    if ERROR_VARIABLE not in os.environ:
        yield
        return
    try:
        yield
    except Exception as error:
        user_fault = isinstance(error, ConfigError | RunError)
        report = {
            "time": time.time(),
            "rank": rank,
            "refused": isinstance(error, ConfigError),
            "message": str(error) if user_fault else "".join(traceback.format_exception(error)),
        }
        Path(os.environ[ERROR_VARIABLE]).write_text(json.dumps(report))
        # Not sys.exit: a collective that waits for other ranks in a destructor must not keep this one alive.
        sys.stderr.flush()
        os._exit(2 if isinstance(error, ConfigError) else 1)
