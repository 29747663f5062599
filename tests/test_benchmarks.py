"""Benchmarks without a GPU: which cases there are, resuming, verdicts, and what they say when they cannot measure."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pool as pools
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import attention  # noqa: E402
import bars  # noqa: E402
import contenders  # noqa: E402
import head  # noqa: E402
import largest  # noqa: E402
import mesh_step  # noqa: E402
import meshes  # noqa: E402
import planning  # noqa: E402
import profiling  # noqa: E402
import ring  # noqa: E402
import ring_share  # noqa: E402
import steps  # noqa: E402
import traffic  # noqa: E402
import train_step  # noqa: E402
import tune  # noqa: E402
from cases import LENGTHS, MASKS, Case, Cell, Contender, documents, identity, visible  # noqa: E402

ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


class Clock:
    """A watch without a GPU: a call takes as many milliseconds as the list says, again and again."""

    device = "cpu"

    def __init__(self, *times: float) -> None:
        self.times, self.count = times, 0

    def on_stream(self):
        return contextlib.nullcontext()

    def captured(self, run):
        return run

    def host_us(self, run) -> float:
        return 1.0

    def ms(self, run, calls: int) -> float:
        run()
        self.count += 1
        return self.times[self.count % len(self.times)]

    def synchronize(self) -> None:
        pass

    def healthy(self) -> bool:
        return True


def test_documents_are_the_same_each_time_and_end_with_the_row():
    for length in LENGTHS:
        borders = documents(length)
        assert borders[0] == 0 and borders[-1] == length
        assert all(a < b for a, b in itertools.pairwise(borders))
    assert 1500 < LENGTHS[-1] / len(documents(LENGTHS[-1])) < 2700


def test_work_is_counted_in_visible_pairs():
    assert visible(8192, "full") == 8192**2
    assert visible(8192, "causal") == 8192 * 8193 // 2
    assert visible(8192, "window") == 4096 * 4097 // 2 + 4096 * 4096
    borders = documents(16384)
    pairs = sum((b - a) * (b - a + 1) // 2 for a, b in itertools.pairwise(borders))
    assert visible(16384, "documents") == pairs
    case = Case(128, 4096, "causal", "backward")
    assert case.flops == 2.5 * 4 * 128 * case.batch * case.heads * visible(4096, "causal")


def test_every_case_has_the_size_that_the_issue_names():
    cells = attention.sweep(["triton", "gluon"])
    cases = {cell.case for cell in cells}
    assert len(cases) == len(cells)
    for case in cases:
        assert case.batch * case.length == max(16384, case.length), case
        assert case.heads % case.kv_heads == 0 and case.heads // case.kv_heads == (4 if case.grouped else 1)
    wanted = {(d, n, m, w, g) for d in (64, 128, 256) for n in LENGTHS for m in MASKS for w in ("forward", "backward")
              for g in (False, True) if m != "documents" or n >= 16384}  # fmt: skip
    assert cases == wanted
    names = {str(contender) for cell in cells for contender in cell.contenders}
    assert names == {
        "cudnn",
        "fa2",
        "flex",
        "fa4",
        "triton",
        "gluon",
        "triton (deterministic)",
        "gluon (deterministic)",
    }


def test_bars_measure_everybody_that_they_name():
    cells = {cell.case: cell.contenders for cell in bars.cells(["triton", "gluon", "gluon_fp8"])}
    for bar in bars.table():
        for case in bar.cases:
            for contender in [bar.ours, *(side[0] for side in (bar.floor, bar.goal) if side)]:
                assert contender in cells[case], (bar.name, case, contender)
    assert Contender("gluon_fp8") in cells[Case(128, 16384, "full", "forward")]
    estimate = sum(attention.estimate_s(Cell(*item), 5) for item in cells.items())
    assert estimate < 240, "with compiling, they must fit a command of ten minutes"


def made_up(ratio: float = 1.0, skip=lambda row: False) -> dict[tuple, dict]:
    """Rows of the bars' cells: ours at 500 * ratio, everybody else at 500."""
    rows = {}
    for cell in bars.cells(["triton", "gluon"]):
        for contender in cell.contenders:
            ours = contender.kernel in ("triton", "gluon") and contender.form in ("", "deterministic", "carried")
            row = attention.row_of(cell, contender) | {"tflops": 500 * (ratio if ours else 1.0)}
            if not skip(row):
                rows[identity(row)] = row
    return rows


