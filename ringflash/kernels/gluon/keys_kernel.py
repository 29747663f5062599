"""The kernel of the key and value gradients for sm_90: one key tile against the query tiles that see it.

Device code only. A program is two consumers of four warps, each with 64 keys and their dk, dv in registers, and one
producer warp that fills rings of query tiles (q, dout and two or four numbers a row) by TMA. Scores are computed
transposed, keys x queries, so that P and dS are already operands of dv and dk: no product is transposed anywhere. The
accumulator of S^T = K Q^T starts at -lse / scale, or -inf where the mask hides the pair, and that of dP^T = V dO^T at
-delta: mask, lse and delta cost no register and no instruction in the loop. `row_starts` makes these numbers, tile by
tile, with -inf behind a short tile's end, so that tails are masked as well.
Source: FlashAttention-3, arXiv:2407.08608.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .ends import load_rows, store_rows
from .walk import (
    arrive_free,
    job_and_head,
    matrix,
    new_barriers,
    new_ring,
    tile_at,
    tma_load,
    wait_full,
)


@triton.jit(do_not_specialize=["num_tiles", "num_rows"])
def row_starts(lse, delta, q_tiles, starts, per_scale, num_tiles, num_rows, BQ: tl.constexpr):
    """What the accumulators of S^T and dP^T start at: starts [B, H, num_tiles, 2, BQ] fp32. per_scale: 1 / scale.

    Rows behind a tile's end and rows that see nothing get -inf and 0.
    """
    i_tile = tl.program_id(0) % num_tiles
    i_bh = tl.program_id(0) // num_tiles
    row = tl.load(q_tiles + 3 * i_tile)
    o_q = tl.arange(0, BQ)
    m_q = o_q < tl.load(q_tiles + 3 * i_tile + 2)
    o_row = i_bh.to(tl.int64) * num_rows + row + o_q
    b_lse = tl.load(lse + o_row, mask=m_q, other=float("-inf"))
    b_delta = tl.load(delta + o_row, mask=m_q, other=0.0)
    b_empty = b_lse == float("-inf")
    o_out = tl.program_id(0).to(tl.int64) * 2 * BQ + o_q
    tl.store(starts + o_out, tl.where(b_empty, float("-inf"), -b_lse * per_scale))
    tl.store(starts + BQ + o_out, tl.where(b_empty, 0.0, -b_delta))


@gluon.jit
def tile_of_step(walk, i, PLAIN: gl.constexpr):
    """The i-th masked query tile, or the i-th of the others. The order of these starts at another place in each
    program, so that programs which run side by side do not all add to the same rows of dq at once."""
    v0, f0, f1, v1, shift = walk
    if PLAIN:
        count = f1 - f0
        return f0 + gl.where(i < count - shift, i + shift, i + shift - count)
    else:
        return tile_at(i, v0, f0, f1, v1)


@gluon.jit
def positions_of(position, count, C: gl.constexpr, TL: gl.constexpr):
    """The positions of consumer C's 64 keys; behind a short tile's end one that no query sees."""
    o_key = C * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, TL))
    return gl.where(o_key < count, position + o_key, 2147483647)


@gluon.jit
def num_steps_of(walk, PLAIN: gl.constexpr):
    """How many query tiles of a head are masked, or are not."""
    v0, f0, f1, v1, _ = walk
    return f1 - f0 if PLAIN else v1 - v0 - (f1 - f0)


@gluon.jit
def _fill_step(descs, rings, barriers, at_head, i_tile, q_tiles, num_tiles, t, STAGES: gl.constexpr):
    """Fill the buffers of step t. lo and hi, which only masked steps and the first read, are too small to leave out."""
    q_desc, dout_desc, starts_desc, bounds_desc = descs
    q_s, dout_s, starts_s, bounds_s = rings
    q_full, dout_full, free = barriers
    i_b, i_head, num_heads = at_head
    BQ: gl.constexpr = q_desc.block_type.shape[2]
    row = gl.load(q_tiles + 3 * i_tile)
    stage = t % STAGES
    mbarrier.wait(free.index(stage), ((t // STAGES) & 1) ^ 1)
    mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes + 16 * BQ)
    tma_load(q_desc, [i_b, i_head, row, 0], q_full.index(stage), q_s.index(stage))
    at = ((i_b * num_heads + i_head) * num_tiles + i_tile) * 2 * BQ
    tma_load(starts_desc, [at], q_full.index(stage), starts_s.index(stage))
    tma_load(bounds_desc, [i_tile * 2 * BQ], q_full.index(stage), bounds_s.index(stage))
    mbarrier.expect(dout_full.index(stage), dout_desc.block_type.nbytes)
    tma_load(dout_desc, [i_b, i_head, row, 0], dout_full.index(stage), dout_s.index(stage))


@gluon.jit
def fill_keys(k_desc, v_desc, k_s, v_s, kv_full, head, k_row):
    i_b, i_h, _, group = head
    mbarrier.expect(kv_full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    tma_load(k_desc, [i_b, i_h // group, k_row, 0], kv_full, k_s)
    tma_load(v_desc, [i_b, i_h // group, k_row, 0], kv_full, v_s)


@gluon.jit
def fill_steps(descs, rings, barriers, walk, head, q_tiles, num_tiles, past, STAGES: gl.constexpr):
    """Masked tiles of all heads first, then the others. past: the program's steps before this job's."""
    i_b, i_h, num_heads, group = head
    t = past
    for PLAIN in gl.static_range(2):
        for i_head in range(i_h, i_h + group):
            for i in range(num_steps_of(walk, PLAIN)):
                i_tile = tile_of_step(walk, i, PLAIN)
                _fill_step(descs, rings, barriers, (i_b, i_head, num_heads), i_tile, q_tiles, num_tiles, t, STAGES)
                t += 1


@gluon.jit
def producer(
    descs, k_desc, v_desc, rings, barriers, k_s, v_s, kv_full, walk, head, q_tiles, num_tiles, k_row,
    STAGES: gl.constexpr,
):  # fmt: skip
    fill_keys(k_desc, v_desc, k_s, v_s, kv_full, head, k_row)
    fill_steps(descs, rings, barriers, walk, head, q_tiles, num_tiles, 0, STAGES)


@gluon.jit
def columns(x, TL: gl.constexpr):
    """One number a query, [BQ], repeated over the keys: [64, BQ]."""
    BQ: gl.constexpr = x.shape[0]
    return gl.broadcast(x.load(gl.SliceLayout(0, TL))[None, :], gl.zeros([64, BQ], gl.float32, TL))[0]


@gluon.jit
def issue_scores(
    rings, k_half, q_full, b_key, t, more, MASK: gl.constexpr, STAGES: gl.constexpr, TL: gl.constexpr
):  # fmt: skip
    """Start S^T(t) = K Q^T - lse / scale. Behind the last step (more is 0) it multiplies stale data nobody reads."""
    q_s, _, starts_s, bounds_s = rings
    BQ: gl.constexpr = q_s.shape[3]
    stage = t % STAGES
    mbarrier.wait(q_full.index(stage), (t // STAGES) & 1, pred=more)
    b_s = columns(starts_s.index(stage).slice(0, BQ), TL)
    if MASK:
        b_lo = bounds_s.index(stage).slice(0, BQ).load(gl.SliceLayout(0, TL))[None, :]
        b_hi = bounds_s.index(stage).slice(BQ, BQ).load(gl.SliceLayout(0, TL))[None, :]
        b_s = gl.where((b_key[:, None] >= b_lo) & (b_key[:, None] < b_hi), b_s, float("-inf"))
    return warpgroup_mma(k_half, matrix(q_s.index(stage)).permute([1, 0]), b_s, is_async=True)


@gluon.jit
def _step(
    rings, barriers, k_half, v_half, b_s, b_dk, b_dv, b_key, t, num_steps, scale_log2,
    MASK: gl.constexpr, STAGES: gl.constexpr, TL: gl.constexpr, KL: gl.constexpr,
):  # fmt: skip
    """Add query tile t to dk and dv. On entry b_s is S^T(t), on exit S^T(t + 1); MASK: of t + 1.

    No product may be in flight over the loop's back edge: ptxas then serialises every product of the kernel.
    """
    q_s, dout_s, starts_s, _ = rings
    BQ: gl.constexpr = q_s.shape[3]
    q_full, dout_full, free = barriers
    AL: gl.constexpr = gl.DotOperandLayout(0, KL, 2)
    stage = t % STAGES
    b_dout = matrix(dout_s.index(stage))
    wait_full(dout_full, t, STAGES)
    b_dp = columns(starts_s.index(stage).slice(BQ, BQ), TL)
    b_dp = warpgroup_mma(v_half, b_dout.permute([1, 0]), b_dp, is_async=True)
    b_p = gl.exp2(b_s * scale_log2)
    b_pa = gl.convert_layout(b_p.to(q_s.dtype), AL)
    b_dv = warpgroup_mma(b_pa, b_dout, b_dv, is_async=True)
    b_dp = warpgroup_mma_wait(1, deps=[b_dp])
    b_dsa = gl.convert_layout((b_p * b_dp).to(q_s.dtype), AL)
    b_dk = warpgroup_mma(b_dsa, matrix(q_s.index(stage)), b_dk, is_async=True)
    if MASK:  # the mask needs registers that the operands still hold
        b_dk, b_dv, b_pa, b_dsa = warpgroup_mma_wait(0, deps=[b_dk, b_dv, b_pa, b_dsa])
        b_s = issue_scores(rings, k_half, q_full, b_key, t + 1, t + 1 < num_steps, MASK, STAGES, TL)
    else:
        b_s = issue_scores(rings, k_half, q_full, b_key, t + 1, t + 1 < num_steps, MASK, STAGES, TL)
        b_dk, b_dv, b_pa, b_dsa = warpgroup_mma_wait(1, deps=[b_dk, b_dv, b_pa, b_dsa])
    arrive_free(free, t, STAGES)
    b_s = warpgroup_mma_wait(0, deps=[b_s])
    return b_s, b_dk, b_dv


@gluon.jit
def new_buffers(q_desc, k_desc, v_desc, dout_desc, starts_desc, bounds_desc, STAGES: gl.constexpr):
    """(rings, their barriers, k, v, barrier of k and v)."""
    k_s = gl.allocate_shared_memory(k_desc.dtype, k_desc.block_type.shape, k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, v_desc.block_type.shape, v_desc.layout)
    kv_full = new_barriers(1, 1).index(0)
    q_s, q_full, free = new_ring(q_desc, STAGES, 2)
    dout_s = gl.allocate_shared_memory(dout_desc.dtype, q_s.shape, dout_desc.layout)
    starts_s = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * q_desc.block_type.shape[2]], starts_desc.layout)
    bounds_s = gl.allocate_shared_memory(gl.int32, [STAGES, 2 * q_desc.block_type.shape[2]], bounds_desc.layout)
    rings = (q_s, dout_s, starts_s, bounds_s)
    return rings, (q_full, new_barriers(STAGES, 1), free), k_s, v_s, kv_full


@gluon.jit
def store_gradients(
    grads, b_dk, b_dv, C: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, ADDS: gl.constexpr
):  # fmt: skip
    """Write the rows of consumer C, or add to them, which are fp32 then. A row of a key is one program's alone.

    grads: pointers to the tile's first row of dk and dv, their strides, its rows
    """
    p_dk, p_dv, dk_row, dv_row, count = grads
    KL: gl.constexpr = b_dk.type.layout
    if ADDS:
        b_dv += load_rows(p_dv, dv_row, count, C, D, WIDTH, KL)
    store_rows(b_dv, p_dv, dv_row, count, C, D, WIDTH)
    if ADDS:
        b_dk += load_rows(p_dk, dk_row, count, C, D, WIDTH, KL)
    store_rows(b_dk, p_dk, dk_row, count, C, D, WIDTH)


@gluon.jit
def _consumer(
    rings, barriers, k_s, v_s, kv_full, num_steps, first_plain, position, grads, scale, scale_log2,
    C: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, ADDS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Keys 64 C ... 64 C + 63 of the tile. grads: see `store_gradients`."""
    TL: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, rings[0].shape[3], 16]
    )
    KL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    k_half = matrix(k_s).slice(C * 64, 64, dim=0)
    v_half = matrix(v_s).slice(C * 64, 64, dim=0)
    q_full, _, _ = barriers
    b_key = positions_of(position, grads[4], C, TL)
    b_dk = gl.zeros([64, D], gl.float32, KL)
    b_dv = gl.zeros([64, D], gl.float32, KL)
    mbarrier.wait(kv_full, 0)
    if num_steps > 0:
        b_s = issue_scores(rings, k_half, q_full, b_key, 0, True, True, STAGES, TL)
        b_s = warpgroup_mma_wait(0, deps=[b_s])
        for t in range(0, first_plain - 1):
            b_s, b_dk, b_dv = _step(
                rings, barriers, k_half, v_half, b_s, b_dk, b_dv, b_key, t, num_steps, scale_log2,
                True, STAGES, TL, KL)  # fmt: skip
        for t in range(first_plain - 1, num_steps):
            b_s, b_dk, b_dv = _step(
                rings, barriers, k_half, v_half, b_s, b_dk, b_dv, b_key, t, num_steps, scale_log2,
                False, STAGES, TL, KL)  # fmt: skip
    store_gradients(grads, b_dk * scale, b_dv, C, D, WIDTH, ADDS)


