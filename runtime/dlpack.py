"""Tensors at addresses: DLPack's structure, filled in by hand.

A view that TVM makes of a tensor keeps the tensor's address beside an offset, which compiled
kernels do not take.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import tvm_ffi

_INT, _BITS = 0, 32  # DLPack's code of int32


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class Int32At:
    """int32 of a shape at an address of a device, contiguous: `tensor`, as TVM takes it.

    What the address belongs to, and this object, have to live as long as the tensor.
    """

    def __init__(self, address: int, shape: tuple[int, ...], device: tuple[int, int]) -> None:
        self._device = device
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._managed = _Managed(
            address, *device, len(shape), _INT, _BITS, 1, self._shape, None, 0, None, None
        )
        self.tensor: Any = tvm_ffi.from_dlpack(self)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **_: Any) -> Any:
        return _capsule(ctypes.addressof(self._managed), b"dltensor", None)


_capsule: Callable[..., Any] = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object  # type: ignore[attr-defined]
_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)  # type: ignore[attr-defined]
