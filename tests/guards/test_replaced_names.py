"""A function in the place of another is detected, and no longer once the original is back."""

from __future__ import annotations

import pytest
from torch.nn import functional as F

from gemini.guards.monkeypatches import _Names


def test_a_function_in_another_s_place_is_detected() -> None:
    names = _Names("torch.nn.functional", vars(F))
    assert names.find_replaced() == ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "relu", lambda x: x)
        assert names.find_replaced() == "torch.nn.functional.relu"
        assert names.find_replaced() == "torch.nn.functional.relu"
    assert names.find_replaced() == ""
