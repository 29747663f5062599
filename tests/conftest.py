"""Fixtures, the one table of tolerances, and `--results FILE`: what a run on a GPU leaves behind for the docs."""

from __future__ import annotations

import datetime
import json
import pathlib
import subprocess
from collections.abc import Callable, Iterator

import pytest
import torch
from pool import World

# largest error / largest value, against the fp64 reference of the same inputs: a fact of the dtype, not of the machine
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """max|got - want| / max|want| over finite entries; infinities must be in the same places; NaN is an error."""
    got, want = got.double(), want.double()
    assert got.shape == want.shape, (got.shape, want.shape)
    finite = torch.isfinite(want)
    assert not got.isnan().any(), "NaN"
    assert torch.equal(got[~finite], want[~finite]), "infinities differ"
    if not finite.any():
        return 0.0
    return float((got - want)[finite].abs().max() / want[finite].abs().max().clamp_min(1e-30))


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], World]]:
    """pool(world_size)(body, *args): see pool.py."""
    worlds: dict[int, World] = {}

    def world(size: int) -> World:
        return worlds.setdefault(size, World(size))

    yield world
    for one in worlds.values():
        one.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", help="write outcomes and recorded errors to this JSON file")
    parser.addoption("--commit", help="the commit that is tested, where the checkout has no git history")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RESULTS] = []


RESULTS = pytest.StashKey[list]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    if report.when == "call" or report.outcome != "passed":
        entry = {"test": item.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
        item.config.stash[RESULTS].append(entry | dict(report.user_properties))
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--results")
    if not path:
        return
    commit = session.config.getoption("--commit") or subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()  # fmt: skip
    tests = [entry for entry in session.config.stash[RESULTS] if "[" in entry["test"] or entry["outcome"] != "skipped"]
    result = {
        "command": "pytest " + " ".join(session.config.invocation_params.args),
        "commit": commit,
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "passed": sum(entry["outcome"] == "passed" for entry in tests),
        "failed": sum(entry["outcome"] == "failed" for entry in tests),
        "tests": tests,
    }
    pathlib.Path(path).write_text(json.dumps(result, indent=1) + "\n")
