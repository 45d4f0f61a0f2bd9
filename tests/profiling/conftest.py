import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Small models run faster on one thread, above all beside other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
