"""The fp8 forward kernel for sm_90: as `gluon.forward_kernel`, with products of e4m3 numbers. Device code only.

Queries are scaled by row and quantised by their own consumer; keys and values come quantised, a scale for each tile,
from `quantise_kernel`. A score is its product times both scales. The scale 2^s of a value tile goes into the softmax,
as if s stood at every score of the tile: the maximum is that of score + s. So the numbers that are rounded to e4m3 use
its range for what they weigh in the output, and the accumulator needs no unit; only the sum divides 2^s out again.

The registers of a product's scores hold, for a thread, other keys than those of a product's e4m3 operand. Instead of
moving them between threads, the values' keys are stored in the order in which the scores lie: see `quantise_kernel`.

The tensor cores keep about 14 bits of an fp8 accumulator. So they add up the values of one key tile only, and fp32
registers the tiles: a row of a million keys is as exact as one of a thousand.
Sources: FlashAttention-3, arXiv:2407.08608 (keys in the order of the registers); DeepSeek-V3, arXiv:2412.19437
(accumulation in two levels).
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

from ..gluon.ends import first_row, load_rows, store_lse, store_out, store_rows
from ..gluon.forward_kernel import issue_scores, sum_in_thread
from ..gluon.walk import (
    LOG2E,
    arrive_free,
    fill,
    fresh,
    job_and_head,
    masked_keys,
    matrix,
    new_barriers,
    new_ring,
    tile_at,
    tma_load,
    wait_full,
)
from .quantise_kernel import log2_scale

HEADROOM = gl.constexpr(8.0)  # probabilities are rounded as p * 2^8: e4m3 ends at 448 and loses bits below 2^-6
CARRIED = gl.constexpr(40.0)  # a carried state has its maximum 2^40 below, so that no new score is rounded for its sake


@gluon.jit
def _producer(q_desc, k_desc, v_desc, shared, walk, head, STAGES: gl.constexpr):
    q_s, _, k_s, v_s, q_full, k_full, k_free, v_full, v_free = shared
    v0, f0, f1, v1, row = walk
    i_b, i_h, i_g = head
    BK: gl.constexpr = k_desc.block_type.shape[2]
    for c in gl.static_range(2):
        mbarrier.expect(q_full.index(c), q_desc.block_type.nbytes)
        tma_load(q_desc, [i_b, i_h, row + c * 64, 0], q_full.index(c), q_s.index(c))
    for j in range(v1 - v0):
        start = tile_at(j, v0, f0, f1, v1) * BK
        fill(k_desc, [i_b, i_g, start, 0], k_s, k_full, k_free, j, STAGES)
        fill(v_desc, [i_b, i_g, 0, start], v_s, v_full, v_free, j, STAGES)


@gluon.jit
def _quantise_queries(b_q, b_q8, D: gl.constexpr, RL: gl.constexpr):
    """Write the consumer's queries as e4m3; returns the scale of each row, fp32 [64]."""
    CL: gl.constexpr = gl.BlockedLayout([1, 16], [512 // D, D // 16], [4, 1], [1, 0])
    x = b_q.load(CL).to(gl.float32)
    b_log = log2_scale(gl.max(gl.abs(x), 1))
    b_q8.store((x * gl.exp2(-b_log)[:, None]).to(gl.float8e4nv))
    fence_async_shared()
    return gl.convert_layout(gl.exp2(b_log), RL)


@gluon.jit
def packed(b_p):
    """Probabilities [64, BK] as e4m3, four in an int32 [64, BK / 16, 4]: those that one register of the operand holds.

    Within 16 keys, 8 w + 2 lane + e becomes byte 2 w + e of the lane. Packed, because a loop carries single bytes each
    in a register of its own.
    """
    x = b_p.reshape([64, b_p.shape[1] // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4])
    even, odd = x.split()
    p0, p2 = even.split()
    p1, p3 = odd.split()
    return gl.inline_asm_elementwise(
        """{ .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high}; }""",
        "=r,r,r,r,r", [p0, p1, p2, p3], gl.int32, is_pure=True, pack=1)  # fmt: skip


@gluon.jit
def _operand(b_p, OL: gl.constexpr):
    """`packed` probabilities as the register operand of a product."""
    even = gl.join(b_p.to(gl.int8), (b_p >> 16).to(gl.int8))
    odd = gl.join((b_p >> 8).to(gl.int8), (b_p >> 24).to(gl.int8))
    x = gl.join(even, odd).reshape([64, b_p.shape[1] * 16])
    return gl.convert_layout(x.to(gl.float8e4nv, bitcast=True), gl.DotOperandLayout(0, OL, 4))


@gluon.jit
def _softmax(b_s, b_max, b_sum, rows, tables, i_tile, b_scale, MASK: gl.constexpr):
    """(p, maximum, sum, factor for what was accumulated before) after the scores of one key tile.

    b_scale: [2] of the tile: (scale of its keys, log2 of the scale of its values)
    """
    b_lo, b_hi, b_row_scale = rows
    k_scale, v_log = b_scale
    if MASK:
        b_s = masked_keys(b_s, b_lo, b_hi, tables, i_tile)
    b_factor = b_row_scale * k_scale
    b_new = gl.maximum(b_max, gl.max(b_s, 1) * b_factor + (v_log - HEADROOM))
    b_safe = gl.where(b_new == float("-inf"), 0.0, b_new) if MASK else b_new
    b_p = gl.exp2(b_s * b_factor[:, None] - (b_safe - v_log)[:, None])
    b_shrink = gl.exp2(b_max - b_safe)
    b_total = sum_in_thread(b_p) * gl.exp2(-v_log)
    b_sum = b_sum * gl.convert_layout(b_shrink, gl.SliceLayout(1, b_sum.type.layout))[:, None] + b_total
    return b_p, b_new, b_sum, b_shrink


@gluon.jit
def _scales_of(scales, i_tile):
    return gl.load(scales + 2 * i_tile), gl.load(scales + 2 * i_tile + 1)


@gluon.jit
def _issue_values(b_p, v_s, j, D: gl.constexpr, STAGES: gl.constexpr, OL: gl.constexpr):
    zero = gl.zeros([64, D], gl.float32, OL)
    b_v = matrix(v_s.index(j % STAGES)).permute([1, 0])
    return warpgroup_mma(_operand(b_p, OL), b_v, zero, use_acc=False, is_async=True)


@gluon.jit
def _step(
    shared, b_q8, b_p, b_acc, b_max, b_sum, b_shrink, rows, scales, k_tiles, i_tile, j,
    MASK: gl.constexpr, D: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    SL: gl.constexpr, OL: gl.constexpr,
):  # fmt: skip
    """The scores of step j and the values of step j - 1. b_shrink: of the accumulator before the values j - 1."""
    _, _, k_s, v_s, _, k_full, k_free, v_full, v_free = shared
    b_scale = _scales_of(scales, i_tile)
    b_s = issue_scores(b_q8, k_s, k_full, j, BK, STAGES, SL)
    b_pv = _issue_values(b_p, v_s, j - 1, D, STAGES, OL)
    b_s = warpgroup_mma_wait(1, deps=[b_s])
    arrive_free(k_free, j, STAGES)
    b_acc = b_acc * gl.convert_layout(b_shrink, gl.SliceLayout(1, OL))[:, None]
    b_pf, b_max, b_sum, b_shrink = _softmax(b_s, b_max, b_sum, rows, k_tiles, i_tile, b_scale, MASK)
    b_next = packed(b_pf)
    # The wait for V(j) stands here for its branch, as in the bf16 kernel.
    wait_full(v_full, j, STAGES)
    b_pv, b_p = warpgroup_mma_wait(0, deps=[b_pv, b_p])
    arrive_free(v_free, j - 1, STAGES)
    # Moved here, behind the wait, into the registers that the product has read: ptxas would else see an operand that
    # changes in flight, and serialise all products.
    return fresh(b_next), b_acc + b_pv, b_max, b_sum, b_shrink


@gluon.jit
def _start(
    p_state, p_lse, state_row, count, C: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, BK: gl.constexpr,
    FIRST: gl.constexpr, SL: gl.constexpr, OL: gl.constexpr,
):  # fmt: skip
    """(acc, maximum, sum) to start from. A normalised state is 2^CARRIED times itself at lse - CARRIED."""
    RL: gl.constexpr = gl.SliceLayout(1, SL)
    b_sum = sum_in_thread(gl.zeros([64, BK], gl.float32, SL))  # for its layout; four threads share a row
    if FIRST:
        b_acc = gl.zeros([64, D], gl.float32, OL)
        b_max = gl.full([64], float("-inf"), gl.float32, RL)
    else:
        b_acc = load_rows(p_state, state_row, count, C, D, WIDTH, OL) * 2.0**CARRIED
        o_q = C * 64 + gl.arange(0, 64, layout=RL)
        b_max = gl.load(p_lse + o_q, mask=o_q < count, other=float("-inf")) * LOG2E - CARRIED
        b_one = gl.where(b_max == float("-inf"), 0.0, 0.25 * 2.0**CARRIED)
        b_sum += gl.convert_layout(b_one, gl.SliceLayout(1, b_sum.type.layout))[:, None]
    return b_acc, b_max, b_sum


@gluon.jit
def _consumer(
    shared, walk, count, p_state, p_out, p_lse, p_lo, p_hi, state_row, out_row, scale_log2, scales, k_tiles,
    C: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    FIRST: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """Queries 64 C ... 64 C + 63 of the tile. p_*: pointers to the tile's first row; *_row: strides."""
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BK, 32])
    OL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 32])
    q_s, q8_s, k_s, v_s, q_full, k_full, k_free, v_full, _ = shared
    v0, f0, f1, v1, _ = walk
    num_steps = v1 - v0
    num_masked = num_steps - (f1 - f0)
    o_q = C * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, SL))
    b_lo = gl.load(p_lo + o_q, mask=o_q < count, other=0)
    b_hi = gl.load(p_hi + o_q, mask=o_q < count, other=0)
    b_acc, b_max, b_sum = _start(p_state, p_lse, state_row, count, C, D, WIDTH, BK, FIRST, SL, OL)
    b_q = matrix(q_s.index(C))
    b_q8 = q8_s.index(C)
    mbarrier.wait(q_full.index(C), 0)
    if num_steps > 0:
        rows = (b_lo, b_hi, _quantise_queries(b_q, b_q8, D, gl.SliceLayout(1, SL)) * scale_log2)
        i_tile = tile_at(0, v0, f0, f1, v1)
        b_scale = _scales_of(scales, i_tile)
        b_s = issue_scores(b_q8, k_s, k_full, 0, BK, STAGES, SL)
        b_s = warpgroup_mma_wait(0, deps=[b_s])
        arrive_free(k_free, 0, STAGES)
        b_pf, b_max, b_sum, b_shrink = _softmax(b_s, b_max, b_sum, rows, k_tiles, i_tile, b_scale, True)
        b_p = packed(b_pf)
        wait_full(v_full, 0, STAGES)
        for j in range(1, num_masked):
            b_p, b_acc, b_max, b_sum, b_shrink = _step(
                shared, b_q8, b_p, b_acc, b_max, b_sum, b_shrink, rows, scales, k_tiles,
                tile_at(j, v0, f0, f1, v1), j, True, D, BK, STAGES, SL, OL)  # fmt: skip
        for j in range(gl.maximum(num_masked, 1), num_steps):
            b_p, b_acc, b_max, b_sum, b_shrink = _step(
                shared, b_q8, b_p, b_acc, b_max, b_sum, b_shrink, rows, scales, k_tiles,
                f0 + j - num_masked, j, False, D, BK, STAGES, SL, OL)  # fmt: skip
        b_pv = _issue_values(b_p, v_s, num_steps - 1, D, STAGES, OL)
        b_pv, b_p = warpgroup_mma_wait(0, deps=[b_pv, b_p])
        b_acc = b_acc * gl.convert_layout(b_shrink, gl.SliceLayout(1, OL))[:, None] + b_pv
    b_inverse = store_lse(p_lse, b_max, b_sum, count, C, gl.SliceLayout(1, SL))
    b_acc = b_acc * gl.convert_layout(b_inverse, gl.SliceLayout(1, OL))[:, None]
    if LAST:
        store_out(b_q, b_acc, p_out, out_row, count, C, D, WIDTH)
    else:
        store_rows(b_acc, p_state, state_row, count, C, D, WIDTH)


