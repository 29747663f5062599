"""What the Gluon kernels share: which tiles a program visits in which order, masks of scores, barriers of rings.

A program walks the range [v0, v1) of tiles that it sees; of these [f0, f1) need no mask. Masked tiles come first, so
that the long loop, which holds no mask code, is the last one and needs no branch. Device code only.

A ring is STAGES buffers in shared memory with two barriers each: `full` completes when a buffer is filled, `free` when
every consumer has read it. Step j uses buffer j % STAGES, and its barriers' phase is (j // STAGES) & 1.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma

tma_load = tma.async_copy_global_to_shared

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def job_and_head(jobs, num_tiles, section):
    """(job, batch x heads + head) of a program: head by head, and the last `section` heads as if they were one.

    A job is (row, position, count, v0, f0, f1, v1, shift) of a tile, `launch.jobs_by_query`: where it starts in the
    tensor and in the sequence, how many rows it has, the range it walks. It is one line of one table, so that a program
    starts after one load and not after three that wait for each other. Jobs are sorted, the longest first. Programs
    that run side by side then read the same tensors; but where the last head starts, its long tiles wait for those of
    the head before, and the grid ends with a few of them. `launch.Work.section` says how many heads even that out.
    """
    i = gl.program_id(0)
    num_heads = gl.num_programs(0) // num_tiles
    i_split = gl.maximum(num_heads - section, 0)
    num_last = num_heads - i_split
    i_last = i - i_split * num_tiles
    p_job = jobs + 8 * gl.where(i_last < 0, i % num_tiles, i_last // num_last)
    job = (
        gl.load(p_job), gl.load(p_job + 1), gl.load(p_job + 2), gl.load(p_job + 3),
        gl.load(p_job + 4), gl.load(p_job + 5), gl.load(p_job + 6), gl.load(p_job + 7),
    )  # fmt: skip
    return job, gl.where(i_last < 0, i // num_tiles, i_split + i_last % num_last)


@gluon.jit
def num_turns(num_jobs):
    """How many of the grid's jobs are this program's."""
    return (num_jobs - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def job_of_turn(jobs, turn):
    """(job, batch entry, head) of a program's turn, from the table of `turns.turns`. What is not used is not loaded."""
    p_job = jobs + 10 * (gl.program_id(0) + turn * gl.num_programs(0))
    job = (
        gl.load(p_job), gl.load(p_job + 1), gl.load(p_job + 2), gl.load(p_job + 3),
        gl.load(p_job + 4), gl.load(p_job + 5), gl.load(p_job + 6), gl.load(p_job + 7),
    )  # fmt: skip
    return job, gl.load(p_job + 8), gl.load(p_job + 9)


@gluon.jit
def tile_at(j, v0, f0, f1, v1):
    """The tile of step j: the masked right end backwards, the masked left end, then the others."""
    right = v1 - f1
    masked = right + f0 - v0
    return gl.where(j < right, v1 - 1 - j, gl.where(j < masked, v0 + j - right, f0 + j - masked))


@gluon.jit
def masked_keys(b_s, b_lo, b_hi, k_tiles, i_tile):
    """Scores [rows, keys] of a key tile: -inf where the key is not in [lo, hi) of its row, or behind the tile's end.

    A key is 8 i + 2 lane + e, of which i and e lie in one thread's registers: with the lane on the other side of the
    comparison they are constants. Held in registers, the positions of a tile make the kernel spill.
    """
    p_tile = k_tiles + 3 * i_tile
    position = gl.load(p_tile + 1)
    count = gl.load(p_tile + 2)
    x = b_s.reshape([b_s.shape[0], b_s.shape[1] // 8, 4, 2])
    XL: gl.constexpr = x.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, XL)))
    o_i = gl.arange(0, b_s.shape[1] // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, XL))))
    o_lane = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, XL))))
    o_e = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, XL))))
    o_k = o_i[None, :, None, None] * 8 + o_e[None, None, None, :]
    b_begin = gl.convert_layout(b_lo - position, ROW)[:, None, None, None] - o_lane[None, None, :, None] * 2
    b_end = gl.convert_layout(gl.minimum(b_hi - position, count), ROW)[:, None, None, None]
    b_end = b_end - o_lane[None, None, :, None] * 2
    x = gl.where((o_k >= b_begin) & (o_k < b_end), x, float("-inf"))
    return gl.convert_layout(x.reshape(b_s.shape), b_s.type.layout)


@gluon.jit
def matrix(buffer):
    """A [1, 1, rows, columns] buffer, the form in which TMA fills it, as [rows, columns]."""
    return buffer.reshape([buffer.shape[2], buffer.shape[3]])


@triton.constexpr_function
def num_products(columns, width):
    """How many `wide_product` starts: 2 where it leaves out a quarter of the columns, which holds zeros."""
    return 2 if columns == 256 and width <= 192 else 1


@gluon.jit
def wide_product(a, b, b_acc, WIDTH: gl.constexpr, ADDS: gl.constexpr):
    """Start a b^T of two buffers, over the WIDTH columns that the tensor has; ADDS: to b_acc."""
    if num_products(a.shape[1], WIDTH) == 1:
        return warpgroup_mma(a, b.permute([1, 0]), b_acc, use_acc=ADDS, is_async=True)
    else:
        most = b.slice(0, 128, dim=1).permute([1, 0])
        b_acc = warpgroup_mma(a.slice(0, 128, dim=1), most, b_acc, use_acc=ADDS, is_async=True)
        rest = b.slice(128, 64, dim=1).permute([1, 0])
        return warpgroup_mma(a.slice(128, 64, dim=1), rest, b_acc, is_async=True)


@gluon.jit
def fresh(offsets):
    """The same int32 offsets, computed again: an address made before a loop would stay in registers through it."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [offsets], gl.int32, is_pure=False, pack=1)


@gluon.jit
def inside(o_row, count, o_column, D: gl.constexpr, WIDTH: gl.constexpr):
    """Mask of [rows, D]: rows before `count`, and columns before WIDTH where tiles are wider than the tensor."""
    m_row = (o_row < count)[:, None]
    return m_row & (o_column < WIDTH)[None, :] if WIDTH < D else m_row


@gluon.jit
def wait_full(full, j, STAGES: gl.constexpr):
    mbarrier.wait(full.index(j % STAGES), (j // STAGES) & 1)


@gluon.jit
def arrive_free(free, j, STAGES: gl.constexpr):
    mbarrier.arrive(free.index(j % STAGES), count=1)


@gluon.jit
def fill(desc, at, ring, full, free, j, STAGES: gl.constexpr):
    """Producer: wait until buffer j % STAGES is free and start to fill it with the block of `desc` at `at`."""
    stage = j % STAGES
    mbarrier.wait(free.index(stage), ((j // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), desc.block_type.nbytes)
    tma_load(desc, at, full.index(stage), ring.index(stage))


@gluon.jit
def new_stages(desc, STAGES: gl.constexpr):
    """(buffers, full) of a ring."""
    buffers = gl.allocate_shared_memory(
        desc.dtype, [STAGES, 1, 1, desc.block_type.shape[2], desc.block_type.shape[3]], desc.layout
    )
    return buffers, new_barriers(STAGES, 1)


@gluon.jit
def new_ring(desc, STAGES: gl.constexpr, READERS: gl.constexpr):
    """(buffers, full, free) of a ring read by READERS consumers."""
    buffers, full = new_stages(desc, STAGES)
    return buffers, full, new_barriers(STAGES, READERS)


@gluon.jit
def new_barriers(NUM: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers
