"""The chunked loss against torch's cross-entropy on whole logits."""

from __future__ import annotations

import pytest
import torch
from conftest import error
from torch.nn.functional import cross_entropy

from train.data import IGNORED
from train.loss import LossHead, loss_sum

TOKENS, WIDTH, VOCAB = 29, 16, 50


def case(ignored=0.0, dtype=torch.float32, tokens=TOKENS):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(VOCAB, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < ignored] = IGNORED
    return hidden, weight, labels


def gradients(loss, *inputs):
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("chunk", [1, 7, TOKENS, 1000])
@pytest.mark.parametrize("weighted", [False, True])
def test_R63_loss_and_gradients_equal_torch(chunk, weighted):
    hidden, weight, labels = case(ignored=0.5)
    weights = torch.rand(TOKENS, generator=torch.Generator().manual_seed(1)) if weighted else None
    losses = cross_entropy(hidden.double() @ weight.double().t(), labels, ignore_index=IGNORED, reduction="none")
    want = (losses * (1.0 if weights is None else weights)).sum()
    got = loss_sum(hidden, weight, labels, weights, chunk=chunk)
    assert error(got, want) <= 1e-6
    for mine, theirs in zip(gradients(3 * got, hidden, weight), gradients(3 * want, hidden, weight), strict=True):
        assert error(mine, theirs) <= 1e-5


def test_R69_gradient_scales_with_the_incoming_one():
    hidden, weight, labels = case()
    once = gradients(loss_sum(hidden, weight, labels, chunk=7), hidden, weight)
    four = gradients(4 * loss_sum(hidden, weight, labels, chunk=7), hidden, weight)
    assert all(torch.equal(4 * a, b) for a, b in zip(once, four, strict=True))


def test_R65_large_common_offset():
    hidden, weight, labels = case()
    hidden = torch.cat((hidden, torch.ones(TOKENS, 1)), 1)
    plain = loss_sum(hidden, torch.cat((weight, torch.zeros(VOCAB, 1)), 1), labels, chunk=7)
    offset = loss_sum(hidden, torch.cat((weight, torch.full((VOCAB, 1), 10_000.0)), 1), labels, chunk=7)
    assert abs(plain - offset) / TOKENS <= 1e-3
    far = torch.tensor([[3e4], [-3e4]])
    loss = loss_sum(far, torch.tensor([[1.0], [-1.0]]), torch.tensor([1, 1]), chunk=1)
    assert loss == 6e4


def test_R59_without_labels_loss_is_zero_and_the_graph_lives():
    hidden, weight, labels = case(ignored=2.0)
    loss = loss_sum(hidden, weight, labels, chunk=7)
    assert loss == 0
    assert loss.requires_grad
    assert all((gradient == 0).all() for gradient in gradients(loss, hidden, weight))


def test_bf16_gradients_are_summed_in_fp32():
    hidden, weight, labels = case(dtype=torch.bfloat16)
    inputs = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    want = gradients(cross_entropy(inputs[0] @ inputs[1].t(), labels, reduction="sum"), *inputs)
    got = gradients(loss_sum(hidden, weight, labels, chunk=1), hidden, weight)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == torch.bfloat16
        assert error(mine, theirs) <= 1.6e-2


def test_R106_logits_of_all_tokens_never_exist():
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            nonlocal largest
            out = op(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    hidden = torch.randn(640, WIDTH, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, requires_grad=True)
    with Watch():
        loss_sum(hidden, weight, torch.zeros(640, dtype=torch.int64), chunk=16).backward()
    assert largest == 640 * WIDTH, "the largest tensor is the hidden states, not 640 x 50 logits"


def test_head_gives_logits_without_labels():
    hidden, weight, labels = case()
    head = LossHead(torch.nn.Parameter(weight.detach()), 7)
    assert torch.equal(head(hidden[None]), (hidden @ weight.t())[None])
    assert error(head(hidden[None], labels[None]), loss_sum(hidden, weight, labels, chunk=7)) == 0


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_each_token_has_its_loss_and_its_hit(chunk):
    hidden, weight, labels = case(ignored=0.3)
    logits = hidden.detach().double() @ weight.detach().double().t()
    labels = torch.where((torch.arange(TOKENS) % 3 == 0) & (labels != IGNORED), logits.argmax(-1), labels)
    head = LossHead(torch.nn.Parameter(weight.detach()), chunk)
    losses, hits = head(hidden[None], labels[None], each=True)
    assert error(losses[0], cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")) <= 1e-6
    assert hits[0].tolist() == (logits.argmax(-1) == labels).tolist()
    assert 0 < hits.sum() < TOKENS and not losses.requires_grad
    assert error(losses.sum(), head(hidden[None], labels[None])) <= 1e-6


def test_label_outside_the_vocabulary_raises():
    hidden, weight, labels = case()
    labels[3] = VOCAB
    with pytest.raises(IndexError):
        loss_sum(hidden, weight, labels, chunk=7)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_R106_the_logits_of_128k_tokens_are_never_held(record_property):
    """Llama-3-8B's head: all logits would be 62.6 GiB in fp32. Twice the tokens add their gradient alone."""
    generator = torch.Generator("cuda").manual_seed(0)
    weight = (torch.randn(128256, 4096, generator=generator, device="cuda") / 64).bfloat16().requires_grad_()

    def given(tokens):
        hidden = torch.randn(tokens, 4096, generator=generator, device="cuda", dtype=torch.bfloat16)
        return hidden.requires_grad_(), torch.randint(128256, (tokens,), generator=generator, device="cuda")

    def above(tokens):
        (hidden, labels), weight.grad = given(tokens), None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss_sum(hidden, weight, labels, chunk=1024).backward()
        return torch.cuda.max_memory_allocated() - before - hidden.grad.nbytes - weight.grad.nbytes

    one, two = above(131072), above(262144)
    record_property("bytes_above_gradients", {"131072": one, "262144": two})
    assert one <= 4 * 2**30 and two - one <= 2**23
    hidden, labels = given(4096)
    with torch.no_grad():
        dense = cross_entropy(hidden.float() @ weight.float().t(), labels, reduction="sum")
        assert error(loss_sum(hidden, weight, labels, chunk=1024), dense) <= 1e-5
