"""Lanes: a backward works on half of its heads beside the other half, each in a stream of its own.

The programs of one kernel never fill a GPU to the end: while its last ones run, most of the GPU stands idle, hop after
hop. Heads know nothing of each other, so neither half waits for the other, and where the programs of a kernel run out
those of the other lane's are already there. What a lane computes it also adds, so that a buffer is used by each lane in
the order of its stream. A forward has one lane: it gained nothing by two. The sections of a gather are lanes that take
turns, forward too. Called by `ring`, `gathering` and `travel`.

Letters: L local tokens, H query heads, G key/value heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from .exchange import Pending, Transport
from .trips import FIRST, REST, WHOLE

LANE_ROWS = 16384
"""With fewer local tokens there is one lane: at 8k a second one cost 0 to 13% on one GPU, at 16k it gained 0 to 1%."""


@dataclass(frozen=True, eq=False)
class Lane:
    """Some heads and where they are worked on. queries, keys: of H and of G; stream: None = whichever is current"""

    queries: slice
    keys: slice
    stream: torch.cuda.Stream | None = None

    def on(self) -> AbstractContextManager:
        """What is computed inside is computed in this lane."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def heads(self, what: str) -> slice:
        """Of tensors that have the heads of `what`, a key of routes.TRAVELLERS."""
        return self.keys if what == "keys" else self.queries


class Lanes:
    """The lanes of one call. The first is that of the caller; it begins and ends with all others: see `together`.

    second: a stream on which the caller works beside his lanes, too
    """

    def __init__(
        self, lanes: Sequence[Lane], transport: Transport | None, device: torch.device,
        second: torch.cuda.Stream | None = None,
    ) -> None:  # fmt: skip
        self.all, self.second = tuple(lanes), second
        self._transport, self._device = transport, device
        streams = [*(lane.stream for lane in lanes), second]
        self._others = list(dict.fromkeys(stream for stream in streams if stream is not None))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Before it all lanes wait for what the caller's stream has, and behind it that stream for all lanes.

        So it does where a kernel has raised: what the caller lets go of then must not be in use.
        """
        self.follow()
        try:
            yield
        finally:
            self.join()

    def follow(self) -> None:
        """All lanes wait for what the first one has been told so far."""
        for stream in self._others:
            stream.wait_stream(torch.cuda.current_stream(self._device))

    def join(self) -> None:
        """The first lane waits for what all have been told so far."""
        for stream in self._others:
            torch.cuda.current_stream(self._device).wait_stream(stream)

    def of(self, part: str) -> tuple[Lane, ...]:
        """The lanes that compute with a part of a block, see `trips`, in the order in which they are told.

        The caller's comes last: what follows on its stream waits for nothing in the others then.
        """
        return {WHOLE: self.all[::-1], FIRST: self.all[:1], REST: self.all[:0:-1]}[part]

    def wait(self, pending: Pending) -> None:
        """In each lane what comes next comes behind these messages."""
        pending.wait()
        for stream in self._others:
            with torch.cuda.stream(stream):
                pending.wait()

    def beside(self) -> AbstractContextManager:
        """See `Transport.beside`: behind what all lanes have been told so far."""
        return self.transport.beside(self._device, self._others)

    @property
    def transport(self) -> Transport:
        """Where there is one."""
        assert self._transport is not None, "a ring of one rank sends nothing"
        return self._transport


def one_lane(q: torch.Tensor, k: torch.Tensor, transport: Transport | None) -> Lanes:
    """All heads on the caller's stream. q: [B, L, H, D]; k: [B, L, G, D]"""
    return Lanes([Lane(slice(0, q.shape[2]), slice(0, k.shape[2]))], transport, q.device)


def lanes_of(q: torch.Tensor, k: torch.Tensor, transport: Transport | None) -> Lanes:
    """Those of a backward: two where there are heads and tokens enough, else one. q, k: as in `one_lane`"""
    heads, groups = q.shape[2], k.shape[2]
    if transport is None or groups < 2 or q.shape[1] < LANE_ROWS:
        return one_lane(q, k, transport)
    border, size = groups - groups // 2, heads // groups
    first = Lane(slice(0, border * size), slice(0, border))
    second = Lane(slice(border * size, heads), slice(border, groups), transport.second_stream(q.device))
    return Lanes([first, second], transport, q.device)


def of_heads(heads: slice, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """These heads of [B, L, H, D] or, contiguous, of [B, H, L], one number a row: nothing beside a block."""
    return [x[:, :, heads] if x.dim() == 4 else x[:, heads].contiguous() for x in tensors]
