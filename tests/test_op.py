"""`ringflash.attention` as torch sees it: autocast, no_grad, checkpointing, compile; and what explain tells."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as checkpointing
from conftest import TOLERANCE
from masks import MASKS
from oracle import got, inputs

import ringflash
from ringflash import Ring, exchange, ops
from ringflash.kernels import eager

# --- explain


def bytes_sent(ulysses: int, groups: int, name: str, dtype: torch.dtype, rotate: str = "auto", **ring: Any) -> None:
    """What explain announces is what the transport carries."""
    sent, heads = {"forward": 0, "backward": 0}, {"forward": 0, "backward": 0}
    phase, plain, keys = ["forward"], exchange.Processes.post, set()

    def counted(self, sends, receives, what, slow=False):
        sent[phase[0]] += sum(x.numel() * x.element_size() for _, x in sends)
        heads[phase[0]] += what.startswith("heads")
        keys.update((what, peer) for peer, _ in sends if phase[0] == "forward" and what.startswith("keys"))
        return plain(self, sends, receives, what, slow)

    exchange.Processes.post = counted
    try:
        given = MASKS[name](64)
        window = given.pop("window", None)
        layout = Ring(ulysses=ulysses, **ring).layout(64, **given)
        q, k, v = (layout.shard(x).requires_grad_() for x in inputs(64, groups=groups, dtype=dtype)[:3])
        told = ringflash.explain(q, k, v, layout=layout, window=window, rotate=rotate)
        out = ringflash.attention(q, k, v, layout=layout, window=window, rotate=rotate)
        phase[0] = "backward"
        out.sum().backward()
    finally:
        exchange.Processes.post = plain
    assert sent == {"forward": told.forward_bytes, "backward": told.backward_bytes}
    assert (told.kernel, told.sends) == ("eager", len(keys))
    # out: q, k, v with dout, then lse and delta in one; back: out and lse, then dq, dk, dv
    assert heads == ({"forward": 3, "backward": 5} if ulysses > 1 else {"forward": 0, "backward": 0})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["causal", "window", "only_padding"])
@pytest.mark.parametrize(("ulysses", "groups"), [(1, 2), (2, 2), (4, 2), (4, 4)])
def test_explain_announces_the_bytes_that_travel(pool, ulysses, groups, name, dtype):
    pool(4)(bytes_sent, ulysses, groups, name, dtype)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_explain_on_one_device(device):
    q, k, v = (x.to(device) for x in inputs(10)[:3])
    told = ringflash.explain(q, k, v)
    assert (told.kernel, told.hops, told.forward_bytes, told.pairs) == ("eager", (0,), 0, 55)
    assert "kernel eager (auto); hops [0], 0 sends" in str(told)


# --- torch: no_grad, autocast, checkpointing, compile


def without_gradients(ring: Ring) -> None:
    layout = ring.layout(64, cu_seqlens=[0, 20, 60])
    q, k, v = (layout.shard(x).requires_grad_() for x in inputs(64)[:3])
    training = ringflash.attention(q, k, v, layout=layout, return_lse=True)
    assert training[0].requires_grad and training[1].requires_grad
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            plain = ringflash.attention(q, k, v, layout=layout, return_lse=True)
        assert all(torch.equal(a, b) and not b.requires_grad for a, b in zip(training, plain, strict=True))


def without_gradients_on_ranks() -> None:
    without_gradients(Ring())


def test_R15_without_gradients_the_forward_is_bitwise_the_same(pool):
    without_gradients(Ring())
    pool(4)(without_gradients_on_ranks)


def test_a_layout_made_under_inference_mode_trains():
    ring = Ring()
    bounds = tuple(x.clone() for x in MASKS["prefix"](64)["intervals"])
    q, k, v = (x.requires_grad_() for x in inputs(64)[:3])
    for given in (
        {"cu_seqlens": [0, 20, 64]},
        {"intervals": bounds},
        {"cu_seqlens": torch.tensor([0, 9], dtype=torch.int32)},
    ):
        with torch.inference_mode():
            layout = ring.layout(64, **given)
            layout.shard(torch.zeros(1, 64)), layout.position_ids
        ringflash.attention(q, k, v, layout=layout).sum().backward()
        layout.shard(torch.zeros(1, 64, 1, requires_grad=True)).sum().backward()


def test_a_second_derivative_is_refused_by_name():
    q, k, v = (x.requires_grad_() for x in inputs(16)[:3])
    grads = torch.autograd.grad(ringflash.attention(q, k, v).square().sum(), (q, k, v), create_graph=True)
    with pytest.raises(NotImplementedError, match="ringflash: attention has no second derivative"):
        sum(grad.square().sum() for grad in grads).backward()


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.jacfwd, torch.func.hessian])
def test_a_transform_of_torch_func_is_refused_by_name(transform):
    q, k, v, *_ = inputs(8)
    layout = Ring().layout(8)
    with pytest.raises(NotImplementedError, match=r"ringflash: attention is not differentiated .* by torch\.func"):
        transform(lambda x: ringflash.attention(x, k, v).sum())(q)
    with pytest.raises(NotImplementedError, match=r"layout\.unshard is not differentiated .* by torch\.func"):
        transform(lambda x: layout.unshard(x).sum())(q)


def test_a_forward_mode_derivative_is_refused_by_name():
    q, k, v, *_ = inputs(8)
    forward = torch.autograd.forward_ad
    with forward.dual_level(), pytest.raises(NotImplementedError, match="attention has no forward-mode derivative"):
        ringflash.attention(forward.make_dual(q, q), k, v)


def test_vmap_is_a_call_for_each():
    q, k, v, dout, _ = (torch.stack([x, x.flip(1), 2 * x]) for x in inputs(8))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    one_by_one = torch.stack([ringflash.attention(*row, window=3) for row in zip(*leaves, strict=True)])
    batched = torch.vmap(lambda *x: ringflash.attention(*x, window=3))(*leaves)
    assert torch.equal(batched, one_by_one)
    grads = (torch.autograd.grad(out, leaves, dout) for out in (batched, one_by_one))
    assert all(torch.equal(batched, alone) for batched, alone in zip(*grads, strict=True))


@pytest.mark.parametrize("backward_inside", [False, True])
def test_R13_under_autocast_inputs_are_cast_and_gradients_come_back_in_their_own_type(backward_inside):
    q, k, v, dout, _ = inputs(64)
    v = v.bfloat16()
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    halves = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    dout = dout.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = ringflash.attention(*leaves, return_lse=True)
        if backward_inside:
            out.backward(dout)
    if not backward_inside:
        out.backward(dout)
    want_out, want_lse = ringflash.attention(*halves, return_lse=True)
    want_out.backward(dout)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert torch.equal(out, want_out) and torch.equal(lse, want_lse), "the kernel's own products were cast too"
    for leaf, half in zip(leaves, halves, strict=True):
        assert leaf.grad.dtype == leaf.dtype and torch.equal(leaf.grad, half.grad.to(leaf.dtype))


def test_fp64_is_refused_under_autocast_too():
    tensors = [x.double() for x in inputs(8)[:3]]
    for function in (ringflash.attention, ringflash.explain):
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=r"q is torch\.float64, k is"):
            function(*tensors)


def test_without_autocast_mixed_types_are_refused():
    q, k, v, *_ = inputs(8)
    with pytest.raises(TypeError, match=r"q is torch.float32, k is torch.float32, v is torch.bfloat16; all three must"):
        ringflash.attention(q, k, v.bfloat16())


def keep_attention(ctx, op, *args, **kwargs):
    saved = checkpointing.CheckpointPolicy.MUST_SAVE
    return saved if op == torch.ops.ringflash.attention.default else checkpointing.CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(policy: str) -> tuple[int, int]:
    """(rings forward, deltas) of one step under a checkpoint policy; gradients are bitwise those without one."""
    counts = {"forward": 0, "delta": 0}
    plain_forward, plain_delta = ops.ring.forward, eager.delta

    def forward(*args, **given):
        counts["forward"] += 1
        return plain_forward(*args, **given)

    def delta(*args):
        counts["delta"] += 1
        return plain_delta(*args)

    ops.ring.forward, eager.delta = forward, delta
    try:
        ring = Ring()
        layout = ring.layout(64)
        tensors = [layout.shard(x) for x in inputs(64)[:3]]

        def block(q, k, v):
            return ringflash.attention(q * 2, k.sin(), v, layout=layout, deterministic=True).sin()

        context = lambda: checkpointing.create_selective_checkpoint_contexts(keep_attention)  # noqa: E731
        how = {"none": None, "plain": {}, "selective": {"context_fn": context}}
        gradients = {}
        for name in ("none", policy):
            counts.update(forward=0, delta=0)
            leaves = [x.clone().requires_grad_() for x in tensors]
            if how[name] is None:
                out = block(*leaves)
            else:
                out = checkpointing.checkpoint(block, *leaves, use_reentrant=False, **how[name])
            gradients[name] = torch.autograd.grad(out.square().sum(), leaves)
        assert all(torch.equal(a, b) for a, b in zip(gradients["none"], gradients[policy], strict=True))
    finally:
        ops.ring.forward, eager.delta = plain_forward, plain_delta
    return counts["forward"], counts["delta"]


@pytest.mark.parametrize(("policy", "forwards"), [("none", 1), ("plain", 2), ("selective", 1)])
def test_R33_a_saving_policy_runs_the_ring_once_and_plain_checkpointing_twice(pool, policy, forwards):
    assert pool(4)(checkpointed, policy) == [(forwards, 1)] * 4


def compiled_steps(ring: Ring) -> None:
    """One compilation serves batches with other numbers of documents, and gives what eager gives."""

    def block(q, k, v, layout):
        out, lse = ringflash.attention(q * 1.5, k, v, layout=layout, window=30, return_lse=True)
        return out * 2, lse

    torch._dynamo.reset()
    fast = torch.compile(block, fullgraph=True, backend="aot_eager")
    for turn, borders in enumerate(([0, 20, 64], [0, 1, 2, 30, 30, 64], [0, 60], [0, 5, 9, 64])):
        layout = ring.layout(64, cu_seqlens=borders)
        tensors = [layout.shard(x) for x in inputs(64)[:4]]
        results = {}
        with torch._dynamo.config.patch(error_on_recompile=turn > 0):
            for name, function in (("compiled", fast), ("plain", block)):
                leaves = [x.clone().requires_grad_() for x in tensors[:3]]
                out, lse = function(*leaves, layout)
                results[name] = (out, lse, *torch.autograd.grad(out, leaves, tensors[3]))
        assert all(torch.equal(a, b) for a, b in zip(results["compiled"], results["plain"], strict=True)), borders


def compiled_on_ranks(layout: str) -> None:
    compiled_steps(Ring(layout=layout))


def test_one_compilation_serves_every_batch_of_documents():
    compiled_steps(Ring())


@pytest.mark.parametrize("layout", ["zigzag", "balanced"])
def test_one_compilation_serves_every_batch_of_documents_over_a_ring(pool, layout):
    pool(4)(compiled_on_ranks, layout)


READS = {
    "positions": lambda x, layout: x + layout.positions,
    "position_ids": lambda x, layout: x + layout.position_ids,
    "shard": lambda x, layout: layout.shard(x, dim=0)[: len(x)],
}


def positions_compiled(name: str) -> None:
    """What is not counted yet is told in words, and is right in one graph afterwards, and in several before."""
    ring, asked = Ring(), "positions" if name == "shard" else name

    def layout(border: int):
        return ring.layout(64, cu_seqlens=[0, border, 64])

    read = READS[name]
    x = torch.arange(layout(20).seq_len if name == "shard" else layout(20).local_len)
    torch._dynamo.reset()
    whole = torch.compile(read, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=rf"read layout\.{asked} of this layout once before the"):
        whole(x, layout(20))
    for border in (20, 30, 40):
        getattr(layout(border), asked)
        assert torch.equal(whole(x, layout(border)), read(x, layout(border)))
    parts = torch.compile(read, backend="eager")
    assert torch.equal(parts(x, layout(50)), read(x, layout(50)))


@pytest.mark.parametrize("name", READS)
def test_positions_that_a_compiler_cannot_count_are_asked_for_before(pool, name):
    positions_compiled(name)
    pool(2)(positions_compiled, name)


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """The same values, [B, H, L, D] underneath, as models hand them over."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("name", ["causal", "documents_window", "random", "nothing"])
def test_opcheck(name):
    q, k, v, dout, dlse = inputs(32)
    q, k, v = (heads_first(x) for x in (q, k, v))
    given = MASKS[name](32)
    window = given.pop("window", ops.NO_WINDOW)
    layout = Ring().layout(32, **given)
    mask = (layout.segments, layout.cu_seqlens, layout.bounds, layout.causal, window, 0.25, "eager")
    alone = (False, "", 1, 0.0, "ring", 0, "auto", "float32", "")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for sinks, softcap in ((None, 0.0), (torch.randn(q.shape[2]).requires_grad_(), 3.0)):
        call = (*leaves, sinks, *mask, *alone, softcap, True)
        torch.library.opcheck(torch.ops.ringflash.attention.default, call)
        out, lse = ringflash.ops.attention(*call)
        saved = [None if x is None else x.detach() for x in (q, k, v, sinks, out, lse)]
        for given_dlse in (dlse, None):
            arguments = (dout, given_dlse, *saved, *mask, *alone, softcap, True)
            torch.library.opcheck(torch.ops.ringflash.attention_backward.default, arguments)


