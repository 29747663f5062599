"""Where the time of a step goes: PyTorch's profiler, what it saw added up by kind. For train_step.py."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

KINDS = {
    "messages": r"nccl|gloo:",
    "copies to the host": r"memcpy dtoh",
    "copies from the host": r"memcpy htod",
    "copies on the device": r"memcpy|memset|copy_",
    "attention forward": r"^attend(_in_turns)?(_\w+)?$|ringflash::attention$",
    "attention backward": r"^(all_gradients|keys|wide_keys|queries|row_starts|row_sums)|ringflash::attention_backward",
    "matrix products": r"gemm|nvjet|cutlass|cublas|xmma|splitk|aten::(mm|addmm|bmm)$",
    "loss": r"softmax|nll|cross_entropy",
    "norms, positions, gates, sums": r"",
}
"""Kind -> what the name of a kernel has in it, in small letters; the first that fits counts."""


class Event(NamedTuple):
    """A kernel or copy. start, end: ns."""

    name: str
    start: int
    end: int


def kind_of(name: str) -> str:
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, name.lower()))


def union(spans: Iterable[tuple[int, int]]) -> int:
    """How long any of them lasts, each moment once."""
    total, reached = 0, None
    for start, end in sorted(spans):
        if reached is None or start > reached:
            total, reached = total + end - start, end
        elif end > reached:
            total, reached = total + end - reached, end
    return total


def summary(events: Iterable[Event], *, longest: int = 12) -> dict[str, Any]:
    """Seconds by kind, added up; what runs beside each other counts in both.

    span_s: from the first begin to the last end; idle_s: of it, without any kernel or copy
    copies_alone_s: with copies from and to the host and no kernel; messages_alone_s: with messages and nothing else
    kernels: those with the most seconds, by name, with how often they ran
    """
    events = list(events)
    kinds = dict.fromkeys(KINDS, 0)
    names: dict[str, list[int]] = {}
    for event in events:
        took = event.end - event.start
        kinds[kind_of(event.name)] += took
        count = names.setdefault(event.name, [0, 0])
        count[0], count[1] = count[0] + 1, count[1] + took
    host = [kind for kind in KINDS if kind.endswith("the host")]
    busy = union((event.start, event.end) for event in events)
    computing = union((event.start, event.end) for event in events if kind_of(event.name) not in host)
    silent = union((event.start, event.end) for event in events if kind_of(event.name) != "messages")
    span = max(event.end for event in events) - min(event.start for event in events)
    top = sorted(names.items(), key=lambda item: -item[1][1])[:longest]
    return {
        "span_s": span / 1e9, "idle_s": (span - busy) / 1e9, "copies_alone_s": (busy - computing) / 1e9,
        "messages_alone_s": (busy - silent) / 1e9,
        "kinds_s": {kind: took / 1e9 for kind, took in kinds.items()},
        "kernels": [{"name": name[:120], "kind": kind_of(name), "calls": calls, "seconds": took / 1e9}
                    for name, (calls, took) in top],
    }  # fmt: skip


class Profile:
    """with Profile(device) as profile: ...; profile.summary() is then that of what ran inside."""

    def __init__(self, device: torch.device) -> None:
        activity = torch.profiler.ProfilerActivity
        self._on_gpu = device.type == "cuda"
        self._profiler = torch.profiler.profile(activities=[activity.CUDA if self._on_gpu else activity.CPU])

    def __enter__(self) -> Profile:
        self._profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
        self._profiler.__exit__(*error)

    def events(self) -> Iterator[Event]:
        wanted = torch.autograd.DeviceType.CUDA if self._on_gpu else torch.autograd.DeviceType.CPU
        for event in self._profiler.profiler.kineto_results.events():
            if event.device_type() == wanted and not event.is_user_annotation():
                yield Event(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())

    def summary(self) -> dict[str, Any]:
        return summary(self.events())


@contextlib.contextmanager
def maybe(device: torch.device, wanted: bool) -> Iterator[Profile | None]:
    """A profile of what runs inside, if it is wanted."""
    if not wanted:
        yield None
        return
    with Profile(device) as profile:
        yield profile
