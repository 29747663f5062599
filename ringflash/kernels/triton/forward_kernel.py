"""The forward kernel: one query tile against the range of visiting key tiles that it sees. Device code only.

One program is one (query tile, batch, head). It loads the carried state, walks its key tiles in one loop, masks only
the tiles that are not seen whole, and stores the state. Inside, lse and maximum are in base 2; at the door natural.
Sources: FlashAttention-2, arXiv:2307.08691 (loop order, late division); online softmax, arXiv:1805.02867.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rows import LN2, LOG2E, capped, load, range_of, store, stream, tile_of


@triton.jit
def start_from(
    state, lse, i_b, i_h, row, count, m_q, BQ: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, FIRST: tl.constexpr
):  # fmt: skip
    """(acc0, acc1, maximum, sum) to start from. A normalised state has the maximum lse and the sum 1, or 0 if empty."""
    if FIRST:
        b_acc0 = tl.zeros([BQ, D0], tl.float32)
        b_acc1 = tl.zeros([BQ, D1 if D1 else D0], tl.float32)
        b_max = tl.full([BQ], float("-inf"), tl.float32)
        b_sum = tl.zeros([BQ], tl.float32)
    else:
        b_acc0 = load(state, i_b, i_h, row, count, BQ, 0, D0, False)
        b_acc1 = load(state, i_b, i_h, row, count, BQ, D0, D1, False) if D1 else b_acc0
        b_max = tl.load(lse + tl.arange(0, BQ), mask=m_q, other=float("-inf")) * LOG2E
        b_sum = tl.where(b_max == float("-inf"), 0.0, 1.0)
    return b_acc0, b_acc1, b_max, b_sum


@triton.jit(do_not_specialize=["num_tiles", "num_full", "num_heads", "group", "num_rows", "num_keys"])
def attend(
    q, k, v, k_desc0, k_desc1, v_desc0, v_desc1, state, out, lse, lo, hi, q_tiles, k_tiles, ranges, order,
    scale_log2, cap_scale, num_tiles, num_full, num_heads, group, num_rows, num_keys,
    D0: tl.constexpr, D1: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    CAP: tl.constexpr, RAGGED: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """state, out, lse: `kernels.State`. group: query heads a key head. scale_log2: scale * log2(e), > 0,
    so that the maximum may be taken before scaling. With CAP it is of the scores tanh(cap_scale * q k).

    RAGGED: some key tile but the last is short, so local starts and counts come from k_tiles, tile by tile. Otherwise
    key tile i starts at i * BK, and the first `num_full` tiles are full.
    """
    i_tile = tl.load(order + tl.program_id(0) % num_tiles)
    i_bh = tl.program_id(0) // num_tiles
    i_b, i_h = i_bh // num_heads, i_bh % num_heads
    i_g = i_h // group
    v0, w0, w1, v1 = range_of(ranges, i_tile)
    if not RAGGED:
        w1 = tl.minimum(w1, num_full)
    row, _, count = tile_of(q_tiles, i_tile)
    o_q, o_k = tl.arange(0, BQ), tl.arange(0, BK)
    m_q = o_q < count
    b_lo = tl.load(lo + row + o_q, mask=m_q, other=0)
    b_hi = tl.load(hi + row + o_q, mask=m_q, other=0)
    p_lse = lse + (i_bh.to(tl.int64) * num_rows + row)
    b_acc0, b_acc1, b_max, b_sum = start_from(state, p_lse, i_b, i_h, row, count, m_q, BQ, D0, D1, FIRST)
    b_q0 = load(q, i_b, i_h, row, count, BQ, 0, D0, UPCAST)
    if D1:
        b_q1 = load(q, i_b, i_h, row, count, BQ, D0, D1, UPCAST)

    for i_k in tl.range(v0, v1):
        start = i_k * BK
        partial = (i_k < w0) | (i_k >= w1)
        if RAGGED:
            start, _, key_count = tile_of(k_tiles, i_k)
            partial = partial | (key_count < BK)
        b_k0 = stream(k_desc0, k, i_b, i_g, start, num_keys, BK, 0, D0, UPCAST)
        b_s = tl.dot(b_q0, b_k0.T, input_precision=PRECISION)
        if D1:
            b_k1 = stream(k_desc1, k, i_b, i_g, start, num_keys, BK, D0, D1, UPCAST)
            b_s = tl.dot(b_q1, b_k1.T, b_s, input_precision=PRECISION)
        if CAP:
            b_s = capped(b_s, cap_scale)
        if partial:
            _, position, seen = tile_of(k_tiles, i_k)
            b_end = tl.minimum(b_hi - position, seen)
            m_s = (o_k[None, :] >= (b_lo - position)[:, None]) & (o_k[None, :] < b_end[:, None])
            b_s = tl.where(m_s, b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1) * scale_log2)
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2(b_s * scale_log2 - b_safe[:, None])
        b_shrink = tl.exp2(b_max - b_safe)
        b_sum = b_sum * b_shrink + tl.sum(b_p, 1)
        b_max = b_new
        b_v0 = stream(v_desc0, v, i_b, i_g, start, num_keys, BK, 0, D0, UPCAST)
        b_p = b_p.to(b_v0.dtype)
        b_acc0 = tl.dot(b_p, b_v0, b_acc0 * b_shrink[:, None], input_precision=PRECISION)
        if D1:
            b_v1 = stream(v_desc1, v, i_b, i_g, start, num_keys, BK, D0, D1, UPCAST)
            b_acc1 = tl.dot(b_p, b_v1, b_acc1 * b_shrink[:, None], input_precision=PRECISION)

    # read again, so that no address computed before the loop stays alive in it: 25 registers a thread
    row = tl.load(q_tiles + 3 * i_tile, volatile=True)
    b_empty = b_sum == 0.0
    b_sum = tl.where(b_empty, 1.0, b_sum)
    tl.store(p_lse + o_q, tl.where(b_empty, float("-inf"), (b_max + tl.log2(b_sum)) * LN2), mask=m_q)
    target = out if LAST else state
    store(target, b_acc0 / b_sum[:, None], i_b, i_h, row, count, BQ, 0, D0)
    if D1:
        store(target, b_acc1 / b_sum[:, None], i_b, i_h, row, count, BQ, D0, D1)
