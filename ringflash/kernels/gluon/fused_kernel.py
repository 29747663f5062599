"""All three gradients in one kernel for sm_90: `keys_kernel` and, from the same scores, dq.

Fast, and not deterministic. Device code only. Both consumers put dS in shared memory, and each multiplies it with its
half of K's columns. Four more warps, the adders, move the finished pieces of dq into the fp32 tensor with additions of
16 bytes: products of the consumers go on meanwhile. The order of these additions differs from run to run, and so do the
last bits of dq.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .keys_kernel import columns, issue_scores, new_buffers, place, producer
from .walk import arrive_free, inside, matrix, new_barriers, range_of, wait_full


@gluon.jit
def _adder(
    dq, exchange, walk, head, q_tiles, num_steps, num_masked, scale, D: gl.constexpr, WIDTH: gl.constexpr
):  # fmt: skip
    """Add every finished [64, D / 2] piece, scaled, to its rows of dq."""
    _, dq_s, _, dq_full, dq_free = exchange
    i_b, i_h, _, _ = head
    LANES: gl.constexpr = D // 8
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [4, 1], [1, 0])
    ROWS: gl.constexpr = 128 // LANES
    o_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    o_column = gl.arange(0, D // 2, layout=gl.SliceLayout(0, L))
    for t in range(num_steps):
        i_head, i_tile = place(walk, i_h, t, num_masked)
        row = gl.load(q_tiles + 3 * i_tile)
        count = gl.load(q_tiles + 3 * i_tile + 2)
        p_tile = dq[0] + (i_b.to(gl.int64) * dq[1] + row.to(gl.int64) * dq[2] + i_head.to(gl.int64) * dq[3])
        for c in gl.static_range(2):
            mbarrier.wait(dq_full.index(c), t & 1)
            for i in gl.static_range(64 // ROWS):
                b_dq = dq_s.index(c).slice(i * ROWS, ROWS, dim=0).load(L) * scale
                p_row = p_tile + ((i * ROWS + o_row).to(gl.int64) * dq[2])[:, None] + (c * (D // 2) + o_column)[None, :]
                m_piece = inside(i * ROWS + o_row, count, c * (D // 2) + o_column, D, WIDTH)
                gl.atomic_add(p_row, b_dq, mask=m_piece, sem="relaxed")
            mbarrier.arrive(dq_free.index(c), count=1)


@gluon.jit
def _step(
    rings, barriers, exchange, k_half, v_half, k_columns, b_s, b_dk, b_dv, b_key, t, num_steps, scale_log2,
    C: gl.constexpr, D: gl.constexpr, MASK: gl.constexpr, STAGES: gl.constexpr, TL: gl.constexpr, KL: gl.constexpr,
):  # fmt: skip
    """As `keys_kernel`'s, and hand this consumer's piece of dq to the adders."""
    q_s, dout_s, _, deltas_s, _, _ = rings
    q_full, q_free, dout_full, dout_free = barriers
    ds_s, dq_s, ds_full, dq_full, dq_free = exchange
    AL: gl.constexpr = gl.DotOperandLayout(0, KL, 2)
    QL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D // 2, 16])
    stage = t % STAGES
    b_dout = matrix(dout_s.index(stage))
    wait_full(dout_full, t, STAGES)
    b_dp = columns(deltas_s.index(stage), TL)
    b_dp = warpgroup_mma(v_half, b_dout.permute([1, 0]), b_dp, is_async=True)
    b_p = gl.exp2(b_s * scale_log2)
    b_pa = gl.convert_layout(b_p.to(q_s.dtype), AL)
    b_dv = warpgroup_mma(b_pa, b_dout, b_dv, is_async=True)
    b_dp = warpgroup_mma_wait(1, deps=[b_dp])
    b_ds = (b_p * b_dp).to(q_s.dtype)
    ds_s.index(t & 1).slice(C * 64, 64, dim=0).store(b_ds)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(t & 1), count=1)
    b_dsa = gl.convert_layout(b_ds, AL)
    b_dk = warpgroup_mma(b_dsa, matrix(q_s.index(stage)), b_dk, is_async=True)
    mbarrier.wait(ds_full.index(t & 1), (t >> 1) & 1)
    zero = gl.zeros([64, D // 2], gl.float32, QL)
    b_dq = warpgroup_mma(ds_s.index(t & 1).permute([1, 0]), k_columns, zero, use_acc=False, is_async=True)
    b_dk, b_dv, b_pa, b_dsa = warpgroup_mma_wait(1, deps=[b_dk, b_dv, b_pa, b_dsa])
    arrive_free(dout_free, t, STAGES)
    arrive_free(q_free, t, STAGES)
    b_s = issue_scores(rings, k_half, q_full, b_key, t + 1, t + 1 < num_steps, MASK, STAGES, TL)
    b_dq = warpgroup_mma_wait(1, deps=[b_dq])
    mbarrier.wait(dq_free.index(C), (t & 1) ^ 1)
    dq_s.index(C).store(b_dq)
    mbarrier.arrive(dq_full.index(C), count=1)
    b_s = warpgroup_mma_wait(0, deps=[b_s])
    return b_s, b_dk, b_dv


@gluon.jit
def _consumer(
    rings, barriers, exchange, k_s, v_s, kv_full, num_steps, first_plain, position, kept, grad_row, scale_log2,
    C: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As `keys_kernel`'s. kept: see `_keep`."""
    TL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    KL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    k_half = matrix(k_s).slice(C * 64, 64, dim=0)
    v_half = matrix(v_s).slice(C * 64, 64, dim=0)
    k_columns = matrix(k_s).slice(C * (D // 2), D // 2, dim=1)
    q_full, _, _, _ = barriers
    b_key = position + C * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, TL))
    b_dk = gl.zeros([64, D], gl.float32, KL)
    b_dv = gl.zeros([64, D], gl.float32, KL)
    mbarrier.wait(kv_full, 0)
    if num_steps > 0:
        b_s = issue_scores(rings, k_half, q_full, b_key, 0, True, True, STAGES, TL)
        b_s = warpgroup_mma_wait(0, deps=[b_s])
        for t in range(0, first_plain - 1):
            b_s, b_dk, b_dv = _step(
                rings, barriers, exchange, k_half, v_half, k_columns, b_s, b_dk, b_dv, b_key, t, num_steps, scale_log2,
                C, D, True, STAGES, TL, KL)  # fmt: skip
        for t in range(first_plain - 1, num_steps):
            b_s, b_dk, b_dv = _step(
                rings, barriers, exchange, k_half, v_half, k_columns, b_s, b_dk, b_dv, b_key, t, num_steps, scale_log2,
                C, D, False, STAGES, TL, KL)  # fmt: skip
    _store(kept, b_dk, b_dv, grad_row, C, D, WIDTH, KL)


