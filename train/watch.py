"""A look at the run from outside: a rank that is gone, a step that does not end. Threads beside the training of a rank.

Neither can be told from inside, where the main thread waits in a collective. Called by `loop`.
"""

import contextlib
import faulthandler
import json
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist

from ringflash import agreement, exchange

from .config import Config
from .world import World

PARTS = ("data", "forward", "backward", "update")
"""Of a step, in order. What else is begun, like "save", has its own time."""

FLOOR_S = 120.0
"""A step that takes less is no hang, whatever the steps before it took."""
FACTOR = 10.0
"""Nor is one that takes up to this many times the median step."""
KNOWN = 3
"""Steps from which a median is made; before them, and outside steps, train.timeout_s is the limit."""
RECENT = 50
"""Steps that the median looks back on."""

TICK_S = 0.5
ANSWER_S = 5.0
"""How long a rank that sees a hang waits for what the others say."""
GRACE_S = 3.0
"""How long a rank whose peer is gone may go on, to say itself what it met."""

GOODBYE = -1
NAME = "watch"
"""Of our threads, which are no work: also those of a run that failed before in this process."""


def end_process(message: str) -> None:
    """Say it and end this process, whose main thread may be where no exception reaches it."""
    print(f"ringflash: {message}", file=sys.stderr, flush=True)
    os._exit(1)


