"""`run=DIR`: the command that made a run directory, once more, so that the run goes on there."""

from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from models.errors import ConfigError

_PLACE = ("run.dir=", "run.id=", "run.root=")


def continued(arguments: list[str]) -> list[str]:
    """A command line without `run=DIR`: in its place the run's own overrides, behind them those given now.

    Raises ConfigError where the directory is not that of a run.
    """
    runs = [argument.removeprefix("run=") for argument in arguments if argument.startswith("run=")]
    if not runs:
        return arguments
    run, given = Path(runs[-1]), [argument for argument in arguments if not argument.startswith("run=")]
    try:
        overrides = list(OmegaConf.load(run / "overrides.yaml"))
        run_id = OmegaConf.load(run / "config.yaml")["run"]["id"]  # type: ignore[index]
    except FileNotFoundError as error:
        raise ConfigError(f"run={run}: {error.filename} is missing, so it is not a run directory.") from error
    except (OmegaConfBaseException, YAMLError, KeyError, TypeError) as error:
        raise ConfigError(f"run={run} is not the directory of a run: {str(error).splitlines()[0]}") from error
    kept = [override for override in map(str, overrides) if not override.startswith(_PLACE)]
    return [*kept, *given, f"run.dir={run}", f"run.id={run_id}"]
