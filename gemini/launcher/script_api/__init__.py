"""Script API: the functions that instrumented source calls as `__gemini__`.

    import gemini.managed as __gemini__        inserted once per file, by the passes that need it

    device placement    __gemini__.device("cuda:0")      the device if it exists, else the managed one
                        __gemini__.on(x).cuda()          the same for methods of PyTorch objects
                        __gemini__.stand_in(torch.cuda.synchronize)()
    managed objects     __gemini__.model(Net()), __gemini__.optimizer(torch.optim.SGD(…))
                                                         the argument, registered with the place where it was made
    training sites      __gemini__.loss(loss).backward(), __gemini__.step(opt).step()
                                                         the argument; the first one reports that the script trains
                        __gemini__.called(net).forward(x)
                                                         a call of the module
    tensor types        __gemini__.type_of(x)            the type of the tensor that a deferred one stands for

These functions decide by the types of the real objects, which the passes do not know. None of them imports a
framework: without torch in `sys.modules` each returns its argument.
"""

from gemini.launcher.script_api.construction_sites import model, optimizer
from gemini.launcher.script_api.cuda_stubs import stand_in, tensor_type
from gemini.launcher.script_api.deferred_types import type_of
from gemini.launcher.script_api.device_methods import on
from gemini.launcher.script_api.dump_imports import prefer
from gemini.launcher.script_api.forward_calls import called
from gemini.launcher.script_api.parallel_run import run_parallel
from gemini.launcher.script_api.script_devices import (
    backend,
    device,
    device_ids,
    device_type,
    keywords,
    map_location,
    pin_memory,
    set_managed_device,
)
from gemini.launcher.script_api.training_marks import loss, step

__all__ = [
    "backend",
    "called",
    "device",
    "device_ids",
    "device_type",
    "keywords",
    "loss",
    "map_location",
    "model",
    "on",
    "optimizer",
    "pin_memory",
    "prefer",
    "run_parallel",
    "set_managed_device",
    "stand_in",
    "step",
    "tensor_type",
    "type_of",
]
