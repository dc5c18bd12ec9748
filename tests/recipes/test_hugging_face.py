"""Export, import and starting from published weights, as a person does it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.recipes.commands import MICRO, MODEL, assert_same_weights, metrics, run, start, succeed, weights


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 3 steps on the standard library, and what it exports to."""
    folder = tmp_path_factory.mktemp("trained")
    succeed(start("train", *MODEL, f"run.dir={folder}/run", "logger=none", "callbacks=none"))
    done = run("export", f"run={folder}/run", f"out={folder}/hf", "shard_gb=0.00002", "verify=true")
    assert done.returncode == 0, done.stderr
    assert "largest difference from transformers' logits: " in done.stdout
    return folder


def test_given_an_export_when_looked_at_then_it_is_a_model_that_others_read(trained: Path) -> None:
    files = {path.name for path in (trained / "hf").iterdir()}
    assert {"config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"} <= files
    assert len([name for name in files if name.endswith(".safetensors")]) > 3
    exported = {name: t for path in (trained / "hf").glob("*.safetensors") for name, t in load_file(path).items()}
    ours = weights(trained / "run")
    assert all(torch.equal(exported[name], ours[name]) for name in exported)
    tokenizer = AutoTokenizer.from_pretrained(trained / "hf")
    assert tokenizer.decode(tokenizer.encode("def é")) == "def é"
    again = run("export", f"run={trained}/run", f"out={trained}/hf")
    assert again.returncode == 2
    assert "is there already" in again.stderr


def test_given_an_export_when_imported_then_weights_are_equal_and_a_run_starts_from_them_under_another_layout(
    trained: Path, tmp_path: Path
) -> None:
    done = run("import_hf", f"path={trained}/hf", f"out={tmp_path}/imported", "verify=true")
    assert done.returncode == 0, done.stderr
    assert "largest difference from transformers' logits: " in done.stdout
    assert_same_weights(tmp_path / "imported", trained / "run")
    assert (tmp_path / "imported" / "published" / "tokenizer.json").is_file()
    split = ["parallelism.tp=2", "parallelism.loss_parallel=true"]
    option = ["--config-dir", f"{tmp_path}/imported/conf", "model=imported"]
    shared = [part for part in MICRO if not part.startswith("model.")]
    began = [*option, *shared, f"weights={tmp_path}/imported"]
    first = start("train", *began, *split, f"run.dir={tmp_path}/a", "run.id=a", "logger=none")
    second = start("train", *MICRO, f"weights={trained}/hf", f"run.dir={tmp_path}/b", "run.id=b", "logger=none")
    succeed(first, second)
    for a, b in zip(metrics(tmp_path / "a"), metrics(tmp_path / "b"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    refused = run("train", *MICRO, f"ckpt={tmp_path}/imported", f"run.dir={tmp_path}/c", "logger=none")
    assert refused.returncode == 2
    assert f"Write weights={tmp_path}/imported" in refused.stderr


def test_given_a_run_in_bfloat16_when_exported_then_its_own_weights_are_verified_in_either_type(tmp_path: Path) -> None:
    succeed(start("train", *MICRO, "precision=bf16", f"run.dir={tmp_path}/run", "logger=none", "callbacks=none"))
    whole = start("export", f"run={tmp_path}/run", f"out={tmp_path}/float32", "verify=true")
    rounded = start("export", f"run={tmp_path}/run", f"out={tmp_path}/bfloat16", "verify=true", "dtype=bfloat16")
    succeed(whole, rounded)
    assert {tensor.dtype for tensor in load_file_all(tmp_path / "float32").values()} == {torch.float32}
    assert {tensor.dtype for tensor in load_file_all(tmp_path / "bfloat16").values()} == {torch.bfloat16}


def test_given_weights_that_know_another_tokenizer_when_trained_from_then_it_is_refused_until_theirs_is_named(
    trained: Path, tmp_path: Path
) -> None:
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text("some text of the user's own, again and again\n" * 20)
    text = ["data=files", f"data.paths=[{tmp_path}/text/*.txt]", f"data.cache_dir={tmp_path}/cache"]
    began = [*MODEL, *text, "data.validation_fraction=0.3", f"weights={trained}/hf", "logger=none", "callbacks=none"]
    other = [*began, "data.tokenizer.kind=bpe", "data.tokenizer.vocab_size=260", f"run.dir={tmp_path}/other"]
    theirs = [*began, "data.tokenizer.kind=file", f"data.tokenizer.path={trained}/hf", f"run.dir={tmp_path}/theirs"]
    refused, accepted = start("train", *other), start("train", *theirs)
    succeed(accepted)
    done = refused.finish()
    assert done.returncode == 2
    assert f"Write data.tokenizer.kind=file data.tokenizer.path={trained}/hf/tokenizer.json." in done.stderr
    done = run("generate", f"run={tmp_path}/theirs", "prompt=some", "max_new_tokens=3")
    assert done.returncode == 0, done.stderr


def test_given_adapters_when_trained_on_two_ranks_then_they_are_exported_alone_or_merged(
    trained: Path, tmp_path: Path
) -> None:
    lora = ["model.lora.rank=2", f"weights={trained}/hf", "parallelism.dp_shard=2", "parallelism.zero=2"]
    succeed(start("train", *MICRO, *lora, f"run.dir={tmp_path}/run", "run.id=l", "logger=none", "optimizer.lr=0.1"))
    alone = start("export", f"run={tmp_path}/run", f"out={tmp_path}/adapters")
    merged = start("export", f"run={tmp_path}/run", f"out={tmp_path}/merged", "merge=true", "verify=true")
    succeed(alone, merged)
    described = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (described["peft_type"], described["r"], described["lora_alpha"]) == ("LORA", 2, 16.0)
    assert described["base_model_name_or_path"] == f"{trained}/hf"
    adapters = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert len(adapters) == 2 * 4 * 2
    base, whole = load_file_all(trained / "hf"), load_file_all(tmp_path / "merged")
    for name, weight in base.items():
        a = adapters.get(f"base_model.model.{name.replace('.weight', '.lora_A.weight')}")
        b = adapters.get(f"base_model.model.{name.replace('.weight', '.lora_B.weight')}")
        added = torch.zeros_like(weight) if a is None or b is None else 8.0 * b @ a
        assert a is None or added.abs().max() > 0
        torch.testing.assert_close(whole[name], weight + added, rtol=0, atol=1e-6)
    refused = run("train", *MICRO, "model.lora.rank=2", f"run.dir={tmp_path}/no", "logger=none")
    assert refused.returncode == 2
    assert "model.lora.rank=2 trains adapters of weights that stand still" in refused.stderr


def load_file_all(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
