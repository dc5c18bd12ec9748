"""What is private in torch and Lightning and is put aside here: by another name the replacement would do nothing."""

import inspect

from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch.distributed.pipelining import PipelineStage, schedules

from parallel.pipeline import _Stage
from parallel.strategy import quiet_signals


def test_every_method_that_our_stage_replaces_is_one_of_torchs_stage() -> None:
    replaced = [name for name, value in vars(_Stage).items() if inspect.isfunction(value)]
    assert len(replaced) > 8
    assert [name for name in replaced if not hasattr(PipelineStage, name)] == []


def test_what_is_set_on_a_schedule_is_read_by_torchs_schedule() -> None:
    source = inspect.getsource(schedules)
    for name in ("unsharded_stages", "pipeline_order_with_comms", "_warmup_p2p", "_inference_mode"):
        assert f".{name}" in source, name
    assert {"UNSHARD", "RESHARD"} <= vars(schedules).keys()


def test_what_is_taken_out_of_lightning_is_there() -> None:
    environment = LightningEnvironment()  # else Lightning looks for SLURM
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, plugins=[environment])
    for owner, name in (
        (trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"),
        (trainer._signal_connector, "register_signal_handlers"),
    ):
        before = getattr(owner, name)
        quiet_signals(trainer)
        assert getattr(owner, name) != before, name
