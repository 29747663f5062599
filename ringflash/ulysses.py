"""Heads for sequence and back: the all-to-all around the ring, for U ranks that share one ring rank's tokens.

Before the ring each of the U ranks holds L tokens of all heads; in the ring, U * L tokens of H / U heads. Fewer
key/value heads than ranks: each rank gets the one that its query heads need, and their gradients are summed in fp32.

Letters: B batch, L local tokens, U Ulysses size, H heads of a tensor, G key/value heads, D head dimension.
Source: DeepSpeed-Ulysses, arXiv:2309.14509; with a ring inside: USP, arXiv:2405.07719.
"""

from __future__ import annotations

import torch

from .exchange import Transport


def _swap(pieces: list[torch.Tensor], transport: Transport, what: str) -> list[torch.Tensor]:
    """pieces[u] goes to rank u; returns what each rank sent here. All pieces have one shape."""
    pieces = [piece.contiguous() for piece in pieces]
    received = [piece if u == transport.rank else torch.empty_like(piece) for u, piece in enumerate(pieces)]
    others = [u for u in range(transport.size) if u != transport.rank]
    transport.post([(u, pieces[u]) for u in others], [(u, received[u]) for u in others], what).wait()
    return received


def kv_heads(groups: int, ulysses: int, rank: int) -> slice:
    """The key/value heads that Ulysses rank `rank` works on: G / U of them, or the one that it shares with others."""
    first = rank * groups // ulysses
    return slice(first, first + max(1, groups // ulysses))


def scatter_heads(tensors: list[torch.Tensor], groups: int, transport: Transport) -> list[torch.Tensor]:
    """[B, L, H, D] of all heads -> [B, U * L, H / U, D] of this rank's, for tensors of one dtype.

    One message a peer. A tensor with G heads is cut as keys and values are (`kv_heads`); G == H cuts both alike.
    """
    size = transport.size

    def heads_of(x: torch.Tensor, rank: int) -> torch.Tensor:
        if x.shape[2] == groups:
            return x[:, :, kv_heads(groups, size, rank)]
        count = x.shape[2] // size
        return x[:, :, rank * count : (rank + 1) * count]

    pieces = [torch.cat([heads_of(x, rank) for x in tensors], 2) for rank in range(size)]
    counts = [heads_of(x, 0).shape[2] for x in tensors]
    # runs of tokens in rank order: the order of the sequence
    whole = torch.cat(_swap(pieces, transport, "heads out"), 1)
    return list(whole.split(counts, 2))


def gather_heads(x: torch.Tensor, transport: Transport) -> torch.Tensor:
    """[B, U * L, H / U, D] of this rank's heads -> [B, L, H, D] of all heads."""
    return torch.cat(_swap(list(x.chunk(transport.size, 1)), transport, "heads back"), 2)


def gather_kv_heads(x: torch.Tensor, groups: int, transport: Transport) -> torch.Tensor:
    """As `gather_heads` for gradients of keys and values: ranks that shared a head are summed, in x's own type."""
    whole = gather_heads(x, transport)
    if groups >= transport.size:
        return whole
    return whole.unflatten(2, (groups, transport.size // groups)).sum(3)
