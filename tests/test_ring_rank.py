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
    (one,) = planned.one.views
    assert one.pairs() == planned.pairs == planned.hops[case.rank].sum()
    assert planned.keys == one.k_segments[:, 1].sum() == sum(v.k_segments[:, 1].sum() for v in planned.plan.views if v)
    assert (one.k_segments[1:, 0] > one.k_segments[:-1].sum(1)).all(), "gathered in order"


@pytest.mark.parametrize("case", ring_rank.tiny()[::2], ids=str)
def test_where_blocks_are_really_there_the_loop_computes_attention(case):
    """With the rank's own keys in place of every visitor the ring is attention of them, at other positions."""

    class Mine(ring_rank.Present):
        def post(self, sends, receives, what):
            for (sent,), (into,) in zip([sends.values()], [receives.values()], strict=True):
                into.copy_(sent)
            return self

    planned = ring_rank.work(case)
    loop = ring_rank.Loop(case, planned.plan, (case.local, case.local), ring_rank.Host())
    loop.present = Mine(case.rank, case.ranks)
    out, lse = loop.forward()
    plans = planned.plan
    whole = (
        torch.cat([loop.k for view in plans.views if view], 1),
        torch.cat([loop.v for view in plans.views if view], 1),
    )
    seen = torch.cat([
        (view.key_positions(torch.device("cpu")) >= torch.from_numpy(view.lo)[:, None])
        & (view.key_positions(torch.device("cpu")) < torch.from_numpy(view.hi)[:, None])
        for view in plans.views if view
    ], 1)  # fmt: skip
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.double().transpose(1, 2) for x in (loop.q, *whole)), attn_mask=seen, enable_gqa=True
    ).transpose(1, 2)
    assert (out - want).abs().max() < 0.03 and lse.isfinite().all()


def test_rows_are_written_once_and_say_share_and_hops(tmp_path, capsys):
    words = ["--tiny", "--rounds", "1", "--output", str(tmp_path / "rows.jsonl")]
    assert ring_rank.main([*words, "--only", "P=2 "]) == 0
    rows = ring_rank.read(tmp_path / "rows.jsonl")
    assert [key[-1] for key in rows] == ["forward", "backward", "both"] * 2
    for row in rows.values():
        assert row["share"] == pytest.approx(row["one_ms"] / row["ms"], abs=1e-3)
        assert row["direction"] == "both" or len(row["hops_ms"]) == row["hops"] == 2
        assert ("to_single" in row) == ("to_causal" in row) == (row["mask"] == "documents")
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
