"""The ring over gloo processes: right results, sub-groups and meshes, and ranks that fail together."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from masks import MASKS
from oracle import NAMES, check, inputs, want
from torch.distributed.device_mesh import init_device_mesh
from worlds import equals_reference, groups_equal_reference, on_ring, small_pieces, told

import ringflash
from ringflash import KERNELS, LAYOUTS, Ring, agreement, exchange, ops
from ringflash.kernels import cudnn, eager, pieces, sdpa

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


def empty_batch() -> None:
    """torch refuses an op results that share memory, and gradients of keys and values travel in one buffer."""
    results = on_ring(Ring(), inputs(8, batch=0), {})
    assert {name: x.shape[0] for name, x in results.items()} == dict.fromkeys(NAMES, 0)


def test_an_empty_batch_over_a_ring(pool):
    pool(2)(empty_batch)


def many_steps(steps: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    transport = exchange.Processes(dist.group.WORLD, rank, range(size), 30.0)
    send, receive = torch.empty(64), torch.empty(64)
    for step in range(steps):
        send.fill_(rank + 10.0 * step)
        transport.post([((rank + 1) % size, send)], [((rank - 1) % size, receive)], f"step {step}").wait()
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
        said = told(TypeError, Ring, group)
        assert f"rank {dist.get_rank()} of the world is not in this group; make its Ring on its members alone" in said


def test_rings_that_do_not_fit_the_world_are_refused_on_every_rank(pool):
    pool(4)(wrong_rings)


# --- failing together


def called_differently(odd: int, change: dict) -> list[str]:
    """Rank `odd` makes another call than the others; then all make the same one, which must work."""
    ring = Ring(dist.new_group(list(range(4))), timeout_s=30)
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
        {"heads": 1}, {"cu_seqlens": [0, 9, 64]}, {"causal": False}, {"softcap": 2.0}, {"sinks": torch.zeros(4)},
    ],
    ids=str,
)  # fmt: skip
def test_ranks_called_with_different_arguments_all_raise_and_name_the_odd_one(pool, change):
    messages = pool(4)(called_differently, 2, change)
    assert all("called with different arguments: rank(s) [2] with [" in message for message in messages)
    name, value = next(iter(change.items()))
    if name in ("window", "scale", "deterministic", "kernel", "softcap"):
        assert f"{name}={value}" in messages[0]
    if name == "sinks":  # parameters: whether there are any is compared, and not what they are
        assert "sinks=True" in messages[0] and "sinks=False" in messages[0]


def one_rank_has_many_pieces() -> str:
    """A kernel of few pieces, and short documents on the last rank alone; then a mask that all ranks compute."""
    KERNELS["few"] = SimpleNamespace(**vars(sdpa) | {"few": pieces.few})
    most, pieces.MOST = pieces.MOST, 4
    try:
        ring = Ring(dist.new_group([0, 1, 2]), layout="contiguous", timeout_s=20)
        layout = ring.layout(48, cu_seqlens=[0, *range(32, 49, 2)])
        q, k, v = (layout.shard(x) for x in inputs(48)[:3])
        began = time.perf_counter()
        message = told(ValueError, ringflash.attention, q, k, v, layout=layout, kernel="few")
        assert time.perf_counter() - began < 10
        tensors, given = inputs(48), {"cu_seqlens": [0, 32, 40, 48]}
        check(on_ring(ring, tensors, given, kernel="few"), want(*tensors, **given))
    finally:
        pieces.MOST = most
        del KERNELS["few"]
    return message


def test_a_mask_that_one_rank_s_kernel_refuses_is_refused_on_every_rank(pool):
    for message in pool(3)(one_rank_has_many_pieces):
        assert "rank(s) [2] of a ring refuse a call: kernel='few': " in message and "kernel=few" in message
        assert "this mask cuts a hop into 8 full rectangles and causal squares, and more than 4 are" in message


def one_rank_refuses() -> tuple[str, str, str]:
    """Rank 1 lacks a package; then the gradient of lse, which the kernel has not, comes on rank 2 alone."""
    rank = dist.get_rank()
    lacking = {"refuses": lambda *_: "the package is too old" if rank == 1 else None}
    KERNELS["lacking"] = SimpleNamespace(**vars(eager) | lacking)
    KERNELS["cudnn"], real = SimpleNamespace(**vars(eager) | {"delta": cudnn.delta}), KERNELS["cudnn"]
    try:
        ring = Ring(dist.new_group([0, 1, 2]), timeout_s=20)
        layout, began = ring.layout(48), time.perf_counter()
        q, k, v = (layout.shard(x).requires_grad_() for x in inputs(48)[:3])
        forward = told(ValueError, ringflash.attention, q, k, v, layout=layout, kernel="lacking")
        out, lse = ringflash.attention(q, k, v, layout=layout, kernel="cudnn", return_lse=True)
        out.sum().backward(retain_graph=True)  # agreed on, but what comes later may be refused
        loss = out.sum() + (lse.sum() if rank == 2 else 0.0)
        backward = told(ValueError, loss.backward)
        new = {"layout": layout, "window": 7, "return_lse": rank == 1}
        called = told(ValueError, ringflash.attention, q, k, v, kernel="cudnn", **new)
        assert time.perf_counter() - began < 10
        ringflash.attention(q, k, v, layout=layout, kernel="cudnn").sum().backward()
        ringflash.attention(q, k, v, kernel="eager", **new)
    finally:
        KERNELS["cudnn"] = real
        del KERNELS["lacking"]
    return forward, backward, called


def test_a_kernel_that_refuses_on_one_rank_is_refused_on_every_rank_with_its_name_and_reason(pool):
    for forward, backward, called in pool(3)(one_rank_refuses):
        assert "rank(s) [1] of a ring refuse a call: kernel='lacking': the package is too old [attention(" in forward
        assert "rank(s) [2] of a ring refuse a call: kernel 'cudnn' has no gradient of lse" in backward
        assert "[backward of attention(" in backward
        assert "rank(s) [1] with [attention(" in called and "returns_lse=True" in called


def refuses_dlse(kernel) -> bool:
    row = torch.zeros(1, 1, 1, 16)
    try:
        kernel.delta(row, row, torch.zeros(1, 1, 1))
    except Exception as error:  # a kernel of GPUs may fail in any other way here
        return "no gradient of lse" in str(error)
    return False


def test_every_kernel_without_a_gradient_of_lse_is_known_to_the_op():
    assert {name for name, kernel in KERNELS.items() if refuses_dlse(kernel)} == set(ops.WITHOUT_DLSE)


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
    layout = ring.layout(64, causal=False)  # causal blocks would go down the ranks
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


def many_calls() -> None:
    kept, agreement.MAX_TEXTS = agreement.MAX_TEXTS, 3
    try:
        group = dist.group.WORLD
        # "one" is forgotten, on every rank, and agreed on anew
        for text in ("one", "two", "three", "four", "four", "one"):
            agreement.agree(group, text, 20.0)
        assert len(agreement._agreed[group].texts) <= 3
    finally:
        agreement.MAX_TEXTS = kept


def test_what_was_agreed_on_does_not_grow_without_end(pool):
    pool(4)(many_calls)


def rings_after_rings() -> tuple[str, float]:
    """A Ring is compared each time, also after its text was agreed on, and a disagreement leaves nothing behind."""
    group = dist.group.WORLD
    Ring(group, layout="striped", timeout_s=30)
    Ring(group, layout="balanced", timeout_s=30)
    started = time.monotonic()
    message = told(ValueError, Ring, group, "striped" if dist.get_rank() == 1 else "balanced", None, 30)
    seconds = time.monotonic() - started
    Ring(group, layout="contiguous", timeout_s=30)
    return message, seconds


def test_a_ring_is_compared_each_time(pool):
    for message, seconds in pool(4)(rings_after_rings):
        assert "[1]" in message and "striped" in message and "balanced" in message and seconds < 10


def one_is_late(timeout_s: float) -> str:
    """Rank 2 is away for the first call; all come to the second."""
    ring = Ring(timeout_s=30)
    text = ""
    if ring.rank != 2:
        text = told(RuntimeError, agreement.agree, dist.group.WORLD, "a call", timeout_s)
    dist.barrier()
    agreement.agree(dist.group.WORLD, "another call", 30)
    return text


def test_a_group_recovers_from_a_call_that_not_all_made(pool):
    for rank, text in enumerate(pool(4)(one_is_late, 2.0)):
        assert rank == 2 or "rank(s) [2]" in text


def late_to_unshard() -> str:
    dist.barrier()  # or a rank may be late to the Ring already
    ring, store = Ring(timeout_s=2), dist.distributed_c10d._get_default_store()
    x = torch.zeros(1, ring.layout(66).local_len)
    if ring.rank == 1:
        store.wait(["told/0", "told/2"], timedelta(seconds=60))
        return ""
    message = told(RuntimeError, ring.layout(66).unshard, x)
    store.set(f"told/{ring.rank}", "")
    return message


def test_unshard_ends_by_the_timeout_of_the_ring(pool):
    outcomes = pool(3).outcomes(late_to_unshard)
    pool(3).close()
    for rank in (0, 2):
        assert f"rank {rank}, unshard: not done within timeout_s=2" in outcomes[rank]
