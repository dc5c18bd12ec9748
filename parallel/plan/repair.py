"""Legal values near an illegal one, by search: a repair is applied and the whole config is checked again.

A rule names values that would satisfy it. A value is suggested only if the config that has it breaks no rule that it
did not break before; where it does break another, that one's values are tried together with it.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from parallel.config import Config, OptimizerConfig
from parallel.layout import world_size
from parallel.plan.problems import Changes, Fault

Check = Callable[[Config, int], list[Fault]]
KEYS_AT_ONCE = 3
VALUES_PER_KEY = 2
BUDGET = 80
"""Configs looked at for one fault."""
MEMORY_COST = 6
"""How many looks count for one at a config that is asked for its memory."""


def changed(config: Config, changes: Changes) -> Config:
    """The config with other values of some keys, such as {"parallelism.tp": 8}."""
    for key, value in changes.items():
        config = _with(config, key.split("."), value)
    return config


def _with(node: Any, path: list[str], value: Any) -> Any:
    if len(path) > 1:
        value = _with(getattr(node, path[0]), path[1:], value)
    return replace(node, **{path[0]: value})


def _current(config: Config, key: str) -> Any:
    node: Any = config
    for name in key.split("."):
        node = getattr(node, name)
    return node


def world_after(config: Config, other: Config, world: int) -> int:
    """Ranks of the changed config: its nodes times the same number on each; on one machine what its axes ask for."""
    if config.cluster.devices_per_node is None and world == world_size(config.cluster, config.parallelism, 0):
        return world_size(other.cluster, other.parallelism, 0)
    if other.cluster.devices_per_node is not None:
        return max(other.cluster.nodes, 1) * max(other.cluster.devices_per_node, 1)
    return world // max(config.cluster.nodes, 1) * max(other.cluster.nodes, 1)


def repairs(config: Config, world: int, fault: Fault, before: list[Fault], check: Check) -> list[Changes]:
    """Changes that remove `fault` and break nothing new: at most `VALUES_PER_KEY` for each key that the rule names."""
    known = Counter(other.rule for other in before)
    known[fault.rule] -= 1
    budget = [BUDGET]
    found: list[Changes] = []
    for key in fault.tries:
        found += islice(_search(config, world, {}, {key: fault.tries[key]}, known, check, budget), VALUES_PER_KEY)
    return found


def _search(
    config: Config, world: int, changes: Changes, tries: Any, known: Counter[str], check: Check, budget: list[int]
) -> Iterator[Changes]:
    later = []
    for key, values in tries.items():
        if key in changes:
            continue
        for value in values:
            if budget[0] <= 0:
                return
            if value == _current(config, key):
                continue
            more = changes | {key: value}
            other = changed(config, more)
            faults = check(other, world_after(config, other, world))
            budget[0] -= MEMORY_COST if any(fault.rule == "memory" for fault in faults) else 1
            new = _beyond(faults, known)
            if not new:
                yield more
            elif len(more) < KEYS_AT_ONCE and new[0].tries:
                later.append((more, new[0].tries))
    for more, following in later:
        yield from islice(_search(config, world, more, following, known, check, budget), 1)


def _beyond(faults: list[Fault], known: Counter[str]) -> list[Fault]:
    """Faults beyond those that were there before."""
    left = Counter(known)
    new = []
    for fault in faults:
        if left[fault.rule] > 0:
            left[fault.rule] -= 1
        else:
            new.append(fault)
    return new


def accepted(config: Config, world: int, check: Check) -> Changes | None:
    """Changes after which the whole config is accepted, fault by fault; None where the search finds none."""
    changes: Changes = {}
    for _ in range(20):
        now = changed(config, changes)
        now_world = world_after(config, now, world)
        faults = check(now, now_world)
        if not faults:
            return changes
        for fault in faults:
            found = repairs(now, now_world, fault, faults, check)
            if found:
                changes |= found[0]
                break
        else:
            return None
    return None


def advice(found: list[Changes]) -> str:
    """Repairs as a sentence, values of one key together: "Write parallelism.tp=4 or 8, or data.seq_len=4096."."""
    if not found:
        return ""
    single: dict[str, list[str]] = {}
    parts = []
    for changes in found:
        if len(changes) == 1:
            ((key, value),) = changes.items()
            single.setdefault(key, []).append(spell(value))
    parts += [f"{key}={' or '.join(values)}" for key, values in single.items()]
    parts += [
        " with ".join(f"{key}={spell(value)}" for key, value in changes.items())
        for changes in found
        if len(changes) > 1
    ]
    return f" Write {', or '.join(parts)}."


def spell(value: Any) -> str:
    """A value as it is written on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, OptimizerConfig):
        return value.name
    if isinstance(value, list):
        return f"[{','.join(spell(part) for part in value)}]"
    return str(value)
