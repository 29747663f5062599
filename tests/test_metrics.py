"""train/metrics.py and its sinks: global numbers, one writer, and a wandb that may fail."""

import io
import json
import logging
import math
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from train import sinks
from train.config import load
from train.evaluation import Result
from train.evaluation.result import Cell, Range
from train.metrics import METRICS, MetricsWriter, StepRecord
from train.sinks import JsonlSink, progress_line

DEMO = Path(__file__).resolve().parent.parent / "configs" / "demo.toml"
RECORD = StepRecord(
    step=1,
    loss_sum=50.0,
    valid_tokens=20,
    tokens=24,
    padding=8,
    tokens_seen=24,
    grad_norm=1.5,
    learning_rate=1e-3,
    step_time_s=0.5,
    data_wait_s=0.1,
    peak_memory_bytes=3 * 2**29,
    num_gpus=4,
    dense_flops=9 * 10**12,
    attention_flops=3 * 10**12,
    peak_tflops=12.0,
)
RESULT = Result(3, 900, 1.5, [Range(0, 127, 30, 2.0), Range(128, 255, 10, 4.0)], [Cell(512, 0.5, 4, 1.0, 0.5)])


class FakeWandb:
    """Stands in for the module wandb: remembers what was called, fails or sleeps where it is told to."""

    def __init__(self, fails_in: str = "", key: bool = True) -> None:
        self.calls: list[tuple[str, object]] = []
        self.fails_in = fails_in
        self.key = key
        self.may_start = threading.Event()
        self.may_start.set()

    def _call(self, name: str, value: object = None) -> None:
        self.calls.append((name, value))
        if name == self.fails_in:
            raise RuntimeError(f"no {name} today")

    def login(self, *, prompt: bool, verify: bool) -> bool:
        assert not prompt
        return self.key

    def init(self, **arguments: object) -> SimpleNamespace:
        assert self.may_start.wait(20)
        self._call("init", arguments)
        return SimpleNamespace(
            define_metric=lambda name, **axis: self._call("define_metric", (name, axis)),
            log=lambda row: self._call("log", row),
            finish=lambda exit_code: self._call("finish", exit_code),
        )

    Image = str

    @staticmethod
    def Table(*, columns: list[str], data: list[list[float]]) -> dict:
        return {"columns": columns, "data": data}

    def named(self, name: str) -> list:
        return [value for called, value in self.calls if called == name]


@pytest.fixture
def wandb(monkeypatch):
    def install(fake: FakeWandb) -> FakeWandb:
        monkeypatch.setitem(__import__("sys").modules, "wandb", fake)
        return fake

    return install


def writer(folder: Path, *overrides: str, rank: int = 0, after: int = 0) -> MetricsWriter:
    config, facts = load(DEMO, [f"metrics.dir={folder}", *overrides]), {"world_size": 4}
    return MetricsWriter(config, global_rank=rank, mfu_null_reason="no peak is known", facts=facts, after=after)


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (folder / "demo" / name).read_text().splitlines()]


EXPECTED = {
    "loss": 2.5,
    "grad_norm": 1.5,
    "learning_rate": 1e-3,
    "tokens_seen": 24,
    "valid_tokens": 20,
    "padding_share": 0.25,
    "tokens_per_s": 48.0,
    "tokens_per_s_per_gpu": 12.0,
    "model_tflops_per_gpu": 6.0,
    "mfu": 0.5,
    "attention_share": 0.25,
    "peak_memory_gib": 1.5,
    "data_wait_s": 0.1,
    "step_time_s": 0.5,
}


def test_every_metric():
    assert {name: metric(RECORD) for name, metric in METRICS.items()} == pytest.approx(EXPECTED)


def test_R92_the_loss_is_the_mean_over_the_valid_tokens_of_all_ranks():
    shards = [(1, 4.0), (3, 2.0)]  # (valid tokens, mean loss) of two ranks
    total = sum(count * mean for count, mean in shards)
    record = replace(RECORD, loss_sum=total, valid_tokens=sum(count for count, _ in shards))
    assert METRICS["loss"](record) == 2.5


