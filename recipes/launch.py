"""Start the processes of a run on this machine, one per rank, and see to it that they end together."""

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from models.errors import ConfigError, RunError
from parallel.files import write_whole
from parallel.ranks import STORE_VARIABLE, Ranks, end_with_parent, node_name
from parallel.watch import Watch, from_collective
from recipes.command import leave_word_of_refusal
from recipes.run_directory import first_failure
from recipes.signals import ENDING, RunInterruptedError

ERROR_VARIABLE = "QUINTET_ERROR_FILE"
"""Where a process that our launcher started leaves why it failed."""
log = logging.getLogger("quintet")
_GRACE_S = 3.0  # between asking the others to end and ending them


def run_on_ranks(module: str, overrides: list[str], world: int, run_id: str) -> None:
    """Run `python -m module overrides` as `world` processes and wait for them.

    The children get the overrides of this one job, never --multirun, so that they do not repeat a sweep. If one fails
    the others are ended, and RunError (or ConfigError, if it refused its config) says which rank it was, with its own
    traceback. An interrupt ends them all; SIGTERM and SIGUSR1 are passed on, for them to save and end. Every process
    dies with this one.
    """
    with tempfile.TemporaryDirectory(prefix="quintet-") as folder:
        ranks = [_start(module, overrides, rank, world, run_id, Path(folder)) for rank in range(world)]
        try:
            _pass_on_signals(ranks)
            failed = _wait_for_failures(ranks)
        finally:
            _end(ranks)
        if failed:
            _raise(failed, Path(folder))


def _pass_on_signals(ranks: list[subprocess.Popen[bytes]]) -> None:
    """A first signal goes to the ranks; a second ends this process by an exception, and so the ranks."""
    told: list[int] = []

    def pass_on(number: int, _: object) -> None:
        if told:
            raise RunError(f"asked to end twice ({signal.Signals(number).name})")
        told.append(number)
        for process in ranks:
            if process.poll() is None:
                process.send_signal(number)

    for number in ENDING:
        signal.signal(number, pass_on)


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
        preexec_fn=end_with_parent,
        process_group=0,
    )


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
    for process in ranks:
        if process.returncode:  # a data worker that is stuck outlives its rank
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


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
        if error["interrupted"]:
            raise RunInterruptedError(error["message"])
        raise RunError(f"rank {error['rank']} failed:\n{error['message']}")
    rank = killed[0] if killed else min(failed)
    output = folder / f"output-{rank}"
    said = output.read_text(errors="replace")[-4000:] if output.exists() else ""
    code = failed[rank]
    reason = f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    raise RunError(f"rank {rank} {reason}.\n{said}".rstrip())


def stalled(run_dir: Path, verdict: str) -> None:
    """Say on this rank who holds the run up, in FAILED too. The process is about to end itself."""
    log.error("%s", verdict)
    first_failure(run_dir, f"stalled: {verdict}")
    if ERROR_VARIABLE in os.environ:
        _leave_report(0, verdict, refused=False, interrupted=False)


def _leave_report(rank: int, message: str, refused: bool, interrupted: bool) -> None:
    report = {"time": time.time(), "rank": rank, "refused": refused, "interrupted": interrupted, "message": message}
    write_whole(Path(os.environ[ERROR_VARIABLE]), json.dumps(report))


@contextmanager
def error_reported(ranks: Ranks, run_dir: Path) -> Iterator[list[Watch]]:
    """In one of several processes: leave an exception where the others' launcher finds it, and end at once.

    Our own launcher finds it in a file. Under srun or torchrun the first rank to fail writes the run's FAILED: they end
    the others, rank 0 among them, before it could. Once there is a watch in the list that is given, it is asked whether
    an error of a collective comes from ranks that differ.
    """
    watched: list[Watch] = []
    if ranks.world == 1:
        try:
            yield watched
        finally:
            for watch in watched:
                watch.stop()  # the next point of a sweep runs in this process
        return
    try:
        yield watched
    except Exception as error:
        user_fault = isinstance(error, ConfigError | RunError)
        message = str(error) if user_fault else "".join(traceback.format_exception(error))
        if watched and from_collective(error) and (order := watched[0].failed(error)):
            message = f"{order}\n{message}"
        if ERROR_VARIABLE in os.environ:
            interrupted = isinstance(error, RunInterruptedError)
            _leave_report(ranks.rank, message, isinstance(error, ConfigError), interrupted)
        elif isinstance(error, RunInterruptedError):
            first_failure(run_dir, f"RunInterruptedError: {message}")
            if ranks.rank == 0:
                print(message, file=sys.stderr, flush=True)
        else:
            print(f"rank {ranks.rank} on {node_name()} failed:\n{message}", file=sys.stderr, flush=True)
            first_failure(run_dir, f"rank {ranks.rank} on {node_name()}: {type(error).__name__}: {message}")
        if isinstance(error, ConfigError):
            leave_word_of_refusal()
        # Not sys.exit: a collective that waits for other ranks in a destructor must not keep this one alive.
        sys.stderr.flush()
        os._exit(2 if isinstance(error, ConfigError) else 1)
