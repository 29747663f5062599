"""Failing together: all ranks compare what they are about to do, through the group's store, before any data is sent.

A rank that was called with other arguments would otherwise hang its peers or, worse, mix in foreign keys. One exchange
for each new call; later calls do not talk. The store is a small TCP service: it works where the data communicator of
the same group would hang.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

GRACE_S = 1.0
MAX_TEXTS = 10_000  # a run that packs documents makes a new call each step; a forgotten one is compared again


@dataclass
class Agreed:
    """What the ranks of one group have agreed on so far, and how often they have all met."""

    texts: dict[str, None] = field(default_factory=dict)  # a set that knows its oldest
    turns: int = 0


# the group itself is torch's, so there is no object of ours to keep this in
_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, Agreed] = weakref.WeakKeyDictionary()


REFUSED = ", refused: "
"""Between the call of a rank and why it refuses."""


def agree(group: dist.ProcessGroup, text: str, timeout_s: float, *, once: bool = True, refusal: str = "") -> None:
    """Raise on every rank of `group` unless all call this with the same text and none refuses the call.

    text: a description of the call, readable: it is shown when ranks differ
    once: a text that was agreed on before is not compared again
    refusal: why this rank cannot make the call. One that all ranks give alike is theirs to raise
    Raises: ValueError naming the odd ranks and both texts, or those that refuse and the reason; RuntimeError naming
        ranks that did not come in timeout_s.
    """
    agreed = _agreed.setdefault(group, Agreed())
    if refusal:
        text = f"{text}{REFUSED}{refusal}"
    if once and text in agreed.texts:
        return
    texts = tell(group, text, timeout_s)
    common = Counter(texts).most_common(1)[0][0]
    odd = [peer for peer, other in enumerate(texts) if other != common]
    refusing = [peer for peer, other in enumerate(texts) if REFUSED in other]
    if odd and refusing:
        call, _, reason = texts[refusing[0]].partition(REFUSED)
        raise ValueError(f"ringflash: rank(s) {refusing} of a ring refuse a call: {reason} [{call}]")
    if odd:
        raise ValueError(
            f"ringflash: the ranks of a ring were called with different arguments: "
            f"rank(s) {odd} with [{texts[odd[0]]}], the others with [{common}]"
        )
    agreed.texts[text] = None
    while len(agreed.texts) > MAX_TEXTS:
        del agreed.texts[next(iter(agreed.texts))]  # the same one on every rank: they agreed in one order


def tell(group: dist.ProcessGroup, text: str, timeout_s: float) -> list[str]:
    """What every rank of `group` told, in the order of ranks. All must call it.

    Raises: RuntimeError naming ranks that did not come in timeout_s.
    """
    agreed = _agreed.setdefault(group, Agreed())
    turn = agreed.turns
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    store = distributed_c10d._get_process_group_store(group)
    keys = [f"ringflash/{turn}/{peer}" for peer in range(size)]
    store.set(keys[rank], text)
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except (RuntimeError, dist.DistStoreError) as error:
        raise RuntimeError(_missing(store, keys, rank, timeout_s, text)) from error
    agreed.turns += 1
    texts = [store.get(key).decode() for key in keys]
    if turn:
        # everybody wrote turn t, so everybody has read turn t - 1
        store.delete_key(f"ringflash/{turn - 1}/{rank}")
    return texts


def _missing(store: dist.Store, keys: list[str], rank: int, timeout_s: float, text: str) -> str:
    """Who did not come. Our own word is taken back, so that the next call of the group starts anew."""
    try:
        missing = [peer for peer, key in enumerate(keys) if not store.check([key])]
        time.sleep(GRACE_S)  # the others are about to look for who is missing, and must still find us
        store.delete_key(keys[rank])
    except (RuntimeError, dist.DistError) as error:
        return f"ringflash: rank {rank} lost the store of its group, which lives on its first rank ({error}): {text}"
    return f"ringflash: rank {rank} waited timeout_s={timeout_s:g} for rank(s) {missing} to make the same call: {text}"
