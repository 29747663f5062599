"""The kernel of the query gradient for sm_90: one query tile against the key tiles that it sees. Device code only.

Built like the forward: two consumers of 64 queries, one producer warp. S = Q K^T and dP = dout V^T come from shared
memory, dS is the register operand of dq += dS K. The product of step j - 1 rides behind the first two of step j. Where
shared memory holds more tiles of keys than of values (V_STAGES) it is the first of the three: its keys are given back
early, and the values have two products' time to arrive in.
Source: FlashAttention-2, arXiv:2307.08691; there `D` is our delta.
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

from .ends import load_rows, store_out, store_rows
from .walk import (
    LOG2E,
    arrive_free,
    fill,
    fresh,
    job_and_head,
    masked_keys,
    matrix,
    new_barriers,
    new_ring,
    num_products,
    tile_at,
    tma_load,
    wait_full,
    wide_product,
)


@gluon.jit
def _producer(
    q_desc, k_desc, v_desc, dout_desc, shared, walk, head, k_tiles,
    NC: gl.constexpr, STAGES: gl.constexpr, V_STAGES: gl.constexpr,
):  # fmt: skip
    q_s, dout_s, k_s, v_s, q_full, k_full, k_free, v_full, v_free = shared
    v0, f0, f1, v1, row = walk
    i_b, i_h, i_g = head
    for c in gl.static_range(NC):
        mbarrier.expect(q_full.index(c), q_desc.block_type.nbytes + dout_desc.block_type.nbytes)
        tma_load(q_desc, [i_b, i_h, row + c * 64, 0], q_full.index(c), q_s.index(c))
        tma_load(dout_desc, [i_b, i_h, row + c * 64, 0], q_full.index(c), dout_s.index(c))
    for j in range(v1 - v0):
        start = gl.load(k_tiles + 3 * tile_at(j, v0, f0, f1, v1))
        fill(k_desc, [i_b, i_g, start, 0], k_s, k_full, k_free, j, STAGES)
        fill(v_desc, [i_b, i_g, start, 0], v_s, v_full, v_free, j, V_STAGES)


@gluon.jit
def _step(
    shared, b_q, b_dout, b_dsa, b_dq, rows, scale_log2, k_tiles, i_tile, j,
    START: gl.constexpr, MASK: gl.constexpr, WIDTH: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    V_STAGES: gl.constexpr, SL: gl.constexpr, OL: gl.constexpr,
):  # fmt: skip
    """dS of step j, and dq += dS K of step j - 1, which the first step (START) has not."""
    _, _, k_s, v_s, _, k_full, k_free, v_full, v_free = shared
    b_lse, b_delta, b_lo, b_hi = rows
    zero = gl.zeros([64, BK], gl.float32, SL)
    NUM: gl.constexpr = num_products(b_q.shape[1], WIDTH)
    IS_EARLY: gl.constexpr = V_STAGES < STAGES and not START
    if IS_EARLY:
        b_dq = warpgroup_mma(b_dsa, matrix(k_s.index((j - 1) % STAGES)), b_dq, is_async=True)
    wait_full(k_full, j, STAGES)
    b_s = wide_product(b_q, matrix(k_s.index(j % STAGES)), zero, WIDTH, False)
    if IS_EARLY:
        b_dq, b_dsa = warpgroup_mma_wait(NUM, deps=[b_dq, b_dsa])
        arrive_free(k_free, j - 1, STAGES)
    wait_full(v_full, j, V_STAGES)
    v_stage = j % V_STAGES
    if V_STAGES == 1:  # a buffer's address that is the same at every step would stay in registers, 32 of them
        v_stage = fresh(0)
    b_dp = wide_product(b_dout, matrix(v_s.index(v_stage)), zero, WIDTH, False)
    RIDES: gl.constexpr = not START and not IS_EARLY
    if RIDES:
        b_dq = warpgroup_mma(b_dsa, matrix(k_s.index((j - 1) % STAGES)), b_dq, is_async=True)
    b_s = warpgroup_mma_wait(NUM + 1 if RIDES else NUM, deps=[b_s])
    if MASK:
        b_s = masked_keys(b_s, b_lo, b_hi, k_tiles, i_tile)
    b_p = gl.exp2(b_s * scale_log2 - b_lse[:, None])
    # Complete already: it ends a basic block, without which ptxas sinks the exponentials below the next wait.
    wait_full(v_full, j, V_STAGES)
    b_dp = warpgroup_mma_wait(1 if RIDES else 0, deps=[b_dp])
    arrive_free(v_free, j, V_STAGES)
    b_ds = b_p * (b_dp - b_delta[:, None])
    if RIDES:
        b_dq, b_dsa = warpgroup_mma_wait(0, deps=[b_dq, b_dsa])
        arrive_free(k_free, j - 1, STAGES)
    return gl.convert_layout(b_ds.to(k_s.dtype), gl.DotOperandLayout(0, OL, 2)), b_dq


@gluon.jit
def _rows_of(p_lse, p_delta, p_lo, p_hi, count, C: gl.constexpr, RL: gl.constexpr):
    """(lse in base 2, delta, lo, hi) of the consumer's rows. Rows that see nothing get +inf and 0, so that dS is 0."""
    o_q = C * 64 + gl.arange(0, 64, layout=RL)
    m_q = o_q < count
    b_lse = gl.load(p_lse + o_q, mask=m_q, other=float("-inf"))
    b_delta = gl.load(p_delta + o_q, mask=m_q, other=0.0)
    b_empty = b_lse == float("-inf")
    b_lo = gl.load(p_lo + o_q, mask=m_q, other=0)
    b_hi = gl.load(p_hi + o_q, mask=m_q, other=0)
    return gl.where(b_empty, float("inf"), b_lse * LOG2E), gl.where(b_empty, 0.0, b_delta), b_lo, b_hi


