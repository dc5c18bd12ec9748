"""The memory formulas against peaks that others have published; the table is in parallel/plan/README.md."""

import pytest

from recipes.docs import composed
from recipes.peaks import SYSTEMS, Peak, accuracy, peaks

MEDIAN = {
    "deepspeed_fp16": 0.04,
    "deepspeed_bf16": 0.04,
    "nanotron": 0.07,
    "torchtitan": 0.12,
    "deepspeed_offload": 0.12,
}


@pytest.fixture(scope="module")
def runs() -> list[Peak]:
    return peaks(composed("precision=bf16", "data=synthetic"))


@pytest.mark.parametrize("system", SYSTEMS)
def test_given_published_peaks_when_predicted_then_half_are_nearer_than_was_found(
    runs: list[Peak], system: str
) -> None:
    found = accuracy([run for run in runs if run.system == system])
    assert found.median_size < MEDIAN[system]
    assert found.ninth_tenth < 2 * MEDIAN[system] + 0.08


def test_given_runs_that_went_out_of_memory_when_predicted_then_all_but_one_were_to_be_expected(
    runs: list[Peak],
) -> None:
    unforeseen = [run for run in runs if run.peak_bytes is None and run.predicted() <= run.gpu_bytes]
    assert [run.config.model.name for run in unforeseen] == ["BLOOM-candidate 206B"]
    assert sum(run.peak_bytes is None for run in runs) == 7


def test_given_runs_that_fitted_when_predicted_then_none_is_said_to_go_out_of_memory(runs: list[Peak]) -> None:
    assert [run.config.model.name for run in runs if run.peak_bytes and run.predicted() > 1.01 * run.gpu_bytes] == []
