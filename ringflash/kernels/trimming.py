"""Rows that nobody sees, cut off before a kernel reads them.

A mask multiplies by 0 what it hides, and 0 * NaN is NaN. Padding holds whatever the caller left there, so it must not
be read at all. Shorter tensors cost nothing, and a rank's padding is the end of its tokens, in every layout.
Called by the kernels, before they make tables and descriptors. numpy on the host.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..mask import ALIGNMENT, View, positions


class Trimmed(NamedTuple):
    """A view without its ends that see nothing and that nobody sees.

    rows: the local queries from the first to the last that sees any key of the sequence
    keys: the visiting keys from the first to the last that these rows see, here
    of_keys: the view of all rows on `keys`; of_both: the view of `rows` on `keys`
    """

    rows: slice
    keys: slice
    of_keys: View
    of_both: View


def trimmed(view: View) -> Trimmed:
    """The view trimmed; made once. Only ends are cut: a hole inside, which only `intervals` can make, stays.

    Keys before the first visible one, in a block of several segments, are cut in runs of ALIGNMENT: a window hides them
    and they are no padding, while a first segment of odd length would cost every tile its alignment.
    """
    return view.memo("trimmed", lambda: _trim(view))


def _trim(view: View) -> Trimmed:
    filled = np.flatnonzero(view.lo < view.hi)
    position = positions(view.k_segments)
    rows, keys = slice(0, 0), slice(0, 0)
    if len(filled):
        rows = slice(int(filled[0]), int(filled[-1]) + 1)
        begin, end = np.searchsorted(position, (view.lo[filled[0]], view.hi[filled[-1]]))
        if len(view.k_segments) > 1:
            begin -= begin % ALIGNMENT if begin < view.k_segments[0, 1] else begin - view.k_segments[0, 1]
        keys = slice(int(begin), max(int(begin), int(end)))
    of_keys = view if (keys.start, keys.stop) == (0, len(position)) else view.of_keys(keys)
    if (rows.start, rows.stop) == (0, len(view.lo)):
        return Trimmed(rows, keys, of_keys, of_keys)
    return Trimmed(rows, keys, of_keys, of_keys.of_rows(rows))
