"""Sizes of named models agree with those published, and faulty tables are refused with all faults at once."""

from __future__ import annotations

import pytest

from gemini.errors import ConfigError
from gemini.tune import Transformer, find_transformer
from gemini.tune.transformer_model import model_presets, read_transformer


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama2-7b", 6_738_415_616),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_parameters_are_those_of_the_published_weights(name, parameters):
    assert find_transformer(name).parameters == pytest.approx(parameters, rel=1e-4)


def test_active_parameters_leave_out_idle_experts():
    model = find_transformer("mixtral-8x7b")
    assert model.active_parameters == pytest.approx(12.9e9, rel=0.01)
    assert find_transformer("llama3-8b").active_parameters == find_transformer("llama3-8b").parameters


def test_operations_are_six_per_parameter_and_token_for_short_sequences():
    model = Transformer(layers=24, hidden=4096, heads=32, vocab=1000, sequence=8)
    assert model.model_flops(1) == pytest.approx(6 * model.parameters * 8, rel=0.01)


def test_a_model_reads_back():
    for name in model_presets():
        model = find_transformer(name)
        assert read_transformer(model.to_dict()) == model


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("lama3-70b", ["unknown model 'lama3-70b'", "llama3-70b"]),
        ({"layers": 2, "hidden": 8, "heads": 2}, ["a model without vocab"]),
        ({"layers": 2, "hiden": 8, "heads": 2, "vocab": 9}, ["'hiden'", "did you mean 'hidden'", "without hidden"]),
        ({"layers": 0, "hidden": -8, "heads": 2, "vocab": 9}, ["layers = 0", "hidden = -8"]),
        ({"layers": 2, "hidden": 8, "heads": 4, "kv_heads": 3, "vocab": 9}, ["4 heads with 3 kv_heads"]),
        ({"layers": 2, "hidden": 8, "heads": 4, "vocab": 9, "experts": 2, "active_experts": 3}, ["active_experts = 3"]),
        (3, ["a model is a name or an object"]),
    ],
)
def test_faulty_models(data, words):
    with pytest.raises(ConfigError) as caught:
        read_transformer(data)
    for word in words:
        assert word in str(caught.value)