@gluon.jit(do_not_specialize=["num_tiles", "num_heads", "group", "num_rows", "num_slots", "together"])
def attend_fp8(
    q_desc, k_desc, v_desc, scales, state, out, lse, lo, hi, k_tiles, jobs,
    scale_log2, num_tiles, num_heads, group, num_rows, num_slots, together,
    D: gl.constexpr, WIDTH: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    FIRST: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """k_desc [B, G, num_slots BK, D], v_desc [B, G, D, num_slots BK], scales [B, G, num_slots, 2]: from
    `quantise_kernel.quantise`, a slot for each key tile. The rest as in `gluon.forward_kernel.attend`.
    """
    job, i_bh = job_and_head(jobs, num_tiles, together)
    row, _, count, v0, f0, f1, v1, _ = job
    i_b = i_bh // num_heads
    i_h = i_bh % num_heads
    i_g = i_h // group
    p_state, p_out, p_lse = first_row(state, out, lse, i_b, i_h, row, num_heads, num_rows)
    p_scales = scales + (i_b.to(gl.int64) * (num_heads // group) + i_g) * (2 * num_slots)

    q_s = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 1, 64, D], q_desc.layout)
    Q8: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], gl.float8e4nv)
    q8_s = gl.allocate_shared_memory(gl.float8e4nv, [2, 64, D], Q8)
    q_full = new_barriers(2, 1)
    k_s, k_full, k_free = new_ring(k_desc, STAGES, 2)
    v_s, v_full, v_free = new_ring(v_desc, STAGES, 2)
    fence_async_shared()
    shared = (q_s, q8_s, k_s, v_s, q_full, k_full, k_free, v_full, v_free)
    walk = (v0, f0, f1, v1, row)
    gl.warp_specialize([
        (_consumer, (shared, walk, count, p_state, p_out, p_lse, lo + row, hi + row, state[2], out[2], scale_log2,
                     p_scales, k_tiles, 0, D, WIDTH, BK, STAGES, FIRST, LAST)),
        (_consumer, (shared, walk, count, p_state, p_out, p_lse, lo + row, hi + row, state[2], out[2], scale_log2,
                     p_scales, k_tiles, 1, D, WIDTH, BK, STAGES, FIRST, LAST)),
        (_producer, (q_desc, k_desc, v_desc, shared, walk, (i_b, i_h, i_g), STAGES)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip
