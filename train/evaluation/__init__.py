"""What a model has learned, on the mesh that trains it: held-out loss, loss by position, pass keys by depth and length.

Everything goes the way of training: packed sequences, the layout, the model under its engine, the chunked loss head.

    evaluator.py    Evaluator: one evaluation, when it is due
    score.py        the loop over sequences, and the sums over all ranks
    needle.py       texts with a pass key
    result.py       what came out, as rows, JSON and a table
    picture.py      the same, drawn
    standalone.py   the evaluation of a checkpoint, outside of training
"""

from .evaluator import Evaluator
from .picture import draw
from .result import Result, in_json

__all__ = ["Evaluator", "Result", "draw", "in_json"]
