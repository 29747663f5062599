"""Rows moved by the kernels are those that torch moves, to the bit: run with `pytest -m gpu`.

test_moving.py has more of the same in Triton's interpreter; here are rounding to bf16, more than 2^31 elements, CUDA
graphs, and gathers of the size that is measured, with the launches that they take.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import test_gpu_lanes as one_rank
import torch
from test_moving import PAIRS, arrivals_at, drawn, rows_of, tensors_of

from ringflash import LAYOUTS, exchange, gathering, mask, moving, ring, routes, travel
from ringflash.kernels import KERNELS
from ringflash.layouts.documents import Documents

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LARGE = {"large": (drawn(2, 3000, 8192), drawn(3, 3000, 9469))}
HALF_LARGE_BYTES = 6 * 2**30


@pytest.fixture
def both(monkeypatch) -> Callable:
    """both(do): what it returns with the kernels and with torch ops."""

    def run(do: Callable):
        assert moving.kernels_for(torch.device("cuda", torch.cuda.current_device())) is not None
        found = do()
        with monkeypatch.context() as patched:
            patched.setattr(moving, "kernels_for", lambda device: None)
            return found, do()

    return run


@pytest.mark.parametrize("pair", [*PAIRS, *LARGE])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", ["keys", "queries", "heads first"])
def test_rows_are_copied_into_a_block_and_no_other_byte_of_it(both, kind, batch, pair):
    here, there = (PAIRS | LARGE)[pair]
    tensors = [x.cuda() for x in tensors_of(kind, batch, here.of)]
    record = travel.Record(tensors)

    def do() -> torch.Tensor:
        block = torch.full((there.of, record.num_bytes), 7, dtype=torch.uint8, device="cuda")
        record.put(tensors, here, there, block)
        return block

    assert torch.equal(*both(do))


@pytest.mark.parametrize("width", [20, 24, 128])
@pytest.mark.parametrize("pair", [name for name in [*PAIRS, *LARGE] if name != "none"])
@pytest.mark.parametrize("transit", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_comes_home_is_added_in_order_and_rounded_once(both, dtype, transit, pair, width):
    there, here = (PAIRS | LARGE)[pair]
    arrivals = arrivals_at(here)
    generator = torch.Generator("cuda").manual_seed(0)
    block = torch.randn(here.of, 2, 2, 3, width, generator=generator, device="cuda")
    count = sum(rows.count * times for rows, _, times in arrivals)
    arrived = torch.randn(count, *block.shape[1:], generator=generator, device="cuda").to(transit)

    def do() -> torch.Tensor:
        into = torch.full((2, 2, there.of, 7, width), 3.0, dtype=dtype, device="cuda")
        part, total = [x[:, :, 2:5] for x in into], block.clone()
        tables = lambda: moving.on_device(total.device, *moving.sums(there, here, arrivals))  # noqa: E731
        if not moving.sum_rows(part, [total[:, f].movedim(0, 1) for f in range(2)], arrived, tables):
            for rows, start, times in arrivals:
                values = arrived[start : start + times * rows.count].unflatten(0, (times, -1))
                travel.add(total, rows, values.sum(0, dtype=torch.float32) if times > 1 else values[0])
            for f, x in enumerate(part):
                travel.move(x.movedim(1, 0), there, total[:, f], here)
        return into

    assert torch.equal(*both(do))


def test_R03_rows_behind_2_to_the_31_elements(both):
    if torch.cuda.mem_get_info()[0] < 3 * HALF_LARGE_BYTES:
        pytest.skip(f"needs {3 * HALF_LARGE_BYTES} free bytes")
    length, heads = 70_000, 256
    x = torch.empty(1, length, heads, 128, dtype=torch.bfloat16, device="cuda")
    here, there = rows_of((5, 3), (length - 30, 30), of=length), rows_of((0, 33), of=33)
    for first, count in here.runs.tolist():
        x[:, first : first + count].normal_()
    record = travel.Record([x])

    def do() -> torch.Tensor:
        block = torch.zeros(there.of, record.num_bytes, dtype=torch.uint8, device="cuda")
        record.put([x], here, there, block)
        return block

    found, wanted = both(do)
    assert torch.equal(found, wanted)
    moving.clear_rows(x, rows_of((length - 30, 30), of=length))
    assert not x[:, -30:].any() and x[:, 5:8].any()


class Here:
    """A transport whose messages are there."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    beside, second_stream = exchange.Processes.beside, exchange.Processes.second_stream

    def post(self, sends, receives, what, slow=False):
        for _, x in receives:
            x.zero_()
        return one_rank.Arrived(torch.cuda.current_stream().record_event())


