"""CUDA IPC: calls of the CUDA driver for memory that processes share, through ctypes.

torch can share CUDA memory as well, but counts references in named files under /dev/shm, which stay behind when a
process is killed. This module allocates its own memory, one handle per segment; references are counted by messages of
the link.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_OUT_OF_MEMORY = 2
_LAZY_PEER_ACCESS = 1
_HANDLE = 64  # bytes
_BLOCK = 2 << 20  # bytes


class _Handle(ctypes.Structure):
    """`CUipcMemHandle`."""

    _fields_ = (("reserved", ctypes.c_char * _HANDLE),)


class DriverError(RuntimeError):
    """A driver call failed."""


@functools.lru_cache(maxsize=1)
def _library() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    pointer, size = ctypes.c_uint64, ctypes.c_size_t
    for name, arguments in {
        "cuInit": (ctypes.c_uint,),
        "cuDeviceGet": (ctypes.c_void_p, ctypes.c_int),
        "cuDevicePrimaryCtxRetain": (ctypes.c_void_p, ctypes.c_int),
        "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
        "cuCtxPopCurrent_v2": (ctypes.c_void_p,),
        "cuCtxSynchronize": (),
        "cuMemAlloc_v2": (ctypes.c_void_p, size),
        "cuMemFree_v2": (pointer,),
        "cuIpcGetMemHandle": (ctypes.c_void_p, pointer),
        "cuIpcOpenMemHandle_v2": (ctypes.c_void_p, _Handle, ctypes.c_uint),
        "cuIpcCloseMemHandle": (pointer,),
        "cuGetErrorName": (ctypes.c_int, ctypes.c_void_p),
    }.items():
        getattr(library, name).argtypes = arguments
    return library


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_library(), name)(*arguments)
    if code == 0:
        return
    text = ctypes.c_char_p()
    _library().cuGetErrorName(code, ctypes.byref(text))
    name_of_error = (text.value or b"unknown").decode()
    kind = torch.OutOfMemoryError if code == _OUT_OF_MEMORY else DriverError
    raise kind(f"{name}: {name_of_error} (code {code})")


@functools.lru_cache(maxsize=64)
def _context(index: int) -> Any:
    """Return the context that torch uses on a device."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuInit", 0)
    _call("cuDeviceGet", ctypes.byref(device), index)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device.value)
    return context


@contextmanager
def _on(index: int) -> Iterator[None]:
    _call("cuCtxPushCurrent_v2", _context(index))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


def allocate(index: int, size: int) -> int:
    """Allocate memory on a device and return its address.

    Sizes are rounded up to whole driver blocks: smaller allocations share a block, a handle names the block and not the
    allocation, and a block cannot be opened twice.
    """
    address = ctypes.c_uint64()
    with _on(index):
        _call("cuMemAlloc_v2", ctypes.byref(address), -(-size // _BLOCK) * _BLOCK)
    return address.value


def free(index: int, address: int) -> None:
    """Free memory."""
    with _on(index):
        _call("cuCtxSynchronize")
        _call("cuMemFree_v2", address)


def share(index: int, address: int) -> bytes:
    """Return the handle under which other processes can open memory."""
    handle = _Handle()
    with _on(index):
        _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
    return ctypes.string_at(ctypes.addressof(handle), _HANDLE)


def open_shared(index: int, handle: bytes) -> int:
    """Open memory of another process and return its address in this one."""
    address = ctypes.c_uint64()
    with _on(index):
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
    return address.value


def close_shared(index: int, address: int) -> None:
    """Close memory of another process."""
    with _on(index):
        _call("cuCtxSynchronize")
        _call("cuIpcCloseMemHandle", address)
