"""Lanes in streams of their own give what one lane gives, to the bit: run with `pytest -m gpu`.

One rank of a ring of 8 runs alone. What it receives is noise by the name of the message, written in a stream as NCCL
would, so results and all that is sent are the same each time, unless a lane reads or writes too early.
"""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch

from ringflash import LAYOUTS, exchange, gathering, lanes, mask, ring, routes
from ringflash.kernels import KERNELS
from ringflash.layouts.documents import Documents

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SIZE, LOCAL = 8, 8192
BORDERS = np.array([0, 3000, 30001, 30100, 52000, SIZE * LOCAL])


class Noisy:
    """A transport whose messages come from a generator. sent: what left, by name and peer."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size = rank, SIZE
        self.sent: dict[tuple, torch.Tensor] = {}

    beside, second_stream = exchange.Processes.beside, exchange.Processes.second_stream

    def post(self, sends, receives, what, slow=False):
        for peer, x in sends:
            self.sent[what, peer, len(self.sent)] = x.clone()
        for peer, x in receives:
            generator = torch.Generator("cuda").manual_seed(zlib.crc32(f"{what} {peer}".encode()))
            numbers = x.view(torch.bfloat16) if x.dtype == torch.uint8 else x
            numbers.normal_(generator=generator)
        return Arrived(torch.cuda.current_stream().record_event())


class Arrived:
    def __init__(self, event):
        self.event = event

    def wait(self):
        torch.cuda.current_stream().wait_event(self.event)


def of_one_rank(plan, rotate: str, transit: torch.dtype, rank: int) -> dict:
    """Gradients and messages of a deterministic backward, ordered while the GPU sleeps."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, LOCAL, heads, 128) for heads in (8, 2, 2, 8)]
    q, k, v, dout = (torch.randn(s, generator=generator, device="cuda").bfloat16() for s in shapes)
    rows = torch.randn(1, 8, LOCAL, generator=generator, device="cuda")
    transport, kernel = Noisy(rank), KERNELS["triton"]
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    route = plan.backward(routes.sizes_of(q, k, transit), rotate)
    given = {"scale": 0.1, "deterministic": True, "transit": transit}
    found = ring.backward(dout, q, k, v, rows + 12, rows, route, transport, kernel, **given)
    torch.cuda.synchronize()
    return {"results": dict(enumerate(found)), "sent": transport.sent}


@pytest.mark.parametrize("transit", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rotate", routes.TRAVELLERS)
@pytest.mark.parametrize("masks", ["causal", "window", "documents"])
@pytest.mark.parametrize(("arrangement", "layout"), [
    ("ring", "zigzag"), ("ring", "striped"), ("double", "zigzag"), ("gather", "balanced"), ("ring", "balanced"),
])  # fmt: skip
def test_two_streams_give_the_bits_of_one(monkeypatch, arrangement, layout, masks, rotate, transit):
    borders = BORDERS if masks == "documents" else np.array([0, SIZE * LOCAL])
    window = 10_000 if masks == "window" else None
    lo, hi = mask.intervals(SIZE * LOCAL, SIZE * LOCAL, causal=True, window=window, cu_seqlens=borders)
    segments = LAYOUTS[layout].segments(SIZE * LOCAL, SIZE, 1, Documents(borders, True))
    rank = 3
    monkeypatch.setattr(lanes, "LANE_ROWS", LOCAL)
    monkeypatch.setattr(gathering, "SECTION_PAIRS", 1)
    plan = routes.Plan(segments, rank, lo, hi, arrangement=arrangement, inner=2 if arrangement == "double" else None)
    with monkeypatch.context() as patched:
        patched.setattr(Noisy, "second_stream", lambda self, device: None)
        wanted = of_one_rank(plan, rotate, transit, rank)
    for _ in range(3):
        got = of_one_rank(plan, rotate, transit, rank)
        for kind, tensors in wanted.items():
            assert got[kind].keys() == tensors.keys()
            for name, x in tensors.items():
                assert torch.equal(got[kind][name].view(torch.uint8), x.view(torch.uint8)), (kind, name)
