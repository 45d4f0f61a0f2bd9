"""Methods that place an object on a device: `x.cuda()`, `x.to("cuda:0")`, `x.pin_memory()`.

The source does not say what `x` is, so `on(x)` decides when it runs. Tensors, modules and the containers
of libraries built on torch get their devices routed; any other object, and any class whose author wrote the
method in question, is called as it always was.
"""

from __future__ import annotations

from typing import Any

from gemini.launcher.script_api.script_devices import any_accelerator, device, managed_device, managed_for, torch_module

# Packages whose `.to(device)` and `.cuda()` mean torch's, besides torch itself.
LIBRARIES = frozenset(
    {
        "accelerate", "dgl", "diffusers", "lightning", "lightning_fabric", "peft", "pytorch_lightning",
        "sentence_transformers", "tensordict", "timm", "torch", "torch_geometric", "torchmetrics", "torchvision",
        "transformers",
    }
)  # fmt: skip


def on(value: Any) -> Any:
    """`value` with its placing methods routed, or `value` itself where they cannot be torch's."""
    torch = torch_module()
    if torch is None:
        return value
    if type(value) is torch.Tensor:
        return Routed(value, True)
    if isinstance(value, (torch.Tensor, torch.nn.Module)):
        return Routed(value)
    if type(value) is super:  # super().cuda() inside a module's own method
        return Routed(value) if isinstance(getattr(value, "__self__", None), torch.nn.Module) else value
    if type(value).__module__.partition(".")[0] in LIBRARIES:
        return Routed(value)
    return value


class Routed:
    """The placing methods of one object. Plain methods and no magic: torch.compile traces through them."""

    __slots__ = ("is_tensor", "value")

    def __init__(self, value: Any, is_tensor: bool = False) -> None:
        self.value = value
        self.is_tensor = is_tensor  # and nothing that derives from one

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """`value.to(…)` with an absent device replaced."""
        value = self.value
        if self.is_tensor and len(args) == 1 and not kwargs:  # in every step of a script
            here = value.device
            if type(args[0]) is type(here) and args[0] == here:
                return value.to(args[0])
        if is_torchs(self.value, "to"):
            if args:
                args = (device(args[0]), *args[1:])
            if "device" in kwargs:
                kwargs["device"] = device(kwargs["device"])
        return self.value.to(*args, **kwargs)

    def to_empty(self, *args: Any, **kwargs: Any) -> Any:
        """`value.to_empty(device=…)` with an absent device replaced."""
        if "device" in kwargs and is_torchs(self.value, "to_empty"):
            kwargs["device"] = device(kwargs["device"])
        return self.value.to_empty(*args, **kwargs)

    def cuda(self, *args: Any, **kwargs: Any) -> Any:
        """`value.cuda(…)`, or `value` on the managed device."""
        if is_torchs(self.value, "cuda"):
            return cuda(self.value, *args, **kwargs)
        return self.value.cuda(*args, **kwargs)

    def pin_memory(self, *args: Any, **kwargs: Any) -> Any:
        """`value.pin_memory()`, or `value` where no accelerator could read it."""
        if not any_accelerator() and is_torchs(self.value, "pin_memory"):
            return self.value
        return self.value.pin_memory(*args, **kwargs)


def cuda(value: Any, *args: Any, **kwargs: Any) -> Any:
    """`value.cuda(…)` where that device exists, else `value` on the managed device."""
    wanted = args[0] if args else kwargs.get("device")
    replaced = managed_for("cuda") if wanted is None else device(wanted)
    if replaced is None or replaced is wanted:
        return value.cuda(*args, **kwargs)
    kwargs.pop("device", None)
    # Positional arguments after the device: non_blocking, then memory_format.
    kwargs.update(zip(("non_blocking", "memory_format"), args[1:]))
    torch = torch_module()
    if torch is not None and isinstance(value, torch.nn.Module):
        # The base's method: an overridden `to` was not what the script called.
        return torch.nn.Module.to(value, managed_device(), **kwargs)
    return value.to(device=managed_device(), **kwargs)  # by keyword: a storage takes it no other way


def is_torchs(value: Any, name: str) -> bool:
    """Whether method `name` was written by torch or a library on top of it, not by the script's author."""
    torch = torch_module()
    if torch is not None and type(value) is torch.Tensor:
        return True
    if torch is not None and isinstance(value, torch.nn.Module) and name in value.__dict__:
        return False  # someone put a method of their own on this very module
    classes = type(value).__mro__
    if type(value) is super:
        owner: Any = value
        classes = type(owner.__self__).__mro__
        classes = classes[classes.index(owner.__thisclass__) + 1 :]
    for cls in classes:
        if name in cls.__dict__:
            return cls.__module__.partition(".")[0] in LIBRARIES
    return False
