"""Which activations a forward keeps, and how the backward makes the others again, layer by layer.

Each layer is a checkpoint of torch. What [memory] changes is where its two kinds of kept tensors are: the hidden states
before the layer (kept, in host memory, or made again from those before an earlier layer) and, with "selective",
attention's (out, lse). Both come back with the bits that they had. Called by `model`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from .config import Memory
from .memory import FLOAT, Sizes
from .offload import Away, Lane

Layer = Callable[[Tensor], Tensor]


def set_checkpointing(model: Any, memory: Memory) -> Layers | None:
    """Recompute the layers of a model of transformers in the backward, as [memory] says; None if it says no."""
    if memory.checkpoint == "none":
        return None
    # the name of newer versions of transformers, and of older ones
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    layers = Layers(memory)
    for index, layer in enumerate(model.get_decoder().layers):
        layer._gradient_checkpointing_func = partial(layers.run, index)
    return layers


class Layers:
    """The layers of one model; layer `index` is run by `run`, which is what transformers calls for it."""

    def __init__(self, memory: Memory) -> None:
        self._every = memory.checkpoint_every
        self._selective = memory.checkpoint == "selective"
        self._hidden = Lane() if "activations" in memory.offload else None
        self._attention = Lane() if "attention" in memory.offload else None
        self._below: States | None = None

    def reserve(self, sizes: Sizes, tokens: int, dtype: torch.dtype, device: torch.device) -> list[Future[None]]:
        """Take the host memory for a forward pass of so many tokens beside the caller. See `Lane.reserve`."""
        coming = []
        if self._hidden is not None:
            kept = -(-sizes.layers // self._every)
            coming.append(self._hidden.reserve([tokens * sizes.width * dtype.itemsize], kept, device))
        if self._attention is not None:
            out, lse = tokens * sizes.query_width * dtype.itemsize, tokens * sizes.heads * FLOAT
            coming.append(self._attention.reserve([out, lse], sizes.layers, device))
        return coming

    def run(self, index: int, layer: Layer, hidden: Tensor) -> Tensor:
        """Layer `index` on hidden states [B, L, E]; what it computes is computed again in the backward."""
        attention = Attention(self._attention)
        # no layer draws random numbers, and to keep their state is to wait for the GPU
        again: Any = partial(checkpoint, layer, use_reentrant=False, preserve_rng_state=False)
        if self._selective:
            again = partial(again, context_fn=lambda: (Keep(attention), Replay(attention, last=True)))
        if self._every == 1 and self._hidden is None:
            return again(hidden)
        below = self._below if index % self._every else None

        def keep(x: Tensor) -> Any:
            if not x.numel():  # torch keeps an empty one beside them
                return x
            self._below = States(layer, attention if self._selective else None, below)
            if below is None:
                self._below.kept = x if self._hidden is None else self._hidden.put([x])
            return self._below

        with torch.autograd.graph.saved_tensors_hooks(
            keep, lambda kept: kept.take() if isinstance(kept, States) else kept
        ):
            return again(hidden)


class States:
    """The hidden states before a layer.

    layer, attention: what makes of them those before the next layer
    below: the same of the layer before, from which they are made again; None where they are kept
    """

    def __init__(self, layer: Layer, attention: Attention | None, below: States | None) -> None:
        self.kept: Tensor | Away | None = None
        self._layer: Layer | None = layer
        self._attention, self._below = attention, below
        self._here: Tensor | None = None

    def look(self) -> Tensor:
        """The states; they stay for `take`. One layer after the other, without what a backward would need."""
        if self._here is None:
            if self._below is not None:
                self._here = self._below.next_states()
            elif isinstance(self.kept, Away):
                (self._here,) = self.kept.get()
            else:
                self._here = self.kept
        assert self._here is not None, "the states of a layer are taken once"
        return self._here

    def next_states(self) -> Tensor:
        """Those behind the layer."""
        states = self.look()
        assert self._layer is not None, "the states behind a layer come before its own are taken"
        with torch.no_grad():
            if self._attention is None:
                return self._layer(states)
            with Replay(self._attention, last=False):
                return self._layer(states)

    def take(self) -> Tensor:
        """The states, for the last time."""
        states = self.look()
        if isinstance(self.kept, Away):  # now that the other states of the group are gone
            self.kept.fetch_next()
        self._here = self.kept = self._below = None
        self._layer = self._attention = None  # what the layer was called with, too
        return states


class Attention:
    """(out, lse) of the attention calls of one layer, kept on the device or in a lane."""

    def __init__(self, lane: Lane | None) -> None:
        self._lane = lane
        self._kept: list[Any] = []

    def keep(self, pair: tuple[Tensor, Tensor]) -> None:
        """In the forward."""
        pair = pair[0].detach(), pair[1].detach()  # what the caller gets will be part of a graph
        self._kept.append(pair if self._lane is None else self._lane.put(pair))

    def of(self, call: int, *, last: bool) -> tuple[Tensor, Tensor]:
        """Of the call with this number. last: they are not asked for again."""
        kept = self._kept[call]
        if isinstance(kept, Away):
            out, lse = kept.get()
            kept.fetch_next(upwards=not last)
        else:
            out, lse = kept
        if last:
            self._kept[call] = None
        return out.detach(), lse.detach()


class Keep(TorchDispatchMode):
    """In a forward: keep what attention returns."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self._attention = attention

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if op is torch.ops.ringflash.attention.default:
            self._attention.keep(result)
        return result


class Replay(TorchDispatchMode):
    """In a recomputation: attention returns what was kept, so that no ring runs twice. last: see `Attention.of`."""

    def __init__(self, attention: Attention, *, last: bool) -> None:
        super().__init__()
        self._attention, self._last, self._calls = attention, last, 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is not torch.ops.ringflash.attention.default:
            return op(*args, **(kwargs or {}))
        self._calls += 1
        return self._attention.of(self._calls - 1, last=self._last)
