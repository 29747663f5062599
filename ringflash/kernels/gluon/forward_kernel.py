"""The forward kernel for sm_90: one query tile against the range of visiting key tiles that it sees. Device code only.

A program is NC consumers of four warps, each with 64 queries, and one producer warp that fills rings of key and value
tiles by TMA. A consumer issues S(j) = Q K(j)^T, scales O by what softmax(j-1) found, issues O += P(j-1) V(j-1) and
computes softmax(j) while that runs. Inside, lse and maximum are in base 2; at the door natural.

The maximum of a row is one that P, sum and O are relative to, not always the largest score: it is renewed only when a
score exceeds it by more than SLACK. The final division and lse use the same maximum, so nothing is approximated; P
reaches 2^SLACK instead of 1. Without slack nearly every tile raises some row, and all of O is multiplied by 1.
Sources: FlashAttention-3, arXiv:2407.08608 (specialised warps, the two overlapping products); FlashAttention-2,
arXiv:2307.08691 (late division); FlashAttention-4 (O is scaled only where the maximum has grown much).
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

from . import jobs as jobs_table
from .ends import first_row, load_rows, store_lse, store_out, store_rows, with_state
from .walk import (
    LOG2E,
    job_and_head,
    masked_keys,
    matrix,
    new_barriers,
    new_stages,
    tile_at,
    tma_load,
    wait_full,
)

SLACK = gl.constexpr(8.0)  # log2: 2^8 is far from 65504, where fp16 ends
# The first of the named barriers that say that a buffer is free, at most 4 a ring. Gluon's arrival at an mbarrier has
# the warps of a consumer wait for each other, these do not. Of the 16 that there are Triton takes 0 and 1, and one from
# 2 on for each partition.
K_FREE = gl.constexpr(8)
V_FREE = gl.constexpr(12)
COUNT_BITS, PASSED_BITS = gl.constexpr(jobs_table.COUNT_BITS), gl.constexpr(jobs_table.PASSED_BITS)


@gluon.jit
def _arrive(barrier, NC: gl.constexpr):
    """Signal, without waiting, one of the named barriers at which NC consumers and the producer meet."""
    gl.inline_asm_elementwise(
        "bar.arrive $1, $2; mov.b32 $0, 0;", "=r,r,n", [barrier, NC * 128 + 32], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _wait(barrier, NC: gl.constexpr):
    gl.inline_asm_elementwise(
        "bar.sync $1, $2; mov.b32 $0, 0;", "=r,r,n", [barrier, NC * 128 + 32], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _fill(desc, at, ring, full, FREE: gl.constexpr, j, STAGES: gl.constexpr, NC: gl.constexpr):
    """Wait until buffer j % STAGES is free, and start to fill it with the block of `desc` at `at`."""
    stage = j % STAGES
    if j >= STAGES:
        _wait(FREE + stage, NC)
    mbarrier.expect(full.index(stage), desc.block_type.nbytes)
    tma_load(desc, at, full.index(stage), ring.index(stage))


@gluon.jit
def _start_of(k_tiles, i_tile, regular, BK: gl.constexpr):
    """The local start of a key tile; not loaded where tiles are regular, because TMA would wait for it."""
    start = i_tile * BK
    if not regular:
        start = gl.load(k_tiles + 3 * i_tile)
    return start


@gluon.jit
def request(
    q_desc, k_desc, v_desc, shared, walk, head, k_tiles, regular, behind, NC: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Ask for all tiles of one job: K(j) before V(j-1), as it is needed and as its buffer falls free.

    behind: (buffer of the first queries, steps before this job's)
    """
    q_s, k_s, v_s, q_full, k_full, v_full = shared
    v0, f0, f1, v1, row = walk
    i_b, i_h, i_g = head
    query, past = behind
    BK: gl.constexpr = k_desc.block_type.shape[2]
    num_steps = v1 - v0
    for c in gl.static_range(NC):
        mbarrier.expect(q_full.index(query + c), q_desc.block_type.nbytes)
        tma_load(q_desc, [i_b, i_h, row + c * 64, 0], q_full.index(query + c), q_s.index(query + c))
    if num_steps > 0:
        start = _start_of(k_tiles, tile_at(0, v0, f0, f1, v1), regular, BK)
        _fill(k_desc, [i_b, i_g, start, 0], k_s, k_full, K_FREE, past, STAGES, NC)
        for j in range(1, num_steps):
            before = start
            start = _start_of(k_tiles, tile_at(j, v0, f0, f1, v1), regular, BK)
            _fill(k_desc, [i_b, i_g, start, 0], k_s, k_full, K_FREE, past + j, STAGES, NC)
            _fill(v_desc, [i_b, i_g, before, 0], v_s, v_full, V_FREE, past + j - 1, STAGES, NC)
        _fill(v_desc, [i_b, i_g, start, 0], v_s, v_full, V_FREE, past + num_steps - 1, STAGES, NC)


