"""Twin training: five steps on micro-batches and stages equal those of one device, with dropout, clipping and slots."""

from __future__ import annotations

from functools import cache, partial

import pytest

from tests.tensorflow.models import classics, transformers
from tests.tensorflow.models.graph_training import Run, assert_equal, in_process, sharded, train

MODELS = {
    "mlp": (classics.mlp, "adam", ()),
    "mnist_cnn": (classics.mnist_cnn, "adam", ()),
    "batch_norm_cnn": (classics.batch_norm_cnn, "momentum", ("conv2d/bias", "conv2d_1/bias", "dense/bias")),
    "lstm": (classics.lstm, "momentum", ()),
    "wide_embeddings": (classics.wide_embeddings, "adam", ()),
    "masked_encoder": (transformers.masked_encoder, "momentum", ("key/bias",)),
    "translator": (transformers.translator, "momentum", ("key/bias",)),
}
TRANSFORMERS = ("masked_encoder", "translator")


@cache
def alone(name: str, sizes: tuple[int, ...] = (8,) * 5) -> Run:
    make, optimizer, _ = MODELS[name]
    return train(make, None, optimizer, sizes)


def check(name: str, stages: int, micro_batches: int, schedule: str, **more: str) -> None:
    make, optimizer, but = MODELS[name]
    twin = train(make, in_process(stages, micro_batches, **more), optimizer)
    (report,) = twin.reports
    assert (report.reason, report.schedule) == ("", schedule)
    assert (report.stages, report.micro_batches) == (stages, micro_batches)
    assert report.comparison is not None
    assert report.comparison.loss_error <= 1e-6
    assert report.comparison.gradient_error <= 1e-4
    assert_equal(alone(name), twin, but)


@pytest.mark.parametrize(
    ("name", "stages", "micro_batches", "schedule"),
    [
        ("mlp", 2, 4, "1f1b"),
        ("mlp", 4, 4, "1f1b"),
        ("mlp", 2, 1, "none"),
        ("mnist_cnn", 2, 4, "1f1b"),
        ("batch_norm_cnn", 2, 4, "none"),
        ("lstm", 2, 4, "gpipe"),
        ("wide_embeddings", 2, 4, "1f1b"),
        pytest.param("mnist_cnn", 4, 4, "1f1b", marks=pytest.mark.slow),
        pytest.param("batch_norm_cnn", 4, 1, "none", marks=pytest.mark.slow),
        pytest.param("masked_encoder", 2, 4, "1f1b", marks=pytest.mark.slow),
        pytest.param("masked_encoder", 4, 4, "1f1b", marks=pytest.mark.slow),
        pytest.param("masked_encoder", 2, 1, "none", marks=pytest.mark.slow),
        pytest.param("translator", 2, 4, "1f1b", marks=pytest.mark.slow),
    ],
)
def test_equals_one_device(name: str, stages: int, micro_batches: int, schedule: str) -> None:
    check(name, stages, micro_batches, schedule)


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1", "interleaved_1f1b", "composed", "none"])
def test_every_schedule_gives_the_same_numbers(schedule: str) -> None:
    make, optimizer, _ = MODELS["mlp"]
    twin = train(make, in_process(2, 4, schedule=schedule), optimizer)
    (report,) = twin.reports
    assert (report.reason, report.schedule) == ("", schedule)
    assert_equal(alone("mlp"), twin)


def test_batch_sizes_may_change_and_need_not_divide() -> None:
    make, optimizer, _ = MODELS["mlp"]
    sizes = (8, 5, 8, 3, 1)
    twin = train(make, in_process(2, 4), optimizer, sizes)
    assert [report.micro_batches for report in twin.reports] == [4, 4, 3, 1]
    assert not any(report.reason for report in twin.reports)
    assert_equal(alone("mlp", sizes), twin)


@pytest.mark.parametrize(
    ("name", "stages", "micro_batches"),
    [
        ("mlp", 1, 1),
        ("mlp", 2, 4),
        ("mnist_cnn", 1, 4),
        ("mnist_cnn", 2, 4),
        pytest.param("batch_norm_cnn", 1, 4, marks=pytest.mark.slow),
        pytest.param("wide_embeddings", 2, 1, marks=pytest.mark.slow),
        pytest.param("masked_encoder", 1, 1, marks=pytest.mark.slow),
        pytest.param("masked_encoder", 2, 4, marks=pytest.mark.slow),
        pytest.param("translator", 2, 4, marks=pytest.mark.slow),
    ],
)
def test_shards_equal_one_device(name: str, stages: int, micro_batches: int) -> None:
    make, optimizer, but = MODELS[name]
    twin = train(make, sharded(stages, 2, micro_batches), optimizer)
    (report,) = twin.reports
    assert (report.reason, report.stages, report.shards, report.gathers) == ("", stages, 2, 0)
    assert report.all_reduces > 0
    assert all(worker.ops > 0 for worker in report.workers[:2])
    assert_equal(alone(name), twin, but)


@pytest.mark.parametrize(("dim", "gathers"), [(0, False), (-1, True)])
def test_the_dimension_of_weights_to_divide_is_honoured(dim: int, gathers: bool) -> None:
    make, optimizer, _ = MODELS["mlp"]
    twin = train(make, sharded(1, 2, 1, sharding_dim=dim), optimizer)
    (report,) = twin.reports
    assert report.reason == ""
    assert (report.gathers > 0) is gathers
    assert_equal(alone("mlp"), twin)


@pytest.mark.slow
def test_a_layer_of_an_encoder_has_two_all_reduces_each_way_and_no_gather() -> None:
    counts = []
    for layers in (1, 2):
        made = train(partial(transformers.masked_encoder, layers), sharded(1, 2, 1), sizes=(8,))
        counts.append(made.reports[0].all_reduces)
        assert made.reports[0].gathers == 0
    assert counts[1] - counts[0] == 4
