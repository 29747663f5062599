"""benchmarks/ring_rank.py without a GPU: the work of a rank and of its one launch are the same, rows are resumed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import ring_rank


@pytest.mark.parametrize("case", ring_rank.tiny(), ids=str)
def test_one_launch_has_the_queries_keys_and_pairs_of_the_ring(case):
    planned = ring_rank.work(case)
    (one,) = planned.one.forward.views
    views = [view for view in planned.plan.forward.views if view]
    assert one.pairs() == sum(view.pairs() for view in views) == planned.hops[case.rank].sum()
    assert planned.keys == one.k_segments[:, 1].sum() == sum(view.k_segments[:, 1].sum() for view in views)
    assert (one.k_segments[1:, 0] > one.k_segments[:-1].sum(1)).all(), "gathered in order"


@pytest.mark.parametrize("case", ring_rank.tiny(), ids=str)
def test_the_loop_attends_to_what_lies_in_the_buffers(case):
    """With keys and values of ones in every visitor, lse is a sum over the own keys and a count of the others."""

    class Ones(ring_rank.Present):
        def post(self, sends, receives, what, slow=False):
            for _, tensor in receives:
                tensor.view(torch.bfloat16).fill_(1.0)
            return ring_rank.Here()

    loop = ring_rank.Loop(case, ring_rank.work(case).plan, (case.local, case.local), ring_rank.Host())
    loop.present, loop.v = Ones(case.rank, case.ranks), torch.ones_like(loop.v)
    out, lse = loop.forward()
    assert torch.equal(out, torch.ones_like(out))
    q, k = (x[0].double().transpose(0, 1) for x in (loop.q, loop.k.repeat_interleave(2, 2)))
    total = torch.zeros(lse.shape[1:], dtype=torch.float64)
    for visit in loop.route.visits:
        lo, hi = (torch.from_numpy(x)[:, None] for x in (visit.view.lo, visit.view.hi))
        at = visit.view.key_positions(torch.device("cpu"))
        seen = (lo <= at) & (at < hi)
        scores = (q @ k.mT if visit.own else q.sum(-1, keepdim=True).expand(-1, -1, len(at))) * loop.scale
        total += (scores.exp() * seen).sum(-1)
    torch.testing.assert_close(lse[0], total.log().float(), rtol=1e-4, atol=1e-4)


def test_rows_are_written_once_and_say_share_and_hops(tmp_path, capsys):
    words = ["--tiny", "--rounds", "1", "--output", str(tmp_path / "rows.jsonl")]
    assert ring_rank.main([*words, "--only", "P=2 "]) == 0
    rows = ring_rank.read(tmp_path / "rows.jsonl")
    assert [key[-1] for key in rows] == ["forward", "backward", "both"] * 2
    for row in rows.values():
        assert row["share"] == pytest.approx(row["one_ms"] / row["ms"], abs=1e-3)
        assert row["direction"] == "both" or (
            len(row["hops_ms"]) == row["hops"] == 2 and row["travels_back"] in ("keys", "queries")
        )
        assert ("to_single" in row) == ("to_causal" in row) == (row["mask"] == "documents")
    for what in ("keys", "queries"):
        assert ring_rank.main([*words, "--rotate", what, "--only", "P=2 .*causal"]) == 0
        rows = [row for row in ring_rank.read(tmp_path / "rows.jsonl").values() if row["rotate"] == what]
        assert {row["travels_back"] for row in rows} == {what}
    capsys.readouterr()
    assert ring_rank.main([*words, "--dry-run"]) == 0
    left = capsys.readouterr().out.splitlines()[-3:]
    assert ["P=4" in line for line in left] == [True, True, False] and "2 cases, 1 rounds" in left[2]
    assert ring_rank.main([*words, "--seconds", "0.001"]) == 3


def test_the_cases_of_the_targets_fit_one_command():
    cases = ring_rank.bars()
    assert {(c.ranks, c.local) for c in cases} == {(p, n) for p in (2, 8, 64) for n in (8192, 32768)}
    assert set(cases) <= set(ring_rank.sweep()) and sum(ring_rank.estimate_s(c, 3) for c in cases) < 500
    assert max(map(ring_rank.memory_gb, ring_rank.sweep())) < 100
    assert {c.kv_heads for c in ring_rank.sweep()} == {16, 4, 2}
    assert {c.ranks for c in ring_rank.sweep() if c.local > 32768} == {2, 8}


def test_the_prediction_is_the_pairs_at_the_measured_rate():
    case = ring_rank.Case(8, 8192, 16, "causal")
    path = ring_rank.ROOT / "docs/results/attention_bars.jsonl"
    rows = [row for row in map(json.loads, path.read_text().splitlines())
            if (row["kernel"], row["form"], row["mask"], row["direction"], row["head_dim"])
            == ("gluon", "", "causal", "forward", 128)]  # fmt: skip
    rate = max(rows, key=lambda row: row["length"])["tflops"]
    assert ring_rank.predicted_ms(case, 1e12, ["forward"]) == pytest.approx(1e3 / rate, rel=1e-2)
    assert ring_rank.predicted_ms(case._replace(head_dim=32), 1e12, ["forward"]) is None
