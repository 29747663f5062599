"""How streams of lanes wait for each other. What is computed in them: test_ring.py, and test_gpu_lanes.py on a GPU."""

from __future__ import annotations

import functools

import played
import pytest
import streams
import torch
from masks import MASKS
from oracle import check, inputs, want

from ringflash import exchange, gathering, lanes, moving, needs, routes
from ringflash.lanes import Lane, Lanes


class Stream:
    """One that writes down what it waits for."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.mark.parametrize("fails", [False, True])
def test_lanes_begin_and_end_together_also_where_a_kernel_raises(monkeypatch, fails):
    """What a caller lets go of, because memory ran out, must not be in use on another stream."""
    log: list[str] = []
    caller, second = Stream("caller", log), Stream("second", log)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: caller)
    lanes = Lanes([Lane(slice(0, 1), slice(0, 1)), Lane(slice(1, 2), slice(1, 2), second)], None, torch.device("cpu"))
    try:
        with lanes.together():
            log.append("work")
            if fails:
                raise torch.OutOfMemoryError("no memory")
    except torch.OutOfMemoryError:
        log.append("raised")
    wanted = ["second waits for caller", "work", "caller waits for second"]
    assert log == wanted + ["raised"] * fails


SIZE = 48


@pytest.fixture
def watched(monkeypatch):
    """Rings that are played have two lanes, on streams that a CPU keeps account of. Returns the faults of all ranks."""
    faults: list[str] = []

    def body_of(body, transport):
        with streams.Watch() as watch:
            result = body(streams.Transport(transport, watch))
        faults.extend(watch.faults)
        return result

    play = exchange.play
    monkeypatch.setattr(exchange, "play", lambda size, body: play(size, functools.partial(body_of, body)))
    monkeypatch.setattr(lanes, "LANE_ROWS", 1)
    monkeypatch.setattr(gathering, "SECTION_PAIRS", 1)
    monkeypatch.setattr(moving, "kernels_for", lambda device: None)  # what a kernel touches would not be seen
    monkeypatch.setattr(torch.cuda, "current_stream", streams.current)
    monkeypatch.setattr(torch.cuda, "stream", streams.on)
    return faults


@pytest.mark.parametrize("transit", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rotate", routes.TRAVELLERS)
@pytest.mark.parametrize("name", ["causal", "documents_window"])
@pytest.mark.parametrize(
    ("arrangement", "layout"), [("ring", "zigzag"), ("double", "contiguous"), ("gather", "balanced")]
)
def test_no_stream_reads_or_writes_too_early(watched, arrangement, layout, name, rotate, transit):
    q, k, v, dout, dlse = inputs(SIZE, heads=4, groups=2)
    given = {"arrangement": arrangement, "layout": layout, "rotate": rotate, "transit": transit}
    given |= {"inner": 2} if arrangement == "double" else {}
    found = played.attention(q, k, v, dout, dlse=dlse, size=4, **given, **MASKS[name](SIZE))
    assert not watched, sorted(set(watched))
    if transit == torch.float32:
        check(found, want(q, k, v, dout, dlse, **MASKS[name](SIZE)))


@pytest.mark.parametrize("rotate", routes.TRAVELLERS)
@pytest.mark.parametrize("few", [0, 4])
@pytest.mark.parametrize(("name", "layout"), [("documents_at_borders", "contiguous"), ("full", "zigzag")])
def test_a_gather_waits_for_what_it_packs_and_keeps_it_until_it_has_gone(
    watched, monkeypatch, name, layout, few, rotate
):
    """few: 0 = every message is packed. At borders half of the ranks have a document each, and no message."""
    monkeypatch.setattr(needs, "FEW", few)
    q, k, v, dout, dlse = inputs(SIZE, heads=4, groups=2)
    given = {"arrangement": "gather", "layout": layout, "rotate": rotate} | MASKS[name](SIZE)
    found = played.attention(q, k, v, dout, dlse=dlse, size=4, **given)
    assert not watched, sorted(set(watched))
    check(found, want(q, k, v, dout, dlse, **MASKS[name](SIZE)))


@pytest.mark.parametrize("rotate", routes.TRAVELLERS)
@pytest.mark.parametrize("name", ["documents", "random_documents", "padding"])
def test_documents_of_one_rank_beside_a_single_section(watched, monkeypatch, name, rotate):
    """All heads in one section, as where there is little work: own rows are all there is on the second stream."""
    monkeypatch.setattr(gathering, "SECTION_PAIRS", 2**29)
    q, k, v, dout, dlse = inputs(SIZE, heads=4, groups=2)
    given = {"arrangement": "gather", "layout": "zigzag", "rotate": rotate} | MASKS[name](SIZE)
    found = played.attention(q, k, v, dout, dlse=dlse, size=4, **given)
    assert not watched, sorted(set(watched))
    check(found, want(q, k, v, dout, dlse, **MASKS[name](SIZE)))


@pytest.mark.parametrize("rotate", routes.TRAVELLERS)
def test_more_sections_are_posted_in_one_order_with_and_without_documents_of_the_own(watched, monkeypatch, rotate):
    """The messages of a pair are told apart by their order alone: over NCCL wrong bytes, where it is another."""
    monkeypatch.setattr(gathering, "MAX_SECTIONS", 4)
    q, k, v, dout, dlse = inputs(SIZE, heads=4, groups=4)
    given = {"arrangement": "gather", "layout": "contiguous", "rotate": rotate}
    masks = {"cu_seqlens": [0, 6, SIZE - 10, SIZE], "causal": False}
    found = played.attention(q, k, v, dout, dlse=dlse, size=4, **given, **masks)
    assert not watched, sorted(set(watched))
    check(found, want(q, k, v, dout, dlse, **masks))