def test_what_is_not_known_is_null():
    record = replace(RECORD, valid_tokens=0, peak_tflops=None, peak_memory_bytes=None, dense_flops=0, attention_flops=0)
    unknown = {name for name, metric in METRICS.items() if metric(record) is None}
    assert unknown == {"loss", "mfu", "peak_memory_gib", "attention_share"}
    assert "MFU" not in progress_line({name: metric(record) for name, metric in METRICS.items()})


def test_each_step_is_in_the_file_before_the_next(tmp_path):
    with writer(tmp_path, "metrics.wandb=disabled") as metrics:
        for step in (1, 2, 3):
            metrics.write(replace(RECORD, step=step))
            assert [line.get("step") for line in lines(tmp_path)] == [None, *range(1, step + 1)]
    header, first, *_ = lines(tmp_path)
    assert header["kind"] == "header" and header["mfu_null_reason"] == "no peak is known"
    assert header["world_size"] == 4 and header["config"]["parallel"]["ring"] == 4
    assert "4 backward" in header["flops_formula"]
    assert first == {"kind": "step", "step": 1, **EXPECTED}


def test_a_number_that_json_lacks_can_be_read_back(tmp_path):
    with writer(tmp_path, "metrics.wandb=disabled") as metrics:
        metrics.write(replace(RECORD, grad_norm=math.nan, loss_sum=math.inf))
    _, row = lines(tmp_path)
    assert math.isnan(float(row["grad_norm"])) and float(row["loss"]) == math.inf


def test_an_earlier_run_of_the_name_is_kept(tmp_path):
    for step in (7, 8):
        with writer(tmp_path, "metrics.wandb=disabled") as metrics:
            metrics.write(replace(RECORD, step=step))
    assert lines(tmp_path)[1]["step"] == 8
    assert lines(tmp_path, "metrics.previous.jsonl")[1]["step"] == 7


