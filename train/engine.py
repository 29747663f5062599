"""DeepSpeed: its config made from ours, the scale of the loss, the gradient norm. Only `partitions` knows it too.

All ranks, data x ring x Ulysses, are one ZeRO world. DeepSpeed averages gradients over ranks and accumulation steps;
the loss is scaled so that what remains is the gradient of the mean over all valid targets. Called by `loop`, `probe`.
"""

import io
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
from torch import Tensor, nn

from . import host_update
from .config import Batch, Config, Optimizer
from .partitions import BUFFER, WEIGHT, Partitions, Piece
from .tiling import is_tiled
from .world import World

BUCKET_NUMEL = 200_000_000
"""Most gradients that are reduced at once; DeepSpeed allocates buffers of this size."""

WHOLE_NUMEL = 100_000
"""ZeRO 3 keeps weights of up to this many numbers whole, if they are also below a hundredth of the model: norms."""


class Engine:
    """A model under DeepSpeed.

    for micro in window:
        engine.backward(engine(...), valid_targets=...)     # the loss SUM of this rank's tokens
    grad_norm = engine.step(lr)
    """

    def __init__(self, model: nn.Module, config: Config, batch: Batch, world: World) -> None:
        self._engine: Any = self._initialize(model, config, batch)
        self._partitions = Partitions(self._engine, config.parallel.zero, world.rank)
        self._zero = config.parallel.zero
        self._clip_norm = config.optimizer.clip_norm
        self._accumulation = batch.accumulation
        self._num_ranks = world.size
        self._skips = False
        self._own_norm: Tensor | None = None
        optimizer = getattr(self._engine.optimizer, "optimizer", self._engine.optimizer)
        self._torch_step, optimizer.step = optimizer.step, self._update

    @staticmethod
    def _initialize(model: nn.Module, config: Config, batch: Batch) -> Any:
        deepspeed = _deepspeed()
        for module in model.modules():
            if is_tiled(module):  # its weights are gathered once, not for each tile
                deepspeed.utils.set_z3_leaf_module(module, True)
        numel = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
        away = "optimizer" in config.memory.offload
        with redirect_stdout(io.StringIO()):  # in bfloat16 at ZeRO 1 it prints its memory, ten times
            engine = deepspeed.initialize(
                model=model,
                optimizer=optimizer_of([p for p in model.parameters() if p.requires_grad], config.optimizer, away=away),
                config=deepspeed_config(config, batch, numel=numel),
                dist_init_required=False,
            )[0]
        if away and config.parallel.zero < 3:
            host_update.release_early(engine.optimizer)
        return engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine(*args, **kwargs)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, the model is called as it is evaluated: no gradient, no recomputation. Then it trains on."""
        self._engine.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self._engine.train()

    def full_parameters(self) -> dict[str, Tensor]:
        """Copies of the whole parameters, on every rank. All ranks must call it."""
        import deepspeed

        whole = {}
        for name, parameter in self.module.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=self._zero == 3):
                whole[name] = parameter.detach().clone()
        return whole

    @property
    def module(self) -> Any:
        """The model itself, as it was given; its parameters are partitioned at ZeRO 3."""
        return self._engine.module

    def backward(self, loss_sum: Tensor, *, valid_targets: int) -> None:
        """One micro-batch. loss_sum: scalar, over this rank's tokens; valid_targets: of all ranks, whole window."""
        scale = self._num_ranks * self._accumulation / max(valid_targets, 1)
        self._engine.backward(loss_sum * scale)
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()  # only counts the micro-batch

    def step(self, lr: float, *, skip: bool = False) -> float:
        """Update the weights after the last micro-batch of a window; returns the gradient norm before clipping.

        skip: only forget the gradients. So it is, too, where their norm is not finite: then it returns NaN.
        """
        self._skips = skip
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        self._own_norm = None
        if self._zero == 0:  # DeepSpeed keeps no norm there, and clips by none unless asked
            limit = self._clip_norm or math.inf
            self._own_norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), limit)
        self._engine.step()
        return self._norm()

    def _norm(self) -> float:
        """The gradient norm of this step, NaN for what is not finite: DeepSpeed makes -1 of it, or keeps an old one."""
        if getattr(self._engine.optimizer, "overflow", False):
            return math.nan
        norm = float(self._engine.optimizer._global_grad_norm if self._own_norm is None else self._own_norm)
        return norm if 0 <= norm < math.inf else math.nan

    def _update(self, closure: None = None) -> None:
        """What DeepSpeed calls as the torch optimizer's step, once the norm is known."""
        if not self._skips and math.isfinite(self._norm()):
            self._torch_step()

    def pieces(self) -> list[Piece]:
        """What this rank holds of the weights, in fp32, and of the optimizer's state, as views."""
        return self._partitions.pieces()

    def fill(self, kinds: Collection[str], read: Callable[[list[Piece]], None]) -> None:
        """Take weights and optimizer from a checkpoint, before the first step. All ranks must call it.

        kinds: of the tensors that it holds; read: writes into the parts of these pieces
        """
        self._partitions.prepare()
        self._partitions.empty(set(kinds) - {WEIGHT, BUFFER})
        read(self._partitions.pieces())
        self._partitions.refresh()

    def close(self) -> None:
        """Let go of the model; another engine may follow in the same process."""
        self._engine.destroy()


def _deepspeed() -> Any:
    """DeepSpeed, quiet and without what it would compile."""
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # it warns of every optimizer of torch
    # an op for inference that each CPU process would compile and load; a process killed meanwhile leaves a lock
    # behind on which all later runs hang
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def cutter(config: Config, batch: Batch) -> Callable[[nn.Module], None] | None:
    """At ZeRO 3: what leaves of the parameters of a module the part of this rank, all ranks together; else None."""
    if config.parallel.zero < 3:
        return None
    deepspeed, settings = _deepspeed(), deepspeed_config(config, batch, numel=0)
    return lambda module: deepspeed.zero.Init(module=module, config_dict_or_path=settings)


def optimizer_of(
    parameters: Iterable[nn.Parameter], optimizer: Optimizer, *, away: bool = False
) -> torch.optim.Optimizer:
    """The torch optimizer that [optimizer] names; its learning rate is set at each step.

    away: it updates flat partitions in host memory
    """
    if optimizer.name == "sgd":
        return torch.optim.SGD(
            parameters, lr=optimizer.lr, momentum=optimizer.momentum, weight_decay=optimizer.weight_decay
        )
    first, second = optimizer.betas
    kind = host_update.AdamW if away else torch.optim.AdamW
    return kind(
        parameters, lr=optimizer.lr, betas=(first, second), eps=optimizer.eps, weight_decay=optimizer.weight_decay
    )


def deepspeed_config(config: Config, batch: Batch, *, numel: int) -> dict[str, Any]:
    """DeepSpeed's config: gradients are reduced and accumulated in fp32; nothing is left to a default that clips.

    numel: parameters of the model
    """
    bucket = min(BUCKET_NUMEL, max(numel, 1))
    away = {"offload_optimizer": {"device": "cpu"}} if "optimizer" in config.memory.offload else {}
    return {
        "train_micro_batch_size_per_gpu": batch.micro_batch,
        "gradient_accumulation_steps": batch.accumulation,
        "gradient_clipping": config.optimizer.clip_norm if config.parallel.zero else 0.0,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": config.model.dtype == "bfloat16"},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": config.parallel.zero,
            "overlap_comm": False,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "stage3_param_persistence_threshold": min(WHOLE_NUMEL, numel // 100),
            **away,
        },
        "zero_force_ds_cpu_optimizer": False,  # its own would be compiled at run time; torch's updates on the host too
        "steps_per_print": None,
    }


def learning_rate(step: int, optimizer: Optimizer, *, steps: int) -> float:
    """The learning rate of a step, counted from 1 to `steps`: linear warmup to lr, then the schedule down to min_lr."""
    warmup, top, low = optimizer.warmup_steps, optimizer.lr, optimizer.min_lr
    if step <= warmup:
        return top * step / warmup
    if optimizer.schedule == "constant":
        return top
    progress = (step - warmup) / max(steps - warmup, 1)
    if optimizer.schedule == "linear":
        return top + (low - top) * progress
    return low + (top - low) * (1 + math.cos(math.pi * progress)) / 2
