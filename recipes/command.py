"""What every command shares: composing its config, refusing a bad one in the user's words, and the exit code.

Exit codes: 0 good; 2 the config is refused; 130 after Ctrl-C; 1 anything else that failed.
"""

import atexit
import dataclasses
import difflib
import logging
import os
import re
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from models.errors import ConfigError, RunError
from recipes import schema
from recipes.completion import completes_in_bash

CONF = Path(__file__).resolve().parent.parent / "conf"
JOB_VARIABLE = "QUINTET_JOB_DIR"
"""The folder of a submitted job, which its batch script names."""


def new_run_id() -> str:
    """QUINTET_RUN_ID where the launcher set it, so that all processes of a run agree, else a new one."""
    return os.environ.get("QUINTET_RUN_ID") or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def command(
    config_name: str,
    task: Callable[[DictConfig], None],
    own_schema: type | None = None,
    extra_schema: type | None = None,
) -> None:
    """Compose conf/<config_name>.yaml with the command line, run `task` with it, and leave with the exit code.

    `own_schema` is the dataclass of a command that does not take the config of a training run, `extra_schema` that of
    what a command takes beside it.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing and leaving with 1 for everything.
    OmegaConf.register_new_resolver("run_id", new_run_id, replace=True, use_cache=True)
    schema.register(extra_schema)
    sys.path.append(str(CONF.parent / "slurm"))  # Hydra finds hydra_plugins there
    if own_schema is not None:
        ConfigStore.instance().store(name=f"{config_name}_schema", node=own_schema)
    start_console_log()
    if completes_in_bash():
        return
    codes: list[int] = []

    def job(composed: DictConfig) -> None:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            OmegaConf.clear_cache(composed)  # Hydra hands the first point's run id down to the others.
        # A failed point of a sweep is reported at once and does not end the sweep.
        try:
            task(composed)
        except Exception as error:
            codes.append(report(error))

    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name=config_name)(job)()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        codes.append(130)
    except ValueError as error:  # Hydra's for an override such as model=null; the job's own errors do not come here
        groups = ", ".join(argument for argument in sys.argv[1:] if argument.endswith("=null"))
        codes.append(report(ConfigError(f"{groups}: {error}")))
    except Exception as error:
        codes.append(report(error))
    leave(max(codes, default=0))


def leave(code: int) -> NoReturn:
    """End this process: whatever is registered to be done at exit is, but the interpreter is not taken down.

    A thread of torch's that wants its lock then would abort the process, and a run that is done would count as failed.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # nobody reads it, or its disk is full
            code = code or 1
    os._exit(code)


def given_arguments() -> list[str]:
    """The command line that composes the running config once more: --config-dir, if it was given, and overrides."""
    hydra_config = HydraConfig.get()
    folders = [source.path for source in hydra_config.runtime.config_sources if source.provider == "command-line"]
    return [*(part for folder in folders for part in ("--config-dir", folder)), *hydra_config.overrides.task]


def report(error: Exception) -> int:
    """Say on standard error what went wrong, without a traceback where it was the user's doing; the exit code."""
    match error:
        case ConfigError():
            code, message = 2, str(error)
        case OverrideParseException():
            code, message = 2, f"{error.override}: not of the form KEY=VALUE, or with a character that needs quotes."
        case HydraException() | OmegaConfBaseException():
            code, message = 2, explain(error)
        case RunError():
            code, message = 1, str(error)
        case OSError() if error.errno is not None:
            code, message = 1, f"{error.filename or 'operating system'}: {error.strerror}"
        case _:
            traceback.print_exception(error)
            return 1
    if code == 2:
        leave_word_of_refusal()
    name = "config refused" if code == 2 else "failed"
    print(f"{name}:{chr(10) if chr(10) in message else ' '}{message}", file=sys.stderr, flush=True)
    return code


def leave_word_of_refusal() -> None:
    """Tell the job's batch script that its config is refused: srun's exit code may be that of a task that it ended."""
    if JOB_VARIABLE in os.environ:
        Path(os.environ[JOB_VARIABLE], "refused").touch()


def start_console_log() -> None:
    """The program's log as plain lines on standard error."""
    log = logging.getLogger("quintet")
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False


def explain(error: Exception) -> str:
    """Hydra's and OmegaConf's errors in the user's words, with the nearest right key or option."""
    cause: BaseException = error
    while not isinstance(cause, OmegaConfBaseException) and cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(error, MissingConfigException) and error.options:
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
        options = [name for name in error.options if not name.endswith("schema") and name != "base"]
        return f"{group}={option}: there is no such option. {_nearest(option, options)}Options: {', '.join(options)}."
    if not isinstance(cause, OmegaConfBaseException):
        return str(error).strip()
    key, full_key = str(cause.key), str(cause.full_key or cause.key)
    first_line = str(cause).splitlines()[0]
    if re.search(r"Key .* (not in|is not in)", first_line):
        siblings = _field_names(cause.object_type) or _children(cause.parent_node)
        prefix = full_key[: len(full_key) - len(key)]
        near = difflib.get_close_matches(key, siblings, n=1)
        if not near:
            near = [path for path in _all_keys() if path.rpartition(".")[2] == key and path != full_key][:1]
            prefix = "" if near else prefix
        advice = f"Did you mean {prefix}{near[0]}? " if near else ""
        known = f"Keys of {prefix.rstrip('.') or 'the config'}: {', '.join(siblings)}." if siblings else ""
        return f"{full_key}: there is no such key. {advice}{known}".strip()
    return f"{full_key}: {first_line}"


def _nearest(word: str, words: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(words), n=1)
    return f"Did you mean {near[0]}? " if near else ""


def _field_names(kind: Any) -> list[str]:
    return [item.name for item in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []


def _children(node: Any) -> list[str]:
    return [str(key) for key in node] if isinstance(node, DictConfig) else []


def _all_keys() -> Iterator[str]:
    for group, schemas in schema.SCHEMAS.items():
        for kind in schemas.values():
            for item in dataclasses.fields(kind):
                yield f"{group}.{item.name}"
                if dataclasses.is_dataclass(item.type):
                    yield from (f"{group}.{item.name}.{inner.name}" for inner in dataclasses.fields(item.type))
