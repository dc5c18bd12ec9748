"""Faults planted in a job from outside: Python runs sitecustomize when it starts, and that patches the product."""

from pathlib import Path

_FRAME = """
import builtins, os, sys, time

def _plant(module):
{body}

_import = builtins.__import__

def _hook(*arguments, **named):
    result = _import(*arguments, **named)
    module = sys.modules.get({module!r})
    if module is not None and hasattr(module, {name!r}):
        builtins.__import__ = _import
        _plant(module)
    return result

if {where}:
    builtins.__import__ = _hook
"""
ON_NODE2 = "os.environ.get('SLURMD_NODENAME') == 'node2'"
FIRST_START_OF_NODE2 = f"{ON_NODE2} and 'SLURM_RESTART_COUNT' not in os.environ"


def plant(folder: Path, where: str, module: str, name: str, body: str) -> str:
    """The override that has ranks where `where` holds run `body`, which sees `module`, once that module has `name`."""
    folder.mkdir(parents=True, exist_ok=True)
    indented = "\n".join(f"    {line}" for line in body.strip().splitlines())
    text = _FRAME.format(body=indented, module=module, name=name, where=where)
    (folder / "sitecustomize.py").write_text(text)
    return f"+cluster.environment.PYTHONPATH={folder}"