@gluon.jit
def _keep(kept, i: gl.constexpr, number):
    """Put a number that only the end needs into shared memory: registers are what this kernel has least of."""
    kept.index(i).store(gl.full([1], number.to(gl.int64), gl.int64, gl.BlockedLayout([1], [32], [4], [0])))


@gluon.jit
def _kept(kept, i: gl.constexpr):
    return gl.max(kept.index(i).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _store(kept, b_dk, b_dv, grad_row, C: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, KL: gl.constexpr):
    p_dk = gl.multiple_of(_kept(kept, 0).to(gl.pointer_type(gl.float32)), 16)
    p_dv = gl.multiple_of(_kept(kept, 1).to(gl.pointer_type(gl.float32)), 16)
    scale = _kept(kept, 3).to(gl.int32).to(gl.float32, bitcast=True)
    o_key = C * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, KL))
    o_column = gl.arange(0, D, layout=gl.SliceLayout(0, KL))
    o_grad = (o_key.to(gl.int64) * grad_row)[:, None] + o_column[None, :]
    m_key = inside(o_key, _kept(kept, 2), o_column, D, WIDTH)
    gl.store(p_dv + o_grad, b_dv, mask=m_key)
    gl.store(p_dk + o_grad, b_dk * scale, mask=m_key)


