"""A checkpoint is believed only if every file is as it was written, and the newest such one is never removed."""

import io
import json
import logging
import os
import pickle
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from torch import nn

from models.errors import ConfigError, RunError
from parallel import checkpoint, rng
from parallel.checkpoint import load, save
from parallel.config import CheckpointConfig, MetricMode
from parallel.manifest import COMPLETE, MANIFEST, damage, digest, mark_complete, write_manifest
from parallel.remote import fetch, keep_only, upload
from parallel.retention import (
    INDEX,
    best,
    checkpoint_name,
    complete_checkpoints,
    find,
    is_among_best,
    newest_sound,
    read_index,
    record,
    retain,
    sweep,
)
from parallel.saver import SaveError, Saver


def _model(value: float = 1.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A linear layer that has made one step."""
    model = nn.Linear(8, 4)
    nn.init.constant_(model.weight, value)
    nn.init.constant_(model.bias, value)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def _write(folder: Path, step: int, value: float = 1.0) -> Path:
    model, optimizer = _model(value)
    path = folder / checkpoint_name(step)
    save(path, model, [optimizer], {"step": step}, {"step": step})
    record(folder, path.name, {})
    return path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `checkpoints` folder with steps 3 and 6."""
    folder = tmp_path_factory.mktemp("written") / "checkpoints"
    _write(folder, 3, 1.0)
    _write(folder, 6, 2.0)
    return folder


def _copy(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def test_given_a_saved_model_when_loaded_into_another_then_weights_optimizer_and_state_are_equal(
    tmp_path: Path,
) -> None:
    path = _write(tmp_path, 7, 3.0)
    assert damage(path) == []
    (model, optimizer), (same, same_optimizer) = _model(5.0), _model(3.0)
    state, _ = load(path, model, [optimizer])
    assert state == {"step": 7}
    assert json.loads((path / "run.json").read_text()) == {"step": 7}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, dict(same.named_parameters())[name])
    for mine, theirs in zip(optimizer.state.values(), same_optimizer.state.values(), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_given_a_checkpoint_when_resumed_then_random_numbers_go_on_as_they_would_have(tmp_path: Path) -> None:
    def draw() -> list[float]:
        numbers = [random.gauss(0, 1), random.random(), np.random.normal(), np.random.normal(), np.random.normal()]
        return [*numbers, *torch.rand(3).tolist()]

    model, optimizer = _model()
    draw()
    save(tmp_path / checkpoint_name(1), model, [optimizer], {}, {})
    expected = draw()
    _, generators = load(tmp_path / checkpoint_name(1), model, [optimizer])
    draw()
    rng.restore(generators)
    assert draw() == expected
    assert load(tmp_path / checkpoint_name(1), model, [])[1] == {}, "who only reads weights keeps his own"


FILES = ("__0_0.distcp", ".metadata", "state.pt", "run.json", MANIFEST, COMPLETE)


def _truncate(path: Path, _: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _empty(path: Path, _: Path) -> None:
    path.write_bytes(b"")


def _flip(path: Path, _: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


def _delete(path: Path, _: Path) -> None:
    path.unlink()


def _swap(path: Path, other: Path) -> None:
    mine, theirs = path.read_bytes(), (other / path.name).read_bytes()
    assert mine != theirs, "nothing is damaged"
    path.write_bytes(theirs)
    (other / path.name).write_bytes(mine)


DAMAGES = (_truncate, _empty, _flip, _delete, _swap)


def test_given_a_checkpoint_when_listed_then_the_files_that_are_damaged_below_are_all_of_it(written: Path) -> None:
    assert {path.name for path in (written / checkpoint_name(6)).iterdir()} == set(FILES)


@pytest.mark.parametrize("what", DAMAGES, ids=lambda function: function.__name__)
@pytest.mark.parametrize("name", FILES)
def test_given_a_damaged_file_when_looked_for_then_it_is_named_and_the_checkpoint_before_is_used(
    written: Path, tmp_path: Path, name: str, what: Callable[[Path, Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    folder = _copy(written, tmp_path)
    spare = tmp_path / "spare"
    shutil.copytree(folder / checkpoint_name(3), spare)
    what(folder / checkpoint_name(6) / name, spare)
    with caplog.at_level(logging.WARNING), pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("quintet"), "propagate", True)
        assert newest_sound(folder, own=True) == folder / checkpoint_name(3)
    assert "CHECKPOINT SKIPPED" in caplog.text
    assert name in caplog.text
    assert checkpoint_name(6) in caplog.text
    assert (folder / f"damaged-{checkpoint_name(6)}").is_dir()
    assert not (folder / checkpoint_name(6)).exists()


def test_given_no_checkpoint_that_can_be_used_when_looked_for_then_the_run_never_starts_from_scratch(
    written: Path, tmp_path: Path
) -> None:
    folder = _copy(written, tmp_path)
    (folder / checkpoint_name(3) / COMPLETE).unlink()
    (folder / checkpoint_name(6) / "state.pt").unlink()
    with pytest.raises(RunError, match=r"step-00000006 cannot be used: state.pt is missing\n.*COMPLETE is missing"):
        newest_sound(folder, own=False)
    shutil.rmtree(folder / checkpoint_name(3))
    shutil.rmtree(folder / checkpoint_name(6))
    with pytest.raises(RunError, match=r"step-00000006 is gone\nstep-00000003 is gone"):
        newest_sound(folder, own=False)


def test_given_only_a_save_that_was_never_finished_when_looked_for_then_the_run_starts_from_the_beginning(
    tmp_path: Path,
) -> None:
    assert newest_sound(tmp_path / "nowhere", own=True) is None
    path = _write(tmp_path, 5)
    (path / COMPLETE).unlink()
    (tmp_path / INDEX).unlink()  # a kill between the rename and the mark
    assert newest_sound(tmp_path, own=True) is None


def test_given_a_path_when_looked_for_then_it_is_a_checkpoint_or_a_run_with_one_or_refused(
    written: Path, tmp_path: Path
) -> None:
    folder = _copy(written, tmp_path)
    assert find(tmp_path, "ckpt") == folder / checkpoint_name(6)
    assert find(folder / checkpoint_name(3), "ckpt") == folder / checkpoint_name(3)
    for nothing in (tmp_path / "nowhere", folder):
        with pytest.raises(ConfigError, match="neither a complete checkpoint"):
            find(nothing, "ckpt")
    _flip(folder / checkpoint_name(6) / ".metadata", folder)
    assert find(tmp_path, "ckpt") == folder / checkpoint_name(3)
    with pytest.raises(ConfigError, match=r"step-00000006 cannot be used: .metadata is not what was written"):
        find(folder / checkpoint_name(6), "ckpt")
    assert (folder / checkpoint_name(6)).exists(), "only a run renames what lies in its own folder"


def _names(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in complete_checkpoints(folder)]


def test_given_a_policy_when_retained_then_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: 5.0, 5: 4.0}
    for step, loss in losses.items():
        path = tmp_path / checkpoint_name(step)
        path.mkdir()
        (path / COMPLETE).touch()
        record(tmp_path, path.name, {"val/loss": loss})
    policy = CheckpointConfig(keep=1, best=2)
    assert best(read_index(tmp_path), policy) == [checkpoint_name(2), checkpoint_name(3)]
    assert best(read_index(tmp_path), CheckpointConfig(best=1, mode=MetricMode.max)) == [checkpoint_name(4)]
    assert is_among_best({"val/loss": 1.5}, read_index(tmp_path), policy)
    assert not is_among_best({"val/loss": 2.0}, read_index(tmp_path), policy)
    assert not is_among_best({}, read_index(tmp_path), policy)
    assert not is_among_best({"val/loss": 0.0}, read_index(tmp_path), CheckpointConfig())
    retain(tmp_path, policy)
    assert _names(tmp_path) == [2, 3, 5]
    retain(tmp_path, CheckpointConfig(keep=2))
    assert _names(tmp_path) == [3, 5]
    assert read_index(tmp_path).keys() == {checkpoint_name(3), checkpoint_name(5)}


def test_given_an_unfinished_save_when_retained_then_the_newest_complete_one_stays(tmp_path: Path) -> None:
    # S-36: the save of step 9 is under way, or was killed; it is no reason to remove step 6.
    for step in (3, 6):
        _write(tmp_path, step)
    (tmp_path / f".{checkpoint_name(9)}.partial").mkdir()
    (tmp_path / checkpoint_name(9)).mkdir()
    retain(tmp_path, CheckpointConfig(keep=1))
    assert newest_sound(tmp_path, own=True) == tmp_path / checkpoint_name(6)
    sweep(tmp_path)
    assert not list(tmp_path.glob(".*"))
    assert _names(tmp_path) == [6]


def test_given_a_slow_disk_when_saved_in_the_background_then_the_copy_is_of_the_moment_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    right = checkpoint.dcp.save
    monkeypatch.setattr(checkpoint.dcp, "save", lambda *a, **k: (gate.wait(20), right(*a, **k)))
    model, optimizer = _model(1.0)
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    saver, path = Saver(), tmp_path / checkpoint_name(1)
    done: list[bool] = []
    saver.start(path, model, [optimizer], {}, {}, lambda: done.append((path / COMPLETE).exists()))
    saver.wait(0.0)  # asks, and does not wait
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert not path.exists()
    gate.set()
    saver.wait()
    assert done == [True]
    load(path, model, [optimizer])
    assert all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("small_disk", ["256k"], indirect=True)
def test_given_a_full_disk_when_saved_then_it_is_an_error_that_says_so_and_older_checkpoints_stay(
    small_disk: Path,
) -> None:
    good = _write(small_disk, 1)
    model = nn.Linear(200, 400)  # more than the disk
    saver = Saver()
    saver.start(small_disk / checkpoint_name(2), model, [], {}, {})
    with pytest.raises(SaveError, match=r"step-00000002 could not be written: rank 0: .*No space left on device"):
        saver.wait()
    assert {path.name for path in small_disk.iterdir()} == {good.name, INDEX}
    assert newest_sound(small_disk, own=True) == good
    small = nn.Linear(2, 2)
    saver.start(small_disk / checkpoint_name(3), small, [], {}, {})
    saver.wait()
    assert newest_sound(small_disk, own=True) == small_disk / checkpoint_name(3)


def test_given_state_that_is_not_plain_when_saved_then_it_is_refused_at_once(tmp_path: Path) -> None:
    model, optimizer = _model()
    with pytest.raises(RunError, match="holds what no checkpoint may"):
        save(tmp_path / checkpoint_name(1), model, [optimizer], {"path": Path("x")}, {})
    assert not list(tmp_path.iterdir())


def test_given_a_remote_address_when_mirrored_then_what_is_kept_is_there_and_is_fetched_whole(
    written: Path, tmp_path: Path
) -> None:
    address = "memory://bucket/run"
    with pytest.raises(ConfigError, match="neither a complete checkpoint nor a folder with one"):
        fetch("ckpt", address, tmp_path)
    for step in (3, 6):
        upload(written / checkpoint_name(step), address)
    fetched = fetch("ckpt", address, tmp_path / "a")
    assert fetched.name == checkpoint_name(6)
    assert damage(fetched) == []
    assert fetch("ckpt", f"{address}/{checkpoint_name(3)}", tmp_path / "b").name == checkpoint_name(3)
    keep_only({checkpoint_name(3)}, address)
    assert fetch("ckpt", address, tmp_path / "c").name == checkpoint_name(3)
    fsspec.filesystem("memory").rm_file(f"/bucket/run/{checkpoint_name(3)}/COMPLETE")
    with pytest.raises(ConfigError, match="neither a complete checkpoint nor a folder with one"):
        fetch("ckpt", address, tmp_path / "d")
    with pytest.raises(ConfigError, match="ckpt=nowhere://x: fsspec knows no nowhere://"):
        fetch("ckpt", "nowhere://x", tmp_path)


class _Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


def test_given_code_in_a_checkpoint_whose_checksums_fit_when_read_then_it_does_not_run(
    written: Path, tmp_path: Path
) -> None:
    for name, write in {".metadata": pickle.dumps, "state.pt": _torch_bytes}.items():
        path = tmp_path / name.strip(".") / checkpoint_name(6)
        shutil.copytree(written / checkpoint_name(6), path)
        (path / name).write_bytes(write(_Evil(tmp_path / "ran")))
        content = json.loads((path / MANIFEST).read_text())["files"]
        write_manifest(path, content | {name: digest(path / name)})
        mark_complete(path)
        assert damage(path) == []
        model, optimizer = _model()
        with pytest.raises(pickle.UnpicklingError):
            load(path, model, [optimizer])
    assert not (tmp_path / "ran").exists()


def _torch_bytes(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
