"""The backward for short ranges of query tiles: `fused_kernel`, with programs that stay as in the forward.

Device code only. The query tiles of the next job are asked for while the consumers still work on the last ones of the
present job. There is room for one tile of keys only, which a loader of its own replaces as soon as both consumers have
read it for the last time; meanwhile they write dk and dv.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .fused_kernel import add_steps, new_exchange, sum_keys
from .keys_kernel import fill_keys, fill_steps, key_tile, new_buffers, steps_of, store_gradients
from .walk import job_of_turn, new_barriers, num_turns


@gluon.jit
def _tile_of_turn(jobs, turn, dk, dv, num_groups, group):
    """As `key_tile`, of a program's turn."""
    job, i_b, i_g = job_of_turn(jobs, turn)
    return key_tile(job, i_b, i_g, dk, dv, num_groups, group)


@gluon.jit
def _consumer(
    rings, barriers, exchange, k_s, v_s, kv_full, kv_free, jobs, num_jobs, dk, dv, num_groups, group, scales,
    C: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, ADDS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    KL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    past = 0
    for turn in range(num_turns(num_jobs)):
        _, position, walk, _, grads = _tile_of_turn(jobs, turn, dk, dv, num_groups, group)
        num_steps, first_plain = steps_of(walk, group)
        b_dk, b_dv = sum_keys(
            rings, barriers, exchange, k_s, v_s, kv_full, (past, turn & 1), num_steps, first_plain, position,
            grads[4], scales, C, D, STAGES, KL)  # fmt: skip
        mbarrier.arrive(kv_free, count=1)
        store_gradients(grads, b_dk * scales[0], b_dv, C, D, WIDTH, ADDS)
        past += num_steps


@gluon.jit
def _adder(dq_desc, exchange, jobs, num_jobs, dk, dv, num_groups, group, q_tiles, D: gl.constexpr):
    past = 0
    for turn in range(num_turns(num_jobs)):
        _, _, walk, head, _ = _tile_of_turn(jobs, turn, dk, dv, num_groups, group)
        add_steps(dq_desc, exchange, walk, head, q_tiles, past, D)
        past += steps_of(walk, group)[0]


@gluon.jit
def _query_loader(
    descs, rings, barriers, jobs, num_jobs, dk, dv, num_groups, group, q_tiles, num_tiles, STAGES: gl.constexpr
):  # fmt: skip
    past = 0
    for turn in range(num_turns(num_jobs)):
        _, _, walk, head, _ = _tile_of_turn(jobs, turn, dk, dv, num_groups, group)
        fill_steps(descs, rings, barriers, walk, head, q_tiles, num_tiles, past, STAGES)
        past += steps_of(walk, group)[0]


@gluon.jit
def _key_loader(k_desc, v_desc, k_s, v_s, kv_full, kv_free, jobs, num_jobs, dk, dv, num_groups, group):
    for turn in range(num_turns(num_jobs)):
        row, _, _, head, _ = _tile_of_turn(jobs, turn, dk, dv, num_groups, group)
        mbarrier.wait(kv_free, turn & 1 ^ 1)
        fill_keys(k_desc, v_desc, k_s, v_s, kv_full, head, row)


@gluon.jit(do_not_specialize=["num_jobs", "num_q_tiles", "num_groups", "group"])
def all_gradients_in_turns(
    q_desc, k_desc, v_desc, dout_desc, starts_desc, bounds_desc, dq_desc, dk, dv,
    q_tiles, jobs, scale, scale_log2, dq_scale, num_jobs, num_q_tiles, num_groups, group,
    D: gl.constexpr, WIDTH: gl.constexpr, ADDS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """As `fused_kernel.all_gradients`, with the jobs of all heads in one table, see `job_of_turn`."""
    rings, barriers, k_s, v_s, kv_full = new_buffers(
        q_desc, k_desc, v_desc, dout_desc, starts_desc, bounds_desc, STAGES
    )
    exchange = new_exchange(q_desc, dq_desc, D)
    kv_free = new_barriers(1, 2).index(0)
    fence_async_shared()
    descs = (q_desc, dout_desc, starts_desc, bounds_desc)
    scales = (scale, scale_log2, dq_scale)
    gl.warp_specialize([
        (_consumer, (rings, barriers, exchange, k_s, v_s, kv_full, kv_free, jobs, num_jobs, dk, dv, num_groups, group,
                     scales, 0, D, WIDTH, ADDS, STAGES)),
        (_consumer, (rings, barriers, exchange, k_s, v_s, kv_full, kv_free, jobs, num_jobs, dk, dv, num_groups, group,
                     scales, 1, D, WIDTH, ADDS, STAGES)),
        (_adder, (dq_desc, exchange, jobs, num_jobs, dk, dv, num_groups, group, q_tiles, D)),
        (_query_loader, (descs, rings, barriers, jobs, num_jobs, dk, dv, num_groups, group, q_tiles, num_q_tiles,
                         STAGES)),
        (_key_loader, (k_desc, v_desc, k_s, v_s, kv_full, kv_free, jobs, num_jobs, dk, dv, num_groups, group)),
    ], [4, 1, 1, 1], [REGISTERS, 24, 24, 24])  # fmt: skip
