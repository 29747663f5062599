"""`memory.offload = ["optimizer"]`: what DeepSpeed's offload would hold longer than it needs, let go of.

Gradients wait on the GPU for their bucket alone, and the update makes its temporaries a piece of the numbers at a time.
Both leave every bit as it was. Called by `engine`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

UPDATE_NUMEL = 1 << 20
"""Numbers that are updated at a time; `memory.UPDATE_NUMEL` is the same. What is made of them fits into caches."""


REPLACED = "_get_compact_grad_partition_slice", "_use_compact_grad_partition_buffer", "copy_grads_in_partition"
"""Methods of DeepSpeed's optimizer that `release_early` replaces or asks."""


class AdamW(torch.optim.AdamW):
    """torch's, of flat parameters, piece by piece: on a CPU torch makes two more tensors of a parameter's size."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for flat in group["params"]:
                state = self._state_of(flat)
                weights, gradients, means, squares = (
                    list(numbers.view(-1).split(UPDATE_NUMEL))
                    for numbers in (flat, flat.grad, state["exp_avg"], state["exp_avg_sq"])
                )
                adamw(
                    weights, gradients, means, squares, [], [state["step"].clone() for _ in weights],
                    foreach=False, amsgrad=False, beta1=first, beta2=second, lr=group["lr"],
                    weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
                )  # fmt: skip
                state["step"] += 1

    def _state_of(self, flat: Tensor) -> dict[str, Tensor]:
        state = self.state[flat]
        if not state:
            state |= {"step": torch.zeros(()), "exp_avg": torch.zeros_like(flat), "exp_avg_sq": torch.zeros_like(flat)}
        return state


def release_early(outer: Any) -> None:
    """Of DeepSpeed's optimizer of ZeRO 1 or 2: no fp32 gradients of a whole partition on the GPU, no idle buffers.

    It adds what a bucket reduced to a tensor of the rank's whole partition, copies that to the host parameter by
    parameter, and keeps it until the update. Here each parameter has a tensor of its own, gone once it is copied.
    A DeepSpeed that does it otherwise (this is 0.19.8's way) is left as it is.
    """
    import deepspeed.comm as dist

    if not all(hasattr(outer, name) for name in REPLACED):
        return
    outer.temp_grad_buffer_for_cpu_offload = None  # nothing uses it
    if outer.dtype == outer.gradient_accumulation_dtype:
        return
    outer.temp_grad_buffer_for_gpu_offload = None  # for sums on the host, which are made on the GPU here
    waiting: dict[int, Tensor] = {}
    copy = outer.copy_grads_in_partition

    def part_of(group: int, partition: int, parameter: int, numel: int) -> Tensor | None:
        mine = partition == dist.get_rank(group=outer.real_dp_process_group[group])
        if not mine or not outer._use_compact_grad_partition_buffer(group):
            return None
        if parameter not in waiting:
            waiting[parameter] = torch.zeros(
                int(numel), dtype=outer.gradient_accumulation_dtype, device=outer.bit16_groups_flat[group].device
            )
        return waiting[parameter]

    def copied(parameter: Any, group: int | None = None) -> None:
        copy(parameter, group)
        if outer.is_gradient_accumulation_boundary():
            waiting.pop(outer.get_param_id(parameter), None)

    outer._get_compact_grad_partition_slice = part_of
    outer.copy_grads_in_partition = copied
