"""Two models may have a tensor in common: workers find it where it was brought last."""

from __future__ import annotations

import torch
from torch import nn

from gemini.runtime.controller.crew import Crew
from gemini.runtime.controller.faults import Record
from gemini.runtime.controller.household import Household


def test_a_tensor_of_two_models_is_where_it_was_brought_last(crew: Crew) -> None:
    shared = nn.Parameter(torch.arange(3.0))
    one, other = (Household(crew, Record(name), torch.device("cpu")) for name in ("one", "other"))
    device, held = crew.workers[0].device, crew.workers[0].link.held
    one.take_in([shared])
    first = held[id(shared)]
    other.take_in([shared])
    second = held[id(shared)]
    assert first != second
    for household, number in ((one, first), (other, second), (one, first)):
        with torch.no_grad():
            shared += 1
        household.bring_home([shared], device)
        assert held[id(shared)] == number
    assert shared.tolist() == [3.0, 4.0, 5.0]
