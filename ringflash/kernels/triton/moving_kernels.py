"""Rows of several tensors copied, summed and rounded, or cleared, each in one launch. Device code only.

Which rows is a table of steps, int32 [n, 3]: (row there, row here, count), at most ROWS each. A tensor [B, N, ...]
reaches a kernel as a tuple of its pointer and strides in elements; the numbers of a row are columns, C of them. Every
element offset is 64-bit. A program has a step, one batch entry of one tensor, and COLUMNS columns.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def step_of(steps, i_step, ROWS: tl.constexpr):
    """(rows there, rows here, which of them are), int64 [ROWS] twice, bool [ROWS]."""
    p_step = steps + 3 * tl.cast(i_step, tl.int64)
    o_row = tl.arange(0, ROWS).to(tl.int64)
    there, here = tl.load(p_step).to(tl.int64), tl.load(p_step + 1).to(tl.int64)
    return there + o_row, here + o_row, o_row < tl.load(p_step + 2)


@triton.jit
def copy_into(x, block, there, here, m_row, i_b, row_bytes, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One tensor's part of `copy_rows`."""
    pointer, batch_stride, row_stride, column_stride, num_columns, first_byte = x
    o_column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    mask = m_row[:, None] & (o_column < num_columns)[None, :]
    o_column = o_column.to(tl.int64)
    p_x = pointer + i_b * batch_stride + (here * row_stride)[:, None] + (o_column * column_stride)[None, :]
    p_row = block + first_byte + there * row_bytes
    o_element = i_b * num_columns + o_column
    p_block = p_row.to(tl.pointer_type(pointer.dtype.element_ty))[:, None] + o_element[None, :]
    tl.store(p_block, tl.load(p_x, mask=mask), mask=mask)


@triton.jit
def copy_rows(xs, block, steps, row_bytes, num_batches, NUM: tl.constexpr, ROWS: tl.constexpr, WIDTHS: tl.constexpr):
    """Rows of NUM tensors into rows of a block of bytes, in which they lie side by side.

    xs: (pointer, batch stride, row stride, column stride, C, first byte in a row of the block) each
    block: uint8 [m, row_bytes]; there is of the block, here of the tensors; WIDTHS: COLUMNS of each
    """
    i_tensor, i_b = tl.program_id(1) // num_batches, (tl.program_id(1) % num_batches).to(tl.int64)
    there, here, m_row = step_of(steps, tl.program_id(0), ROWS)
    for i in tl.static_range(NUM):
        if i_tensor == i:
            copy_into(xs[i], block, there, here, m_row, i_b, row_bytes, ROWS, WIDTHS[i])


@triton.jit
def sum_rows(
    xs, sums, arrived, spans, arrivals, steps, num_batches, num_columns,
    NUM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows `there` of xs = rows `here` of sums, and what has arrived for them, added in fp32 and rounded once.

    xs, sums: (pointer, batch stride, row stride) each, NUM of both; sums fp32, xs of any type
    arrived: (pointer, row stride, stride of a tensor, batch stride) of what has arrived, of any type, or None
    spans: int32 [steps, 2] (first, end) of the arrivals of a step
    arrivals: int32 [n, 3] (row of the first, how many, rows from one to the next): those are summed, then added
    """
    i_x, i_b = tl.program_id(1) // num_batches, (tl.program_id(1) % num_batches).to(tl.int64)
    i_step = tl.cast(tl.program_id(0), tl.int64)
    there, here, m_row = step_of(steps, i_step, ROWS)
    o_column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    mask = m_row[:, None] & (o_column < num_columns)[None, :]
    o_column = o_column.to(tl.int64)
    for i in tl.static_range(NUM):
        if i_x == i:
            _, batch_stride, row_stride = sums[i]
            p_sum = sums[i][0] + i_b * batch_stride + (here * row_stride)[:, None] + o_column[None, :]
            b_sum = tl.load(p_sum, mask=mask, other=0.0)
            if arrived is not None:
                p_arrived = arrived[0] + i * arrived[2] + i_b * arrived[3] + o_column[None, :]
                o_row = tl.arange(0, ROWS).to(tl.int64)
                for i_one in range(tl.load(spans + 2 * i_step), tl.load(spans + 2 * i_step + 1)):
                    p_one = arrivals + 3 * tl.cast(i_one, tl.int64)
                    row, count, apart = tl.load(p_one), tl.load(p_one + 1), tl.load(p_one + 2)
                    o_first = (row.to(tl.int64) + o_row) * arrived[1]
                    b_part = tl.load(p_arrived + o_first[:, None], mask=mask, other=0.0).to(tl.float32)
                    for i_next in range(1, count):
                        o_next = o_first + tl.cast(i_next, tl.int64) * apart * arrived[1]
                        b_part += tl.load(p_arrived + o_next[:, None], mask=mask, other=0.0).to(tl.float32)
                    b_sum += b_part
            p_x = xs[i][0] + i_b * xs[i][1] + (there * xs[i][2])[:, None] + o_column[None, :]
            tl.store(p_x, b_sum.to(xs[i][0].dtype.element_ty), mask=mask)


@triton.jit
def clear_rows(x, steps, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Zeros in the rows `there` of x: (pointer, batch stride, row stride)."""
    there, _, m_row = step_of(steps, tl.program_id(0), ROWS)
    o_column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    mask = m_row[:, None] & (o_column < num_columns)[None, :]
    p_x = x[0] + tl.program_id(1).to(tl.int64) * x[1] + (there * x[2])[:, None] + o_column.to(tl.int64)[None, :]
    tl.store(p_x, tl.zeros([ROWS, COLUMNS], x[0].dtype.element_ty), mask=mask)