class Watch:
    """What this rank began last, and two threads: one keeps the time, one listens to the next rank.

    with watch:
        watch.begin(step, part)     # a rank that begins nothing new for `limit_s` hangs
        watch.took(step_time_s)

    Each rank waits for a word of the next one on World.lifeline, which comes at the end. If the connection breaks
    instead, that rank is gone: the news go round, and all ranks end within GRACE_S, on all nodes.

    fail: what ends the process, given one sentence
    """

    def __init__(self, config: Config, world: World, fail: Callable[[str], None] = end_process) -> None:
        self._world = world
        self._timeout_s = float(config.train.timeout_s)
        self._folder = config.run_dir / "hang"
        self._fail = fail
        self._hosts: list[str] = []
        self._times: deque[float] = deque(maxlen=RECENT)
        self._since: float | None = None
        self._closed = threading.Event()
        self.step, self.part = 0, "start"

    def begin(self, step: int, part: str) -> None:
        """Say what comes now."""
        if step != self.step or part not in PARTS:
            self._since = time.monotonic()
        self.step, self.part = step, part

    def took(self, step_time_s: float) -> None:
        """Say how long a step took."""
        self._times.append(step_time_s)

    @property
    def limit_s(self) -> float:
        """Seconds after which what was begun is a hang."""
        if self.part not in PARTS or len(self._times) < KNOWN:
            return self._timeout_s
        return min(self._timeout_s, max(FLOOR_S, FACTOR * statistics.median(self._times)))

    def __enter__(self) -> Self:
        self._world.board.delete_key(self._key(self._world.rank))  # what a run before said in this world
        self._hosts = self._world.gather_objects(os.uname().nodename)
        bodies = [self._keep_time] + [self._listen] * (self._world.size > 1)
        for body in bodies:
            threading.Thread(target=body, name=NAME, daemon=True).start()
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        self._closed.set()
        if kind is None and self._world.size > 1:
            self._pass_on(GOODBYE)

    def _key(self, rank: int) -> str:
        return f"hang/{rank}"

    def _named(self, rank: int) -> str:
        return f"rank {rank} on {self._hosts[rank]}"

    def _listen(self) -> None:
        """Body of the thread that hears of ranks that are gone."""
        following = (self._world.rank + 1) % self._world.size
        word = torch.tensor(following)
        try:
            dist.recv(word, src=following, group=self._world.lifeline)
        except RuntimeError:
            word.fill_(following)
        gone = int(word)
        if gone == GOODBYE:
            return
        self._pass_on(gone)
        if not self._closed.wait(GRACE_S):
            self._fail(f"{self._named(gone)} is gone; rank {self._world.rank} was at step {self.step}, {self.part}")

    def _pass_on(self, word: int) -> None:
        preceding = (self._world.rank - 1) % self._world.size
        with contextlib.suppress(RuntimeError):  # it is gone itself, or heard of another before
            sent: Any = dist.isend(torch.tensor(word), dst=preceding, group=self._world.lifeline)
            sent.wait(timedelta(seconds=GRACE_S))

    def _keep_time(self) -> None:
        """Body of the thread that sees a hang."""
        while not self._closed.wait(TICK_S):
            since, limit_s = self._since, self.limit_s
            if since is not None and time.monotonic() - since > limit_s:
                return self._fail(self._hang(limit_s))

    def _hang(self, limit_s: float) -> str:
        """One sentence about all ranks; the stacks of this one go to a file."""
        waits = waits_for()
        self._world.board.set(self._key(self._world.rank), json.dumps([self.step, self.part, waits]))
        self._dump()
        said = {rank: self._answer(rank, time.monotonic() + ANSWER_S) for rank in range(self._world.size)}
        return f"step {self.step} does not end, {limit_s:g} s after its begin: {blame(said, self._named)}"

    def _answer(self, rank: int, deadline: float) -> tuple[int, str, str | None] | None:
        """What a rank says that it does, None if it does not."""
        key = self._key(rank)
        while not self._world.board.check([key]):
            if time.monotonic() > deadline:
                return None
            time.sleep(TICK_S / 5)
        step, part, waits = json.loads(self._world.board.get(key))
        return step, part, waits

    def _dump(self) -> None:
        """The stacks of all threads, and the collectives that PyTorch's flight recorder has under way."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(self._folder / f"rank-{self._world.rank:05}.txt", "w", encoding="utf-8") as file:
                faulthandler.dump_traceback(file)
            if recorded := flight_record():
                (self._folder / f"rank-{self._world.rank:05}.json").write_text(json.dumps(recorded), encoding="utf-8")
        except OSError as error:
            print(f"ringflash: {self._folder} cannot be written: {error}", file=sys.stderr)


def blame(said: dict[int, tuple[int, str, str | None] | None], named: Callable[[int], str]) -> str:
    """Who holds up whom.

    said: rank -> the step and part where it is, and the message or collective that it waits for; None: no answer
    """
    silent = [f"{named(rank)} does not answer" for rank, answer in said.items() if answer is None]
    answers = {rank: answer for rank, answer in said.items() if answer is not None}
    busy = [
        f"{named(rank)} waits for no other, in {part} of step {step}"
        for rank, (step, part, waits) in answers.items()
        if waits is None
    ]
    waiting = [
        f"rank {rank} waits in {part} of step {step} ({waits})"
        for rank, (step, part, waits) in answers.items()
        if waits is not None
    ]
    more = [f"{len(waiting) - 3} more wait"] if len(waiting) > 4 else []
    return "; ".join(silent + busy + (waiting[:3] + more if more else waiting))


def waits_for() -> str | None:
    """The message of the ring, or else the collective, that a thread of this process waits for, the main one first.

    Read from the stacks, as a debugger would: what waits says nothing itself.
    """
    collectives = []
    ours = {thread.ident for thread in threading.enumerate() if thread.name == NAME}
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != threading.main_thread().ident)
    for thread, innermost in frames:  # those of autograd too, which `threading` does not know
        frame: FrameType | None = innermost
        collective = None
        while frame is not None and thread not in ours:
            if message := _message(frame):
                return message
            if frame.f_globals.get("__name__") == dist.distributed_c10d.__name__:
                collective = frame.f_code.co_name  # the outermost: what was called
            frame = frame.f_back
        collectives += [collective] if collective else []
    recorded = [entry["profiling_name"] for entry in flight_record()[:1]]
    # the host may be far ahead of its GPU, which does one after the other; over gloo it waits in what holds it up
    names = recorded + collectives if torch.cuda.is_available() else collectives + recorded
    return next((f"collective {name}" for name in names), None)


def _message(frame: FrameType) -> str | None:
    """The message that this frame of `ringflash` waits for, on the host or on a CUDA stream."""
    if frame.f_code is agreement.agree.__code__:
        return "ring, for all its ranks to call attention"
    if frame.f_code is exchange.Batch.wait.__code__ and not frame.f_locals["self"].on_stream:
        return f"ring, {frame.f_locals.get('name')}"
    if frame.f_code is exchange.Watcher._run.__code__:
        late = [batch.unfinished() for _, batch in frame.f_locals.get("under_way", ())]
        return next((f"ring, {name}" for name in late if name), None)
    return None


def flight_record() -> list[dict[str, Any]]:
    """The collectives that PyTorch's flight recorder has under way, the oldest first: NCCL's, without a GPU gloo's.

    Empty where nothing is recorded: see `world.RECORDER_VARIABLE`.
    """
    name = "_dump_nccl_trace_json" if torch.cuda.is_available() else "_dump_fr_trace_json"
    dump = getattr(torch._C._distributed_c10d, name, None)
    if dump is None:
        return []
    entries: list[dict[str, Any]] = json.loads(dump(includeCollectives=True, onlyActive=True)).get("entries", [])
    return [entry for entry in entries if not (_is_over(entry) or _is_batched(entry))]


def _is_over(entry: dict[str, Any]) -> bool:
    return entry.get("state") == "completed" or bool(entry.get("retired"))


def _is_batched(entry: dict[str, Any]) -> bool:
    """One message of a batch, which is "scheduled" for ever: the batch has an entry, which ends (pytorch#137969)."""
    return bool(entry.get("is_p2p")) and not entry["profiling_name"].endswith("coalesced")