LOCAL = 4096
# ranks with documents of their own beside the block, and at most four that send the same rows home: from five on torch
# adds in another order
RANKS = {2: 1, 8: 3}


def calls(size: int, rotate: str, transport, dtype: torch.dtype = torch.bfloat16) -> tuple[Callable, Callable]:
    """(forward, backward) of one rank's gather of documents."""
    count, rank = LOCAL * size, RANKS[size]
    inner = range(5000, count, 2000) if size == 2 else (12000, *range(13000, count, 1700))
    borders = np.array([0, 1500, 3000, *inner, count])
    lo, hi = mask.intervals(count, count, causal=True, cu_seqlens=borders)
    segments = LAYOUTS["balanced"].segments(count, size, 1, Documents(borders, True))
    plan = routes.Plan(segments, rank, lo, hi, arrangement="gather")
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (torch.randn(1, LOCAL, 4, 64, generator=generator, device="cuda").to(dtype) for _ in range(4))
    engine = KERNELS["triton"]
    way_back = plan.backward(routes.sizes_of(q, k, torch.float32), rotate)
    assert gathering.own_of(way_back) and gathering.joined_of(way_back)
    forward = lambda: ring.forward(q, k, v, plan.forward, transport, engine, scale=0.1)  # noqa: E731
    out, lse = forward()
    delta = engine.delta(out, dout, None)
    given = {"scale": 0.1, "deterministic": True}
    return forward, lambda: ring.backward(dout, q, k, v, lse + 12, delta, way_back, transport, engine, **given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("pairs", [1, 2**29], ids=["two sections", "one section"])
@pytest.mark.parametrize("rotate", routes.TRAVELLERS)
@pytest.mark.parametrize("size", [2, 8])
def test_a_gather_has_the_same_bits_whoever_moves_its_rows(monkeypatch, both, size, rotate, pairs, dtype):
    monkeypatch.setattr(gathering, "SECTION_PAIRS", pairs)
    for call in calls(size, rotate, one_rank.Noisy(RANKS[size]), dtype):
        found, wanted = both(call)
        assert all(torch.equal(*two) for two in zip(found, wanted, strict=True))


@pytest.mark.parametrize("rotate", routes.TRAVELLERS)
def test_a_graph_of_a_gather_gives_the_bits_of_its_calls(rotate):
    for call in calls(8, rotate, Here(RANKS[8], 8)):
        wanted = [x.clone() for x in call()]
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.graph(graph, stream=stream):
            found = call()
        for x in found:
            x.fill_(3.0)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(*two) for two in zip(found, wanted, strict=True))


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_rows_are_moved_in_one_launch_forward_and_four_backward():
    """Backward: own rows cleared, all copied, summed when they come home, the others rounded."""
    names = {}
    for way, call in zip(("forward", "backward"), calls(8, "queries", Here(RANKS[8], 8)), strict=True):
        call()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        names[way] = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    ours = ("copy_rows", "sum_rows", "clear_rows")
    moved = {way: sorted(name for name in found if name in ours) for way, found in names.items()}
    assert moved["forward"] == ["copy_rows"], names
    assert moved["backward"] == ["clear_rows", "copy_rows", "sum_rows", "sum_rows"], names
