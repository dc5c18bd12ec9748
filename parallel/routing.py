"""What routers did in a training step: notes of all layers, ranks and microbatches, summed once a step.

From the sums come the biases of auxiliary-loss-free balancing and all telemetry of experts.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from models.config import ROUTING_SCALARS, note_columns
from models.moe import MixtureOfExperts, RoutingStep
from models.router import update_bias
from parallel.collectives import all_reduce
from parallel.config import Config
from parallel.layout import Layout
from parallel.plan.expert_traffic import exchange_bytes

_BIAS_RANGE = ROUTING_SCALARS.index("bias_range") - len(ROUTING_SCALARS)


class RoutingBook:
    """The notes of this rank's routers. Training opens it for a step and closes it; nothing else touches it."""

    def __init__(
        self, config: Config, layout: Layout, mixtures: Sequence[MixtureOfExperts], device: torch.device
    ) -> None:
        self.config, self.layout, self.mixtures, self.device = config, layout, mixtures, device
        # What all ranks of a pipeline stage know is noted by the first of them, or a sum would count it once for each.
        self._first_of_stage = dist.get_rank() % (layout.world // layout.pp) == 0
        self._layers = torch.tensor(config.model.mixtures, device=device)
        self.totals: Tensor | None = None
        """float64 (layers, `note_columns`): sums over the whole of the last step, the same on every rank."""
        self._counting = False

    def open(self, batch: dict[str, Tensor]) -> None:
        """Begin a step with this rank's whole batch."""
        data, layers = self.config.data, self.config.model.num_hidden_layers
        rows = len(batch["sample"]) // data.micro_batch
        shape = (rows, layers, note_columns(self.config.model))
        self._notes = torch.zeros(shape, dtype=torch.float64, device=self.device)
        self._first = batch["sample"][:1]
        self._load: Tensor | None = None

    @property
    def must_count(self) -> bool:
        """Whether the load of the step must be found out by a pass of its own."""
        return self.config.model.moe.counts_first(len(self._notes))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """While this is open, forward passes only count; afterwards the load of the step is known."""
        self._counting = True
        yield
        self._counting = False
        self._load = self._sum()[:, : self.config.model.moe.num_experts]

    def step_of(self, batch: dict[str, Tensor]) -> RoutingStep:
        """What the routers of one microbatch are told."""
        data = self.config.data
        microbatch = (batch["sample"][:1] - self._first) // data.micro_batch
        tokens = data.global_batch * data.seq_len
        return RoutingStep(self._notes, microbatch, tokens, self._load, self._counting)

    @torch.no_grad()
    def close(self) -> None:
        """End the step: sum the notes, and move the biases once."""
        biases = {m.layer: m.gate.expert_bias for m in self.mixtures if m.gate.expert_bias is not None}
        for layer, bias in biases.items() if self._first_of_stage else ():
            self._notes[0, layer, _BIAS_RANGE] = bias.max() - bias.min()
        self.totals = self._sum()
        for layer, bias in biases.items():
            load = self.totals[layer, : -len(ROUTING_SCALARS)]
            update_bias(bias, load, self.config.model.moe.bias_update_rate)

    def load(self) -> Tensor:
        """How often each expert was chosen in the last step: float64 (layers with experts, experts)."""
        assert self.totals is not None
        return self.totals[self._layers, : -len(ROUTING_SCALARS)]

    def metrics(self) -> dict[str, Tensor]:
        """What is worth knowing of the last step, on the device: scalars, and loads by layer (layers with experts,).

        Loads are relative to the mean over a layer's experts; scalars are those of the worst layer but for the means
        `expert_load_cv` and `router_entropy` (nats), and for sums: dead experts, losses with their coefficients, bytes.
        """
        assert self.totals is not None
        moe, data, layers = self.config.model.moe, self.config.data, len(self._layers)
        load = self.load()
        relative = load / load.mean(1, keepdim=True)
        chosen = data.global_batch * data.seq_len * moe.num_experts_per_tok * layers
        columns = dict(zip(ROUTING_SCALARS, self.totals[:, -len(ROUTING_SCALARS) :].unbind(1), strict=True))
        most, least, spread = relative.amax(1), relative.amin(1), relative.std(1, correction=0)
        found = {
            "expert_load_max": most.max(),
            "expert_load_min": least.min(),
            "expert_load_cv": spread.mean(),
            "expert_load_max_by_layer": most,
            "expert_load_min_by_layer": least,
            "expert_load_cv_by_layer": spread,
            "experts_dead": (load == 0).sum(),
            "router_entropy": columns["router_entropy"].sum() / (chosen / moe.num_experts_per_tok),
            "dropped_fraction": columns["dropped"].sum() / chosen,
            "exchange_bytes": columns["sent"].sum() * exchange_bytes(self.config, self.layout),
        }
        if moe.balance_loss:
            found["balance_loss"] = moe.balance_loss * columns["balance_loss"].sum()
        if moe.z_loss:
            found["z_loss"] = moe.z_loss * columns["z_loss"].sum()
        if moe.bias_update_rate:
            found["expert_bias_range"] = columns["bias_range"].max()
        return found

    def _sum(self) -> Tensor:
        # Every rank has tokens of its own or layers of its own: the sum over all ranks counts each once.
        return all_reduce(self._notes.sum(0), dist.group.WORLD)
