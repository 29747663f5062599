"""All three gradients in one kernel for sm_90: those of `keys_kernel` and, from the same scores, dq.

Fast, and not deterministic. Device code only. Both consumers put dS in shared memory, and each multiplies it with its
half of K's columns. One more warp, the adder, has the copy engine add the finished pieces to the fp32 tensor, while the
consumers go on. The order of these additions differs from run to run, and so do the last bits of dq.
Source: FlashAttention-3, arXiv:2407.08608.
"""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .keys_kernel import (
    columns,
    issue_scores,
    key_tile,
    new_buffers,
    num_steps_of,
    positions_of,
    producer,
    steps_of,
    store_gradients,
    tile_of_step,
)
from .walk import arrive_free, job_and_head, matrix, new_barriers, wait_full


@builtin
def tma_add(desc, at, source, _semantic=None):
    """Start to add `source` to the block of `desc` at `at`. Triton 3.6 and 3.7 have the operation without a name."""
    at = _semantic._convert_to_ir_values(at, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, at, source.handle)


@gluon.jit
def add_steps(dq_desc, exchange, walk, head, q_tiles, past, D: gl.constexpr):
    """Add every finished [BQ, D / 2] piece to its rows of dq, in the producer's order. past: as in `fill_steps`.

    Rows behind the end of a short tile, which are the next tile's, get 0.
    """
    _, dq_s, _, dq_full, dq_free = exchange
    i_b, i_h, _, group = head
    t = past
    for PLAIN in gl.static_range(2):
        for i_head in range(i_h, i_h + group):
            for i in range(num_steps_of(walk, PLAIN)):
                row = gl.load(q_tiles + 3 * tile_of_step(walk, i, PLAIN))
                for c in gl.static_range(2):
                    mbarrier.wait(dq_full.index(c), t & 1)
                    tma_add(dq_desc, [i_b, i_head, row, c * (D // 2)], dq_s.index(c))
                tma.store_wait(1)
                mbarrier.arrive(dq_free.index(0), count=1)
                tma.store_wait(0)
                mbarrier.arrive(dq_free.index(1), count=1)
                t += 1


@gluon.jit
def _step(
    rings, barriers, exchange, k_half, v_half, k_columns, b_s, b_dk, b_dv, b_key, t, end, scale_log2, dq_scale,
    C: gl.constexpr, D: gl.constexpr, MASK: gl.constexpr, STAGES: gl.constexpr, TL: gl.constexpr, KL: gl.constexpr,
):  # fmt: skip
    """As `keys_kernel`'s, and hand this consumer's piece of dq to the adder."""
    q_s, dout_s, starts_s, _ = rings
    BQ: gl.constexpr = q_s.shape[3]
    q_full, dout_full, free = barriers
    ds_s, dq_s, ds_full, dq_full, dq_free = exchange
    AL: gl.constexpr = gl.DotOperandLayout(0, KL, 2)
    QL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D // 2, 16])
    stage = t % STAGES
    b_dout = matrix(dout_s.index(stage))
    wait_full(dout_full, t, STAGES)
    b_dp = columns(starts_s.index(stage).slice(BQ, BQ), TL)
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
    zero = gl.zeros([BQ, D // 2], gl.float32, QL)
    b_dq = warpgroup_mma(ds_s.index(t & 1).permute([1, 0]), k_columns, zero, use_acc=False, is_async=True)
    b_dk, b_dv, b_pa, b_dsa = warpgroup_mma_wait(1, deps=[b_dk, b_dv, b_pa, b_dsa])
    arrive_free(free, t, STAGES)
    b_s = issue_scores(rings, k_half, q_full, b_key, t + 1, t + 1 < end, MASK, STAGES, TL)
    b_dq = warpgroup_mma_wait(1, deps=[b_dq])
    mbarrier.wait(dq_free.index(C), (t & 1) ^ 1)
    matrix(dq_s.index(C)).store(b_dq * dq_scale)
    fence_async_shared()
    mbarrier.arrive(dq_full.index(C), count=1)
    b_s = warpgroup_mma_wait(0, deps=[b_s])
    return b_s, b_dk, b_dv


@gluon.jit
def sum_keys(
    rings, barriers, exchange, k_s, v_s, kv_full, behind, num_steps, first_plain, position, count, scales,
    C: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, KL: gl.constexpr,
):  # fmt: skip
    """(dk without its scale, dv) of a job's keys 64 C ... 64 C + 63, when nothing in shared memory is read any more.

    behind: (the program's steps before this job's, phase of the barrier that says that the keys are there)
    """
    TL: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, rings[0].shape[3], 16]
    )
    k_half = matrix(k_s).slice(C * 64, 64, dim=0)
    v_half = matrix(v_s).slice(C * 64, 64, dim=0)
    k_columns = matrix(k_s).slice(C * (D // 2), D // 2, dim=1)
    q_full, _, _ = barriers
    _, scale_log2, dq_scale = scales
    past, phase = behind
    end = past + num_steps
    b_key = positions_of(position, count, C, TL)
    b_dk = gl.zeros([64, D], gl.float32, KL)
    b_dv = gl.zeros([64, D], gl.float32, KL)
    mbarrier.wait(kv_full, phase)
    if num_steps > 0:
        b_s = issue_scores(rings, k_half, q_full, b_key, past, True, True, STAGES, TL)
        b_s = warpgroup_mma_wait(0, deps=[b_s])
        for t in range(past, past + first_plain - 1):
            b_s, b_dk, b_dv = _step(
                rings, barriers, exchange, k_half, v_half, k_columns, b_s, b_dk, b_dv, b_key, t, end,
                scale_log2, dq_scale, C, D, True, STAGES, TL, KL)  # fmt: skip
        for t in range(past + first_plain - 1, end):
            b_s, b_dk, b_dv = _step(
                rings, barriers, exchange, k_half, v_half, k_columns, b_s, b_dk, b_dv, b_key, t, end,
                scale_log2, dq_scale, C, D, False, STAGES, TL, KL)  # fmt: skip
    return b_dk, b_dv


@gluon.jit
def _consumer(
    rings, barriers, exchange, k_s, v_s, kv_full, num_steps, first_plain, position, grads, scales,
    C: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, ADDS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As `keys_kernel`'s."""
    KL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    b_dk, b_dv = sum_keys(
        rings, barriers, exchange, k_s, v_s, kv_full, (0, 0), num_steps, first_plain, position, grads[4], scales,
        C, D, STAGES, KL)  # fmt: skip
    store_gradients(grads, b_dk * scales[0], b_dv, C, D, WIDTH, ADDS)


@gluon.jit
def new_exchange(q_desc, dq_desc, D: gl.constexpr):
    """(dS of two steps, a piece of dq for each consumer, the barriers of both)."""
    BQ: gl.constexpr = q_desc.block_type.shape[2]
    DS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ds_s = gl.allocate_shared_memory(q_desc.dtype, [2, 128, BQ], DS)
    dq_s = gl.allocate_shared_memory(gl.float32, [2, 1, 1, BQ, D // 2], dq_desc.layout)
    return ds_s, dq_s, new_barriers(2, 2), new_barriers(2, 1), new_barriers(2, 1)


@gluon.jit(do_not_specialize=["num_tiles", "num_q_tiles", "num_groups", "group", "section"])
def all_gradients(
    q_desc, k_desc, v_desc, dout_desc, starts_desc, bounds_desc, dq_desc, dk, dv,
    q_tiles, jobs, scale, scale_log2, dq_scale, num_tiles, num_q_tiles, num_groups, group, section,
    D: gl.constexpr, WIDTH: gl.constexpr, ADDS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """As `keys_kernel.keys`, and add dq_scale dS K to dq. dq_desc: [B, H, N, D] fp32 in boxes of BQ rows, D / 2."""
    job, i_bg = job_and_head(jobs, num_tiles, section)
    row, position, walk, head, grads = key_tile(job, i_bg // num_groups, i_bg % num_groups, dk, dv, num_groups, group)
    num_steps, first_plain = steps_of(walk, group)

    rings, barriers, k_s, v_s, kv_full = new_buffers(
        q_desc, k_desc, v_desc, dout_desc, starts_desc, bounds_desc, STAGES
    )
    exchange = new_exchange(q_desc, dq_desc, D)
    fence_async_shared()
    descs = (q_desc, dout_desc, starts_desc, bounds_desc)
    scales = (scale, scale_log2, dq_scale)
    gl.warp_specialize([
        (_consumer, (rings, barriers, exchange, k_s, v_s, kv_full, num_steps, first_plain, position, grads, scales,
                     0, D, WIDTH, ADDS, STAGES)),
        (_consumer, (rings, barriers, exchange, k_s, v_s, kv_full, num_steps, first_plain, position, grads, scales,
                     1, D, WIDTH, ADDS, STAGES)),
        (add_steps, (dq_desc, exchange, walk, head, q_tiles, 0, D)),
        (producer, (descs, k_desc, v_desc, rings, barriers, k_s, v_s, kv_full, walk, head, q_tiles,
                    num_q_tiles, row, STAGES)),
    ], [4, 1, 1], [REGISTERS, 24, 24])  # fmt: skip
