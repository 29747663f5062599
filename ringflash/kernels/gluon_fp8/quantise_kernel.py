"""Rounding to e4m3: keys and values of one hop as the forward reads them, and what they stand for. Device code only.

Every key tile of a head has a scale, and every query. Scales are powers of two: a format with an exponent loses nothing
by it, products of small integers stay exact, and what a rounded number stands for is exact in bfloat16.

Key tile i gets the slot i of BK rows, filled up with zeros, so that every tile starts where TMA may start. Values are
stored transposed, because wgmma wants both operands of 8 bits with their summed dimension innermost, and within each 16
keys in the order in which the registers of the scores lie (see `forward_kernel.packed`).
"""

from __future__ import annotations

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)
SMALLEST = tl.constexpr(2.0**-40)  # where the largest number is below, it is rounded as if it were this


@triton.jit
def log2_scale(largest):
    """Whole log2 of the scale by which the largest number becomes one that e4m3 still holds."""
    return tl.ceil(tl.log2(tl.maximum(largest, SMALLEST) / E4M3_MAX))


@triton.jit
def stored_key(o_position):
    """Which key of a tile stands at a position of the values: within 16, 8 w + 2 lane + e at 4 lane + 2 w + e."""
    return o_position // 16 * 16 + o_position // 2 % 2 * 8 + o_position // 4 % 4 * 2 + o_position % 2


@triton.jit
def _load(x, i_b, i_h, start, count, o_row, WIDTH: tl.constexpr, D: tl.constexpr):
    """Rows start + o_row of a head in fp32 [rows, D]: 0 from row start + count and from column WIDTH on."""
    o_d = tl.arange(0, D)
    p_row = x[0] + i_b.to(tl.int64) * x[1] + (start + o_row).to(tl.int64) * x[2] + i_h.to(tl.int64) * x[3]
    m_x = (o_row < count)[:, None] & (o_d < WIDTH)[None, :]
    return tl.load(p_row[:, None] + o_d[None, :], mask=m_x, other=0.0).to(tl.float32)


@triton.jit
def _tile_log2_scale(b_x):
    return log2_scale(tl.max(tl.max(tl.abs(b_x), 1), 0))


@triton.jit(do_not_specialize=["num_slots", "num_heads"])
def quantise(
    k, v, k8, v8, scales, k_tiles, num_slots, num_heads, WIDTH: tl.constexpr, D: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """One key tile of one head: k8 [B, G, num_slots BK, D], v8 [B, G, D, num_slots BK] and its two scales.

    k, v: as in `triton.rows`; scales: fp32 [B, G, num_slots, 2], of k the scale, of v its log2
    """
    i_tile = tl.program_id(0) % num_slots
    i_bg = tl.program_id(0) // num_slots
    i_b, i_g = i_bg // num_heads, i_bg % num_heads
    start = tl.load(k_tiles + 3 * i_tile)
    count = tl.load(k_tiles + 3 * i_tile + 2)
    o_k = tl.arange(0, BK)
    o_d = tl.arange(0, D)
    o_slot = (i_bg.to(tl.int64) * num_slots + i_tile) * BK
    b_k = _load(k, i_b, i_g, start, count, o_k, WIDTH, D)
    b_v = _load(v, i_b, i_g, start, count, stored_key(o_k), WIDTH, D)
    k_log = _tile_log2_scale(b_k)
    v_log = _tile_log2_scale(b_v)
    tl.store(k8 + (o_slot + o_k)[:, None] * D + o_d[None, :], (b_k * tl.exp2(-k_log)).to(tl.float8e4nv))
    p_v8 = v8 + i_bg.to(tl.int64) * num_slots * BK * D + i_tile.to(tl.int64) * BK
    o_v8 = o_d.to(tl.int64) * num_slots * BK
    tl.store(p_v8 + o_v8[:, None] + o_k[None, :], tl.trans((b_v * tl.exp2(-v_log)).to(tl.float8e4nv)))
    p_scales = scales + (i_bg.to(tl.int64) * num_slots + i_tile) * 2
    tl.store(p_scales, tl.exp2(k_log))
    tl.store(p_scales + 1, v_log)


@triton.jit(do_not_specialize=["num_tiles", "num_heads"])
def represent(
    x, y, tiles, num_tiles, num_heads,
    BY_ROW: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = what the rounded x stands for, of one tile of one head. x, y: as in `triton.rows`, of one type.

    BY_ROW: a scale for each row, as the queries have; else one for the tile, as keys and values
    """
    i_tile = tl.program_id(0) % num_tiles
    i_bh = tl.program_id(0) // num_tiles
    i_b, i_h = i_bh // num_heads, i_bh % num_heads
    start = tl.load(tiles + 3 * i_tile)
    count = tl.load(tiles + 3 * i_tile + 2)
    o_row = tl.arange(0, BLOCK)
    o_d = tl.arange(0, D)
    b_x = _load(x, i_b, i_h, start, count, o_row, WIDTH, D)
    b_log = log2_scale(tl.max(tl.abs(b_x), 1))[:, None] if BY_ROW else _tile_log2_scale(b_x)
    b_y = (b_x * tl.exp2(-b_log)).to(tl.float8e4nv).to(tl.float32) * tl.exp2(b_log)
    p_row = y[0] + i_b.to(tl.int64) * y[1] + (start + o_row).to(tl.int64) * y[2] + i_h.to(tl.int64) * y[3]
    m_y = (o_row < count)[:, None] & (o_d < WIDTH)[None, :]
    tl.store(p_row[:, None] + o_d[None, :], b_y.to(y[0].dtype.element_ty), mask=m_y)
