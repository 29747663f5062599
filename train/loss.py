"""Cross-entropy of an output head, chunk by chunk: the logits of the whole local sequence never exist.

The head is a module with its weight inside, so that ZeRO-3 gathers the weight around its forward and its backward.
`memory.loss` says whether its sum is ours or Liger-Kernel's. Called by `model`; `check_device` by `loop`.

Letters: N tokens, E model width, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .data import IGNORED


class LossHead(nn.Linear):
    """An output head, E -> V, that returns the loss instead of the logits when it is given labels.

    chunk: tokens whose logits exist at one time
    kind: "chunked" or "liger", whose sum it is; the losses of each token are ours
    """

    def __init__(self, weight: nn.Parameter, chunk: int, kind: str = "chunked") -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = weight
        self.chunk, self.kind = chunk, kind

    def forward(
        self, hidden: Tensor, labels: Tensor | None = None, weights: Tensor | None = None, *, each: bool = False
    ) -> Any:
        """hidden: [..., E] -> logits [..., V]; with labels: [...] int64 -> the sum of their losses, see `loss_sum`.

        each: instead of the sum what `token_scores` says of each token, [...]
        Raises: ValueError for weights where Liger, which knows none, makes the sum.
        """
        if labels is None:
            return super().forward(hidden)
        flat = hidden.reshape(-1, hidden.shape[-1])
        if each:
            losses, hits = token_scores(flat, self.weight, labels.reshape(-1), chunk=self.chunk)
            return losses.view_as(labels), hits.view_as(labels)
        if self.kind == "liger":
            if weights is not None:
                raise ValueError("memory.loss = 'liger' knows no weight of a token: 'chunked' is accepted with weights")
            return liger_loss_sum(flat, self.weight, labels.reshape(-1))
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


def liger_loss_sum(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The sum of `loss_sum` by Liger-Kernel, which makes both gradients in the forward: 3 products of the head, not 4.

    hidden: [N, E], weight: [V, E], one float type, on a GPU or in Triton's interpreter; labels: int64 [N]
    returns fp32 scalar, for one backward

    Numerics: logits and their gradient in the inputs' type, softmax and the sum of the weight's gradient in fp32. What
        comes in is multiplied in after both gradients are rounded, and they are rounded again. The host waits for the
        GPU in each direction: Liger counts the labels, and looks whether what comes in is 1.
    Source: Hsu et al., arXiv:2410.10989
    """
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Fused

    # no bias, no weights of classes, no penalty, no smoothing, no cap, no second loss; sums in fp32
    return Fused.apply(hidden, weight, labels, None, None, IGNORED, 0.0, 0.0, "sum", None, False, torch.float32)[0]


def check_device(kind: str, device: torch.device) -> None:
    """Refuse a memory.loss without a kernel for the device, before a step. Raises: ValueError."""
    if kind != "liger" or device.type == "cuda":
        return
    import triton

    if not triton.knobs.runtime.interpret:
        raise ValueError(
            f"memory.loss = 'liger' needs a GPU, or TRITON_INTERPRET=1; this process computes on {device}, where "
            "'chunked' is accepted"
        )


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