def missed(rows: dict[tuple, dict]) -> list[tuple[str, str]]:
    return [(line.bar.name, line.where) for line in bars.lines(rows) if not line.floor_met]


def test_verdict_meets_floors_exactly_when_the_ratio_allows_it():
    assert missed(made_up(1.06)) == []
    assert bars.verdict(made_up(1.06))[1]
    assert {name for name, _ in missed(made_up(1.0))} == {"portable"}
    assert {name for name, _ in missed(made_up(0.985))} == {"portable", "fast, geometric mean", "D=256"}
    at_4k = [where for name, where in missed(made_up(0.93)) if name == "fast at 4k"]
    assert "D=64 causal forward 4k" not in at_4k and len(at_4k) == 7
    at_4k = [where for name, where in missed(made_up(0.89)) if name == "fast at 4k"]
    assert "D=64 causal forward 4k" in at_4k and len(at_4k) == 8


def test_geometric_mean_and_single_cells_are_judged_apart():
    rows = made_up(1.06)
    one = ("fast", "D=128 full forward 16k")
    for key, row in rows.items():
        if key[:4] == (128, 16384, "full", "forward") and row["kernel"] == "gluon":
            row["tflops"] = 480.0
    assert missed(rows) == [one]
    (mean,) = [line for line in bars.lines(rows) if line.bar.name == "fast, geometric mean"]
    assert mean.floor == pytest.approx((1.06**15 * 0.96) ** (1 / 16))


def test_what_was_not_measured_misses_its_floor_and_no_goal():
    rows = made_up(1.06, skip=lambda row: row["kernel"] == "fa4")
    assert missed(rows) == []
    assert all(line.goal_met is None for line in bars.lines(rows) if line.bar.name == "fast")
    rows = made_up(1.06, skip=lambda row: row["kernel"] == "flex")
    assert {name for name, _ in missed(rows)} == {"portable", "D=256"}
    assert "not measured" in bars.verdict(rows)[0]


def test_verdict_command_says_by_its_exit_code_whether_floors_are_met(tmp_path, capsys):
    for ratio, code in ((1.06, 0), (0.9, 1)):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in made_up(ratio).values()))
        assert attention.main(["--verdict", str(path)]) == code
        assert "floors met" in capsys.readouterr().out


def test_finished_cells_are_skipped_and_failures_are_not_repeated(tmp_path):
    cells = attention.sweep(["gluon"])[:3]
    path = tmp_path / "rows.jsonl"
    rows = [attention.row_of(cells[0], contender) | {"tflops": 1.0} for contender in cells[0].contenders]
    rows += [attention.row_of(cells[1], Contender("cudnn")) | {"error": "no"}]
    rows += [attention.row_of(cells[1], Contender("fa2")) | {"tflops": 1.0}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    left = attention.left(cells, attention.read(path))
    assert [cell.case for cell in left] == [cells[1].case, cells[2].case]
    assert Contender("cudnn") not in left[0].contenders and Contender("fa2") in left[0].contenders


def test_the_last_row_of_a_measurement_holds(tmp_path):
    cell = attention.sweep(["gluon"])[0]
    row = attention.row_of(cell, cell.contenders[0])
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row | {"tflops": rate}) + "\n" for rate in (1.0, 2.0)))
    assert [kept["tflops"] for kept in attention.read(path).values()] == [2.0]


@pytest.fixture
def small(monkeypatch):
    """Cases that a CPU can compute."""
    monkeypatch.setattr(Case, "batch", property(lambda case: 1))
    monkeypatch.setattr(Case, "heads", property(lambda case: 4))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("mask", MASKS)
