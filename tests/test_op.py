"""`ringflash.attention` as a user calls it: over gloo processes, under autocast, no_grad, checkpointing and compile."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint as checkpointing
from conftest import TOLERANCE
from masks import MASKS
from oracle import NAMES, check, got, inputs, want
from torch.distributed.device_mesh import init_device_mesh
from worlds import equals_reference, groups_equal_reference, on_ring, small_pieces, told

import ringflash
from ringflash import LAYOUTS, Ring, agreement, exchange, ops
from ringflash.kernels import eager

# --- over processes, against the reference


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_mask_over_4_processes(pool, layout):
    pool(4)(equals_reference, list(MASKS), layout, 96)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_R26_an_odd_ring(pool, layout):
    pool(3)(equals_reference, ["causal", "window", "documents", "random", "past"], layout, 66)


def test_8_processes(pool):
    pool(8)(equals_reference, ["causal", "documents_window"], "zigzag", 96)
    pool(8)(equals_reference, ["window"], "zigzag", 96, 2)


@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[1, 2, 3], [0]]], ids=str)
def test_R25_sub_groups_are_rings_of_their_own(pool, groups):
    pool(4)(groups_equal_reference, groups, "zigzag")


def half_types(kernel: str) -> None:
    small_pieces()
    for dtype in (torch.bfloat16, torch.float16):
        tensors = inputs(64, dtype=dtype)
        results = on_ring(Ring(), tensors, {}, kernel=kernel)
        assert all(results[name].dtype == dtype for name in ("out", "dq", "dk", "dv"))
        assert results["lse"].dtype == torch.float32
        check(results, want(*tensors), dtype)


def test_R115_half_types_over_gloo(pool):
    pool(4)(half_types, "eager")


def seven_of_eight() -> None:
    tensors = inputs(8)
    results = on_ring(Ring(), tensors, {"cu_seqlens": [0, 7]})
    alone = want(*(x[:, :7] for x in tensors[:4]), tensors[4][..., :7])
    for name in NAMES:
        dim = 2 if name == "lse" else 1
        real, pad = results[name].narrow(dim, 0, 7), results[name].narrow(dim, 7, 1)
        assert (real - alone[name]).abs().max() < 1e-5
        assert (pad == (-torch.inf if name == "lse" else 0)).all(), name
    assert all(results[name][:, 6].any() for name in ("dq", "dk", "dv"))


def test_R42_seven_tokens_on_two_ranks_are_seven(pool):
    pool(2)(seven_of_eight)


def many_steps(steps: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    transport = exchange.Processes(dist.group.WORLD, rank, range(size), 30.0)
    send, receive = torch.empty(64), torch.empty(64)
    for step in range(steps):
        send.fill_(rank + 10.0 * step)
        transport.post({(rank + 1) % size: send}, {(rank - 1) % size: receive}, f"step {step}").wait()
        assert (receive == (rank - 1) % size + 10.0 * step).all(), step


def test_R28_a_thousand_steps_run_through(pool):
    pool(4)(many_steps, 1000)


# --- meshes and groups


def meshes() -> None:
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("ring",))
    assert (Ring(flat).size, Ring(flat, ulysses=2).ulysses) == (4, 2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    for ring in (Ring(mesh), Ring(mesh, ulysses=2)):
        assert (ring.size, ring.rank, ring.ulysses, ring.ring_rank) == (4, dist.get_rank(), 2, dist.get_rank() // 2)
    assert "ulysses=4 differs from the mesh's second dimension of 2" in told(ValueError, Ring, mesh, ulysses=4)
    tensors = inputs(64)
    check(on_ring(ring, tensors, {}), want(*tensors))
    data = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "ring"))
    mine = Ring(data["ring"])  # one dimension of a larger mesh: a ring of 2
    assert (mine.size, mine.rank) == (2, dist.get_rank() % 2)
    check(on_ring(mine, tensors, {}), want(*tensors))
    cube = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("data", "ring", "ulysses"))
    assert "3 dimensions" in told(ValueError, Ring, cube) and "slice it" in told(ValueError, Ring, cube)
    part = Ring(cube["ring", "ulysses"])
    assert (part.size, part.rank, part.ulysses) == (2, dist.get_rank() % 2, 1)
    check(on_ring(part, tensors, {}), want(*tensors))


def test_meshes_of_one_and_two_dimensions_are_rings_and_others_are_refused(pool):
    pool(4)(meshes)


def wrong_rings() -> None:
    assert "ulysses=3 must divide the 4 ranks" in told(ValueError, Ring, ulysses=3)
    assert "ulysses=8 must divide the 4 ranks" in told(ValueError, Ring, ulysses=8)
    assert "group is str; it must be a ProcessGroup, a DeviceMesh or None" in told(TypeError, Ring, "world")
    group = dist.new_group([1, 2])
    if dist.get_rank() in (0, 3):
        told(TypeError, Ring, group)


def test_rings_that_do_not_fit_the_world_are_refused_on_every_rank(pool):
    pool(4)(wrong_rings)


# --- failing together


def called_differently(odd: int, change: dict) -> list[str]:
    """Rank `odd` makes another call than the others; then all make the same one, which must work."""
    ring = Ring(dist.new_group(list(range(4))))
    layout = ring.layout(64)
    q, k, v, *_ = (layout.shard(x) for x in inputs(64)[:4])
    mine = change if dist.get_rank() == odd else {}
    if "dtype" in mine:
        q, k, v = (x.to(mine["dtype"]) for x in (q, k, v))
    if "heads" in mine:
        k, v = (x[:, :, : mine["heads"]] for x in (k, v))
    if "cu_seqlens" in mine or "causal" in mine:
        layout = ring.layout(64, **mine)
    call = {key: value for key, value in mine.items() if key not in ("dtype", "heads", "cu_seqlens", "causal")}
    began = time.perf_counter()
    message = told(ValueError, ringflash.attention, q, k, v, layout=layout, **call)
    assert time.perf_counter() - began < 10
    tensors = inputs(64)
    check(on_ring(ring, tensors, {}), want(*tensors))
    return message


@pytest.mark.parametrize(
    "change",
    [
        {"window": 5}, {"scale": 0.5}, {"deterministic": True}, {"kernel": "sdpa"}, {"dtype": torch.bfloat16},
        {"heads": 1}, {"cu_seqlens": [0, 9, 64]}, {"causal": False},
    ],
    ids=str,
)  # fmt: skip
def test_ranks_called_with_different_arguments_all_raise_and_name_the_odd_one(pool, change):
    messages = pool(4)(called_differently, 2, change)
    assert all("called with different arguments: rank(s) [2] with [" in message for message in messages)
    name, value = next(iter(change.items()))
    if name in ("window", "scale", "deterministic", "kernel"):
        assert f"{name}={value}" in messages[0]


def rings_made_differently(name: str, values: list) -> str:
    return told(ValueError, Ring, dist.new_group(list(range(4))), **{name: values[dist.get_rank()]})


@pytest.mark.parametrize(
    ("name", "values"),
    [("layout", ["zigzag", "zigzag", "striped", "zigzag"]), ("ulysses", [1, 2, 1, 1]), ("timeout_s", [60, 60, 60, 30])],
)
def test_rings_made_with_different_arguments_all_raise(pool, name, values):
    odd = next(i for i, value in enumerate(values) if values.count(value) == 1)
    for message in pool(4)(rings_made_differently, name, values):
        assert f"rank(s) [{odd}] with [Ring(" in message and f"{name}={values[odd]!r}" in message


def one_stays_away() -> str | None:
    ring = Ring(dist.new_group(list(range(4))), timeout_s=2)
    layout = ring.layout(64)
    q, k, v, *_ = (layout.shard(x) for x in inputs(64)[:4])
    if ring.rank == 3:
        return None
    return told(RuntimeError, ringflash.attention, q, k, v, layout=layout)


def test_a_rank_that_does_not_come_is_named_within_the_timeout(pool):
    *messages, _ = pool(4)(one_stays_away)
    for rank, message in enumerate(messages):
        assert f"rank {rank} waited timeout_s=2 for rank(s) [3] to make the same call" in message


def one_leaves_later() -> str | None:
    """The call was agreed on before, so only the messages themselves can show that a rank is gone."""
    ring = Ring(dist.new_group(list(range(4))), timeout_s=2)
    layout = ring.layout(64)
    q, k, v, *_ = (layout.shard(x) for x in inputs(64)[:4])
    ringflash.attention(q, k, v, layout=layout)
    dist.barrier()
    if ring.rank == 3:
        return None
    return told(RuntimeError, ringflash.attention, q, k, v, layout=layout)


def test_a_rank_that_leaves_later_ends_the_others_naming_peer_and_hop(pool):
    *messages, _ = pool(4)(one_leaves_later)
    assert "keys and values for hop 1: receiving from rank 3: not done within timeout_s=2" in messages[0]
    assert all(re.search(r"for hop \d: (receiving from|sending to) rank \d", message) for message in messages)


def talk() -> dict[str, int]:
    """How often the store is asked for: once a new call, never by a layout."""
    asked = [0]
    plain = agreement.distributed_c10d._get_process_group_store

    def counted(group):
        asked[0] += 1
        return plain(group)

    agreement.distributed_c10d._get_process_group_store = counted
    try:
        ring, counts = Ring(), {}
        tensors = inputs(64)
        for name, given in (("first", {}), ("again", {}), ("window", {"window": 3}), ("window again", {"window": 3})):
            asked[0] = 0
            on_ring(ring, tensors, given, scale=0.123)
            counts[name] = asked[0]
        asked[0] = 0
        if ring.rank == 0:  # the others are not even asked
            ring.layout(128, cu_seqlens=[0, 5, 128])
        counts["layout"] = asked[0]
    finally:
        agreement.distributed_c10d._get_process_group_store = plain
    return counts


def test_only_the_first_use_of_a_call_talks_and_a_layout_never_does(pool):
    for counts in pool(4)(talk):
        assert counts == {"first": 1, "again": 0, "window": 1, "window again": 0, "layout": 0}


def global_where_local_is_due() -> str:
    layout = Ring().layout(64)
    q, k, v, *_ = inputs(64)
    return told(ValueError, ringflash.attention, q, k, v, layout=layout)


def test_a_global_tensor_where_a_local_one_is_due(pool):
    for message in pool(4)(global_where_local_is_due):
        assert "q has 64 tokens" in message and "it must have 16: cut it with layout.shard(q) first" in message


# --- explain


def bytes_sent(ulysses: int, groups: int, name: str, dtype: torch.dtype) -> None:
    """What explain announces is what the transport carries."""
    sent = {"forward": 0, "backward": 0}
    phase, plain = ["forward"], exchange.Processes.post

    def counted(self, sends, receives, what):
        sent[phase[0]] += sum(x.numel() * x.element_size() for x in sends.values())
        return plain(self, sends, receives, what)

    exchange.Processes.post = counted
    try:
        given = MASKS[name](64)
        window = given.pop("window", None)
        layout = Ring(ulysses=ulysses).layout(64, **given)
        q, k, v = (layout.shard(x).requires_grad_() for x in inputs(64, groups=groups, dtype=dtype)[:3])
        told = ringflash.explain(q, k, v, layout=layout, window=window)
        out = ringflash.attention(q, k, v, layout=layout, window=window)
        phase[0] = "backward"
        out.sum().backward()
    finally:
        exchange.Processes.post = plain
    assert sent == {"forward": told.forward_bytes, "backward": told.backward_bytes}
    assert (told.kernel, told.sends) == ("eager", max(0, len(told.hops) - 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["causal", "window", "only_padding"])
@pytest.mark.parametrize(("ulysses", "groups"), [(1, 2), (2, 2), (4, 2), (4, 4)])
def test_explain_announces_the_bytes_that_travel(pool, ulysses, groups, name, dtype):
    pool(4)(bytes_sent, ulysses, groups, name, dtype)


def test_explain_on_one_device():
    q, k, v, *_ = inputs(10)
    told = ringflash.explain(q, k, v)
    assert (told.kernel, told.hops, told.forward_bytes, told.pairs) == ("eager", (0,), 0, 55)
    assert "kernel eager; hops [0], 0 sends" in str(told)


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


@pytest.mark.parametrize("name", ["causal", "documents_window", "random", "nothing"])
def test_opcheck(name):
    q, k, v, dout, dlse = inputs(32)
    given = MASKS[name](32)
    window = given.pop("window", ops.NO_WINDOW)
    layout = Ring().layout(32, **given)
    mask = (layout.segments, layout.cu_seqlens, layout.bounds, layout.causal, window, 0.25, "eager")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.ringflash.attention.default, (*leaves, *mask, False, "", 1, 0.0))
    out, lse = ringflash.ops.attention(*leaves, *mask, False, "", 1, 0.0)
    saved = [x.detach() for x in (q, k, v, out, lse)]
    for given_dlse in (dlse, None):
        arguments = (dout, given_dlse, *saved, *mask, "", 1, 0.0)
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
