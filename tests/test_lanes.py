"""How streams of lanes wait for each other. What is computed in them: test_ring.py, and test_gpu_lanes.py on a GPU."""

from __future__ import annotations

import pytest
import torch

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