def test_contenders_are_compared_and_timed_and_failures_become_rows(small, mask, direction):
    names = [Contender("eager"), Contender("sdpa"), Contender("eager", "causal"), Contender("gluon")]
    cell = Cell(Case(32, 256, mask, direction, True), tuple(names))
    measuring = attention.Measuring(cell, Clock(4.0, 1.0, 2.0))
    measuring.prepare()
    measuring.time(3)
    rows = {Contender(row["kernel"], row["form"]): row for row in measuring.rows()}
    assert "needs an NVIDIA GPU" in rows[Contender("gluon")]["error"]
    assert rows[Contender("sdpa")]["difference"] < 0.02 and rows[Contender("eager")]["difference"] == 0
    assert rows[Contender("eager")]["min"] <= rows[Contender("eager")]["tflops"] <= rows[Contender("eager")]["max"]
    assert rows[Contender("eager")]["rounds"] == 3
    mine, other = rows[Contender("eager", "causal")], cell.case._replace(mask="causal").flops
    assert mine["tflops"] == pytest.approx(other / mine["ms"] / 1e9, abs=0.01)


def test_rates_are_flops_over_the_median_time(small):
    case = Case(64, 512, "causal", "forward")
    measuring = attention.Measuring(Cell(case, (Contender("eager"),)), Clock(0.001))
    measuring.prepare()
    measuring.time(2)
    (row,) = measuring.rows()
    assert row["tflops"] == pytest.approx(case.flops / 0.001 / 1e9, rel=0.01)


def test_a_wrong_result_is_an_error_and_is_not_timed(small, monkeypatch):
    monkeypatch.setitem(contenders.FORMS, "wrong", lambda case, kernel: lambda q, k, v: q * torch.nan)
    cell = Cell(Case(32, 128, "causal", "forward"), (Contender("eager"), Contender("eager", "wrong")))
    measuring = attention.Measuring(cell, Clock(1.0))
    measuring.prepare()
    measuring.time(1)
    rows = {row["form"]: row for row in measuring.rows()}
    assert "differs" in rows["wrong"]["error"] and "tflops" in rows[""]


