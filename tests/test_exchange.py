"""The watcher that keeps the time of messages on CUDA streams, and ranks played in one process."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from ringflash import exchange


class Work:
    """A message of torch.distributed that is done when told so."""

    def __init__(self, *, done: bool) -> None:
        self.done = done

    def is_completed(self) -> bool:
        return self.done


def batch(work: Work, timeout_s: float) -> exchange.Batch:
    return exchange.Batch([work], ["keys and values for hop 3: receiving from rank 5"], 6, timeout_s, True)


def test_R99_the_watcher_tells_of_a_late_message_with_peer_and_hop(monkeypatch):
    monkeypatch.setattr(exchange, "WATCH_S", 0.02)
    told: list[str] = []
    heard = threading.Event()
    late = Work(done=False)

    def fail(message: str) -> None:
        told.append(message)
        late.done = True
        heard.set()

    watcher = exchange.Watcher(fail)
    watcher.watch(batch(Work(done=True), 0.05))
    posted = time.monotonic()
    watcher.watch(batch(late, 0.2))
    assert heard.wait(5)
    assert time.monotonic() - posted > 0.2
    assert "rank 6" in told[0] and "hop 3" in told[0] and "rank 5" in told[0] and "timeout_s=0.2" in told[0]


def test_the_watcher_is_silent_about_messages_in_time(monkeypatch):
    monkeypatch.setattr(exchange, "WATCH_S", 0.02)
    told: list[str] = []
    watcher, work = exchange.Watcher(told.append), Work(done=False)
    for _ in range(3):
        watcher.watch(batch(work, 1.0))
        time.sleep(0.05)
    work.done = True
    time.sleep(1.2)
    assert not told


@pytest.mark.parametrize("is_cuda", [True, False])
def test_the_watcher_keeps_the_time_of_what_a_cuda_stream_carries(monkeypatch, is_cuda):
    watched: list[exchange.Batch] = []
    monkeypatch.setattr(exchange, "watcher", lambda: SimpleNamespace(watch=watched.append))
    one = exchange.begun([Work(done=False)], ["unshard"], 6, 0.2, SimpleNamespace(is_cuda=is_cuda))
    assert watched == ([one] if is_cuda else [])
    assert one.failure(one.unfinished()) == "ringflash: rank 6, unshard: not done within timeout_s=0.2"


def test_a_failing_rank_ends_the_play_with_its_own_error():
    def body(transport: exchange.Transport) -> None:
        if transport.rank == 2:
            raise ValueError("boom")
        one = torch.zeros(1)
        transport.post([((transport.rank + 1) % 3, one)], [((transport.rank - 1) % 3, one.clone())], "a message").wait()

    started = time.monotonic()
    with pytest.raises(ValueError, match="boom"):
        exchange.play(3, body)
    assert time.monotonic() - started < 10


def test_played_messages_of_a_pair_arrive_in_the_order_of_their_posts_whatever_is_waited_for_first():
    def body(transport: exchange.Transport) -> list[float]:
        peer = 1 - transport.rank
        sent, got = [torch.full((1,), 10.0 * transport.rank + i) for i in range(3)], torch.zeros(3, 1)
        posted = [transport.post([(peer, sent[i])], [(peer, got[i])], f"message {i}", i == 0) for i in range(3)]
        for i in (2, 0, 1):
            posted[i].wait()
        return got.flatten().tolist()

    assert exchange.play(2, body) == [[10.0, 11.0, 12.0], [0.0, 1.0, 2.0]]


@pytest.mark.parametrize(
    ("variable", "options", "found"),
    [("1", None, True), ("TRUE", None, True), ("0", None, False), (None, None, False), (None, True, True)],
)
def test_a_group_has_priority_by_the_variable_or_by_its_options(monkeypatch, variable, options, found):
    monkeypatch.delenv(exchange.PRIORITY, raising=False)
    if variable is not None:
        monkeypatch.setenv(exchange.PRIORITY, variable)
    backend = SimpleNamespace(**({"options": SimpleNamespace(is_high_priority_stream=True)} if options else {}))
    group = SimpleNamespace(_get_backend=lambda device: backend)
    assert exchange.has_priority(group, torch.device("cuda")) is found
