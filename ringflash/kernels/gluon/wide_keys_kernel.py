"""The kernel of the key and value gradients for sm_90 where a row has 256 columns. Device code only.

As `keys_kernel`, but dk and dv of 64 keys fill 128 registers of a thread each, so two consumers share 64 keys: one
computes S^T = K Q^T, P and dv += P dO, the other dP^T = V dO^T, dS and dk += dS Q. P is handed over in shared memory in
fp32. Each has two of the four products, and the second walks a little behind the first, so that one multiplies while
the other does not. No sum is shared: the bits repeat.

What waits for what, at step t: the first consumer needs q(t + 1) and dout(t), the second P(t), q(t) and dout(t + 1).
q(t) is free when dS(t) Q is done, because P(t) was there, and so S(t) done, before that began. For the same reason the
buffer of P(t) needs no barrier that says it is free: P(t + STAGES) is made from q(t + STAGES), which has q(t)'s place.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .ends import load_rows, store_out, store_rows
from .keys_kernel import columns, fill_keys, key_tile, num_steps_of, positions_of, steps_of, tile_of_step
from .walk import (
    arrive_free,
    job_and_head,
    matrix,
    new_barriers,
    new_ring,
    num_products,
    tma_load,
    wait_full,
    wide_product,
)


@triton.constexpr_function
def _as_threads_hold_it(rows, queries):
    """How P [64, queries] lies in shared memory: 4 numbers of a thread, then its neighbour's, without bank conflicts.

    Both consumers hold it alike, so what a thread reads is what the same thread of the other has written.
    """
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    others = [[0, 8 << i] for i in range((queries // 8).bit_length() - 1)]
    return gl.SharedLinearLayout([[0, 1], [8, 0], *lanes, [rows // 4, 0], [rows // 2, 0], *others])


@gluon.jit
def _fill_step(descs, rings, barriers, at_head, i_tile, q_tiles, num_tiles, t, STAGES: gl.constexpr):
    """Fill the buffers of step t: dout first, whose buffer is free first."""
    q_desc, dout_desc, starts_desc, bounds_desc = descs
    q_s, dout_s, lse_s, delta_s, bounds_s = rings
    q_full, q_free, dout_full, dout_free, _ = barriers
    i_b, i_head, num_heads = at_head
    BQ: gl.constexpr = q_desc.block_type.shape[2]
    row = gl.load(q_tiles + 3 * i_tile)
    at = ((i_b * num_heads + i_head) * num_tiles + i_tile) * 2 * BQ
    stage = t % STAGES
    phase = ((t // STAGES) & 1) ^ 1
    mbarrier.wait(dout_free.index(stage), phase)
    mbarrier.expect(dout_full.index(stage), dout_desc.block_type.nbytes + 4 * BQ)
    tma_load(dout_desc, [i_b, i_head, row, 0], dout_full.index(stage), dout_s.index(stage))
    tma_load(starts_desc, [at + BQ], dout_full.index(stage), delta_s.index(stage))
    mbarrier.wait(q_free.index(stage), phase)
    mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes + 12 * BQ)
    tma_load(q_desc, [i_b, i_head, row, 0], q_full.index(stage), q_s.index(stage))
    tma_load(starts_desc, [at], q_full.index(stage), lse_s.index(stage))
    tma_load(bounds_desc, [i_tile * 2 * BQ], q_full.index(stage), bounds_s.index(stage))


@gluon.jit
def _producer(
    descs, k_desc, v_desc, rings, barriers, k_s, v_s, kv_full, walk, head, q_tiles, num_tiles, k_row,
    STAGES: gl.constexpr,
):  # fmt: skip
    """As `keys_kernel.producer`."""
    i_b, i_h, num_heads, group = head
    fill_keys(k_desc, v_desc, k_s, v_s, kv_full, head, k_row)
    t = 0
    for PLAIN in gl.static_range(2):
        for i_head in range(i_h, i_h + group):
            for i in range(num_steps_of(walk, PLAIN)):
                i_tile = tile_of_step(walk, i, PLAIN)
                _fill_step(descs, rings, barriers, (i_b, i_head, num_heads), i_tile, q_tiles, num_tiles, t, STAGES)
                t += 1


@gluon.jit
def _issue_scores(
    rings, barriers, k_s, b_key, t, more,
    WIDTH: gl.constexpr, MASK: gl.constexpr, STAGES: gl.constexpr, TL: gl.constexpr,
):  # fmt: skip
    """Start S^T(t) = K Q^T - lse / scale. Behind the last step (more is 0) it multiplies stale data nobody reads."""
    q_s, _, lse_s, _, bounds_s = rings
    BQ: gl.constexpr = q_s.shape[3]
    stage = t % STAGES
    mbarrier.wait(barriers[0].index(stage), (t // STAGES) & 1, pred=more)
    b_s = columns(lse_s.index(stage), TL)
    if MASK:
        b_lo = bounds_s.index(stage).slice(0, BQ).load(gl.SliceLayout(0, TL))[None, :]
        b_hi = bounds_s.index(stage).slice(BQ, BQ).load(gl.SliceLayout(0, TL))[None, :]
        b_s = gl.where((b_key[:, None] >= b_lo) & (b_key[:, None] < b_hi), b_s, float("-inf"))
    return wide_product(matrix(k_s), matrix(q_s.index(stage)), b_s, WIDTH, True)


@gluon.jit
def _step_of_values(
    rings, barriers, p_s, k_s, b_s, b_dv, b_key, t, num_steps, scale_log2,
    WIDTH: gl.constexpr, MASK: gl.constexpr, STAGES: gl.constexpr, TL: gl.constexpr, KL: gl.constexpr,
):  # fmt: skip
    """Add query tile t to dv and hand P over. On entry b_s is S^T(t), on exit S^T(t + 1); MASK: of t + 1."""
    _, dout_s, _, _, _ = rings
    _, _, dout_full, dout_free, p_full = barriers
    AL: gl.constexpr = gl.DotOperandLayout(0, KL, 2)
    b_p = gl.exp2(b_s * scale_log2)
    b_pa = gl.convert_layout(b_p.to(dout_s.dtype), AL)
    wait_full(dout_full, t, STAGES)
    b_dv = warpgroup_mma(b_pa, matrix(dout_s.index(t % STAGES)), b_dv, is_async=True)
    p_s.index(t % STAGES).store(b_p)
    mbarrier.arrive(p_full.index(t % STAGES), count=1)
    b_s = _issue_scores(rings, barriers, k_s, b_key, t + 1, t + 1 < num_steps, WIDTH, MASK, STAGES, TL)
    b_dv, b_pa = warpgroup_mma_wait(num_products(k_s.shape[3], WIDTH), deps=[b_dv, b_pa])
    arrive_free(dout_free, t, STAGES)
    b_s = warpgroup_mma_wait(0, deps=[b_s])
    return b_s, b_dv


@gluon.jit
def _issue_dp(rings, barriers, v_s, t, more, WIDTH: gl.constexpr, STAGES: gl.constexpr, TL: gl.constexpr):
    """Start dP^T(t) = V dO^T - delta. more: as in `_issue_scores`."""
    _, dout_s, _, delta_s, _ = rings
    stage = t % STAGES
    mbarrier.wait(barriers[2].index(stage), (t // STAGES) & 1, pred=more)
    b_dp = columns(delta_s.index(stage), TL)
    return wide_product(matrix(v_s), matrix(dout_s.index(stage)), b_dp, WIDTH, True)


@gluon.jit
def _step_of_keys(
    rings, barriers, p_s, v_s, b_dp, b_dk, t, num_steps,
    WIDTH: gl.constexpr, STAGES: gl.constexpr, TL: gl.constexpr, KL: gl.constexpr,
):  # fmt: skip
    """Add query tile t to dk. On entry b_dp is dP^T(t), on exit dP^T(t + 1), which is the last that reads dout."""
    q_s, _, _, _, _ = rings
    q_full, q_free, _, dout_free, p_full = barriers
    AL: gl.constexpr = gl.DotOperandLayout(0, KL, 2)
    wait_full(p_full, t, STAGES)
    b_p = p_s.index(t % STAGES).load(TL)
    b_dsa = gl.convert_layout((b_p * b_dp).to(q_s.dtype), AL)
    wait_full(q_full, t, STAGES)  # complete already: it makes what the copy engine wrote visible here as well
    b_dk = warpgroup_mma(b_dsa, matrix(q_s.index(t % STAGES)), b_dk, is_async=True)
    b_dp = _issue_dp(rings, barriers, v_s, t + 1, t + 1 < num_steps, WIDTH, STAGES, TL)
    b_dk, b_dsa = warpgroup_mma_wait(num_products(v_s.shape[3], WIDTH), deps=[b_dk, b_dsa])
    arrive_free(q_free, t, STAGES)
    b_dp = warpgroup_mma_wait(0, deps=[b_dp])
    arrive_free(dout_free, t + 1, STAGES)
    return b_dp, b_dk


@gluon.jit
def _store(b_x, buffer, p_x, x_row, count, D: gl.constexpr, WIDTH: gl.constexpr, ADDS: gl.constexpr):
    """Write the tile's rows of a gradient, or add to them, which are fp32 then.

    A half type goes through the buffer of the tile that nobody else reads: there is no shared memory left to exchange
    columns between lanes.
    """
    if ADDS:
        b_x += load_rows(p_x, x_row, count, 0, D, WIDTH, b_x.type.layout)
    if p_x.dtype.element_ty.primitive_bitwidth == 16:
        store_out(matrix(buffer), b_x, p_x, x_row, count, 0, D, WIDTH)
    else:
        store_rows(b_x, p_x, x_row, count, 0, D, WIDTH)


@gluon.jit
def _values_consumer(
    rings, barriers, p_s, k_s, kv_full, num_steps, first_plain, position, grads, scale_log2,
    D: gl.constexpr, WIDTH: gl.constexpr, ADDS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The scores, and from them dv. grads: see `keys_kernel.store_gradients`."""
    BQ: gl.constexpr = rings[0].shape[3]
    TL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BQ, 16])
    KL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    _, p_dv, _, dv_row, count = grads
    b_key = positions_of(position, count, 0, TL)
    b_dv = gl.zeros([64, D], gl.float32, KL)
    mbarrier.wait(kv_full, 0)
    if num_steps > 0:
        b_s = _issue_scores(rings, barriers, k_s, b_key, 0, True, WIDTH, True, STAGES, TL)
        b_s = warpgroup_mma_wait(0, deps=[b_s])
        for t in range(0, first_plain - 1):
            b_s, b_dv = _step_of_values(
                rings, barriers, p_s, k_s, b_s, b_dv, b_key, t, num_steps, scale_log2, WIDTH, True, STAGES, TL, KL
            )
        for t in range(first_plain - 1, num_steps):
            b_s, b_dv = _step_of_values(
                rings, barriers, p_s, k_s, b_s, b_dv, b_key, t, num_steps, scale_log2, WIDTH, False, STAGES, TL, KL
            )
    _store(b_dv, k_s, p_dv, dv_row, count, D, WIDTH, ADDS)


