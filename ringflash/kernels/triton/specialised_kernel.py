"""The forward kernel whose copies and products lie on different warps: Triton's own warp specialisation. Device code.

One loop, in which every key tile is whole, or every one is masked from above. Triton 3.6 splits it into one warp group
that copies and two that compute 64 rows each, but only a loop of this form: keys and values by the host's descriptors;
queries by a descriptor made here, in two dimensions, because the split shifts its first coordinate; numbers of the rows
by loads that the compiler cannot see. What it makes of other forms may be wrong without an error, so nothing here is
used before `specialised.fault` has looked at the numbers of the very configuration.
Source: FlashAttention-3, arXiv:2407.08608 (specialised warps).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .forward_kernel import start_from
from .rows import LN2, load, range_of, store, stream, tile_of


@triton.jit
def _unseen(p_x, SPECIALISED: tl.constexpr):
    """tl.load of int32 that the compiler does not know for a load: one beside the loop makes its splitting abort."""
    if SPECIALISED:
        return tl.inline_asm_elementwise("ld.global.b32 $0, [$1];", "=r,l", [p_x], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return tl.load(p_x)


@triton.jit(do_not_specialize=["num_tiles", "num_heads", "group", "num_rows", "num_keys"])
def attend(
    q, k, v, k_desc, v_desc, state, out, lse, ends, q_tiles, ranges, order,
    scale_log2, num_tiles, num_heads, group, num_rows, num_keys,
    D0: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    MASK: tl.constexpr, SPECIALISED: tl.constexpr,
):  # fmt: skip
    """As `forward_kernel.attend`, for views of which every query tile sees [v0, v1) whole, or with MASK up to `ends`.

    ends: int32 [L + BQ]: how many of the visiting keys, from the first on, the row sees. Key tile i starts at i * BK.
    SPECIALISED: False is the same loop without the split, for the interpreter.
    """
    i_tile = tl.load(order + tl.program_id(0) % num_tiles)
    i_bh = tl.program_id(0) // num_tiles
    i_b, i_h = i_bh // num_heads, i_bh % num_heads
    i_g = i_h // group
    v0, _, _, v1 = range_of(ranges, i_tile)
    row, _, count = tile_of(q_tiles, i_tile)
    o_q, o_k = tl.arange(0, BQ), tl.arange(0, BK)
    m_q = o_q < count
    p_lse = lse + (i_bh.to(tl.int64) * num_rows + row)
    b_acc, _, b_max, b_sum = start_from(state, p_lse, i_b, i_h, row, count, m_q, BQ, D0, 0, FIRST)
    b_end = _unseen(ends + row + o_q, SPECIALISED) if MASK else o_q
    if SPECIALISED:
        p_q = q[0] + tl.cast(i_b, tl.int64) * q[1] + tl.cast(i_h, tl.int64) * q[3]
        b_q = tl.make_tensor_descriptor(p_q, [num_rows, D0], [q[2], 1], [BQ, D0]).load([row, 0])
    else:
        b_q = load(q, i_b, i_h, row, count, BQ, 0, D0, False)

    for i_k in tl.range(v0, v1, warp_specialize=SPECIALISED):
        start = i_k * BK
        b_k = stream(k_desc, k, i_b, i_g, start, num_keys, BK, 0, D0, False)
        b_s = tl.dot(b_q, b_k.T)
        if MASK:
            b_s = tl.where(o_k[None, :] < (b_end - start)[:, None], b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1) * scale_log2)
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2(b_s * scale_log2 - b_safe[:, None])
        b_shrink = tl.exp2(b_max - b_safe)
        b_sum = b_sum * b_shrink + tl.sum(b_p, 1)
        b_max = b_new
        b_v = stream(v_desc, v, i_b, i_g, start, num_keys, BK, 0, D0, False)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_shrink[:, None])

    b_empty = b_sum == 0.0
    b_sum = tl.where(b_empty, 1.0, b_sum)
    tl.store(p_lse + o_q, tl.where(b_empty, float("-inf"), (b_max + tl.log2(b_sum)) * LN2), mask=m_q)
    store(out if LAST else state, b_acc / b_sum[:, None], i_b, i_h, row, count, BQ, 0, D0)