def test_results_never_share_memory_with_inputs_or_each_other():
    q, k, v, dout, _ = inputs(32)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = ringflash.attention(*leaves)
    grads = torch.autograd.grad(out, leaves, dout)
    pointers = [x.untyped_storage().data_ptr() for x in (*leaves, dout, out, *grads)]
    assert len(set(pointers)) == len(pointers)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_call_never_changes_its_arguments(dtype):
    tensors = inputs(32, dtype=dtype)
    kept = [x.clone() for x in tensors]
    got(*tensors)
    assert all(torch.equal(a, b) for a, b in zip(tensors, kept, strict=True))


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_a_gradient_of_an_infinite_lse_reaches_nothing(kernel):
    q, k, v, dout, dlse = inputs(5, 2)  # rows 0 to 2 see no key
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = ringflash.attention(*leaves, return_lse=True, kernel=kernel)
    dlse = dlse.masked_fill(lse == -torch.inf, torch.nan)
    grads = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    assert all(grad.isfinite().all() for grad in grads) and not grads[0][:, :3].any() and grads[0][:, 3:].any()


def test_compiled_gradients_of_tensors_in_another_memory_order_are_those_without_a_compiler():
    *tensors, dout, _ = inputs(24)  # fp32: the kernel adds to dq itself, which must be as the compiler was told

    def block(q, k, v):
        return ringflash.attention(*(heads_first(x) for x in (q, k, v)))

    leaves = [x.requires_grad_() for x in tensors]
    plain, fast = (torch.autograd.grad(run(*leaves), leaves, dout) for run in (block, torch.compile(block)))
    assert all(torch.equal(a, b) for a, b in zip(plain, fast, strict=True))


