"""A link between hosts, over gloo on the loopback address, is a link like any other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from gemini.capture.regions import Region
from gemini.runtime import settings
from gemini.runtime.generator import get_state, set_state
from gemini.runtime.protocol import Backward, Forward, Gradients, Outputs
from gemini.runtime.transport.channel import ChannelClosed
from gemini.runtime.transport.gloo_channel import GlooChannel
from gemini.runtime.transport.link import Link
from gemini.runtime.transport.packing import pack, unpack
from tests.runtime.test_transport import TENSORS

ROOT = Path(__file__).parents[2]
SECRET = b"the secret of this run"
ECHO = """
import sys
from gemini.runtime.transport.gloo_channel import GlooChannel
from gemini.runtime.transport.link import Link
from gemini.runtime.transport.channel import ChannelClosed
from gemini.runtime.protocol import Backward, Forward
from gemini.runtime.worker.calls import Calls
try:
    link = Link(GlooChannel.join(sys.argv[2].encode(), "127.0.0.1", int(sys.argv[1])), side=1)
    calls = Calls(link.classes)
    while True:
        request, _ = link.receive()
        if isinstance(request, Forward):
            link.send(calls.forward(request))
        elif isinstance(request, Backward):
            link.send(calls.backward(request))
        elif isinstance(request, dict) and "install" in request:
            calls.install(request["install"])
        else:
            link.send(request)
except ChannelClosed as closed:
    print(closed)
"""


def start(secret: bytes) -> tuple[subprocess.Popen[str], GlooChannel]:
    door = GlooChannel.door()
    assert door.getsockname()[0] == "127.0.0.1"
    command = [sys.executable, "-c", ECHO, str(door.getsockname()[1]), secret.decode()]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        return process, GlooChannel.listen(SECRET, door)
    except BaseException:
        process.kill()
        process.wait()
        raise


@pytest.fixture(scope="module")
def far() -> Iterator[Link]:
    process, channel = start(SECRET)
    link = Link(channel)
    yield link
    link.close()
    assert "closed the connection" in process.communicate(timeout=20)[0]


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_as_it_was(name: str, far: Link) -> None:
    tensor = TENSORS[name]
    far.send({"x": [tensor, None]})
    found = far.receive(20)
    assert found is not None
    came = found[0]["x"][0]
    assert (came.dtype, came.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(came.to_dense(), tensor.to_dense())


def test_nothing_arrives_in_time(far: Link) -> None:
    assert far.receive(0.01) is None


def test_a_module_computes_the_same_there(far: Link) -> None:
    torch.manual_seed(2)
    module = nn.Sequential(nn.Linear(64, 300), nn.Dropout(0.3), nn.Tanh(), nn.Linear(300, 8))
    x = torch.randn(16, 64, requires_grad=True)
    far.send({"install": {1: module}})
    state, region = get_state(), Region.current()
    body, inputs = pack(((x,), {}), far.classes)
    switches = (region.grad, region.inference, region.autocast, settings.current())
    flags = tuple(m.training for m in module.modules()), tuple(p.requires_grad for p in module.parameters())
    far.send(Forward(1, 1, body, switches, state, flags, [], inputs))
    found = far.receive(20)
    assert found is not None
    outputs: Outputs = found[0]
    result = unpack(outputs.body, outputs.tensors, far.classes)
    ended = outputs.generator
    set_state(state)
    expected = module(x)
    assert get_state() == ended
    assert torch.equal(result, expected)
    gradient = torch.randn_like(expected)
    far.send(Backward(2, 1, [0], [0, 1, 2, 3], [], [gradient]))
    answer = far.receive(20)
    assert answer is not None
    gradients: Gradients = answer[0]
    wanted = torch.autograd.grad(expected, [x, *module.parameters()], gradient)
    assert all(torch.equal(a, b) for a, b in zip(gradients.tensors, wanted, strict=True))


def test_who_does_not_know_the_secret_is_not_heard() -> None:
    with pytest.raises(ChannelClosed, match="does not know the secret"):
        start(b"a guess")


def test_the_death_of_the_other_end_is_noticed() -> None:
    process, channel = start(SECRET)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    with pytest.raises(ChannelClosed):
        channel.receive(20)
    with pytest.raises(ChannelClosed):
        channel.receive(20)


def test_descriptors_do_not_cross_hosts(far: Link) -> None:
    with pytest.raises(ValueError, match="another host"):
        far.send("x", (0,))
