"""Which nodes are called bad, on reports that are made up; and what a run's environment is compared with."""

import json
from pathlib import Path

import pytest

from recipes.doctor import changes, main, note_bad_nodes
from recipes.health import CHECKS, Report, bad_nodes, disk, matmul, variables, versions
from tests.recipes.commands import run
from tests.small import config


def _reports(**odd: object) -> list[Report]:
    reports = [Report(rank, f"node{rank // 2 + 1}") for rank in range(8)]
    for report in reports:
        report.equal = {"torch": "2.13.0", "gpu": "H100"}
        report.more_is_better = {"free host memory, GiB": 100.0, "matmul, TFLOP/s": 700.0}
        report.clock = 1e9 + report.rank * 0.01
    for key, value in odd.items():
        setattr(reports[5], key, getattr(reports[5], key) | value if isinstance(value, dict) else value)
    return reports


def test_given_nodes_that_are_alike_when_compared_then_none_is_bad() -> None:
    assert bad_nodes(_reports(), "cuda") == {}


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"equal": {"torch": "2.12.0"}}, "torch is 2.12.0, on the other nodes 2.13.0"),
        ({"equal": {"gpu": "A100"}}, "gpu is A100, on the other nodes H100"),
        ({"more_is_better": {"free host memory, GiB": 70.0}}, "free host memory, GiB: 70 on rank 5, usual is 100"),
        ({"more_is_better": {"matmul, TFLOP/s": 500.0}}, "matmul, TFLOP/s: 500 on rank 5, usual is 700"),
        ({"clock": 1e9 + 60}, "its clock is +60 s off the others'"),
        ({"faults": ["GPU 1: 3 uncorrected ECC errors"]}, "GPU 1: 3 uncorrected ECC errors"),
    ],
)
def test_given_a_node_that_differs_when_compared_then_it_is_named_with_the_reason(odd: dict, words: str) -> None:
    assert bad_nodes(_reports(**odd), "cuda") == {"node3": [words]}


def test_given_half_against_half_when_compared_then_the_half_with_a_fault_of_its_own_is_bad() -> None:
    reports = [
        Report(0, "a", equal={"lightning": "2.6.5"}, faults=["lightning 2.6.5"]),
        Report(1, "b", equal={"lightning": "2.6.6"}),
    ]
    assert list(bad_nodes(reports, "cpu")) == ["a"]


def test_given_bad_nodes_when_noted_then_only_if_others_are_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUINTET_JOB_DIR", str(tmp_path))
    note_bad_nodes(_reports(), {f"node{index}": ["old"] for index in range(1, 5)})
    assert not (tmp_path / "bad-nodes").exists()
    note_bad_nodes(_reports(), {"node2": ["old"], "node1": ["slow"]})
    assert (tmp_path / "bad-nodes").read_text() == "node1\nnode2\n"


def test_given_this_machine_when_checked_then_nothing_is_wrong_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    report = Report(0, "here")
    for check in CHECKS:
        check(config("data=synthetic", f"run.root={tmp_path}", "cluster.device=cpu"), report)
    assert report.faults == []
    assert report.equal["lightning"] == "2.6.6"
    assert report.more_is_better["matmul, TFLOP/s"] > 0


def test_given_an_old_variable_when_checked_then_the_right_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ASYNC_ERROR_HANDLING", "1")
    report = Report(0, "here")
    variables(config("data=synthetic"), report)
    [fault] = report.faults
    assert fault.startswith("the environment has NCCL_ASYNC_ERROR_HANDLING=1")
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" in fault


def test_given_a_wrong_version_when_checked_then_package_found_and_wanted_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # S-45
    import importlib.metadata

    right = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.6.2" if name == "lightning" else right(name))
    report = Report(0, "here")
    versions(config("data=synthetic"), report)
    assert report.faults == ["lightning 2.6.2 is installed, 2.6.6 is wanted"]


def test_given_a_processor_that_errs_when_checked_then_it_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    right = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: right(a, b) + (a.dtype == torch.float32))
    report = Report(0, "here")
    matmul(config("data=synthetic", "cluster.device=cpu"), report)
    assert report.faults == ["a product of whole numbers came out wrong: the processor or its memory is broken"]


def test_given_a_disk_too_small_for_checkpoints_when_checked_then_free_and_needed_are_told(small_disk: Path) -> None:
    report = Report(0, "here")
    disk(config("data=synthetic", f"run.dir={small_disk}/deep/run"), report)
    [fault] = report.faults
    assert fault.startswith(f"{small_disk}: 0.000 GB free, 0.120 GB are needed")


def test_given_a_run_when_asked_what_has_changed_then_key_by_key(tmp_path: Path) -> None:
    then = {"packages": {"torch": "2.12.0", "numpy": "2.4.6"}, "host": "a"}
    now = {"packages": {"torch": "2.13.0", "numpy": "2.4.6"}, "host": "a", "cuda": None}
    assert changes(then, now) == ["packages.torch: 2.12.0 then, 2.13.0 now"]
    (tmp_path / "environment.json").write_text(json.dumps({"python": "2.7"}))
    done = run("doctor", f"run={tmp_path}")
    assert done.returncode == 1
    assert "python: 2.7 then, 3." in done.stdout
    assert run("doctor", "run=/nowhere").returncode == 2


def test_given_locks_when_the_doctor_is_asked_then_it_says_whether_recipes_agree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["recipes.doctor", "--locks", "tiny"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().out == "every recipe is what its lock says\n"
