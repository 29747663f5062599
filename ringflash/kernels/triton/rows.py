"""What the Triton kernels share: reading and writing rows of a strided tensor, and the math constants.

A tensor reaches a kernel as the tuple (pointer, batch stride, row stride, head stride), in elements; its innermost
stride is 1. A head dimension D that is no power of two is two column blocks, D0 and D1 (96 = 64 + 32, 192 = 128 + 64);
D1 = 0 otherwise. Every element offset is 64-bit: an index is widened before it meets a stride. Device code only.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def pointers(x, i_b, i_h, row, BLOCK: tl.constexpr, COLUMN: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers to x[i_b, row : row + BLOCK, i_h, COLUMN : COLUMN + WIDTH]."""
    p_base = x[0] + tl.cast(i_b, tl.int64) * x[1] + tl.cast(row, tl.int64) * x[2] + tl.cast(i_h, tl.int64) * x[3]
    o_row = tl.arange(0, BLOCK).to(tl.int64) * x[2]
    return p_base + o_row[:, None] + (COLUMN + tl.arange(0, WIDTH))[None, :]


@triton.jit
def load(
    x, i_b, i_h, row, count, BLOCK: tl.constexpr, COLUMN: tl.constexpr, WIDTH: tl.constexpr, UPCAST: tl.constexpr
):  # fmt: skip
    """The same block, 0 from its row `count` on; in fp32 where UPCAST (the interpreter cannot compute with bf16)."""
    p_x = pointers(x, i_b, i_h, row, BLOCK, COLUMN, WIDTH)
    b_x = tl.load(p_x, mask=(tl.arange(0, BLOCK) < count)[:, None], other=0.0)
    return b_x.to(tl.float32) if UPCAST else b_x


@triton.jit
def store(x, b_x, i_b, i_h, row, count, BLOCK: tl.constexpr, COLUMN: tl.constexpr, WIDTH: tl.constexpr):
    """Write the first `count` rows of a block, in the type of x."""
    p_x = pointers(x, i_b, i_h, row, BLOCK, COLUMN, WIDTH)
    tl.store(p_x, b_x.to(x[0].dtype.element_ty), mask=(tl.arange(0, BLOCK) < count)[:, None])


@triton.jit
def stream(
    desc, x, i_b, i_h, row, length, BLOCK: tl.constexpr, COLUMN: tl.constexpr, WIDTH: tl.constexpr, UPCAST: tl.constexpr
):  # fmt: skip
    """The same block inside the main loop: by tensor descriptor where there is one, by pointers where desc is None.

    length: rows of x; rows behind it are 0. Rows behind the tile but inside x are loaded: the caller masks them.
    """
    if desc is None:
        return load(x, i_b, i_h, row, length - row, BLOCK, COLUMN, WIDTH, UPCAST)
    else:
        b_x = desc.load([i_b, i_h, row, COLUMN]).reshape([BLOCK, WIDTH])
        return b_x.to(tl.float32) if UPCAST else b_x


@triton.jit
def stream_numbers(desc, x, index, count, BLOCK: tl.constexpr):
    """x[index : index + BLOCK] of one number a row, inside the main loop. From `count` on: 0 or what stands there.

    By pointers every thread would copy all the rows of its own products by itself.
    """
    o_row = tl.arange(0, BLOCK)
    if desc is None:
        return tl.load(x + index + o_row, mask=o_row < count, other=0)
    else:
        return desc.load([tl.cast(index, tl.int32)])


@triton.jit
def tile_of(tiles, i_tile):
    """(local start, global start, count) of a tile."""
    p_tile = tiles + 3 * i_tile
    return tl.load(p_tile), tl.load(p_tile + 1), tl.load(p_tile + 2)


@triton.jit
def range_of(ranges, i_tile):
    """(v0, w0, w1, v1) of a tile: it sees [v0, v1), of which [w0, w1) whole. See `mask.Tiles`."""
    p_range = ranges + 4 * i_tile
    return tl.load(p_range), tl.load(p_range + 1), tl.load(p_range + 2), tl.load(p_range + 3)


@triton.jit
def capped(b_s, cap_scale):
    """tanh(cap_scale * b_s); what is beyond the range of exp is -1 or 1."""
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * cap_scale * b_s))
