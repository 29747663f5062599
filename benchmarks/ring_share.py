"""One rank's part of a ring in one process: attention takes the hops of that rank, whatever it is called for.

The loop is the library's own (`ringflash.ring`); what would come from other ranks is copied from this GPU's memory, on
the stream that messages use, so that it arrives beside the kernels. What it holds is noise: values do not matter to
speed. For train_step.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from ringflash import LAYOUTS, exchange, mask, ring, routes
from ringflash.kernels import KERNELS, Kernel
from ringflash.kernels.choice import choose
from ringflash.layouts.documents import Documents


class Arriving:
    """A transport whose messages come from here. num_bytes: received since `begin`; see `exchange.Transport`."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.num_bytes = rank, size, 0
        self._noise: dict[torch.dtype, torch.Tensor] = {}

    beside, second_stream = exchange.Processes.beside, exchange.Processes.second_stream

    def post(self, sends: exchange.Messages, receives: exchange.Messages, what: str, slow: bool = False) -> Here:
        """See `exchange.Transport.post`."""
        for _, tensor in receives:
            self.num_bytes += tensor.nbytes
            tensor.copy_(self._noise_like(tensor))
        return Here()

    def _noise_like(self, x: torch.Tensor) -> torch.Tensor:
        """Blocks are bytes of bf16 numbers; sums of gradients, fp32, are small."""
        noise = self._noise.get(x.dtype)
        if noise is None or len(noise) < x.numel():
            numbers = torch.randn(x.numel(), device=x.device) / (1 if x.dtype == torch.uint8 else 1000)
            as_bytes = numbers[: -(-x.numel() // 2)].bfloat16().view(torch.uint8)
            noise = self._noise[x.dtype] = as_bytes if x.dtype == torch.uint8 else numbers.to(x.dtype)
        return noise[: x.numel()].view(x.shape)


class Here:
    """What has been told to the current stream so far, as a message. See `exchange.Pending`."""

    def __init__(self) -> None:
        self._event = torch.cuda.current_stream().record_event() if torch.cuda.is_available() else None

    def wait(self) -> None:
        """What follows on this stream comes behind the message."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class Share:
    """The work of one rank of a ring of `size`, layout zigzag.

    share = Share(8, 4, [2**20, 2**17], None)
    with share.taken(): ...         # a model of 2**17 or 2**14 tokens

    lengths: of whole sequences; kernel: as `ringflash.attention` takes it
    """

    def __init__(
        self, size: int, rank: int, lengths: Sequence[int], window: int | None, kernel: str = "auto"
    ) -> None:  # fmt: skip
        if not 0 <= rank < size:
            raise ValueError(f"--ring-rank {rank} must be one of 0 to {size - 1}")
        self._plans: dict[int, routes.Plan] = {}
        for length in lengths:
            if length % (2 * size):
                raise ValueError(f"--length {length} must divide by {2 * size}, twice --ring (--warm by 2)")
            lo, hi = mask.intervals(length, length, causal=True, window=window)
            segments = LAYOUTS["zigzag"].segments(length, size, 1, Documents(np.array([0, length]), True))
            self._plans[length // size] = routes.Plan(segments, rank, lo, hi)
        self.transport = Arriving(rank, size)
        if kernel not in ("auto", *KERNELS):
            raise ValueError(f"--ring-kernel {kernel} must be auto or one of {', '.join(KERNELS)}")
        self._kernel = kernel

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Inside, the ring's loop walks this rank's route instead of that of one device."""
        forward, backward, plans, transport = ring.forward, ring.backward, self._plans, self.transport

        def chosen(q: Any, k: Any) -> Kernel:
            return KERNELS[choose(self._kernel, q, k, False, transport.size).kernel]

        def go(q: Any, k: Any, v: Any, *route: Any, **given: Any) -> Any:
            return forward(q, k, v, plans[q.shape[1]].forward, transport, chosen(q, k), **given)

        def back(dout: Any, q: Any, k: Any, *rest: Any, **given: Any) -> Any:
            *tensors, _, _, _ = rest
            route = plans[q.shape[1]].backward(routes.sizes_of(q, k, torch.float32), "keys")
            return backward(dout, q, k, *tensors, route, transport, chosen(q, k), **given)

        with patch.multiple(ring, forward=go, backward=back):
            yield
