"""Every classic model with remote modules in two workers trains exactly as on one device."""

from __future__ import annotations

import pytest

from conformance.zoo.classics import CLASSICS
from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.pool.worker_pool import WorkerPool
from tests.training import largest_difference, state_difference, train

# Models in which no module can run elsewhere: each keeps a computed tensor in an attribute of every layer.
AT_HOME = ("old_weight_norm", "loss_in_attribute")
# A weight used twice under autocast is cast once on one device, and once a call in workers.
ROUNDS_OTHERWISE = {"grad_and_autocast_regions": 2e-2}


@pytest.mark.parametrize("name", sorted(CLASSICS))
def test_trains_as_on_one_device(name: str, pool: WorkerPool) -> None:
    reference, args, kwargs = CLASSICS[name]()
    expected = train(reference, args, kwargs)
    model, args, kwargs = CLASSICS[name]()
    managed = ManagedModel(model, pool, quiet=True)
    dispatch.manage(model, managed)
    found = train(model, args, kwargs)
    limit = ROUNDS_OTHERWISE.get(name, 1e-5)
    assert largest_difference(expected, found) <= limit
    assert state_difference(reference, model) <= limit
    if name in AT_HOME:
        assert managed.refused
    else:
        assert managed.calls, "no unit ran in a worker"
