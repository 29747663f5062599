"""Where a step is and how long attention and loss take, on a GPU without holding the host. For train_step.py."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from ringflash import ring
from train import loss


class Watched(NamedTuple):
    """A function whose calls are timed: what it is of, its name, and whether it is a method without self."""

    what: str
    owner: Any
    name: str
    is_static: bool


WATCHED = [
    Watched(what, owner, name, is_static)
    for what, owner, is_static in (("attention", ring, False), ("loss", loss._LossSum, True))
    for name in ("forward", "backward")
]


class Spans:
    """The seconds that the device spends in what is `WATCHED`, told call by call as they end.

    with spans.watching(): ...
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: dict[str, list[tuple[Any, Any]]] = {f"{one.what}_{one.name}": [] for one in WATCHED}
        self._begun: Any = None
        self._ended: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._tell, daemon=True).start()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, calls are timed."""
        with contextlib.ExitStack() as stack:
            for one in WATCHED:
                run: Any = self._timed(f"{one.what}_{one.name}", getattr(one.owner, one.name))
                stack.enter_context(patch.object(one.owner, one.name, staticmethod(run) if one.is_static else run))
            yield

    def _timed(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            begun = self._now()
            result = run(*args, **options)
            span = begun, self._now()
            self._spans[name].append(span)
            self._ended.put((name, len(self._spans[name]), self._begun, *span))
            return result

        return timed

    def begin(self) -> None:
        """Forget what was; what is told counts from now."""
        for spans in self._spans.values():
            spans.clear()
        self._begun = self._now()

    def calls(self) -> dict[str, list[float]]:
        """Once the device is done: the seconds of each call."""
        return {name: [round(self._between(*span), 4) for span in spans] for name, spans in self._spans.items()}

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begun: Any, ended: Any) -> float:
        return ended - begun if self._device.type == "cpu" else begun.elapsed_time(ended) / 1e3

    def _tell(self) -> None:
        """To stderr, so that a step that is killed has told how far it came."""
        while True:
            name, call, origin, begun, ended = self._ended.get()
            if self._device.type == "cuda":
                ended.synchronize()
            since, took = self._between(origin, ended), self._between(begun, ended)
            print(f"{since:8.2f} s: {name.replace('_', ' ')} {call} took {took:.3f} s", file=sys.stderr, flush=True)
