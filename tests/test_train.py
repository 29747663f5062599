"""The trainer against one process with plain torch: meshes x ZeRO stages x labels x optimizers, on four processes."""

from __future__ import annotations

import pytest
import training
from conftest import error

MESHES = [(4, 1, 1), (2, 2, 1), (1, 4, 1), (1, 2, 2), (1, 1, 4)]
ZERO = [0, 1, 2, 3]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return training.write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def alone(texts):
    known = {}

    def result(optimizer, labels):
        key = optimizer, labels
        if key not in known:
            known[key] = training.train_alone(training.config_of(texts, optimizer=optimizer), labels)
        return known[key]

    return result


@pytest.mark.parametrize(("optimizer", "checkpoint"), [("sgd", "none"), ("adamw", "selective")])
@pytest.mark.parametrize("zero", ZERO)
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "x".join(map(str, mesh)))
def test_R60_R70_R75_training_equals_one_process(pool, texts, alone, mesh, zero, optimizer, checkpoint):
    """In turns: nine of ten labels of one rank ignored; one valid label in the whole batch."""
    config = training.config_of(
        texts, mesh=mesh, zero=zero, optimizer=optimizer, memory={"checkpoint": checkpoint, "loss_chunk": 5}
    )
    results = pool(4)(training.train, config, "mixed")
    want = alone(optimizer, "mixed")
    got = results[0]
    assert len({result["digest"] for result in results}) == 1, "ranks drifted apart"
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)
    assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5)
    for name, weight in want["weights"].items():
        if optimizer == "sgd":
            assert error(got["weights"][name], weight) <= 1e-5, name
        else:
            assert (got["weights"][name] - weight).abs().max() <= 2 * config.optimizer.lr, name