@gluon.jit
def key_tile(job, i_b, i_g, dk, dv, num_groups, group):
    """What a job of a batch entry and key head is: (its first key, the position of that, walk, head, grads).

    walk: see `tile_of_step`; head: (batch entry, first query head of the group, query heads, heads of the group);
    grads: see `store_gradients`
    """
    row, position, count, v0, f0, f1, v1, shift = job
    p_dk = dk[0] + (i_b.to(gl.int64) * dk[1] + row.to(gl.int64) * dk[2] + i_g.to(gl.int64) * dk[3])
    p_dv = dv[0] + (i_b.to(gl.int64) * dv[1] + row.to(gl.int64) * dv[2] + i_g.to(gl.int64) * dv[3])
    head = (i_b, i_g * group, num_groups * group, group)
    return row, position, (v0, f0, f1, v1, shift), head, (p_dk, p_dv, dk[2], dv[2], count)


@gluon.jit
def steps_of(walk, group):
    """(how many steps all query heads make, how many of them, the first at least, are masked)."""
    num_masked = num_steps_of(walk, False) * group
    num_steps = num_masked + num_steps_of(walk, True) * group
    return num_steps, gl.minimum(gl.maximum(num_masked, 1), num_steps)


@gluon.jit(do_not_specialize=["num_tiles", "num_q_tiles", "num_groups", "group", "section"])
def keys(
    q_desc, k_desc, v_desc, dout_desc, starts_desc, bounds_desc, dk, dv,
    q_tiles, jobs, scale, scale_log2, num_tiles, num_q_tiles, num_groups, group, section,
    D: gl.constexpr, WIDTH: gl.constexpr, ADDS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Write dk and dv of one (key tile, batch, key head): all query heads of its group, all query tiles that see it.

    *_desc: [B, H or G, N, D] in boxes of BQ queries or 128 keys; starts: of `row_starts`, flat; bounds: lo and hi
    likewise, int32 [num_q_tiles, 2, BQ]; section: see `job_and_head`. Rows that nobody sees are written as 0. ADDS: add
    to dk and dv, which are fp32.
    """
    job, i_bg = job_and_head(jobs, num_tiles, section)
    row, position, walk, head, grads = key_tile(job, i_bg // num_groups, i_bg % num_groups, dk, dv, num_groups, group)
    num_steps, first_plain = steps_of(walk, group)

    rings, barriers, k_s, v_s, kv_full = new_buffers(
        q_desc, k_desc, v_desc, dout_desc, starts_desc, bounds_desc, STAGES
    )
    fence_async_shared()
    descs = (q_desc, dout_desc, starts_desc, bounds_desc)
    gl.warp_specialize([
        (_consumer, (rings, barriers, k_s, v_s, kv_full, num_steps, first_plain, position, grads, scale,
                     scale_log2, 0, D, WIDTH, ADDS, STAGES)),
        (_consumer, (rings, barriers, k_s, v_s, kv_full, num_steps, first_plain, position, grads, scale,
                     scale_log2, 1, D, WIDTH, ADDS, STAGES)),
        (producer, (descs, k_desc, v_desc, rings, barriers, k_s, v_s, kv_full, walk, head, q_tiles, num_q_tiles, row,
                    STAGES)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip
