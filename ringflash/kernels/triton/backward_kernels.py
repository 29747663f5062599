"""The backward kernels: delta, the key and value gradients, the query gradient. Device code only.

Two gradient kernels and no atomics, so the result is the same bits in every run. The scores are computed again in each:
7 products for the 5 of a fused kernel. `keys` computes S^T = K Q^T and dP^T = V dO^T directly, because a product whose
operand is a transposed product is compiled wrongly by Triton 3.4 to 3.7 (flash-linear-attention#640).
Source: FlashAttention-2, arXiv:2307.08691; there `D` is our delta.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rows import LOG2E, capped, load, range_of, store, stream, stream_numbers, tile_of


@triton.jit(do_not_specialize=["num_tiles", "num_heads", "num_rows"])
def row_sums(
    out, dout, dlse, delta, dlse_b, dlse_h, dlse_l, num_tiles, num_heads, num_rows,
    D0: tl.constexpr, D1: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """delta = sum over D of out * dout, minus dlse, in fp32 [B, H, L]. dlse: None, or a pointer with three strides."""
    row = tl.program_id(0) % num_tiles * BQ
    i_bh = tl.program_id(0) // num_tiles
    i_b, i_h = i_bh // num_heads, i_bh % num_heads
    count = num_rows - row
    o_q = tl.arange(0, BQ)
    m_q = o_q < count
    b_out = load(out, i_b, i_h, row, count, BQ, 0, D0, True)
    b_delta = tl.sum(b_out * load(dout, i_b, i_h, row, count, BQ, 0, D0, True), 1)
    if D1:
        b_out = load(out, i_b, i_h, row, count, BQ, D0, D1, True)
        b_delta += tl.sum(b_out * load(dout, i_b, i_h, row, count, BQ, D0, D1, True), 1)
    if dlse is not None:
        p_dlse = dlse + i_b.to(tl.int64) * dlse_b + i_h.to(tl.int64) * dlse_h + (row + o_q).to(tl.int64) * dlse_l
        b_delta -= tl.load(p_dlse, mask=m_q, other=0.0).to(tl.float32)
    tl.store(delta + (i_bh.to(tl.int64) * num_rows + row) + o_q, b_delta, mask=m_q)


@triton.jit
def _rows_of(lse, delta, row, count, BQ: tl.constexpr):
    """(lse in base 2, delta) of the rows of a tile. A row that sees nothing gets +inf and 0, so that p and ds are 0."""
    o_q = tl.arange(0, BQ)
    b_lse = tl.load(lse + row + o_q, mask=o_q < count, other=float("-inf"))
    b_delta = tl.load(delta + row + o_q, mask=o_q < count, other=0.0)
    b_empty = b_lse == float("-inf")
    return tl.where(b_empty, float("inf"), b_lse) * LOG2E, tl.where(b_empty, 0.0, b_delta)


@triton.jit
def _keys_step(
    b_dk0, b_dk1, b_dv0, b_dv1, b_k0, b_k1, b_v0, b_v1, b_key, i_q, q, dout, q_desc0, q_desc1, dout_desc0, dout_desc1,
    lse_desc, delta_desc, lo_desc, hi_desc, lse, delta, lo, hi, o_head, q_tiles, i_b, i_h, num_rows,
    scale_log2, cap_scale, D0: tl.constexpr, D1: tl.constexpr, BQ: tl.constexpr,
    MASK: tl.constexpr, CAP: tl.constexpr, RAGGED: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one query tile to dk and dv of one key tile; without MASK the tile is full and seen whole."""
    row, count = i_q * BQ, BQ
    if MASK:
        start, _, count = tile_of(q_tiles, i_q)
        if RAGGED:
            row = start
    o_q = tl.arange(0, BQ)
    m_q = o_q < count
    b_q0 = stream(q_desc0, q, i_b, i_h, row, num_rows, BQ, 0, D0, UPCAST)
    b_s = tl.dot(b_k0, b_q0.T, input_precision=PRECISION)
    if D1:
        b_q1 = stream(q_desc1, q, i_b, i_h, row, num_rows, BQ, D0, D1, UPCAST)
        b_s = tl.dot(b_k1, b_q1.T, b_s, input_precision=PRECISION)
    if CAP:
        b_s = capped(b_s, cap_scale)
        b_slope = 1.0 - b_s * b_s
    b_lse = stream_numbers(lse_desc, lse, o_head + row, count, BQ) * LOG2E
    b_s = b_s * scale_log2 - b_lse[None, :]
    if MASK:
        # the rows behind `count` and the rows that see nothing (lse = -inf) have no key between lo and hi
        b_lo = stream_numbers(lo_desc, lo, row, count, BQ)
        b_hi = stream_numbers(hi_desc, hi, row, count, BQ)
        b_s = tl.where((b_key[:, None] >= b_lo[None, :]) & (b_key[:, None] < b_hi[None, :]), b_s, float("-inf"))
    b_p = tl.exp2(b_s)
    b_do0 = stream(dout_desc0, dout, i_b, i_h, row, num_rows, BQ, 0, D0, UPCAST)
    b_dv0 = tl.dot(b_p.to(b_do0.dtype), b_do0, b_dv0, input_precision=PRECISION)
    b_dp = tl.dot(b_v0, b_do0.T, input_precision=PRECISION)
    if D1:
        b_do1 = stream(dout_desc1, dout, i_b, i_h, row, num_rows, BQ, D0, D1, UPCAST)
        b_dv1 = tl.dot(b_p.to(b_do1.dtype), b_do1, b_dv1, input_precision=PRECISION)
        b_dp = tl.dot(b_v1, b_do1.T, b_dp, input_precision=PRECISION)
    b_delta = stream_numbers(delta_desc, delta, o_head + row, count, BQ)
    if MASK and delta_desc is not None:  # behind `count` stands a row of the next head, or of the padding
        b_delta = tl.where(m_q, b_delta, 0.0)
    b_ds = b_p * (b_dp - b_delta[None, :])
    if CAP:
        b_ds *= b_slope
    b_ds = b_ds.to(b_q0.dtype)
    b_dk0 = tl.dot(b_ds, b_q0, b_dk0, input_precision=PRECISION)
    if D1:
        b_dk1 = tl.dot(b_ds, b_q1, b_dk1, input_precision=PRECISION)
    return b_dk0, b_dk1, b_dv0, b_dv1


@triton.jit
def _give(
    x, b_x, i_b, i_h, row, count, ROWS: tl.constexpr, COLUMN: tl.constexpr, WIDTH: tl.constexpr, ADDS: tl.constexpr
):
    """Write a tile of a gradient, or add to it."""
    if ADDS:
        b_x += load(x, i_b, i_h, row, count, ROWS, COLUMN, WIDTH, False)
    store(x, b_x, i_b, i_h, row, count, ROWS, COLUMN, WIDTH)


@triton.jit(do_not_specialize=["num_tiles", "num_full", "num_groups", "group", "num_rows", "head_stride", "skipped"])
def keys(
    q, k, v, dout, q_desc0, q_desc1, dout_desc0, dout_desc1, lse_desc, delta_desc, lo_desc, hi_desc,
    dk, dv, lse, delta, lo, hi, q_tiles, k_tiles, ranges, order,
    scale, scale_log2, cap_scale, num_tiles, num_full, num_groups, group, num_rows, head_stride, skipped,
    D0: tl.constexpr, D1: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, ADDS: tl.constexpr,
    CAP: tl.constexpr, RAGGED: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dk and dv of one (key tile, batch, key head): all query heads of its group, all query tiles that see it.

    ADDS: add to dk and dv, which are fp32
    RAGGED, num_full: as in `forward_kernel.attend`, of the query tiles. Rows that nobody sees are written as 0.
    lse_desc to hi_desc: one dimension in boxes of BQ; or None, all four, as where RAGGED
    head_stride, skipped: rows from one head to the next in lse and delta, and those of each before q begins
    """
    i_tile = tl.load(order + tl.program_id(0) % num_tiles)
    i_bg = tl.program_id(0) // num_tiles
    i_b, i_g = i_bg // num_groups, i_bg % num_groups
    v0, w0, w1, v1 = range_of(ranges, i_tile)
    if RAGGED:
        w0, w1 = v0, v0
    else:
        w1 = tl.maximum(tl.minimum(w1, num_full), w0)
    row, position, count = tile_of(k_tiles, i_tile)
    b_key = position + tl.arange(0, BK)
    b_k0 = load(k, i_b, i_g, row, count, BK, 0, D0, UPCAST)
    b_v0 = load(v, i_b, i_g, row, count, BK, 0, D0, UPCAST)
    b_k1 = load(k, i_b, i_g, row, count, BK, D0, D1, UPCAST) if D1 else b_k0
    b_v1 = load(v, i_b, i_g, row, count, BK, D0, D1, UPCAST) if D1 else b_v0
    b_dk0 = tl.zeros([BK, D0], tl.float32)
    b_dv0 = tl.zeros([BK, D0], tl.float32)
    b_dk1 = tl.zeros([BK, D1 if D1 else D0], tl.float32)
    b_dv1 = tl.zeros([BK, D1 if D1 else D0], tl.float32)
    for i_h in range(i_g * group, i_g * group + group):
        o_head = (i_b * num_groups * group + i_h).to(tl.int64) * head_stride + skipped
        # first the tiles that are full and seen whole, then those on both sides of them
        for MASK in tl.static_range(2):
            begin, end = (0, w0 - v0 + v1 - w1) if MASK else (w0, w1)
            for i in tl.range(begin, end):
                i_q = i + tl.where(i < w0 - v0, v0, w1 - (w0 - v0)) if MASK else i
                b_dk0, b_dk1, b_dv0, b_dv1 = _keys_step(
                    b_dk0, b_dk1, b_dv0, b_dv1, b_k0, b_k1, b_v0, b_v1, b_key, i_q, q, dout, q_desc0, q_desc1,
                    dout_desc0, dout_desc1, lse_desc, delta_desc, lo_desc, hi_desc, lse, delta, lo, hi, o_head,
                    q_tiles, i_b, i_h, num_rows, scale_log2, cap_scale, D0, D1, BQ, MASK, CAP, RAGGED, UPCAST,
                    PRECISION)  # fmt: skip
    _give(dk, b_dk0 * scale, i_b, i_g, row, count, BK, 0, D0, ADDS)
    _give(dv, b_dv0, i_b, i_g, row, count, BK, 0, D0, ADDS)
    if D1:
        _give(dk, b_dk1 * scale, i_b, i_g, row, count, BK, D0, D1, ADDS)
        _give(dv, b_dv1, i_b, i_g, row, count, BK, D0, D1, ADDS)


@triton.jit
def _queries_step(
    b_dq0, b_dq1, b_q0, b_q1, b_do0, b_do1, b_lse, b_delta, b_lo, b_hi, i_k, k, v, k_desc0, k_desc1, v_desc0, v_desc1,
    k_tiles, i_b, i_g, num_keys, scale_log2, cap_scale, D0: tl.constexpr, D1: tl.constexpr, BK: tl.constexpr,
    MASK: tl.constexpr, CAP: tl.constexpr, RAGGED: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one key tile to dq of one query tile; without MASK the tile is full and seen whole."""
    row = i_k * BK
    if MASK:
        start, position, count = tile_of(k_tiles, i_k)
        if RAGGED:
            row = start
    b_k0 = stream(k_desc0, k, i_b, i_g, row, num_keys, BK, 0, D0, UPCAST)
    b_s = tl.dot(b_q0, b_k0.T, input_precision=PRECISION)
    if D1:
        b_k1 = stream(k_desc1, k, i_b, i_g, row, num_keys, BK, D0, D1, UPCAST)
        b_s = tl.dot(b_q1, b_k1.T, b_s, input_precision=PRECISION)
    if CAP:
        b_s = capped(b_s, cap_scale)
        b_slope = 1.0 - b_s * b_s
    b_s = b_s * scale_log2 - b_lse[:, None]
    if MASK:
        o_k = tl.arange(0, BK)
        b_end = tl.minimum(b_hi - position, count)
        m_s = (o_k[None, :] >= (b_lo - position)[:, None]) & (o_k[None, :] < b_end[:, None])
        b_s = tl.where(m_s, b_s, float("-inf"))
    b_p = tl.exp2(b_s)
    b_v0 = stream(v_desc0, v, i_b, i_g, row, num_keys, BK, 0, D0, UPCAST)
    b_dp = tl.dot(b_do0, b_v0.T, input_precision=PRECISION)
    if D1:
        b_v1 = stream(v_desc1, v, i_b, i_g, row, num_keys, BK, D0, D1, UPCAST)
        b_dp = tl.dot(b_do1, b_v1.T, b_dp, input_precision=PRECISION)
    b_ds = b_p * (b_dp - b_delta[:, None])
    if CAP:
        b_ds *= b_slope
    b_ds = b_ds.to(b_k0.dtype)
    b_dq0 = tl.dot(b_ds, b_k0, b_dq0, input_precision=PRECISION)
    if D1:
        b_dq1 = tl.dot(b_ds, b_k1, b_dq1, input_precision=PRECISION)
    return b_dq0, b_dq1


@triton.jit(do_not_specialize=["num_tiles", "num_full", "num_heads", "group", "head_stride", "skipped", "num_keys"])
def queries(
    q, k, v, dout, k_desc0, k_desc1, v_desc0, v_desc1, dq, lse, delta, lo, hi, q_tiles, k_tiles, ranges, order,
    scale, scale_log2, cap_scale, num_tiles, num_full, num_heads, group, head_stride, skipped, num_keys,
    D0: tl.constexpr, D1: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    CAP: tl.constexpr, RAGGED: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add up dq of one (query tile, batch, head) over all key tiles that it sees: added to fp32, written to half types.

    RAGGED, num_full: as in the forward. head_stride, skipped: as in `keys`.
    """
    i_tile = tl.load(order + tl.program_id(0) % num_tiles)
    i_bh = tl.program_id(0) // num_tiles
    i_b, i_h = i_bh // num_heads, i_bh % num_heads
    i_g = i_h // group
    v0, w0, w1, v1 = range_of(ranges, i_tile)
    if RAGGED:
        w0, w1 = v0, v0
    else:
        w1 = tl.maximum(tl.minimum(w1, num_full), w0)
    row, _, count = tile_of(q_tiles, i_tile)
    o_q = tl.arange(0, BQ)
    m_q = o_q < count
    b_lo = tl.load(lo + row + o_q, mask=m_q, other=0)
    b_hi = tl.load(hi + row + o_q, mask=m_q, other=0)
    o_head = i_bh.to(tl.int64) * head_stride + skipped
    b_lse, b_delta = _rows_of(lse + o_head, delta + o_head, row, count, BQ)
    b_q0 = load(q, i_b, i_h, row, count, BQ, 0, D0, UPCAST)
    b_do0 = load(dout, i_b, i_h, row, count, BQ, 0, D0, UPCAST)
    b_q1 = load(q, i_b, i_h, row, count, BQ, D0, D1, UPCAST) if D1 else b_q0
    b_do1 = load(dout, i_b, i_h, row, count, BQ, D0, D1, UPCAST) if D1 else b_do0
    b_dq0 = tl.zeros([BQ, D0], tl.float32)
    b_dq1 = tl.zeros([BQ, D1 if D1 else D0], tl.float32)
    for MASK in tl.static_range(2):
        begin, end = (0, w0 - v0 + v1 - w1) if MASK else (w0, w1)
        for i in tl.range(begin, end):
            i_k = i + tl.where(i < w0 - v0, v0, w1 - (w0 - v0)) if MASK else i
            b_dq0, b_dq1 = _queries_step(
                b_dq0, b_dq1, b_q0, b_q1, b_do0, b_do1, b_lse, b_delta, b_lo, b_hi, i_k, k, v, k_desc0, k_desc1,
                v_desc0, v_desc1, k_tiles, i_b, i_g, num_keys, scale_log2, cap_scale, D0, D1, BK, MASK, CAP, RAGGED,
                UPCAST, PRECISION)  # fmt: skip
    # a half type is what one hop, being all there is, writes
    ADDS: tl.constexpr = dq[0].dtype.element_ty == tl.float32
    _give(dq, b_dq0 * scale, i_b, i_h, row, count, BQ, 0, D0, ADDS)
    if D1:
        _give(dq, b_dq1 * scale, i_b, i_h, row, count, BQ, D0, D1, ADDS)
