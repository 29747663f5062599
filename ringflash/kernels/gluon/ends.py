"""Where a forward program begins and ends: pointers to its tile's rows, and how results get there. Device code only."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .walk import LN2, fresh, inside


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
def store_state(
    b_acc, p_state, state_row, count, C: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, OL: gl.constexpr
):  # fmt: skip
    o_row = fresh(C * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, OL)))
    o_column = gl.arange(0, D, layout=gl.SliceLayout(0, OL))
    p_row = p_state + (o_row.to(gl.int64) * state_row)[:, None] + o_column[None, :]
    gl.store(p_row, b_acc, mask=inside(o_row, count, o_column, D, WIDTH))


@gluon.jit
def store_out(b_q, b_acc, p_out, out_row, count, C: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr):
    """Write the consumer's rows of `out`, through the shared memory of its queries so that a thread writes 16 bytes."""
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
