"""Where a step is and how long its attention takes, on a GPU without holding the host. For train_step.py."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

import ringflash


class Spans:
    """The seconds that the device spends in the ring, forward and backward, told call by call as they end.

    with patch.multiple(ringflash.ring, **spans.watched()): ...
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: dict[str, list[tuple[Any, Any]]] = {"forward": [], "backward": []}
        self._begun: Any = None
        self._ended: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._tell, daemon=True).start()

    def watched(self) -> dict[str, Callable[..., Any]]:
        """`ringflash.ring.forward` and `backward` between two events."""
        return {name: self._timed(name, getattr(ringflash.ring, name)) for name in self._spans}

    def _timed(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            begun = self._now()
            result = run(*args, **options)
            span = begun, self._now()
            self._spans[name].append(span)
            self._ended.put((name, len(self._spans[name]), *span))
            return result

        return timed

    def begin(self) -> None:
        """Forget what was; what is told counts from now."""
        for spans in self._spans.values():
            spans.clear()
        self._begun = self._now()

    def seconds(self) -> dict[str, float]:
        """Once the device is done: of all calls together."""
        return {
            f"attention_{name}_s": round(sum(self._between(*span) for span in spans), 4)
            for name, spans in self._spans.items()
        }

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
            name, call, begun, ended = self._ended.get()
            if self._device.type == "cuda":
                ended.synchronize()
            since, took = self._between(self._begun, ended), self._between(begun, ended)
            print(f"{since:8.2f} s: {name} {call} of attention took {took:.3f} s", file=sys.stderr, flush=True)
