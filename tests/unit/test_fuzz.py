"""Whatever a config says, `validate` answers at once, and what it suggests is accepted."""

import time
from collections import Counter

import pytest

from parallel.plan.plan import make_plan
from parallel.plan.problems import Severity
from parallel.plan.repair import accepted, changed, world_after
from parallel.plan.validate import errors, validate
from tests.unit.fuzz import draw

COUNT = 300


def _ask(seed: int) -> tuple[float, int, int]:
    """Seconds, errors and repairs of one config; asserts that each repair does what it says."""
    config, world = draw(seed)
    started = time.process_time()
    problems = validate(config, world)
    seconds = time.process_time() - started
    refused = [problem for problem in problems if problem.severity == Severity.error]
    if not refused:
        make_plan(config, world)
        return seconds, 0, 0
    before = Counter(problem.rule for problem in refused)
    for problem in refused:
        for repair in problem.repairs:
            other = changed(config, repair)
            after = Counter(fault.rule for fault in errors(other, world_after(config, other, world)))
            assert after <= before - Counter([problem.rule]), (seed, problem, repair, after)
    return seconds, len(refused), sum(len(problem.repairs) for problem in refused)


def _all(seeds: range) -> None:
    import torch.distributed.pipelining  # noqa: F401  for the orders of torch's schedules: not counted

    asked = [_ask(seed) for seed in seeds]
    refused = sum(1 for _, faults, _ in asked if faults)
    slow = sorted(seconds for seconds, _, _ in asked)
    late = [seed for seed, (seconds, _, _) in zip(seeds, asked, strict=True) if seconds > 0.05]
    repaired = sum(1 for _, faults, repairs in asked if faults and repairs)
    print(
        f"{len(asked)} configs, {refused} refused, {repaired} of them with repairs; CPU seconds: median "
        f"{slow[len(slow) // 2]:.4f}, 99% {slow[len(slow) * 99 // 100]:.4f}, most {slow[-1]:.4f}; "
        f"{len(late)} above 0.05: {late[:20]}"
    )
    assert late == []
    assert 0.1 < refused / len(asked) < 0.95
    assert repaired > 0.95 * refused


def test_given_random_configs_when_validated_then_every_suggestion_is_accepted() -> None:
    _all(range(COUNT))


def test_given_random_refused_configs_when_repaired_fault_by_fault_then_they_are_accepted() -> None:
    tried = mended = 0
    for seed in range(60):
        config, world = draw(seed)
        if not errors(config, world):
            continue
        tried += 1
        changes = accepted(config, world, errors)
        if changes is not None:
            other = changed(config, changes)
            assert errors(other, world_after(config, other, world)) == []
            mended += 1
    assert mended > 0.9 * tried


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_given_20000_random_configs_when_validated_then_every_suggestion_is_accepted() -> None:
    _all(range(20000))