@gluon.jit
def _consumer(
    shared, walk, count, p_dq, p_lse, p_delta, p_lo, p_hi, dq_row, scale, scale_log2, k_tiles,
    C: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
):  # fmt: skip
    """Queries 64 C ... 64 C + 63 of the tile. p_*: pointers to the tile's first row."""
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BK, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    q_s, dout_s, k_s, _, q_full, _, _, _, _ = shared
    v0, f0, f1, v1, _ = walk
    num_steps = v1 - v0
    num_masked = num_steps - (f1 - f0)
    rows = _rows_of(p_lse, p_delta, p_lo, p_hi, count, C, gl.SliceLayout(1, SL))
    b_q = matrix(q_s.index(C))
    b_dout = matrix(dout_s.index(C))
    b_dq = gl.zeros([64, D], gl.float32, OL)
    mbarrier.wait(q_full.index(C), 0)
    if num_steps > 0:
        b_dsa = gl.convert_layout(gl.zeros([64, BK], k_s.dtype, SL), gl.DotOperandLayout(0, OL, 2))
        b_dsa, b_dq = _step(
            shared, b_q, b_dout, b_dsa, b_dq, rows, scale_log2, k_tiles, tile_at(0, v0, f0, f1, v1), 0,
            True, True, WIDTH, BK, STAGES, V_STAGES, SL, OL)  # fmt: skip
        for j in range(1, num_masked):
            b_dsa, b_dq = _step(
                shared, b_q, b_dout, b_dsa, b_dq, rows, scale_log2, k_tiles, tile_at(j, v0, f0, f1, v1), j,
                False, True, WIDTH, BK, STAGES, V_STAGES, SL, OL)  # fmt: skip
        for j in range(gl.maximum(num_masked, 1), num_steps):
            b_dsa, b_dq = _step(
                shared, b_q, b_dout, b_dsa, b_dq, rows, scale_log2, k_tiles, 0, j,
                False, False, WIDTH, BK, STAGES, V_STAGES, SL, OL)  # fmt: skip
        b_dq = warpgroup_mma(b_dsa, matrix(k_s.index((num_steps - 1) % STAGES)), b_dq, is_async=True)
        b_dq, b_dsa = warpgroup_mma_wait(0, deps=[b_dq, b_dsa])
    b_dq = b_dq * scale
    if p_dq.dtype.element_ty == gl.float32:
        b_dq += load_rows(p_dq, dq_row, count, C, D, WIDTH, OL)
        store_rows(b_dq, p_dq, dq_row, count, C, D, WIDTH)
    else:
        store_out(b_q, b_dq, p_dq, dq_row, count, C, D, WIDTH)