@gluon.jit
def _keys_consumer(
    rings, barriers, p_s, v_s, kv_full, num_steps, grads, scale,
    D: gl.constexpr, WIDTH: gl.constexpr, ADDS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dS, and from it dk."""
    BQ: gl.constexpr = rings[0].shape[3]
    TL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BQ, 16])
    KL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_dk, _, dk_row, _, count = grads
    b_dk = gl.zeros([64, D], gl.float32, KL)
    mbarrier.wait(kv_full, 0)
    if num_steps > 0:
        b_dp = _issue_dp(rings, barriers, v_s, 0, True, WIDTH, STAGES, TL)
        b_dp = warpgroup_mma_wait(0, deps=[b_dp])
        arrive_free(barriers[3], 0, STAGES)
        for t in range(num_steps):
            b_dp, b_dk = _step_of_keys(rings, barriers, p_s, v_s, b_dp, b_dk, t, num_steps, WIDTH, STAGES, TL, KL)
    _store(b_dk * scale, v_s, p_dk, dk_row, count, D, WIDTH, ADDS)


@gluon.jit
def _new_buffers(q_desc, k_desc, v_desc, dout_desc, starts_desc, bounds_desc, STAGES: gl.constexpr):
    """(rings, their barriers and those of P, P, k, v, barrier of k and v)."""
    BQ: gl.constexpr = q_desc.block_type.shape[2]
    BK: gl.constexpr = k_desc.block_type.shape[2]
    k_s = gl.allocate_shared_memory(k_desc.dtype, k_desc.block_type.shape, k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, v_desc.block_type.shape, v_desc.layout)
    p_s = gl.allocate_shared_memory(gl.float32, [STAGES, BK, BQ], _as_threads_hold_it(BK, BQ))
    q_s, q_full, q_free = new_ring(q_desc, STAGES, 1)
    dout_s, dout_full, dout_free = new_ring(dout_desc, STAGES, 2)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BQ], starts_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BQ], starts_desc.layout)
    bounds_s = gl.allocate_shared_memory(gl.int32, [STAGES, 2 * BQ], bounds_desc.layout)
    barriers = (q_full, q_free, dout_full, dout_free, new_barriers(STAGES, 1))
    return (q_s, dout_s, lse_s, delta_s, bounds_s), barriers, p_s, k_s, v_s, new_barriers(1, 1).index(0)


@gluon.jit(do_not_specialize=["num_tiles", "num_q_tiles", "num_groups", "group", "section"])
def wide_keys(
    q_desc, k_desc, v_desc, dout_desc, starts_desc, bounds_desc, dk, dv,
    q_tiles, jobs, scale, scale_log2, num_tiles, num_q_tiles, num_groups, group, section,
    D: gl.constexpr, WIDTH: gl.constexpr, ADDS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """As `keys_kernel.keys`, for key tiles of 64. starts: its boxes are of BQ numbers."""
    job, i_bg = job_and_head(jobs, num_tiles, section)
    row, position, walk, head, grads = key_tile(job, i_bg // num_groups, i_bg % num_groups, dk, dv, num_groups, group)
    num_steps, first_plain = steps_of(walk, group)

    rings, barriers, p_s, k_s, v_s, kv_full = _new_buffers(
        q_desc, k_desc, v_desc, dout_desc, starts_desc, bounds_desc, STAGES
    )
    fence_async_shared()
    descs = (q_desc, dout_desc, starts_desc, bounds_desc)
    gl.warp_specialize([
        (_values_consumer, (rings, barriers, p_s, k_s, kv_full, num_steps, first_plain, position, grads, scale_log2,
                            D, WIDTH, ADDS, STAGES)),
        (_keys_consumer, (rings, barriers, p_s, v_s, kv_full, num_steps, grads, scale, D, WIDTH, ADDS, STAGES)),
        (_producer, (descs, k_desc, v_desc, rings, barriers, k_s, v_s, kv_full, walk, head, q_tiles, num_q_tiles, row,
                     STAGES)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip
