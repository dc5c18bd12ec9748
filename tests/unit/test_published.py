"""S-34: weights in and out of Hugging Face's format, to the bit; files that cannot be trusted are refused by name."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from models.config import ModelConfig
from models.counts import parameter_shapes
from models.decoder import Decoder
from models.errors import ConfigError
from models.hugging_face import config_dict, config_from, published_names
from parallel.checkpoint import save, save_weights
from parallel.published import Published, fill_from_published
from parallel.stored import StoredWeights, write_published
from tests.small import SMALL, random_decoder, random_tokens
from tests.unit.test_hugging_face_parity import FAMILIES, MIXTURES

ALL = FAMILIES | MIXTURES


def _publish(config: ModelConfig, folder: Path, dtype: torch.dtype, shard: str) -> dict[str, torch.Tensor]:
    """A folder that transformers itself has written, and its tensors."""
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config_dict(config)))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)
    theirs.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return _tensors(folder)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def _import(folder: Path, checkpoint: Path) -> ModelConfig:
    published = Published(folder, "path")
    config = published.config()
    published.check(config)
    kinds = {
        name: torch.empty(shape, dtype=published.dtype(published_names(config, name)[0]), device="meta")
        for name, shape in parameter_shapes(config).items()
    }
    shapes = parameter_shapes(config)
    save_weights(
        checkpoint, kinds, lambda name: published.block(config, name, [0] * len(shapes[name]), shapes[name]), {}
    )
    return config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("config", "family"), ALL.values(), ids=ALL)
def test_given_published_weights_when_imported_and_exported_then_every_bit_is_the_same(
    tmp_path: Path, config: ModelConfig, family: str, dtype: torch.dtype
) -> None:
    before = _publish(config, tmp_path / "in", dtype, "100KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 1
    read = _import(tmp_path / "in", tmp_path / "step-00000000")
    assert config_dict(read) == config_dict(config)
    assert config_dict(read)["model_type"] == family
    (tmp_path / "out").mkdir()
    write_published(tmp_path / "out", read, StoredWeights(tmp_path / "step-00000000"), None, 100_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    after = _tensors(tmp_path / "out")
    assert after.keys() == before.keys()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
    (tmp_path / "out" / "config.json").write_text(json.dumps(config_dict(read)))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation="eager")
    ours = Decoder(read).eval()
    fill_from_published(ours, Published(tmp_path / "out", "path"))
    tokens = random_tokens(config, 2, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs.eval()(tokens).logits, rtol=0, atol=1e-5)


def test_given_config_json_of_transformers_4_when_read_then_it_means_the_same() -> None:
    old = {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "torch_dtype": "bfloat16",
    }
    config = config_from(old, "llama3.1")
    assert (config.head_dim, config.rope.theta, config.rope.factor) == (128, 500000.0, 8.0)
    assert config_from(config_dict(config), "llama3.1") == config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "model_type=gpt2 is none of the families"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type=longrope"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "max_window",
        ),
    ],
)
def test_given_a_model_that_is_not_computed_here_when_read_then_it_is_refused(
    change: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        config_from(config_dict(SMALL) | change, "x")


def test_given_files_that_cannot_be_used_when_opened_then_each_fault_is_named(tmp_path: Path) -> None:
    _publish(SMALL, tmp_path, torch.float32, "100KB")
    first, second, *_ = sorted(tmp_path.glob("*.safetensors"))
    content = second.read_bytes()
    second.write_bytes(content[:-10])
    with pytest.raises(ConfigError, match=f"{second.name} is not a safetensors file, or is cut off"):
        Published(tmp_path, "path")
    second.unlink()
    with pytest.raises(ConfigError, match=f"{second.name} is missing"):
        Published(tmp_path, "path")
    second.write_bytes(content)
    tensors = load_file(first)
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name][:1].clone(), "extra": torch.zeros(1)}, first)
    with pytest.raises(ConfigError, match=rf"extra is not part of the model; {name} has shape"):
        Published(tmp_path, "path").check(SMALL)
    with pytest.raises(ConfigError, match=r"no \.safetensors file"):
        Published(tmp_path / "nowhere", "path")


def test_given_pickle_files_when_opened_then_they_are_refused_and_never_run_even_if_allowed(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    state = {name: tensor.clone() for name, tensor in random_decoder(SMALL).state_dict().items()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"only as pickle files.*allow_pickle=true"):
        Published(tmp_path, "path")
    ours = Decoder(SMALL)
    fill_from_published(ours, Published(tmp_path, "path", allow_pickle=True))
    assert all(torch.equal(parameter, state[name]) for name, parameter in ours.named_parameters())
    torch.save({"x": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises((pickle.UnpicklingError, ConfigError)):
        Published(tmp_path, "path", allow_pickle=True)
    assert not (tmp_path / "ran").exists()


def test_given_a_checkpoint_when_exported_then_no_more_than_one_tensor_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = random_decoder(SMALL)
    save(tmp_path / "step-00000001", decoder, [], {}, {})
    weights = StoredWeights(tmp_path / "step-00000001")
    alive: list[int] = []
    right = weights.read

    def read(name: str) -> torch.Tensor:
        tensor = right(name)
        alive.append(tensor.numel())
        assert weights._latest is not None
        assert weights._latest[1] is tensor
        return tensor

    monkeypatch.setattr(weights, "read", read)
    (tmp_path / "out").mkdir()
    write_published(tmp_path / "out", SMALL, weights, torch.bfloat16, 50_000)
    assert sum(alive) == sum(parameter.numel() for parameter in decoder.parameters())
    exported = _tensors(tmp_path / "out")
    assert all(torch.equal(exported[name], p.bfloat16()) for name, p in decoder.named_parameters())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == exported.keys()
    assert max(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")) < 52_000