def test_one_device_compiles_with_documents_and_intervals():
    q, k, v, *_ = inputs(24)
    borders = torch.tensor([0, 10, 20], dtype=torch.int32)
    lo, hi = torch.zeros(24, dtype=torch.int32), torch.arange(1, 25, dtype=torch.int32)
    packed = torch.compile(lambda q, borders: ringflash.attention(q * 1.0, k, v, cu_seqlens=borders), fullgraph=True)
    bounded = torch.compile(lambda q, hi: ringflash.attention(q * 1.0, k, v, intervals=(lo, hi)), fullgraph=True)
    assert torch.equal(packed(q, borders), ringflash.attention(q, k, v, cu_seqlens=borders))
    assert torch.equal(bounded(q, hi), ringflash.attention(q, k, v, intervals=(lo, hi)))
    with pytest.raises(Exception, match="never fall"):  # the op reads what the compiler could not
        packed(q, torch.tensor([0, 20, 10], dtype=torch.int32))


def test_a_layout_is_planned_outside_of_a_compiled_function():
    ring, (x, *_) = Ring(), inputs(24)

    def block(x, borders):
        return ringflash.attention(x * 1.0, x, x, layout=ring.layout(24, cu_seqlens=borders))

    with pytest.raises(torch._dynamo.exc.Unsupported, match="make them before the compiled call"):
        torch.compile(block, fullgraph=True, backend="eager")(x, [0, 7, 24])
    fast = torch.compile(block, backend="eager")  # its graph ends there
    for border in (8, 9, 20):
        assert torch.equal(fast(x, [0, border, 24]), block(x, [0, border, 24]))