@gluon.jit
def drain(num_steps, NC: gl.constexpr, STAGES: gl.constexpr):
    """Take the signals that no buffer waited for: a program leaves its named barriers as it found them."""
    for j in range(gl.maximum(num_steps - STAGES, 0), num_steps):
        _wait(K_FREE + j % STAGES, NC)
        _wait(V_FREE + j % STAGES, NC)


@gluon.jit
def _producer(q_desc, k_desc, v_desc, shared, walk, head, k_tiles, regular, NC: gl.constexpr, STAGES: gl.constexpr):
    v0, _, _, v1, _ = walk
    request(q_desc, k_desc, v_desc, shared, walk, head, k_tiles, regular, (0, 0), NC, STAGES)
    drain(v1 - v0, NC, STAGES)


@gluon.jit
def sum_in_thread(b_p):
    """[rows, keys] -> [rows, 4]: each of the four lanes of a row adds what it holds; they meet after the loop."""
    return gl.sum(gl.sum(b_p.reshape([b_p.shape[0], b_p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _softmax(b_s, b_max, b_sum, scale_log2):
    """(p, maximum in use, sum, factor for what was accumulated before) after the masked scores of one key tile."""
    b_top = gl.max(b_s, 1) * scale_log2
    b_new = gl.where(b_top - b_max <= SLACK, b_max, b_top)  # -inf - -inf is NaN, and stays -inf
    b_safe = gl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = gl.exp2(b_s * scale_log2 - b_safe[:, None])
    b_shrink = gl.exp2(b_max - b_safe)
    b_sum = b_sum * gl.convert_layout(b_shrink, gl.SliceLayout(1, b_sum.type.layout))[:, None] + sum_in_thread(b_p)
    return b_p, b_new, b_sum, b_shrink


@triton.constexpr_function
def _scale_ptx(n):
    """PTX that multiplies a thread's n accumulators, by turns two of each of its two rows, unless all its warp's
    factors are 1."""
    copies = "".join(f"mov.f32 ${i}, ${n + i}; " for i in range(n))
    products = "".join(f"mul.f32 ${i}, ${i}, ${2 * n + i % 4 // 2 * 2}; " for i in range(n))
    changed = f"setp.neu.f32 p, ${2 * n}, 0f3F800000; setp.neu.or.f32 p, ${2 * n + 2}, 0f3F800000, p; "
    vote = "vote.sync.any.pred p, p, 0xffffffff; "
    return "{ .reg .pred p; " + changed + vote + copies + "@!p bra.uni DONE; " + products + "DONE: }"


@triton.constexpr_function
def _scale_registers(n):
    return ",".join(["=f"] * n + ["f"] * (2 * n))


@gluon.jit
def _scaled(b_acc, b_factor, OL: gl.constexpr):
    """b_acc times b_factor of its row. A branch of each warp, since there is hardly ever something to do; inline,
    because Gluon's own branch is one of the whole partition and costs a barrier."""
    b_factor = gl.convert_layout(b_factor, gl.SliceLayout(1, OL))[:, None]
    N: gl.constexpr = b_acc.shape[1] // 2
    return gl.inline_asm_elementwise(
        _scale_ptx(N), _scale_registers(N), [b_acc, b_factor], gl.float32, is_pure=False, pack=N
    )


@gluon.jit
def _pairs(b_p, TYPE: gl.constexpr):
    """P rounded, two numbers in an int32: as single numbers ptxas unpacks and packs all of them in every step."""
    even, odd = b_p.reshape([b_p.shape[0], b_p.shape[1] // 2, 2]).split()
    ROUND: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if gl.bfloat16 == TYPE else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(ROUND, "=r,f,f", [even, odd], gl.int32, is_pure=True, pack=1)


@gluon.jit
def _operand(b_pairs, TYPE: gl.constexpr, OL: gl.constexpr):
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [b_pairs], (gl.int16, gl.int16), is_pure=True, pack=1
    )
    b_p = gl.join(even, odd).reshape([b_pairs.shape[0], b_pairs.shape[1] * 2]).to(TYPE, bitcast=True)
    return gl.convert_layout(b_p, gl.DotOperandLayout(0, OL, 2))


@gluon.jit
def issue_scores(b_q, k_s, k_full, j, BK: gl.constexpr, STAGES: gl.constexpr, SL: gl.constexpr):
    zero = gl.zeros([64, BK], gl.float32, SL)
    wait_full(k_full, j, STAGES)
    return warpgroup_mma(b_q, matrix(k_s.index(j % STAGES)).permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def _issue_values(b_pairs, b_shrink, v_s, b_acc, j, STAGES: gl.constexpr, OL: gl.constexpr):
    """(accumulator in flight, operand, which must live until the product is done)"""
    b_acc = _scaled(b_acc, b_shrink, OL)
    b_p = _operand(b_pairs, v_s.dtype, OL)
    return warpgroup_mma(b_p, matrix(v_s.index(j % STAGES)), b_acc, is_async=True), b_p


@gluon.jit
def _step(
    shared, b_q, b_pairs, b_acc, b_max, b_sum, b_shrink, b_lo, b_hi, scale_log2, k_tiles, i_tile, is_masked, s,
    BK: gl.constexpr, STAGES: gl.constexpr, SL: gl.constexpr, OL: gl.constexpr, NC: gl.constexpr,
):  # fmt: skip
    """The scores of the program's step s and the values of step s - 1."""
    _, k_s, v_s, _, k_full, v_full = shared
    b_s = issue_scores(b_q, k_s, k_full, s, BK, STAGES, SL)
    # O is scaled here, and not where softmax found the factor, because the tensor cores have work meanwhile
    b_acc, b_p = _issue_values(b_pairs, b_shrink, v_s, b_acc, s - 1, STAGES, OL)
    b_s = warpgroup_mma_wait(1, deps=[b_s])
    _arrive(K_FREE + s % STAGES, NC)
    # All threads of the program branch alike. Two loops, with and without a mask, need twice the code, and were slower.
    if is_masked:
        b_s = masked_keys(b_s, b_lo, b_hi, k_tiles, i_tile)
    b_pf, b_max, b_sum, b_shrink = _softmax(b_s, b_max, b_sum, scale_log2)
    # The next step needs V(s), but the wait stands here for its branch: without the end of a basic block ptxas sinks
    # the softmax below the wait for the products, and nothing overlaps. A second branch below it undoes this.
    wait_full(v_full, s, STAGES)
    b_acc, b_p = warpgroup_mma_wait(0, deps=[b_acc, b_p])
    _arrive(V_FREE + (s - 1) % STAGES, NC)
    return _pairs(b_pf, v_s.dtype), b_acc, b_max, b_sum, b_shrink


@gluon.jit
def _start(p_lse, count, C: gl.constexpr, BK: gl.constexpr, FIRST: gl.constexpr, SL: gl.constexpr):
    """(maximum, sum) to start from. A normalised state has the maximum lse and the sum 1, or 0 if empty."""
    RL: gl.constexpr = gl.SliceLayout(1, SL)
    if FIRST:
        b_max = gl.full([64], float("-inf"), gl.float32, RL)
        b_one = gl.zeros([64], gl.float32, RL)
    else:
        o_q = C * 64 + gl.arange(0, 64, layout=RL)
        b_max = gl.load(p_lse + o_q, mask=o_q < count, other=float("-inf")) * LOG2E
        b_one = gl.where(b_max == float("-inf"), 0.0, 1.0)
    b_sum = sum_in_thread(gl.zeros([64, BK], gl.float32, SL))  # for its layout; four threads share a row
    return b_max, b_sum + 0.25 * gl.convert_layout(b_one, gl.SliceLayout(1, b_sum.type.layout))[:, None]


@gluon.jit
def _pass_over(shared, past, num_steps, STAGES: gl.constexpr, NC: gl.constexpr):
    """Give back the buffers of steps in which this consumer's rows see nothing."""
    _, _, _, _, k_full, v_full = shared
    for s in range(past, past + num_steps):
        wait_full(k_full, s, STAGES)
        _arrive(K_FREE + s % STAGES, NC)
        wait_full(v_full, s, STAGES)
        _arrive(V_FREE + s % STAGES, NC)


@gluon.jit
def _walk(
    shared, walk, past, passed, b_q, b_acc, b_max, b_sum, b_lo, b_hi, scale_log2, k_tiles,
    BK: gl.constexpr, STAGES: gl.constexpr, SL: gl.constexpr, OL: gl.constexpr, NC: gl.constexpr,
):  # fmt: skip
    """(acc, maximum, sum) after all key tiles but the first `passed`; one at least is left."""
    _, k_s, v_s, _, k_full, v_full = shared
    v0, f0, f1, v1, _ = walk
    num_steps = v1 - v0
    num_masked = num_steps - (f1 - f0)
    first = past + passed
    b_s = issue_scores(b_q, k_s, k_full, first, BK, STAGES, SL)
    b_s = warpgroup_mma_wait(0, deps=[b_s])
    _arrive(K_FREE + first % STAGES, NC)
    b_s = masked_keys(b_s, b_lo, b_hi, k_tiles, tile_at(passed, v0, f0, f1, v1))
    b_pf, b_max, b_sum, b_shrink = _softmax(b_s, b_max, b_sum, scale_log2)
    b_pairs = _pairs(b_pf, v_s.dtype)
    wait_full(v_full, first, STAGES)
    for j in range(passed + 1, num_steps):
        b_pairs, b_acc, b_max, b_sum, b_shrink = _step(
            shared, b_q, b_pairs, b_acc, b_max, b_sum, b_shrink, b_lo, b_hi, scale_log2, k_tiles,
            tile_at(j, v0, f0, f1, v1), j < num_masked, past + j, BK, STAGES, SL, OL, NC)  # fmt: skip
    b_acc, b_p = _issue_values(b_pairs, b_shrink, v_s, b_acc, past + num_steps - 1, STAGES, OL)
    b_acc, b_p = warpgroup_mma_wait(0, deps=[b_acc, b_p])
    _arrive(V_FREE + (past + num_steps - 1) % STAGES, NC)
    return b_acc, b_max, b_sum


@gluon.jit
def consume(
    shared, walk, behind, phase, count, p_state, p_out, p_lse, p_lo, p_hi, state_row, out_row, scale_log2, k_tiles,
    C: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    FIRST: gl.constexpr, LAST: gl.constexpr, NC: gl.constexpr,
):  # fmt: skip
    """One job's queries 64 C ... 64 C + 63. p_*: pointers to the tile's first row; *_row: strides.

    behind: as in `request`; phase: of the barrier that says that the queries are there
    """
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BK, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    q_s, _, _, q_full, _, _ = shared
    v0, _, _, v1, _ = walk
    passed = (count >> (COUNT_BITS + PASSED_BITS * C)) & (2**PASSED_BITS - 1)
    count = count & (2**COUNT_BITS - 1)
    o_q = C * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, SL))
    b_lo = gl.load(p_lo + o_q, mask=o_q < count, other=0)
    b_hi = gl.load(p_hi + o_q, mask=o_q < count, other=0)
    b_max, b_sum = _start(p_lse, count, C, BK, FIRST, SL)
    # At D = 64 ptxas spills in the loop if the accumulator starts from memory, which costs 8%; at 128 adding the state
    # at the end costs 2%.
    LATE: gl.constexpr = D == 64
    if FIRST or LATE:
        b_acc = gl.zeros([64, D], gl.float32, OL)
    else:
        b_acc = load_rows(p_state, state_row, count, C, D, WIDTH, OL)
    query, past = behind
    b_q = matrix(q_s.index(query + C))
    mbarrier.wait(q_full.index(query + C), phase)
    _pass_over(shared, past, passed, STAGES, NC)
    if v1 - v0 > passed:
        b_acc, b_max, b_sum = _walk(
            shared, walk, past, passed, b_q, b_acc, b_max, b_sum, b_lo, b_hi, scale_log2, k_tiles,
            BK, STAGES, SL, OL, NC)  # fmt: skip
    if LATE and not FIRST:
        b_acc = with_state(b_acc, b_max, p_state, p_lse, state_row, count, C, D, WIDTH)
    b_inverse = store_lse(p_lse, b_max, b_sum, count, C, gl.SliceLayout(1, SL))
    b_acc = b_acc * gl.convert_layout(b_inverse, gl.SliceLayout(1, OL))[:, None]
    if LAST:
        store_out(b_q, b_acc, p_out, out_row, count, C, D, WIDTH)
    else:
        store_rows(b_acc, p_state, state_row, count, C, D, WIDTH)


@gluon.jit(do_not_specialize=["num_tiles", "regular", "num_heads", "group", "num_rows", "section"])
def attend(
    q_desc, k_desc, v_desc, state, out, lse, lo, hi, k_tiles, jobs,
    scale_log2, num_tiles, regular, num_heads, group, num_rows, section,
    D: gl.constexpr, WIDTH: gl.constexpr, BK: gl.constexpr, NC: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """q_desc, k_desc, v_desc: [B, H or G, N, D] in boxes of 64 queries or BK keys and D columns, of which the
    tensors have WIDTH; TMA reads 0 in the others. The rest as in `triton.forward_kernel.attend`, without num_full and
    ragged. regular: key tile i starts at i * BK. section: see `job_and_head`.
    """
    job, i_bh = job_and_head(jobs, num_tiles, section)
    row, _, count, v0, f0, f1, v1, _ = job
    i_b = i_bh // num_heads
    i_h = i_bh % num_heads
    p_state, p_out, p_lse = first_row(state, out, lse, i_b, i_h, row, num_heads, num_rows)

    q_s = gl.allocate_shared_memory(q_desc.dtype, [NC if NC != 3 else 4, 1, 1, 64, D], q_desc.layout)
    q_full = new_barriers(4, 1)
    gl.static_assert(STAGES <= 4, "named barriers")
    k_s, k_full = new_stages(k_desc, STAGES)
    v_s, v_full = new_stages(v_desc, STAGES)
    fence_async_shared()
    shared = (q_s, k_s, v_s, q_full, k_full, v_full)
    walk = (v0, f0, f1, v1, row)
    # written out, because adding tuples turns their constexprs into run-time numbers
    if NC == 2:
        gl.warp_specialize([
            (consume, (shared, walk, (0, 0), 0, count, p_state, p_out, p_lse, lo + row, hi + row, state[2], out[2],
                       scale_log2, k_tiles, 0, D, WIDTH, BK, STAGES, FIRST, LAST, NC)),
            (consume, (shared, walk, (0, 0), 0, count, p_state, p_out, p_lse, lo + row, hi + row, state[2], out[2],
                       scale_log2, k_tiles, 1, D, WIDTH, BK, STAGES, FIRST, LAST, NC)),
            (_producer, (q_desc, k_desc, v_desc, shared, walk, (i_b, i_h, i_h // group), k_tiles, regular,
                         NC, STAGES)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (shared, walk, (0, 0), 0, count, p_state, p_out, p_lse, lo + row, hi + row, state[2], out[2],
                       scale_log2, k_tiles, 0, D, WIDTH, BK, STAGES, FIRST, LAST, NC)),
            (consume, (shared, walk, (0, 0), 0, count, p_state, p_out, p_lse, lo + row, hi + row, state[2], out[2],
                       scale_log2, k_tiles, 1, D, WIDTH, BK, STAGES, FIRST, LAST, NC)),
            (consume, (shared, walk, (0, 0), 0, count, p_state, p_out, p_lse, lo + row, hi + row, state[2], out[2],
                       scale_log2, k_tiles, 2, D, WIDTH, BK, STAGES, FIRST, LAST, NC)),
            (_producer, (q_desc, k_desc, v_desc, shared, walk, (i_b, i_h, i_h // group), k_tiles, regular,
                         NC, STAGES)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
