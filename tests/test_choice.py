"""What `kernel="auto"` means: order, start-up checks, what is logged and what `explain` tells."""

from __future__ import annotations

import logging

import played
import pytest
import test_hf
import torch

import ringflash
from ringflash.kernels import KERNELS, choice, eager, gluon
from ringflash.kernels.gluon import check

CPU = torch.device("cpu")


@pytest.fixture
def order(monkeypatch):
    """auto means gluon, then sdpa; gluon computes what eager does."""
    for name in ("forward", "delta", "backward"):
        monkeypatch.setattr(gluon, name, getattr(eager, name))
    monkeypatch.setattr(gluon, "refuses", lambda *call: None)
    monkeypatch.setitem(choice.FASTEST_FIRST, "cpu", ("gluon", "sdpa"))
    choice._checked.cache_clear()
    yield monkeypatch
    choice._checked.cache_clear()


def tensors() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(1, 40, 2, 64).bfloat16() for _ in range(3))


def test_a_kernel_that_passes_is_used_and_named(order, caplog):
    caplog.set_level(logging.INFO, "ringflash")
    q, k, v = tensors()
    told = ringflash.explain(q, k, v)
    assert (told.kernel, told.reason) == ("gluon", "auto") and "kernel gluon (auto)" in str(told)
    assert "kernel gluon for bfloat16, head dimension 64, on cpu passed its start-up check" in caplog.text
    assert torch.equal(ringflash.attention(q, k, v), ringflash.attention(q, k, v, kernel="eager"))


@pytest.mark.parametrize("wrong", ["forward", "backward"])
def test_a_kernel_that_computes_wrongly_is_passed_over_and_says_so(order, caplog, wrong):
    right = getattr(eager, wrong)
    order.setattr(gluon, wrong, lambda *call, scale, **how: right(*call, scale=scale * 1.05, **how))
    q, k, v = tensors()
    told = ringflash.explain(q, k, v)
    assert told.kernel == "sdpa" and "failed its start-up check" in told.reason and " is off by " in told.reason
    assert caplog.text.count("WARNING") == 1 and "the next of gluon, sdpa is used" in caplog.text
    assert torch.equal(ringflash.attention(q, k, v), ringflash.attention(q, k, v, kernel="sdpa"))
    assert caplog.text.count("WARNING") == 1  # asked once


def test_a_kernel_that_does_not_compile_is_passed_over(order):
    def broken(*call, **how):
        raise RuntimeError("PassManager::run failed\nmore")

    order.setattr(gluon, "backward", broken)
    told = ringflash.explain(*tensors())
    assert told.kernel == "sdpa" and told.reason.endswith("RuntimeError: PassManager::run failed")


def test_the_check_compares_in_fp32_also_under_autocast(order):
    seen = []
    order.setitem(choice.CHECKS, "gluon", lambda *call: seen.append(torch.is_autocast_enabled("cpu")))
    with torch.autocast("cpu", torch.bfloat16):
        ringflash.attention(*tensors())
    assert seen == [False]


def test_a_refusal_is_told(order):
    order.setattr(gluon, "refuses", lambda *call: "it wants another card")
    assert ringflash.explain(*tensors()).reason == "auto; it wants another card"
    order.setitem(choice.FASTEST_FIRST, "cpu", ("gluon",))
    with pytest.raises(ValueError, match="kernel='auto': no kernel can do this call: it wants another card"):
        ringflash.attention(*tensors())


def test_a_named_kernel_is_taken_as_it_is(order):
    def broken(*call):
        raise AssertionError("a named kernel was checked")

    order.setitem(choice.CHECKS, "gluon", broken)
    q, k, v = tensors()
    assert ringflash.explain(q, k, v, kernel="gluon").reason == "named"
    ringflash.attention(q, k, v, kernel="gluon")


@pytest.mark.parametrize("name", ["out over three hops", "lse over three hops", "out", "lse", "dq", "dk", "dv"])
def test_the_check_sees_every_result(order, name):
    assert check.fault(CPU, torch.bfloat16, 64, False) is None
    results = check.results

    def spoiled(kernel, *tensors, **how):
        found = results(kernel, *tensors, **how)
        if kernel is gluon:
            found[name][..., 7] = torch.nan
        return found

    order.setattr(check, "results", spoiled)
    assert check.fault(CPU, torch.bfloat16, 64, False).startswith(f"{name} is off by nan")


def test_the_limits_leave_room_for_rounding(order):
    """A kernel that only rounds stays under a third of what counts as a fault."""
    for dtype, limit in check.LIMITS.items():
        order.setitem(check.LIMITS, dtype, limit / 3)
        assert check.fault(CPU, dtype, 64, True) is None


def test_every_name_of_the_order_is_a_kernel():
    assert {name for names in choice.FASTEST_FIRST.values() for name in names} <= set(KERNELS)
    assert set(choice.CHECKS) <= set(KERNELS)


@pytest.fixture
def told(monkeypatch) -> list[bool]:
    """Whether each backward of a kernel was to be deterministic."""
    told, backward = [], eager.backward

    def recorded(*call, **how):
        told.append(how["deterministic"])
        backward(*call, **how)

    monkeypatch.setattr(eager, "backward", recorded)
    return told


@pytest.fixture
def deterministic_torch():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_deterministic_reaches_the_kernel(told, deterministic, size):
    if size == 1:
        q, k, v = (x.requires_grad_() for x in tensors())
        ringflash.attention(q, k, v, kernel="eager", deterministic=deterministic).sum().backward()
    else:
        played.attention(*tensors(), tensors()[0], size=size, deterministic=deterministic)
    assert told and set(told) == {deterministic}


def test_deterministic_algorithms_of_torch_reach_the_kernel(deterministic_torch, told):
    q, k, v = (x.requires_grad_() for x in tensors())
    ringflash.attention(q, k, v).sum().backward()
    model = test_hf.on_ring("llama", ringflash.Ring(), num_hidden_layers=1)
    model(test_hf.sample()[0]).logits.sum().backward()
    assert told == [True, True]


def test_a_kernel_that_cannot_repeat_is_refused_where_torch_is_deterministic(order, deterministic_torch):
    order.setattr(gluon, "refuses", lambda q, k, deterministic, num_hops: "it cannot repeat" if deterministic else None)
    assert ringflash.explain(*tensors()).kernel == "sdpa"
    for function in (ringflash.attention, ringflash.explain):
        with pytest.raises(ValueError, match="kernel='gluon': it cannot repeat"):
            function(*tensors(), kernel="gluon")
