"""Cross-entropy of an output head, chunk by chunk: the logits of the whole local sequence never exist.

The head is a module with its weight inside, so that ZeRO-3 gathers the weight around its forward and its backward.
Called by `model`.

Letters: N tokens, E model width, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .data import IGNORED


class LossHead(nn.Linear):
    """An output head, E -> V, that returns the loss instead of the logits when it is given labels.

    chunk: tokens whose logits exist at one time
    """

    def __init__(self, weight: nn.Parameter, chunk: int) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = weight
        self.chunk = chunk

    def forward(
        self, hidden: Tensor, labels: Tensor | None = None, weights: Tensor | None = None, *, each: bool = False
    ) -> Any:
        """hidden: [..., E] -> logits [..., V]; with labels: [...] int64 -> the sum of their losses, see `loss_sum`.

        each: instead of the sum what `token_scores` says of each token, [...]
        """
        if labels is None:
            return super().forward(hidden)
        flat = hidden.reshape(-1, hidden.shape[-1])
        if each:
            losses, hits = token_scores(flat, self.weight, labels.reshape(-1), chunk=self.chunk)
            return losses.view_as(labels), hits.view_as(labels)
        weights = None if weights is None else weights.reshape(-1)
        return loss_sum(flat, self.weight, labels.reshape(-1), weights, chunk=self.chunk)


def loss_sum(hidden: Tensor, weight: Tensor, labels: Tensor, weights: Tensor | None = None, *, chunk: int) -> Tensor:
    """The sum over tokens of weight_i * cross-entropy(logits_i, label_i), in nats.

    hidden: [N, E], weight: [V, E], one float type; labels: int64 [N], IGNORED = no loss
    weights: float [N], a factor a token, 1 unless given; not differentiable
    chunk: tokens whose logits exist at one time
    returns fp32 scalar; without a valid label it is 0 and its gradients are 0, but it has them

    Numerics: logits in the inputs' type, softmax and sums in fp32, gradients of the head summed over chunks in fp32
        and rounded once. The backward computes the logits of each chunk again.
    """
    return _LossSum.apply(hidden, weight, labels, weights, chunk)


@torch.no_grad()
def token_scores(hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk: int) -> tuple[Tensor, Tensor]:
    """The loss of each token, and whether its label is the most likely one; arguments as of `loss_sum`.

    returns fp32 [N], nats, 0 for IGNORED; bool [N], false for IGNORED
    """
    losses = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
    hits = torch.empty(len(labels), dtype=torch.bool, device=hidden.device)
    for rows in _chunks(len(labels), chunk):
        logits, losses[rows] = _losses(hidden[rows], weight, labels[rows])
        hits[rows] = logits.argmax(dim=-1) == labels[rows]
    return losses, hits


def _losses(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(logits, losses) of the tokens of one chunk, fp32."""
    logits = (hidden @ weight.t()).float()
    return logits, nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")


class _LossSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, weights: Tensor | None, chunk: int) -> Tensor:
        ctx.save_for_backward(hidden, weight, labels, weights)
        ctx.chunk = chunk
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for rows in _chunks(len(labels), chunk):
            losses = _losses(hidden[rows], weight, labels[rows])[1]  # with a name the logits would live on
            total += losses.sum() if weights is None else (losses * weights[rows]).sum()
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden, weight, labels, weights = ctx.saved_tensors
        dhidden = torch.empty_like(hidden)
        dweight = None  # of a frozen head
        if ctx.needs_input_grad[1]:
            dweight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for rows in _chunks(len(labels), ctx.chunk):
            valid = labels[rows] != IGNORED
            factor = gradients[0] * valid if weights is None else gradients[0] * valid * weights[rows]
            dlogits = torch.softmax((hidden[rows] @ weight.t()).float(), dim=-1)
            dlogits[torch.arange(len(valid), device=valid.device), labels[rows].clamp(min=0)] -= 1
            dlogits = (dlogits * factor[:, None]).to(hidden.dtype)
            dhidden[rows] = dlogits @ weight
            if dweight is not None:
                dweight += dlogits.t() @ hidden[rows]
        return dhidden, None if dweight is None else dweight.to(weight.dtype), None, None, None


def _chunks(tokens: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]
