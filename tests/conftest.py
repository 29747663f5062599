"""Fixtures, the one table of tolerances, and `--results FILE`: what a run on a GPU leaves behind for the docs."""

from __future__ import annotations

import datetime
import gc
import json
import pathlib
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from pool import World

# largest error / largest value, against the fp64 reference of the same inputs: a fact of the dtype, not of the machine
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

# files by what they take, or one worker ends with a long one alone
LONGEST = ("train", "kernel_triton", "failures", "compile", "resume", "compile_gluon", "evaluation", "op", "ring")
LONGEST += ("liger", "host_update", "benchmarks", "train_main", "nodes", "launch")


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """max|got - want| / max|want| over finite entries; infinities must be in the same places; NaN is an error."""
    got, want = got.detach().double(), want.detach().double()
    assert got.shape == want.shape, (got.shape, want.shape)
    finite = torch.isfinite(want)
    assert not got.isnan().any(), "NaN"
    assert torch.equal(got[~finite], want[~finite]), "infinities differ"
    if not finite.any():
        return 0.0
    return float((got - want)[finite].abs().max() / want[finite].abs().max().clamp_min(1e-30))


MULTIGPU = [pytest.mark.multigpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs several GPUs")]


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[..., World]]:
    """pool(world_size)(body, *args): see pool.py. pool(world_size, "nccl"): with a GPU each."""
    worlds: dict[tuple[int, str], World] = {}

    def world(size: int, backend: str = "gloo") -> World:
        return worlds.setdefault((size, backend), World(size, backend))

    yield world
    for one in worlds.values():
        one.close()


@pytest.fixture(scope="session")
def gpus(pool: Callable[..., World]) -> World:
    """One NCCL world of all GPUs of this host, a rank each."""
    return pool(torch.cuda.device_count(), "nccl")


@pytest.fixture(params=["gloo", pytest.param("nccl", marks=MULTIGPU)])
def two(request: pytest.FixtureRequest, pool: Callable[..., World]) -> World:
    """Two processes: over gloo, and with `-m multigpu` over NCCL."""
    return pool(2, request.param)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder of text files to train on."""
    import training  # and with it transformers and DeepSpeed, which few tests need

    return training.write_texts(tmp_path_factory.mktemp("texts"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", help="write outcomes and recorded errors to this JSON file")
    parser.addoption("--commit", help="the commit that is tested, where the checkout has no git history")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # small tensors: more threads only wait for each other
    if config.getoption("--results") and not hasattr(config, "workerinput"):  # not in a worker of pytest-xdist
        config.pluginmanager.register(Results(config))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # or each full collection of a test looks through all tests and all that they import


def command(args: Sequence[str]) -> str:
    """The command line, without where its results went and what the tester's machine needed."""
    words = iter(args)
    kept = ["pytest"]
    for word in words:
        if word in ("--results", "--commit", "-p", "-n", "--dist"):
            next(words)
        elif not word.startswith(("-q", "--tb", "--no-loadscope")):
            kept.append(word)
    return shlex.join(kept)


class Results:
    """Writes what each test did and recorded, with commit, hardware and date."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.tests: list[dict] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            entry = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
            self.tests.append(entry | dict(report.user_properties))

    def pytest_sessionfinish(self) -> None:
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        result = {
            "command": command(self.config.invocation_params.args),
            "commit": self.config.getoption("--commit") or git.stdout.strip(),
            "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
        }
        result |= {kind: sum(t["outcome"] == kind for t in self.tests) for kind in ("passed", "failed", "skipped")}
        path = pathlib.Path(self.config.getoption("--results"))
        path.write_text(json.dumps(result | {"tests": sorted(self.tests, key=lambda t: t["test"])}, indent=1) + "\n")