def test_rings_and_layouts_do_not_import_the_compiler():
    code = "import sys, ringflash; ringflash.Ring().layout(64); assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("is_capturing", [True, False])
def test_what_a_graph_was_captured_with_outlives_the_plans_of_other_masks(monkeypatch, is_capturing):
    """A replay reads its tables on the device, and nobody asks for them again."""
    monkeypatch.setattr(ops, "_is_capturing", lambda device: is_capturing)
    monkeypatch.setattr(ops, "_captured", {})
    plans, plain = [], ops.make_plan
    monkeypatch.setattr(ops, "make_plan", lambda *given, **named: plans.append(plain(*given, **named)) or plans[-1])
    q, k, v, *_ = inputs(24)
    ringflash.attention(q, k, v, window=3)
    captured = weakref.ref(plans.pop())
    plans.clear()
    monkeypatch.setattr(ops, "_is_capturing", lambda device: False)
    for window in range(4, 14):
        ringflash.attention(q, k, v, window=window)
    plans.clear()
    gc.collect()
    assert (captured() is not None) is is_capturing


@pytest.mark.parametrize(("wrong", "kind"), [({"layout": "zigzag"}, TypeError), ({"kernel": ["eager"]}, ValueError)])
def test_things_of_another_kind_are_told(wrong, kind):
    q, k, v, *_ = inputs(8)
    with pytest.raises(kind, match=next(iter(wrong))):
        ringflash.attention(q, k, v, **wrong)
