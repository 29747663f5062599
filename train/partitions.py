"""Which part of which parameter, and of its optimizer state, a rank holds: DeepSpeed's partitions under one form.

At every ZeRO stage a rank holds, of a flat parameter, one range of numbers: all of it at stage 0, what falls into its
share of one long buffer at 1 and 2, its share of each parameter at 3. So a checkpoint is ranges by name, and knows no
stage and no number of ranks. Called by `engine`.
"""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

WEIGHT, BUFFER, STEP = "weight", "buffer", "step"


class Piece(NamedTuple):
    """What this rank holds of a flat tensor.

    key: kind.name, such as exp_avg.decoder.lm_head.weight; kind WEIGHT is what the optimizer updates, in fp32
    numel, start: of the whole tensor; where the part begins in it
    part: [numbers] a view, written to when a checkpoint is loaded
    whole: whether every rank holds all of it
    """

    key: str
    numel: int
    start: int
    part: Tensor
    whole: bool


class Master(NamedTuple):
    """Where the numbers that the optimizer updates for one parameter are on this rank.

    flat: what the optimizer knows; offset: where the parameter's range begins in it; start, length: of the range
    """

    flat: Tensor
    offset: int
    start: int
    length: int


class Partitions:
    """The state of a model under DeepSpeed: its pieces to be saved, and the same to be filled."""

    def __init__(self, engine: Any, zero: int, rank: int) -> None:
        self._module: nn.Module = engine.module
        self._zero, self._rank = zero, rank
        self._outer = engine.optimizer
        self._optimizer: torch.optim.Optimizer = engine.optimizer.optimizer if zero else engine.optimizer
        self._trained = {name: p for name, p in self._module.named_parameters() if p.requires_grad}

    def pieces(self) -> list[Piece]:
        """What this rank holds; that of another rank may be the same only where `whole` says so.

        Frozen weights are left out: they are those of model.pretrained.
        """
        return [*self._masters(), *self._states(), *self._buffers()]

    def empty(self, kinds: Collection[str]) -> None:
        """Give the optimizer the states of these kinds, all zero, as its first step would. Only before that step."""
        for flat in {id(m.flat): m.flat for _, m in self._located()}.values():
            states = {kind: torch.zeros_like(flat, requires_grad=False) for kind in kinds if kind != STEP}
            self._optimizer.state[flat] = states | ({STEP: torch.zeros(())} if STEP in kinds else {})

    def prepare(self) -> None:
        """Before the pieces are filled."""
        if self._zero == 3:  # no weight stays gathered, as in a new engine
            self._outer.checkpoint_event_prologue()

    def refresh(self) -> None:
        """Once the pieces are filled: the weights that the model computes with follow. All ranks must call it."""
        steps = [state[STEP] for state in self._optimizer.state.values() if STEP in state]
        for other in steps[1:]:
            other.copy_(steps[0])
        if self._zero in (1, 2):
            self._outer.update_lp_params()
        elif self._zero == 3:
            for group in range(len(self._outer.fp32_partitioned_groups_flat)):
                self._outer._reassign_or_swap_out_partitioned_parameters(group)

    def _located(self) -> Iterator[tuple[str, Master]]:
        """name, its place, of each trained parameter of which this rank holds something."""
        for name, parameter in self._trained.items():
            master = (self._plain, self._flattened, self._flattened, self._split)[self._zero](parameter)
            if master is not None:
                yield name, master

    def _plain(self, parameter: Any) -> Master:
        return Master(parameter, 0, 0, parameter.numel())

    def _flattened(self, parameter: Any) -> Master | None:
        place = parameter._hp_mapping
        if place is None:
            return None
        flat = self._outer.single_partition_of_fp32_groups[place.param_group_index]
        inside, outside = place.hp_fragment_address, place.lp_fragment_address
        return Master(flat, inside.start, outside.start, outside.numel)

    def _split(self, parameter: Any) -> Master:
        group, offset, padded = self._outer.grad_position[self._outer.get_param_id(parameter)]
        start, length = self._share(parameter, padded)
        return Master(self._outer.fp32_partitioned_groups_flat[group], offset, start, length)

    def _share(self, parameter: Any, padded: int) -> tuple[int, int]:
        start = padded * self._rank
        return start, max(0, min(padded, parameter.ds_numel - start))

    def _masters(self) -> Iterator[Piece]:
        for name, at in self._located():
            yield self._piece(WEIGHT, name, at, at.flat)

    def _states(self) -> Iterator[Piece]:
        for name, at in self._located():
            for kind, state in self._optimizer.state.get(at.flat, {}).items():
                if kind != STEP and state is not None:
                    yield self._piece(kind, name, at, state)
        steps = [state[STEP] for state in self._optimizer.state.values() if STEP in state]
        assert len({float(step) for step in steps}) <= 1, "one step updates all parameters"
        if steps:
            yield Piece(STEP, 1, 0, steps[0].view(1), True)

    def _piece(self, kind: str, name: str, at: Master, values: Tensor) -> Piece:
        part = values.detach().view(-1)[at.offset : at.offset + at.length]
        return Piece(f"{kind}.{name}", self._numel(self._trained[name]), at.start, part, self._zero == 0)

    def _numel(self, parameter: Any) -> int:
        return parameter.ds_numel if self._zero == 3 else parameter.numel()

    def _buffers(self) -> Iterator[Piece]:
        kept = self._module.state_dict(keep_vars=True)
        for name, buffer in self._module.named_buffers():
            if name in kept:
                yield Piece(f"{BUFFER}.{name}", buffer.numel(), 0, buffer.view(-1), True)
