"""Methods that place an object on a device: `x.cuda()`, `x.to("cuda:0")`, `x.pin_memory()`.

The source does not show the type of `x`, so `on(x)` decides at run time. It routes the devices of tensors, modules and
the containers of libraries built on PyTorch; other objects, and classes that define the method themselves, are called
unchanged.
"""

from __future__ import annotations

from typing import Any

from gemini.launcher.script_api.script_devices import (
    device,
    has_accelerator,
    managed_device,
    replacement_for,
    torch_module,
)

# Packages whose `.to(device)` and `.cuda()` behave like PyTorch's.
LIBRARIES = frozenset(
    {
        "accelerate", "dgl", "diffusers", "lightning", "lightning_fabric", "peft", "pytorch_lightning",
        "sentence_transformers", "tensordict", "timm", "torch", "torch_geometric", "torchmetrics", "torchvision",
        "transformers",
    }
)  # fmt: skip


def on(value: Any) -> Any:
    """Return `value` with routed device methods, or `value` if they are not PyTorch's."""
    torch = torch_module()
    if torch is None:
        return value
    if type(value) is torch.Tensor:
        return RoutedMethods(value, True)
    if isinstance(value, (torch.Tensor, torch.nn.Module)):
        return RoutedMethods(value)
    if type(value) is super:  # super().cuda() in a method of a module
        return RoutedMethods(value) if isinstance(getattr(value, "__self__", None), torch.nn.Module) else value
    if type(value).__module__.partition(".")[0] in LIBRARIES:
        return RoutedMethods(value)
    return value


class RoutedMethods:
    """The device methods of one object; plain methods, which torch.compile can trace."""

    __slots__ = ("is_tensor", "value")

    def __init__(self, value: Any, is_tensor: bool = False) -> None:
        self.value = value
        self.is_tensor = is_tensor  # exactly, not a subclass

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """`value.to(…)` with an absent device replaced."""
        value = self.value
        if self.is_tensor and len(args) == 1 and not kwargs:  # in every step of a script
            current = value.device
            if type(args[0]) is type(current) and args[0] == current:
                return value.to(args[0])
        if is_from_torch(self.value, "to"):
            if args:
                args = (device(args[0]), *args[1:])
            if "device" in kwargs:
                kwargs["device"] = device(kwargs["device"])
        return self.value.to(*args, **kwargs)

    def to_empty(self, *args: Any, **kwargs: Any) -> Any:
        """`value.to_empty(device=…)` with an absent device replaced."""
        if "device" in kwargs and is_from_torch(self.value, "to_empty"):
            kwargs["device"] = device(kwargs["device"])
        return self.value.to_empty(*args, **kwargs)

    def cuda(self, *args: Any, **kwargs: Any) -> Any:
        """`value.cuda(…)`, or `value` on the managed device."""
        if is_from_torch(self.value, "cuda"):
            return cuda(self.value, *args, **kwargs)
        return self.value.cuda(*args, **kwargs)

    def pin_memory(self, *args: Any, **kwargs: Any) -> Any:
        """`value.pin_memory()`, or `value` where no accelerator could read it."""
        if not has_accelerator() and is_from_torch(self.value, "pin_memory"):
            return self.value
        return self.value.pin_memory(*args, **kwargs)


def cuda(value: Any, *args: Any, **kwargs: Any) -> Any:
    """`value.cuda(…)` where that device exists, else `value` on the managed device."""
    wanted = args[0] if args else kwargs.get("device")
    replaced = replacement_for("cuda") if wanted is None else device(wanted)
    if replaced is None or replaced is wanted:
        return value.cuda(*args, **kwargs)
    kwargs.pop("device", None)
    # The positional arguments after the device are non_blocking and memory_format.
    kwargs.update(zip(("non_blocking", "memory_format"), args[1:]))
    torch = torch_module()
    if torch is not None and isinstance(value, torch.nn.Module):
        # The method of the base class: the script did not call an overridden `to`.
        return torch.nn.Module.to(value, managed_device(), **kwargs)
    return value.to(device=managed_device(), **kwargs)  # a storage takes it by keyword only


def is_from_torch(value: Any, name: str) -> bool:
    """Return whether method `name` is defined by PyTorch or a library on it, not by the script."""
    torch = torch_module()
    if torch is not None and type(value) is torch.Tensor:
        return True
    if torch is not None and isinstance(value, torch.nn.Module) and name in value.__dict__:
        return False  # an instance attribute overrides the method
    classes = type(value).__mro__
    if type(value) is super:
        owner: Any = value
        classes = type(owner.__self__).__mro__
        classes = classes[classes.index(owner.__thisclass__) + 1 :]
    for cls in classes:
        if name in cls.__dict__:
            return cls.__module__.partition(".")[0] in LIBRARIES
    return False
