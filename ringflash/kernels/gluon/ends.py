"""Where a program begins and ends: pointers to its tile's rows, and how results get there. Device code only."""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .walk import LN2, LOG2E, fresh, inside


@triton.constexpr_function
def _rows_of_16_bytes(columns):
    """How 64 rows of a half type lie when each thread holds 8 columns in a row, where an accumulator's holds 2."""
    bits = [[0, 1 << i] for i in range(columns.bit_length() - 1)]
    lanes = [*bits[3:5], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([*bits[:3], [8, 0], *bits[5:]], lanes, [[16, 0], [32, 0]], [], [64, columns])


@gluon.jit
def store_rows(b_x, p_x, x_row, count, C: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr):
    """Write an accumulator [64, D] of consumer C. p_x: pointer to the tile's first row; x_row: stride of rows.

    As it lies, four lanes hold 8 columns of a row: 32 bytes of fp32, the least that memory takes, but 16 of a half
    type, whose stores took three times as long as those of fp32.
    """
    IS_HALF: gl.constexpr = p_x.dtype.element_ty.primitive_bitwidth == 16
    PL: gl.constexpr = _rows_of_16_bytes(D) if IS_HALF else b_x.type.layout
    b_x = gl.convert_layout(b_x.to(p_x.dtype.element_ty), PL)
    o_row = fresh(C * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, PL)))
    o_column = gl.arange(0, D, layout=gl.SliceLayout(0, PL))
    p_row = p_x + (o_row.to(gl.int64) * x_row)[:, None] + o_column[None, :]
    gl.store(p_row, b_x, mask=inside(o_row, count, o_column, D, WIDTH))


@gluon.jit
def store_lse(p_lse, b_max, b_sum, count, C: gl.constexpr, RL: gl.constexpr):
    """Write lse; returns what normalises the accumulator, 1 for rows that have seen nothing."""
    b_sum = gl.convert_layout(gl.sum(b_sum, 1), RL)
    b_empty = b_sum == 0.0
    b_sum = gl.where(b_empty, 1.0, b_sum)
    o_q = C * 64 + gl.arange(0, 64, layout=RL)
    gl.store(p_lse + o_q, gl.where(b_empty, float("-inf"), (b_max + gl.log2(b_sum)) * LN2), mask=o_q < count)
    return 1.0 / b_sum


@gluon.jit
def load_rows(p_x, x_row, count, C: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, OL: gl.constexpr):
    """The rows of consumer C of an fp32 tensor, as an accumulator lies."""
    o_row = fresh(C * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, OL)))
    o_column = gl.arange(0, D, layout=gl.SliceLayout(0, OL))
    p_row = p_x + (o_row.to(gl.int64) * x_row)[:, None] + o_column[None, :]
    return gl.load(p_row, mask=inside(o_row, count, o_column, D, WIDTH), other=0.0)


@gluon.jit
def with_state(
    b_acc, b_max, p_state, p_lse, state_row, count, C: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr
):  # fmt: skip
    """b_acc, which is relative to b_max, and the normalised state that was carried here, which is relative to lse."""
    OL: gl.constexpr = b_acc.type.layout
    b_state = load_rows(p_state, state_row, count, C, D, WIDTH, OL)
    o_row = fresh(C * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, OL)))
    b_lse = gl.load(p_lse + o_row, mask=o_row < count, other=float("-inf"))
    b_max = gl.convert_layout(b_max, gl.SliceLayout(1, OL))
    b_share = gl.where(b_lse == float("-inf"), 0.0, gl.exp2(b_lse * LOG2E - b_max))
    return b_acc + b_state * b_share[:, None]


@gluon.jit
def store_out(b_q, b_acc, p_out, out_row, count, C: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr):
    """Write the consumer's rows, through shared memory that it alone still uses so that a thread writes 16 bytes."""
    CL: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    b_q.store(b_acc.to(b_q.dtype))
    o_row = fresh(C * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, CL)))
    o_column = gl.arange(0, D, layout=gl.SliceLayout(0, CL))
    p_row = p_out + (o_row.to(gl.int64) * out_row)[:, None] + o_column[None, :]
    gl.store(p_row, b_q.load(CL), mask=inside(o_row, count, o_column, D, WIDTH))


@gluon.jit
def first_row(state, out, lse, i_b, i_h, row, num_heads, num_rows):
    """Pointers to row `row` of one head in the three."""
    o_b = i_b.to(gl.int64)
    o_h = i_h.to(gl.int64)
    o_row = row.to(gl.int64)
    p_state = state[0] + (o_b * state[1] + o_row * state[2] + o_h * state[3])
    p_out = out[0] + (o_b * out[1] + o_row * out[2] + o_h * out[3])
    return p_state, p_out, lse + ((i_b * num_heads + i_h).to(gl.int64) * num_rows + row)