@gluon.jit(do_not_specialize=["num_tiles", "num_q_tiles", "num_groups", "group"])
def all_gradients(
    q_desc, k_desc, v_desc, dout_desc, starts_desc, deltas_desc, lo_desc, hi_desc, dq, dk, dv,
    q_tiles, k_tiles, ranges, order, scale, scale_log2, dq_scale, num_tiles, num_q_tiles, num_groups, group,
    D: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """As `keys_kernel.keys`, and add dq_scale dS K to dq. dk, dv: of equal strides, rows on 16 bytes."""
    i_tile = gl.load(order + gl.program_id(0) % num_tiles)
    i_bg = gl.program_id(0) // num_tiles
    i_b = i_bg // num_groups
    i_g = i_bg % num_groups
    v0, f0, f1, v1 = range_of(ranges, i_tile, num_q_tiles)
    row = gl.load(k_tiles + 3 * i_tile)
    position = gl.load(k_tiles + 3 * i_tile + 1)
    count = gl.load(k_tiles + 3 * i_tile + 2)
    p_dk = dk[0] + (i_b.to(gl.int64) * dk[1] + row.to(gl.int64) * dk[2] + i_g.to(gl.int64) * dk[3])
    p_dv = dv[0] + (i_b.to(gl.int64) * dv[1] + row.to(gl.int64) * dv[2] + i_g.to(gl.int64) * dv[3])
    num_steps = (v1 - v0) * group
    num_masked = (v1 - v0 - (f1 - f0)) * group
    first_plain = gl.minimum(gl.maximum(num_masked, 1), num_steps)

    rings, barriers, k_s, v_s, kv_full = new_buffers(q_desc, k_desc, v_desc, dout_desc, starts_desc, lo_desc, STAGES)
    DS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ds_s = gl.allocate_shared_memory(q_desc.dtype, [2, 128, 64], DS)
    # 16-byte units of a row are permuted by the row, so that neither side meets a bank twice
    dq_s = gl.allocate_shared_memory(gl.float32, [2, 64, D // 2], gl.SwizzledSharedLayout(4, 1, 8, order=[1, 0]))
    exchange = (ds_s, dq_s, new_barriers(2, 2), new_barriers(2, 1), new_barriers(2, 1))
    kept = gl.allocate_shared_memory(gl.int64, [4, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    _keep(kept, 0, p_dk)
    _keep(kept, 1, p_dv)
    _keep(kept, 2, count)
    _keep(kept, 3, scale.to(gl.int32, bitcast=True))
    fence_async_shared()
    descs = (q_desc, dout_desc, starts_desc, deltas_desc, lo_desc, hi_desc)
    head = (i_b, i_g * group, num_groups * group, group)
    walk = (v0, f0, f1, v1)
    gl.warp_specialize([
        (_consumer, (rings, barriers, exchange, k_s, v_s, kv_full, num_steps, first_plain, position, kept,
                     dk[2], scale_log2, 0, D, WIDTH, STAGES)),
        (_consumer, (rings, barriers, exchange, k_s, v_s, kv_full, num_steps, first_plain, position, kept,
                     dk[2], scale_log2, 1, D, WIDTH, STAGES)),
        (_adder, (dq, exchange, walk, head, q_tiles, num_steps, num_masked, dq_scale, D, WIDTH)),
        (producer, (descs, k_desc, v_desc, rings, barriers, k_s, v_s, kv_full, walk, head, q_tiles,
                    num_q_tiles, row, STAGES)),
    ], [4, 4, 1], [REGISTERS, 24, 24])  # fmt: skip
