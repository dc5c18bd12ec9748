"""Published weights as a run directory: `python -m recipes.import_hf path=<folder> out=<run directory>`.

To train from them there is no need to: `recipes.train weights=<folder>` reads the safetensors straight into any layout.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from models.errors import ConfigError
from recipes.command import command
from recipes.export import new_folder


@dataclass
class ImportConfig:
    """conf/import_hf.yaml."""

    path: str
    out: str
    allow_pickle: bool
    verify: bool


def import_hf(composed: DictConfig) -> None:
    """Write config.yaml, a checkpoint of step 0, and the model as an option for `model=`."""
    settings = OmegaConf.to_object(composed)
    assert isinstance(settings, ImportConfig)
    if not settings.path or not Path(settings.path).is_dir():
        raise ConfigError(f"path={settings.path} is no folder; write that of config.json and the .safetensors files.")
    out = new_folder(settings.out)

    import torch
    from hydra import compose

    from models.counts import parameter_count, parameter_shapes
    from models.decoder import Decoder
    from models.hugging_face import published_names
    from parallel.checkpoint import save_weights
    from parallel.published import Published
    from parallel.retention import checkpoint_name, record
    from recipes.plain import plain
    from recipes.resume import PUBLISHED, keep_companions
    from recipes.run_directory import RunDirectory, environment
    from recipes.schema import to_config
    from recipes.verify import verify_logits

    folder = Path(settings.path)
    published = Published(folder, "path", settings.allow_pickle)
    model = published.config()
    published.check(model)
    base = to_config(compose("config", overrides=[f"run.dir={out}", f"run.id={out.name}"]))
    config = replace(base, model=model, recipe=replace(base.recipe, name="imported", hardware="", status=""))
    run = RunDirectory(out)
    run.create(config, [])
    keep_companions(folder, run)
    option = {"defaults": ["schema", "_self_"], **plain(config)["model"]}
    (out / "conf" / "model").mkdir(parents=True)
    (out / "conf" / "model" / "imported.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(option)))

    shapes = parameter_shapes(model)
    tensors = {
        name: torch.empty(shape, dtype=published.dtype(published_names(model, name)[0]), device="meta")
        for name, shape in shapes.items()
    }
    with torch.device("meta"):  # what is no weight, routers' biases, begins at 0 as in any new run
        buffers = dict(Decoder(model).named_buffers())

    def make(name: str) -> torch.Tensor:
        if name in buffers:
            return torch.zeros_like(buffers[name], device="cpu")
        return published.block(model, name, [0] * len(shapes[name]), shapes[name])

    name = checkpoint_name(0)
    about = {"step": 0, "config": plain(config), "environment": environment(), "imported": str(folder.resolve())}
    save_weights(run.checkpoints / name, tensors | buffers, make, about)
    record(run.checkpoints, name, {})
    published.close()
    if settings.verify:
        verify_logits(config, run.checkpoints / name, folder)
    print(f"{model.name}: {parameter_count(model):,} parameters in {out}")
    words = f"--config-dir {out}/conf model=imported weights={out} data=..."
    if (folder / "tokenizer.json").is_file():
        words += f" data.tokenizer.kind=file data.tokenizer.path={out / PUBLISHED}"
    print(f"python -m recipes.train {words} begins from them")


if __name__ == "__main__":
    command("import_hf", import_hf, ImportConfig)