def test_a_run_writes_every_row_stops_in_time_and_goes_on(small, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(attention, "Stopwatch", lambda: Clock(1.0, 2.0))
    monkeypatch.setattr(
        attention, "provenance", lambda *_: {"command": "c", "commit": "x", "hardware": "h", "date": "d"}
    )
    path = tmp_path / "rows.jsonl"
    names = (Contender("eager"), Contender("gluon"))
    cells = [Cell(Case(32, length, "causal", "forward"), names) for length in (128, 256)]
    arguments = attention.parse(["--output", str(path), "--jobs", "0", "--seconds", "0.01"])
    assert attention.run(cells, arguments) == 3 and not path.is_file()
    arguments = attention.parse(["--output", str(path), "--jobs", "0"])
    assert attention.run(cells[:1], arguments) == 0
    left = attention.left(cells, attention.read(path))
    assert [cell.case.length for cell in left] == [256]
    assert attention.run(left, arguments) == 0
    rows = list(attention.read(path).values())
    assert len(rows) == 4 and attention.left(cells, attention.read(path)) == []
    assert all(row["commit"] == "x" for row in rows) and sum("error" in row for row in rows) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().out


def test_a_lost_gpu_ends_the_run_with_one_row_for_its_cause(small, monkeypatch, tmp_path):
    class Lost(Clock):
        def healthy(self) -> bool:
            return False

    monkeypatch.setattr(attention, "Stopwatch", lambda: Lost(1.0))
    monkeypatch.setattr(attention, "provenance", lambda *_: {})
    path = tmp_path / "rows.jsonl"
    cell = Cell(Case(32, 128, "causal", "forward"), tuple(map(Contender, ("eager", "gluon", "sdpa"))))
    assert attention.run([cell], attention.parse(["--output", str(path), "--jobs", "0"])) == 3
    assert [row["kernel"] for row in attention.read(path).values()] == ["gluon"]
    (left,) = attention.left([cell], attention.read(path))
    assert [contender.kernel for contender in left.contenders] == ["eager", "sdpa"]


@pytest.mark.parametrize("state", ["one hop", "carried"])
def test_hops_of_a_ring_run_through_the_kernel_protocol(small, state):
    cell = Cell(Case(32, 128, "causal", "forward"), (Contender("eager", state),))
    measuring = attention.Measuring(cell, Clock(1.0))
    measuring.prepare()
    measuring.time(1)
    assert [row.get("error") for row in measuring.rows()] == [None]


@pytest.mark.parametrize("mask", ["causal", "window", "documents"])
def test_block_masks_are_those_that_flex_attention_makes(mask):
    from torch.nn.attention.flex_attention import create_block_mask

    case = Case(64, 8192 if mask == "window" else 4096, mask, "forward")
    made = contenders.block_mask(case, "cpu")
    want = create_block_mask(made.mask_mod, None, None, case.length, case.length, device="cpu")
    for name in ("", "full_"):
        for side in ("kv", "q"):
            counts, other = (getattr(x, f"{name}{side}_num_blocks") for x in (made, want))
            assert torch.equal(counts, other), (name, side)
            mine, theirs = (getattr(x, f"{name}{side}_indices") for x in (made, want))
            for row, count in enumerate(counts[0, 0].tolist()):
                assert torch.equal(mine[0, 0, row, :count].sort()[0], theirs[0, 0, row, :count].sort()[0])


@pytest.mark.parametrize("kind", planning.KINDS)
def test_a_batch_is_planned_as_a_loader_gives_it(kind):
    borders, seq_len = planning.batch(kind, 300, 0, 8)
    assert borders.dtype == torch.int32 and len(borders) == 301 and 0 <= seq_len - int(borders[-1]) < 8 * 128
    row = planning.measure(kind, 300, 8, 1)
    assert row["tokens"] == seq_len and row["segments"] >= 8 and 1 <= row["makespan"] < 1.1
    assert 0 < row["fastest_ms"] == row["ms"]


NCU = """==PROF== Connected to process 7
==WARNING== words
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","spin_kernel(long)","dram__bytes_read.sum","byte","32"
"0","7","spin_kernel(long)","dram__bytes_write.sum","byte","0"
"1","7","attend","dram__bytes_read.sum","byte","1,000"
"1","7","attend","dram__bytes_write.sum","byte","200"
"2","7","spin_kernel(long)","dram__bytes_read.sum","byte","32"
"3","7","keys","dram__bytes_read.sum","byte","5"
"4","7","queries","dram__bytes_read.sum","byte","6"
"5","7","spin_kernel(long)","dram__bytes_read.sum","byte","32"
"""


def test_bytes_belong_to_the_step_behind_whose_marker_a_kernel_stands():
    steps = traffic.steps_of(list(traffic.kernels(NCU.splitlines())))
    assert steps == [[("attend", 1200)], [("keys", 5), ("queries", 6)], []]
    times = [{"case": 0, "error": "does not fit"}, {"case": 1, "forward": {"ms": 1.0}, "backward": {"ms": 2.0}}]
    rows = traffic.joined(times, steps)
    assert [row.get("bytes") for row in rows] == [None, None, 1200, 11]
    assert [row["method"] for row in rows] == ["plain", "plain", "ours", "ours"]
    assert rows[3]["num_kernels"] == 2 and rows[3]["ms"] == 2.0 and rows[0]["error"] == "does not fit"
    with pytest.raises(ValueError, match="markers"):
        traffic.joined([*times, {"case": 2, "forward": {}, "backward": {}}], steps)


def test_a_case_that_does_not_fit_under_the_counters_is_a_row_with_its_error(monkeypatch):
    """ncu needs memory, too: the other cases keep their bytes."""
    monkeypatch.setattr(traffic, "CASES", traffic.CASES[:2])

    def worker(name, kernel, indices, before=()):
        if name == "timed":
            return [{"case": i, "forward": {"ms": 1.0}, "backward": {"ms": 2.0}} for i in indices]
        if indices == [0]:
            return [{"case": 0, "error": "does not fit: out of memory"}]
        Path(before[-1]).write_text(NCU, encoding="utf-8")
        return [{"case": 1}]

    monkeypatch.setattr(traffic, "worker", worker)
    rows = traffic.measure("ncu", "eager")
    assert [row.get("error") for row in rows] == ["under the counters: does not fit: out of memory"] * 2 + [None] * 2
    assert [row.get("bytes") for row in rows] == [None, None, 1200, 11]


def test_counters_that_may_not_be_read_are_said():
    with pytest.raises(ValueError, match="ERR_NVGPUCTRPERM"):
        list(traffic.kernels(["==ERROR== ERR_NVGPUCTRPERM - no permission"]))


def test_each_tensor_once_is_what_the_shapes_say():
    shape = traffic.Shape("x", 2, 1024, 16, 64)
    tensor, lse = 2 * 1024 * 16 * 64 * 2, 2 * 1024 * 16 * 4
    assert shape.once("forward") == 4 * tensor + lse and shape.once("backward") == 8 * tensor + lse
    assert {s.length for s in traffic.SHAPES} == {1024, *(2048 * 2**i for i in range(6))}


def test_plain_attention_is_attention():
    q, k, v = (torch.randn(2, 48, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    got, want = traffic.plain(q, k, v), torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(out.sum(), (q, k, v)) for out in (got, want)))


def candidate(block_q: int, kernel: str = "keys") -> tune.Candidate:
    return tune.Candidate(kernel, 128, tune.Tiling(block_q, 64, 8, 2))


def test_candidates_begin_with_the_present_tiling_and_differ():
    found = tune.candidates(tune.Card("cuda", 90))
    assert len(set(found)) == len(found)
    rows = {(c.kernel, c.head_dim): c.tiling for c in reversed(found)}
    assert len(rows) == 9
    for (kernel, width), first in rows.items():
        assert first == tune.tiling(kernel, width, 2, tune.Card("cuda", 90))


def test_another_tiling_must_be_faster_by_more_than_noise():
    present, other = candidate(64), candidate(128)
    assert tune.best({present: 100.0, other: 100.9}) is present
    assert tune.best({present: 100.0, other: 101.1}) is other


def test_the_table_keeps_other_cards_and_says_where_a_row_comes_from():
    where = {"command": "python benchmarks/tune.py", "commit": "abc", "hardware": "x", "date": "2000-01-01"}
    before = {"cuda:80": {"rows": {}}, "cuda:90": {"rows": {"keys": {"64": {}}}}}
    table = tune.updated(before, tune.Card("cuda", 90), {candidate(64): 123.45}, where)
    assert table["cuda:80"] == before["cuda:80"]
    assert table["cuda:90"]["commit"] == "abc"
    tiles = {"block_q": 64, "block_k": 64, "num_warps": 8, "num_stages": 2}
    assert table["cuda:90"]["rows"] == {"keys": {"128": {"tiling": tiles, "tflops": 123.5}}}


def test_a_chosen_tiling_holds_inside_only():
    from ringflash.kernels.triton import launch

    present = launch.tiling
    with tune.chosen(candidate(32).tiling):
        assert launch.tiling("keys", 128, 2, None) == candidate(32).tiling
    assert launch.tiling is present


def test_what_does_not_fit_is_dropped_by_the_compiler():
    many_stages = tune.Candidate("forward", 64, tune.Tiling(128, 64, 8, 20))
    with tune.pool(1) as workers:
        reason = workers.submit(tune.compiler_says, "sm_90", many_stages).result()
    assert reason is not None and "bytes of shared memory" in reason, reason


def test_candidates_are_launched_with_their_tiles_and_compared():
    code = """
import tune
for kernel in tune.KERNELS:
    for tiles in ((32, 64, 4, 1), (64, 32, 4, 1)):
        print(tune.runs_wrong(tune.Candidate(kernel, 64, tune.Tiling(*tiles)), length=100, device="cpu"))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "benchmarks", capture_output=True, text=True, timeout=120,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["None"] * 6, done.stdout + done.stderr


def test_a_training_step_is_measured():
    words = "--dry-run --optimizer adamw --zero 2 --checkpoint-every 2 --offload activations --warm --commit abc"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", ROOT / "benchmarks/train_step.py", *words.split()], capture_output=True,
        text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert row["memory"]["checkpoint_every"] == row["zero"] == row["layers"] == 2 and row["commit"] == "abc"
    parts = row["forward_s"] + row["backward_s"] + row["update_s"]
    assert parts == pytest.approx(row["seconds"], abs=1e-3)
    assert 0 < row["attention_forward_s"] < row["forward_s"] and 0 < row["attention_backward_s"] < row["backward_s"]
    assert row["loss"] == pytest.approx(5.6, abs=0.3), "the logarithm of 260 ids"
    assert row["tokens_per_s"] == pytest.approx(64 / row["seconds"], rel=1e-2)
    assert row["predicted_peak_bytes"] == sum(row["predicted_peak"]["parts"].values()) > 0
    assert row["predicted_host_bytes"] == 64 * 64 * 4 and row["predicted_seconds"] > 0
    assert "attention backward 1 took" in done.stderr and "loss forward 1 took" in done.stderr


@pytest.fixture
def place(monkeypatch):
    """What a run writes into the environment goes with the test."""
    for name in ("LOCAL_RANK", "DS_ACCELERATOR", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, {"LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu"}.get(name, "expandable_segments:True"))


def step_row(capsys, words):
    assert train_step.main(words.split()) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("place")
def test_one_rank_of_a_ring_is_measured(capsys):
    row = step_row(capsys, "--dry-run --ring 2 --ring-rank 1 --warm 10 --profile --commit abc")
    # rank 1 of 2 has the middle of the sequence: it needs half of the other's 32 tokens, and 16 come home with dk, dv
    keys = 2 * 16 * 2 * 4
    assert row["received_bytes"] == 2 * 16 * keys * (1 + 1 + 1 + 1)
    assert row["ring_seconds_none_hidden"] >= row["ring_seconds_all_hidden"] > 0 and row["layers_of_ring"] == 2
    assert row["loss"] == pytest.approx(5.6, abs=0.3)
    profile = row["profile"]
    assert profile["kinds_s"]["attention forward"] > 0 and profile["span_s"] == pytest.approx(row["seconds"], rel=0.5)


def test_a_share_warms_up_on_hops_of_the_ring():
    share = ring_share.Share(2, 1, [64, 20], None)
    assert [[len(plan.forward.visits), plan.forward.hops] for plan in share._plans.values()] == [[2, (0, 1)]] * 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--ring 2 --warm 3", "--length 6 must divide by 4, twice --ring (--warm by 2)"),
        ("--ring 2 --ring-rank 2", "--ring-rank 2 must be one of 0 to 1"),
        ("--ring 2 --ring-kernel cuda", "--ring-kernel cuda must be auto or one of eager"),
        ("--ring 3", "--length 64 must divide by 6, twice --ring"),
        ("--ring 2 --optimizer sgd", "--ring 2 is one rank alone, without --optimizer sgd: leave it out"),
        ("--loss liger --loss-chunk 5", "--loss-chunk 5 is of --loss chunked: leave it out"),
        pytest.param("--loss liger", "memory.loss = 'liger' needs", marks=ON_CPU),
    ],
)
def test_a_share_that_is_none_is_refused(capsys, words, said):
    assert train_step.main(["--dry-run", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_the_head_is_measured_beside_what_may_be_missing(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.fused_linear_cross_entropy", None)
    assert head.main(["--dry-run", "--commit", "abc"]) == 0
    mine, other = map(json.loads, capsys.readouterr().out.splitlines())
    assert (mine["head"], mine["tokens"], mine["chunk"], mine["commit"]) == ("ringflash", 64, 16, "abc")
    assert mine["seconds"] > 0 and 0 < mine["error_hidden"] < 0.02 and 0 < mine["error_weight"] < 0.02
    assert other["head"] == "liger" and "ModuleNotFoundError" in other["error"]


@pytest.fixture
def here(monkeypatch):
    """Each step of --largest in this process, on a CPU, which has no memory that ends."""

    def attempt(words, timeout_s):
        out, said = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
            code = train_step.main(words)
        if code:
            return {2: "refused"}[code], largest.last_line(said.getvalue()), None
        return "finished", "", json.loads(out.getvalue())

    monkeypatch.setattr(largest, "attempt", attempt)


@pytest.mark.usefixtures("place", "here")
def test_around_the_longest_one_step_finishes_and_one_is_refused(capsys):
    words = "--largest --shape tiny --dtype float32 --window 64 --device-gb 2.016 --host-gb 137 --switches offload"
    code = train_step.main([*words.split(), "--commit", "abc"])
    row, beyond, verdict = map(json.loads, capsys.readouterr().out.splitlines())
    at = verdict["longest"]
    assert row["length"] == round(0.95 * at / 64) * 64 < at and row["memory"]["offload"] == ["activations"]
    assert row["seconds"] > 0 and row["window"] == 64 and beyond["length"] == round(1.05 * at / 64) * 64
    below, above, forced = verdict["tried"]
    assert (below["outcome"], above["outcome"]) == ("finished", "refused") and above["length"] > at
    assert f"sequence.length = {above['length']} does not fit" in above["said"]
    assert f"The longest that fits is {at};" in above["said"]
    assert forced["forced"] and forced["outcome"] == "finished", "more than the planner says, and here it fits"
    assert code == 1 and verdict["planner_is_right"] is False and verdict["commit"] == "abc"


@pytest.mark.usefixtures("place", "here")
def test_where_host_memory_ends_nothing_is_forced(capsys):
    words = "--largest --shape tiny --dtype float32 --window 64 --device-gb 150 --host-gb 3.0012 --switches offload"
    assert train_step.main(words.split()) == 0
    _, verdict = map(json.loads, capsys.readouterr().out.splitlines())
    assert verdict["lacks_above"] == "host" and verdict["planner_is_right"]
    assert [one["outcome"] for one in verdict["tried"]] == ["finished", "refused"]


@pytest.mark.usefixtures("place")
def test_a_step_that_never_ends_is_ended():
    words = ["--dry-run", "--device-gb", "150"]
    outcome, _, row = largest.attempt(words, 0.05)
    assert outcome == "not done in 0 s" and row is None


def test_the_longest_needs_to_know_the_gpu_without_asking_it(capsys):
    with pytest.raises(SystemExit):
        train_step.main(["--largest"])
    assert "--largest needs --device-gb" in capsys.readouterr().err
    assert train_step.main(["--largest", "--optimizer", "adamw", "--device-gb", "80", "--host-gb", "137"]) == 2
    assert "no length fits" in capsys.readouterr().err


def test_a_profile_counts_each_moment_once():
    events = [
        profiling.Event("attend", 0, 100), profiling.Event("Memcpy DtoH (Device -> Pinned)", 50, 120),
        profiling.Event("nvjet_hsh_128x256", 130, 200), profiling.Event("nvjet_hsh_128x256", 200, 230),
        profiling.Event("all_gradients", 300, 400), profiling.Event("ncclDevKernel_SendRecv", 210, 310),
    ]  # fmt: skip
    found = profiling.summary(events)
    assert (found["span_s"], found["idle_s"], found["copies_alone_s"]) == (400e-9, 10e-9, 20e-9)
    assert found["messages_alone_s"] == pytest.approx(70e-9)
    kinds = {kind: round(seconds * 1e9) for kind, seconds in found["kinds_s"].items() if seconds}
    assert kinds == {"copies to the host": 70, "attention forward": 100, "matrix products": 100,
                     "attention backward": 100, "messages": 100}  # fmt: skip
    assert {"name": "nvjet_hsh_128x256", "kind": "matrix products", "calls": 2, "seconds": 1e-7} in found["kernels"]


def test_memory_and_time_are_predicted_within_a_tenth_of_what_was_measured():
    lines = steps.against(ROOT / "docs/results/train_step.jsonl")
    assert len(lines) >= 6
    for line in lines:
        for measured, predicted in (line[4:6], line[6:8], line[10:12]):
            got, said = float(measured), float(predicted.split()[0])
            tokens = int(line[2].replace(",", "")) if measured is line[4] and "mlp_tile" in line[3] else 0
            width = steps.SHAPES[line[0].split(",")[0]].get("hidden_size")
            assert 0.9 * (got - normalised_then(tokens, width) / 1e9) <= said <= 1.1 * got, line


def normalised_then(tokens, width):
    """Bytes that a tiled layer kept of what its two norms returned, when the rows were measured; it does not now."""
    return 2 * 2 * tokens * width


def rows_of(name):
    return [json.loads(line) for line in (ROOT / f"docs/results/{name}.jsonl").read_text().splitlines()]


def test_the_longest_of_every_set_was_tried_and_is_right():
    tried = [row for row in rows_of("largest") if "tried" in row]
    assert {row["switches"] for row in tried} == steps.SETS.keys()
    assert all(row["planner_is_right"] for row in tried)


def test_a_window_leaves_the_peak_as_it_was_measured_without_one():
    rows = [row for row in rows_of("train_step") if row["length"] == 131072 and row["optimizer"] == "none"]
    rows = [row for row in rows if not steps.switches(row["memory"])]
    without, within = sorted(rows, key=lambda row: row["window"] or 0)
    assert within["peak_allocated_bytes"] == pytest.approx(without["peak_allocated_bytes"], abs=1e7)
    assert steps.shape_of(within) == "llama3-8b, window 4,096"


def test_a_first_call_that_compiles_is_told_apart():
    row = {"calls_s": {"attention_forward": [2.0, 1.5, 1.7], "attention_backward": [3.0], "loss_forward": [9.0, 1.0]}}
    assert steps.first_call(row) == pytest.approx(0.4) and steps.first_call({}) == 0


@ON_CPU
@pytest.mark.parametrize("script", ["attention.py", "ring_rank.py", "traffic.py", "tune.py"])
def test_without_a_gpu_it_is_said_in_a_sentence(script):
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "GPU" in done.stdout and "Traceback" not in done.stderr


def rows_of_a_small_ring() -> list[dict]:
    ring.ROUNDS = {0: ring.Rounds(1, 1, 1)}
    return list(ring.rows_of(ring.Case(64, 4, 2), torch.device("cpu"), list(ring.CONTENDERS), profiled=True))


def test_a_ring_of_processes_is_measured_beside_its_rivals(pool):
    rows = {(row["contender"], row.get("way")): row for row in pool(2)(rows_of_a_small_ring)[0]}
    for name in ("ring", "gather", "alone"):
        assert all(0 < rows[name, way]["host_ms"] <= rows[name, way]["ms"] for way in ring.WAYS)
    assert rows["ring", "both"]["messages_ms"]["span"] > 0
    if importlib.util.find_spec("ring_flash_attn"):
        assert rows["zigzag cudnn", "both"]["ms"] > 0
    else:
        assert "pip install --no-deps ring-flash-attn==0.1.8" in rows["zigzag cudnn", None]["error"]


def test_several_processes_take_a_step_of_each_kind_of_mesh(tmp_path):
    cases, output = ["zero3-128k", "documents-gather"], str(tmp_path / "rows.jsonl")
    words = [str(ROOT / "benchmarks/mesh_step.py"), "--tiny", "--cases", *cases, "--output", output]
    done, other = pools.ranks(words, tmp_path)  # a run claims its folder
    assert done.returncode == other.returncode == 0, done.stderr + other.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["case"] for row in rows] == cases
    assert list(map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())) == rows
    assert all(row["seconds"] > row["attention_forward_s"] > 0 for row in rows)
    assert all(row["predicted_peak_bytes"] > 0 and "predicted_seconds" in row for row in rows)


def test_steps_of_meshes_are_predicted_within_a_tenth_of_what_was_measured():
    rows = list(map(json.loads, (ROOT / "docs/results/mesh_step.jsonl").read_text().splitlines()))
    assert len(rows) >= 9
    for row in rows:
        case = meshes.CASES[row["case"]]
        share = row["attention_share"] if case.documents else None
        said = meshes.predicted(case.config(row["ranks"], tiny=False), row["ranks"], share)
        config = case.config(row["ranks"], tiny=False)
        assert config.memory.mlp_tile is not None
        then = normalised_then(row["length"] // row["ranks"], config.model.config["hidden_size"])
        assert 0.9 * (row["peak_bytes"] - then) <= said["predicted_peak_bytes"] <= 1.1 * row["peak_bytes"], row
        assert said["predicted_seconds"] == pytest.approx(row["seconds"], rel=0.1), row


def test_a_ring_without_processes_is_refused(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="torchrun --nproc-per-node 2"):
        ring.main(["--tiny"])


def test_heads_that_gpus_cannot_share_are_refused_alone(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    with (
        pytest.raises(ValueError, match="16:16 heads cannot be shared by 3 GPUs"),
        ring.alone(ring.Case(96, 16, 16), torch.device("cpu")),
    ):
        pass


@pytest.mark.parametrize(("name", "ranks"), [("ring-128k", 3), ("ulysses-128k", 1), ("ulysses-128k", 3)])
def test_numbers_of_processes_that_a_mesh_cannot_have_are_refused(name, ranks):
    with pytest.raises(ValueError, match=f"{ranks} processes: 512 tokens and ulysses="):
        meshes.CASES[name].small().config(ranks, tiny=True)


@ON_CPU
def test_a_mesh_without_a_gpu_is_refused():
    asked = argparse.Namespace(cases=["ring-128k"], tiny=False, commit=None)
    with pytest.raises(ValueError, match="this measures GPUs, and torch sees none; --tiny needs no GPU"):
        mesh_step.go(asked, None)
