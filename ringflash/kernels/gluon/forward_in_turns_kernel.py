"""The forward kernel for short ranges of key tiles: `forward_kernel`, but programs that stay. Device code only.

A program of `forward_kernel.attend` pays for its start, for the first tiles, for which it waits, and for its end; where
it has ten steps that is a quarter of its time. Here there is one program for each SM, and it takes one job after the
other. Its producer asks for the next job's queries and first tiles while the consumers still work on the last ones, and
the consumers begin it each at its own time. So the rings and their barriers go on from job to job, and queries have two
buffers, of which a job's is free once its result has left it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .ends import first_row
from .forward_kernel import consume, drain, request
from .walk import job_of_turn, new_barriers, new_stages, num_turns


@gluon.jit
def _producer(
    q_desc, k_desc, v_desc, shared, q_free, jobs, num_jobs, group, k_tiles, regular,
    NC: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    past = 0
    for turn in range(num_turns(num_jobs)):
        job, i_b, i_h = job_of_turn(jobs, turn)
        row, _, _, v0, f0, f1, v1, _ = job
        mbarrier.wait(q_free.index(turn % 2), (turn // 2 & 1) ^ 1)
        request(
            q_desc, k_desc, v_desc, shared, (v0, f0, f1, v1, row), (i_b, i_h, i_h // group), k_tiles, regular,
            (turn % 2 * NC, past), NC, STAGES)  # fmt: skip
        past += v1 - v0
    drain(past, NC, STAGES)


@gluon.jit
def _consumer(
    shared, q_free, jobs, num_jobs, num_heads, num_rows, state, out, lse, lo, hi, scale_log2, k_tiles,
    C: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    FIRST: gl.constexpr, LAST: gl.constexpr, NC: gl.constexpr,
):  # fmt: skip
    past = 0
    for turn in range(num_turns(num_jobs)):
        job, i_b, i_h = job_of_turn(jobs, turn)
        row, _, count, v0, f0, f1, v1, _ = job
        p_state, p_out, p_lse = first_row(state, out, lse, i_b, i_h, row, num_heads, num_rows)
        consume(
            shared, (v0, f0, f1, v1, row), (turn % 2 * NC, past), turn // 2 & 1, count, p_state, p_out, p_lse,
            lo + row, hi + row, state[2], out[2], scale_log2, k_tiles,
            C, D, WIDTH, BK, STAGES, FIRST, LAST, NC)  # fmt: skip
        fence_async_shared()  # the result went through the buffer that TMA is to fill
        mbarrier.arrive(q_free.index(turn % 2), count=1)
        past += v1 - v0


@gluon.jit(do_not_specialize=["num_jobs", "regular", "num_heads", "group", "num_rows"])
def attend_in_turns(
    q_desc, k_desc, v_desc, state, out, lse, lo, hi, k_tiles, jobs,
    scale_log2, num_jobs, regular, num_heads, group, num_rows,
    D: gl.constexpr, WIDTH: gl.constexpr, BK: gl.constexpr, NC: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """As `forward_kernel.attend`, with all heads' jobs in one table of which program p takes lines p, p + grid, ..."""
    gl.static_assert(NC == 2, "of its tiles")
    q_s = gl.allocate_shared_memory(q_desc.dtype, [2 * NC, 1, 1, 64, D], q_desc.layout)
    q_full = new_barriers(2 * NC, 1)
    q_free = new_barriers(2, NC)
    gl.static_assert(STAGES <= 4, "named barriers")
    k_s, k_full = new_stages(k_desc, STAGES)
    v_s, v_full = new_stages(v_desc, STAGES)
    fence_async_shared()
    shared = (q_s, k_s, v_s, q_full, k_full, v_full)
    gl.warp_specialize([
        (_consumer, (shared, q_free, jobs, num_jobs, num_heads, num_rows, state, out, lse, lo, hi, scale_log2,
                     k_tiles, 0, D, WIDTH, BK, STAGES, FIRST, LAST, NC)),
        (_consumer, (shared, q_free, jobs, num_jobs, num_heads, num_rows, state, out, lse, lo, hi, scale_log2,
                     k_tiles, 1, D, WIDTH, BK, STAGES, FIRST, LAST, NC)),
        (_producer, (q_desc, k_desc, v_desc, shared, q_free, jobs, num_jobs, group, k_tiles, regular, NC, STAGES)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip
