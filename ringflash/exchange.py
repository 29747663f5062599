"""The only point-to-point calls: post() starts a message, wait() ends it. The ring and Ulysses send nothing else.

A transport is one rank's door to the others. `Processes` goes through torch.distributed; `Threads` plays all ranks
inside one process (one GPU, or a test), with the same posts and waits. Ranks here are 0..size-1 of the transport; which
processes they are is known only to this file. Buffers belong to the exchange from post() to wait().
"""

from __future__ import annotations

import functools
import os
import queue
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

Messages = Sequence[tuple[int, torch.Tensor]]
"""(peer, what goes there or where it comes to), in one order on both sides where a pair has several."""

WATCH_S = 1.0  # how often the watcher looks at messages under way


class Pending(Protocol):
    """Messages under way."""

    def wait(self) -> None:
        """Return when what was posted has arrived and its sends are free; on CUDA, as the current stream sees it."""


class Transport(Protocol):
    """One rank's door to the other ranks of a ring, or of a Ulysses group."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def second_stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """For kernels that need not wait for those of the current one; None where ranks have but one."""

    def beside(self, device: torch.device, others: Sequence[torch.cuda.Stream] = ()) -> AbstractContextManager:
        """What is computed and posted inside runs beside the kernels that come, behind those that are under way.

        others: streams on which there are some, besides the current one
        """

    def post(self, sends: Messages, receives: Messages, what: str, slow: bool = False) -> Pending:
        """Start one batch: contiguous tensors to the ranks of `sends`, and from those of `receives`.

        slow: other batches may pass it on the way. All ranks post the messages of a pair in one order.
        """


@dataclass(frozen=True)
class Processes:
    """Ranks are processes of a torch.distributed group.

    members: the group rank of each rank of this transport
    slow_group: the same processes once more, for what goes between nodes while others go inside them
    timeout_s: seconds after which a message that has not arrived ends this process's wait (gloo) or the process (NCCL)
    """

    group: dist.ProcessGroup
    rank: int
    members: range
    timeout_s: float
    slow_group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    def second_stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """See `Transport.second_stream`."""
        return second_stream(device) if device.type == "cuda" else None

    @contextmanager
    def beside(self, device: torch.device, others: Sequence[torch.cuda.Stream] = ()) -> Iterator[None]:
        """See `Transport.beside`."""
        if device.type != "cuda":
            yield
            return
        stream = side_stream(device)
        for other in (torch.cuda.current_stream(device), *others):
            stream.wait_stream(other)
        with torch.cuda.stream(stream):
            yield

    def post(self, sends: Messages, receives: Messages, what: str, slow: bool = False) -> Pending:
        """See `Transport.post`. NCCL carries the batches of one group one after the other."""
        group = self.slow_group if slow and self.slow_group else self.group
        ops, names = [], []
        for peers, start, verb in ((sends, dist.isend, "sending to"), (receives, dist.irecv, "receiving from")):
            for peer, tensor in peers:
                ops.append(dist.P2POp(start, tensor, group=group, group_peer=self.members[peer]))
                names.append(f"{what}: {verb} rank {self.members[peer]}")
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            rank = self.members[self.rank]
            raise RuntimeError(f"ringflash: rank {rank}, {', '.join(names)}: cannot start ({error})") from error
        if len(works) != len(ops):  # NCCL makes one work of a batch
            names = [", ".join(names)] * len(works)
        return begun(works, names, self.members[self.rank], self.timeout_s, ops[0].tensor)


# the groups are torch's, so there is no object of ours to keep this in
_connected: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def connect(group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> None:
    """Make the communicator of NCCL, once a group, when all its ranks call this.

    It is made by the first batch, in which all must take part, and a batch of a ring may concern only some of them.
    """
    if device.type != "cuda" or group in _connected:
        return
    if dist.get_rank(group) == 0 and not has_priority(group, device):
        warnings.warn(PRIORITY_ADVICE, stacklevel=2)
    one = torch.zeros(1, device=device)
    work = dist.all_reduce(one, group=group, async_op=True)
    begun([work], ["first meeting of all ranks"], dist.get_rank(group), timeout_s, one).wait()
    _connected.add(group)


PRIORITY = "TORCH_NCCL_HIGH_PRIORITY"
PRIORITY_ADVICE = (
    f"ringflash: messages wait until a kernel that began before them leaves the GPU; set {PRIORITY}=1 before the group "
    "is made, or make it with ProcessGroupNCCL.Options(is_high_priority_stream=True), and they travel beside it"
)


def has_priority(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Do the messages of this group of NCCL get a free place on the GPU before kernels that wait for one?"""
    if os.environ.get(PRIORITY, "").lower() in ("1", "t", "true", "y", "yes"):
        return True
    options = getattr(group._get_backend(device), "options", None)
    return bool(getattr(options, "is_high_priority_stream", False))


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of this process on which messages are packed and posted: before what waits for a place on the GPU."""
    return torch.cuda.Stream(device, priority=-1)


@functools.cache
def second_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of this process for the second lane of a ring's kernels, see `lanes`."""
    return torch.cuda.Stream(device)


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch that torch.distributed carries.

    on_stream: the works run on a CUDA stream: wait() holds the stream, never the host, so the watcher keeps the time
    """

    works: list[Any]
    names: list[str]
    rank: int
    timeout_s: float
    on_stream: bool

    def wait(self) -> None:
        """See `Pending.wait`. RuntimeError that names peer and hop if the time passes or the connection breaks."""
        for work, name in zip(self.works, self.names, strict=True):
            if self.on_stream:
                work.wait()
                continue
            try:
                work.wait(timedelta(seconds=self.timeout_s))
            except RuntimeError as error:
                raise RuntimeError(f"{self.failure(name)} ({error})") from error

    def failure(self, name: str) -> str:
        """One sentence about a message that did not come."""
        return f"ringflash: rank {self.rank}, {name}: not done within timeout_s={self.timeout_s:g}"

    def unfinished(self) -> str | None:
        """The first message still under way; None when all have arrived. Never waits."""
        return next((n for w, n in zip(self.works, self.names, strict=True) if not w.is_completed()), None)


def begun(works: list[Any], names: list[str], rank: int, timeout_s: float, tensor: torch.Tensor) -> Batch:
    """The batch of works that torch.distributed has started, its time kept. tensor: one that they write or read."""
    batch = Batch(works, names, rank, timeout_s, tensor.is_cuda)
    # what a CUDA graph records is not under way, and must not be asked
    if batch.on_stream and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        watcher().watch(batch)
    return batch


class Watcher:
    """A daemon thread that ends the process when a message on a CUDA stream is late.

    The loop of the ring never synchronises with the host, so only a look from outside can tell that a peer is gone.
    """

    def __init__(self, fail: Callable[[str], None]) -> None:
        self._fail = fail
        self._new: queue.SimpleQueue[tuple[float, Batch]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="ringflash-watcher", daemon=True).start()

    def watch(self, batch: Batch) -> None:
        """Keep the time of this batch from now on."""
        self._new.put((time.monotonic(), batch))

    def _run(self) -> None:
        under_way = [self._new.get()]
        while True:
            while not self._new.empty():
                under_way.append(self._new.get())
            under_way = [(posted, batch) for posted, batch in under_way if batch.unfinished()]
            for posted, batch in under_way:
                name = batch.unfinished()
                if name and time.monotonic() - posted > batch.timeout_s:
                    self._fail(batch.failure(name))
            if under_way:
                time.sleep(WATCH_S)
            else:
                under_way.append(self._new.get())


def _end_process(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
    os._exit(1)  # the main thread may be held by the driver: no exception could reach it


@functools.cache
def watcher() -> Watcher:
    """The one watcher of this process, started by the first message on a CUDA stream."""
    return Watcher(_end_process)


class Stage:
    """What the ranks of one `play` share: the messages of each pair, a baton, and the first failure.

    Only the rank that holds the baton runs; it lets go inside wait(). So the ranks take turns, and a run is the same
    every time, whatever the kernels beneath think of threads.
    """

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size, self.timeout_s = size, timeout_s
        pairs = [(i, j) for i in range(size) for j in range(size)]
        self.sent: dict[tuple[int, int], list[tuple[torch.Tensor, threading.Event] | None]] = {p: [] for p in pairs}
        self.awaited = dict.fromkeys(pairs, 0)
        self.baton = threading.Lock()
        self.failures: list[BaseException] = []

    def until(self, ready: Callable[[], object], what: str) -> None:
        """Let the others run until `ready`; RuntimeError after timeout_s, or at once when a rank has failed."""
        deadline = time.monotonic() + self.timeout_s
        while not ready():
            if self.failures or time.monotonic() > deadline:
                raise RuntimeError(f"ringflash: {what}: " + ("a peer failed" if self.failures else "timed out"))
            self.baton.release()
            time.sleep(0)  # the next thread takes the baton
            self.baton.acquire()


@dataclass(frozen=True)
class Threads:
    """Ranks are threads of one process; `play` makes them."""

    stage: Stage
    rank: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.stage.size

    def second_stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """See `Transport.second_stream`: the ranks share one stream, on which messages are copied."""
        return None

    def beside(self, device: torch.device, others: Sequence[torch.cuda.Stream] = ()) -> AbstractContextManager:
        """See `Transport.beside`."""
        return nullcontext()

    def post(self, sends: Messages, receives: Messages, what: str, slow: bool = False) -> Pending:
        """See `Transport.post`."""
        taken, tickets = [], []
        for peer, tensor in sends:
            taken.append(threading.Event())
            self.stage.sent[self.rank, peer].append((tensor, taken[-1]))
        for peer, into in receives:
            tickets.append((peer, self.stage.awaited[peer, self.rank], into))
            self.stage.awaited[peer, self.rank] += 1
        return _Handover(self.stage, self.rank, tickets, taken, what)


@dataclass(frozen=True)
class _Handover:
    """tickets: (peer, the number of a message among all of this pair, where it goes)"""

    stage: Stage
    rank: int
    tickets: list[tuple[int, int, torch.Tensor]]
    taken: list[threading.Event]
    what: str

    def wait(self) -> None:
        """See `Pending.wait`."""
        name = f"rank {self.rank}, {self.what}"
        for peer, number, into in self.tickets:
            box = self.stage.sent[peer, self.rank]
            sent = functools.partial(lambda box, number: len(box) > number, box, number)
            self.stage.until(sent, f"{name}: receiving from rank {peer}")
            message, box[number] = box[number], None
            assert message is not None, "a message is waited for once"
            into.copy_(message[0])
            message[1].set()
        self.stage.until(lambda: all(event.is_set() for event in self.taken), f"{name}: sending")


def play(size: int, body: Callable[[Transport], Any], timeout_s: float = 600.0) -> list[Any]:
    """Run body(transport) for every rank of a ring inside this process, one thread each; returns their results.

    The ranks take turns. On CUDA they share the current device and stream, so their kernels run one after another. What
    the first failing rank raises is raised here.
    """
    stage = Stage(size, timeout_s)

    def run(rank: int) -> Any:
        with stage.baton:
            try:
                return body(Threads(stage, rank))
            except BaseException as error:
                stage.failures.append(error)
                return None

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(run, range(size)))
    if stage.failures:
        raise stage.failures[0]
    return results