class Killed(BaseException):
    """Ends the process in the middle of a call, as far as files can tell."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a killed process closes no file
@pytest.mark.parametrize("call", ["fsync", "replace 1", "replace 2"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_R96_a_kill_while_the_old_rows_are_taken_over_loses_none(tmp_path, monkeypatch, call, moment):
    folder = tmp_path / "demo"
    sink = JsonlSink(folder, {"kind": "header"})
    for step in (1, 2, 3, 4):
        sink.write({"step": step})
    sink.close(failed=True)
    (folder / "metrics.previous.jsonl").write_text('{"kind": "step", "step": 2, "stale": 1}\n')
    name, _, number = call.partition(" ")
    calls, real = [], getattr(sinks.os, name)

    def killing(*arguments):
        calls.append(arguments)
        last = len(calls) == int(number or 1)
        if last and moment == "before":
            raise Killed
        real(*arguments)
        if last:
            raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(sinks.os, name, killing)
        JsonlSink(folder, {"kind": "header"}, after=3)
    JsonlSink(folder, {"kind": "header"}, after=3).close(failed=False)
    assert lines(tmp_path) == [{"kind": "header"}, *({"kind": "step", "step": step} for step in (1, 2, 3))]


def test_R96_a_file_of_an_older_run_is_not_taken_for_this_one(tmp_path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "metrics.previous.jsonl").write_text('{"kind": "step", "step": 1}\n')
    JsonlSink(tmp_path / "demo", {"kind": "header"}, after=3).close(failed=False)
    assert lines(tmp_path) == [{"kind": "header"}]


def test_what_a_crash_left_in_the_file_ends_no_resume(tmp_path):
    with writer(tmp_path) as metrics:
        metrics.write(RECORD)
    file = tmp_path / "demo" / "metrics.jsonl"
    junk = [b"\0" * 40, bytes(range(256)), b"5", b'{"kind": "step"}', b'{"kind": "step", "step": "x"}', b"[" * 100_000]
    file.write_bytes(b"\n".join([*junk[:3], file.read_bytes(), *junk[3:]]))
    with writer(tmp_path, after=RECORD.step):
        pass
    assert [row["kind"] for row in lines(tmp_path)] == ["header", "step"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
def test_a_disk_that_is_full_is_told_with_the_file(tmp_path):
    sink = JsonlSink(tmp_path, {"kind": "header"})
    sink._file.close()
    sink._file = open("/dev/full", "w")  # noqa: SIM115
    with pytest.raises(OSError, match=r"No space left on device: .*metrics\.jsonl"):
        sink.write({"step": 1})
    sink.close(failed=True)


def test_one_progress_line_a_step(tmp_path, capsys):
    with writer(tmp_path, "metrics.wandb=disabled") as metrics:
        metrics.write(RECORD)
        metrics.write(replace(RECORD, step=2))
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step 1/24  loss 2.5000") and "48 tokens/s" in first and "MFU 50.0%" in first
    assert second.startswith("step 2/24")


@pytest.mark.parametrize("error", [BrokenPipeError(32, "gone"), OSError(28, "no space")], ids=repr)
def test_output_that_nobody_takes_ends_no_run(tmp_path, capsys, monkeypatch, error):
    class Gone(io.StringIO):
        def write(self, text):
            raise error

    monkeypatch.setattr(sys, "stdout", Gone())
    monkeypatch.setattr(os, "dup2", lambda *_: None)  # which rich calls for a pipe
    with writer(tmp_path, "metrics.wandb=disabled") as metrics:
        metrics.write(RECORD)
        metrics.write(replace(RECORD, step=2))
    assert [row["kind"] for row in lines(tmp_path)] == ["header", "step", "step"]
    assert capsys.readouterr().err.count("progress is not shown any more, the run goes on") == 1


def test_R93_one_wandb_run_in_the_whole_job(tmp_path, wandb):
    fake = wandb(FakeWandb())
    for rank in (3, 2, 0, 1):  # rank 2 is local rank 0 of a second node
        with writer(tmp_path / str(rank), rank=rank) as metrics:
            metrics.write(RECORD)
    assert len(fake.named("init")) == len(fake.named("log")) == len(fake.named("finish")) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_wandb_is_offline_with_a_step_axis_of_its_own(tmp_path, wandb):
    fake = wandb(FakeWandb())
    with writer(tmp_path) as metrics:
        for step in (5, 3):  # a resumed run goes back
            metrics.write(replace(RECORD, step=step, peak_tflops=None))
    [init] = fake.named("init")
    assert (init["mode"], init["name"], init["dir"]) == ("offline", "demo", str(tmp_path / "demo"))
    assert init["config"]["config"]["sequence"]["length"] == 8192
    assert fake.named("define_metric") == [("step", {}), ("*", {"step_metric": "step"})]
    assert [row["step"] for row in fake.named("log")] == [5, 3]
    assert "mfu" not in fake.named("log")[0]
    assert fake.named("finish") == [0]


def test_R97_a_run_that_goes_on_is_the_same_to_wandb_and_one_that_begins_is_another(tmp_path, wandb):
    fake = wandb(FakeWandb())
    for after in (0, 75, 80, 0):
        with writer(tmp_path, after=after):
            pass
    first, second, third, anew = (init["id"] for init in fake.named("init"))
    assert first == second == third != anew and all(init["resume"] == "allow" for init in fake.named("init"))
    (tmp_path / "demo" / "wandb.id").write_text("")  # killed before it was written
    with writer(tmp_path, after=80):
        pass
    assert fake.named("init")[-1]["id"] == (tmp_path / "demo" / "wandb.id").read_text().strip() != ""


def test_an_evaluation_goes_to_every_sink(tmp_path, wandb, capsys):
    fake = wandb(FakeWandb())
    with writer(tmp_path) as metrics:
        metrics.write(replace(RECORD, step=3))
        metrics.write_evaluation(RESULT)
        metrics.write(replace(RECORD, step=4))
    assert [line["kind"] for line in lines(tmp_path)] == ["header", "step", "evaluation", "step"]
    assert lines(tmp_path)[2] == {"kind": "evaluation", **RESULT.row()}
    said = capsys.readouterr().out.splitlines()[1]
    assert said.startswith("step 3 evaluated  held-out loss 2.5000  pass keys 50.0%")
    _, logged, _ = fake.named("log")
    assert logged["eval/needle/512/0.5"] == 0.5 and logged["tokens_seen"] == 900
    assert logged["eval/picture"] == str(tmp_path / "demo" / "evaluation" / "step-00000003.png")
    assert logged["eval/needle/table"]["data"] == [[512, 0.5, 4, 1.0, 0.5]]
    with writer(tmp_path, "metrics.wandb=disabled", after=3):
        pass
    assert [line.get("step") for line in lines(tmp_path)] == [None, 3, 3], "a resumed run keeps what it evaluated"


def test_a_picture_that_cannot_be_drawn_ends_no_run(tmp_path, wandb, capsys):
    fake = wandb(FakeWandb())
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "evaluation").write_text("in the way")
    with writer(tmp_path) as metrics:
        metrics.write_evaluation(RESULT)
    assert lines(tmp_path)[1] == {"kind": "evaluation", **RESULT.row()}
    assert "is not drawn, the run goes on" in capsys.readouterr().err
    assert "eval/picture" not in fake.named("log")[0] and fake.named("log")[0]["eval/needle/512/0.5"] == 0.5


@pytest.mark.parametrize("fails_in", ["init", "define_metric", "log", "finish"])
def test_a_failing_wandb_is_told_once_and_never_ends_a_run(tmp_path, wandb, caplog, fails_in):
    wandb(FakeWandb(fails_in=fails_in))
    with writer(tmp_path) as metrics:
        for step in (1, 2, 3):
            metrics.write(replace(RECORD, step=step))
    assert len(lines(tmp_path)) == 4
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        f"wandb failed, the run goes on without it: RuntimeError: no {fails_in} today"
    ]


def test_R98_a_slow_wandb_does_not_hold_up_the_run(tmp_path, wandb):
    fake = wandb(FakeWandb())
    fake.may_start.clear()
    with writer(tmp_path) as metrics:
        metrics.write(RECORD)
        assert len(lines(tmp_path)) == 2 and not fake.calls
        fake.may_start.set()
    assert len(fake.named("log")) == 1


def test_a_wandb_that_never_ends_is_left_behind(tmp_path, wandb, caplog, monkeypatch):
    monkeypatch.setattr(sinks, "WANDB_CLOSE_TIMEOUT_S", 0.05)
    fake = wandb(FakeWandb())
    fake.may_start.clear()
    with writer(tmp_path) as metrics:
        metrics.write(RECORD)
    assert "did not end within" in caplog.text
    fake.may_start.set()


def test_online_needs_a_key(tmp_path, wandb, caplog):
    fake = wandb(FakeWandb(key=False))
    with writer(tmp_path, "metrics.wandb=online"):
        pass
    assert fake.named("init")[0]["mode"] == "offline"
    assert "there is no key" in caplog.text
    fake = wandb(FakeWandb(key=True))
    with writer(tmp_path, "metrics.wandb=online"):
        pass
    assert fake.named("init")[0]["mode"] == "online"


def test_a_run_that_failed_says_so_to_wandb(tmp_path, wandb):
    fake = wandb(FakeWandb())
    with pytest.raises(RuntimeError, match="boom"), writer(tmp_path):
        raise RuntimeError("boom")
    assert fake.named("finish") == [1]


def test_R97_a_real_offline_run_and_what_goes_on_from_it(tmp_path, caplog):
    with writer(tmp_path) as metrics:
        metrics.write(RECORD)
        metrics.write_evaluation(RESULT)
    with writer(tmp_path, after=1) as metrics:
        metrics.write(replace(RECORD, step=2))
    assert "wandb failed" not in caplog.text
    runs = list((tmp_path / "demo" / "wandb").glob("offline-run-*/*.wandb"))
    assert runs and all(run.stat().st_size > 0 for run in runs)
    assert {run.stem for run in runs} == {f"run-{(tmp_path / 'demo' / 'wandb.id').read_text().strip()}"}