@gluon.jit(do_not_specialize=["num_tiles", "num_heads", "group", "num_rows", "section"])
def queries(
    q_desc, k_desc, v_desc, dout_desc, dq, lse, delta, lo, hi, k_tiles, jobs,
    scale, scale_log2, num_tiles, num_heads, group, num_rows, section,
    D: gl.constexpr, WIDTH: gl.constexpr, BK: gl.constexpr, NC: gl.constexpr, STAGES: gl.constexpr,
    V_STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dq of one (query tile, batch, head) from all key tiles that it sees: added to fp32, written to half types.

    jobs, section, *_desc: as in the forward. scale: of dq; scale_log2: of the scores, > 0.
    """
    job, i_bh = job_and_head(jobs, num_tiles, section)
    row, _, count, v0, f0, f1, v1, _ = job
    i_b = i_bh // num_heads
    i_h = i_bh % num_heads
    p_dq = dq[0] + (i_b.to(gl.int64) * dq[1] + row.to(gl.int64) * dq[2] + i_h.to(gl.int64) * dq[3])
    o_lse = i_bh.to(gl.int64) * num_rows + row

    BUFFERS: gl.constexpr = NC if NC != 3 else 4  # a power of two
    q_s = gl.allocate_shared_memory(q_desc.dtype, [BUFFERS, 1, 1, 64, D], q_desc.layout)
    dout_s = gl.allocate_shared_memory(q_desc.dtype, [BUFFERS, 1, 1, 64, D], dout_desc.layout)
    q_full = new_barriers(BUFFERS, 1)
    k_s, k_full, k_free = new_ring(k_desc, STAGES, NC)
    v_s, v_full, v_free = new_ring(v_desc, V_STAGES, NC)
    fence_async_shared()
    shared = (q_s, dout_s, k_s, v_s, q_full, k_full, k_free, v_full, v_free)
    walk = (v0, f0, f1, v1, row)
    head = (i_b, i_h, i_h // group)
    if NC == 3:
        gl.warp_specialize([
            (_consumer, (shared, walk, count, p_dq, lse + o_lse, delta + o_lse, lo + row, hi + row, dq[2], scale,
                         scale_log2, k_tiles, 0, D, WIDTH, BK, STAGES, V_STAGES)),
            (_consumer, (shared, walk, count, p_dq, lse + o_lse, delta + o_lse, lo + row, hi + row, dq[2], scale,
                         scale_log2, k_tiles, 1, D, WIDTH, BK, STAGES, V_STAGES)),
            (_consumer, (shared, walk, count, p_dq, lse + o_lse, delta + o_lse, lo + row, hi + row, dq[2], scale,
                         scale_log2, k_tiles, 2, D, WIDTH, BK, STAGES, V_STAGES)),
            (_producer, (q_desc, k_desc, v_desc, dout_desc, shared, walk, head, k_tiles, NC, STAGES, V_STAGES)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (shared, walk, count, p_dq, lse + o_lse, delta + o_lse, lo + row, hi + row, dq[2], scale,
                         scale_log2, k_tiles, 0, D, WIDTH, BK, STAGES, V_STAGES)),
            (_consumer, (shared, walk, count, p_dq, lse + o_lse, delta + o_lse, lo + row, hi + row, dq[2], scale,
                         scale_log2, k_tiles, 1, D, WIDTH, BK, STAGES, V_STAGES)),
            (_producer, (q_desc, k_desc, v_desc, dout_desc, shared, walk, head, k_tiles, NC, STAGES, V_STAGES)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
