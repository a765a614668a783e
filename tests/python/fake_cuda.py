"""Arrays on the fake GPU of tests/cuda/fake_libcuda.cc, whose memory faults where the host reads it, and whose copies
end late: a library of arrays as CuPy is (`ndarray`, `empty`), without a real GPU."""

from __future__ import annotations

import contextlib
import ctypes

import numpy as np

_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
_CUDA, _BFLOAT = 2, 4


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("dims", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Managed._fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


class _ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_READ_ONLY = 1

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

_exported: dict[int, object] = {}


@_Deleter
def _delete(managed):
    del _exported[managed]


class Driver:
    """The driver, and one stream as the library's current one."""

    def __init__(self):
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self("cuInit", 0)
        self._context = ctypes.c_void_p()
        self("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), 0)
        self.enter()
        self.stream, self._event = self.new_stream(), ctypes.c_void_p()
        self.current = 0  # GPU
        self.has_failed = False
        self("cuEventCreate", ctypes.byref(self._event), 2)

    def new_stream(self):
        """As the library's streams are."""
        stream = ctypes.c_void_p()
        self("cuStreamCreateWithPriority", ctypes.byref(stream), 1, -5)
        return stream

    def fail(self):
        """As after an illegal address in a kernel: nothing goes on, ever."""
        self("herring_fake_fail")
        self.has_failed = True

    @contextlib.contextmanager
    def stuck(self):
        """A kernel that does not end is on the current stream, until this ends."""
        gate, stream = ctypes.c_void_p(), self.new_stream()
        self("cuEventCreate", ctypes.byref(gate), 2)
        self("herring_fake_stall", stream, 1)
        self("cuEventRecord", gate, stream)
        self("cuStreamWaitEvent", self.stream, gate, 0)
        try:
            yield
        finally:
            self("herring_fake_stall", stream, 0)

    def enter(self):
        """For this thread."""
        self("cuCtxPushCurrent_v2", self._context)

    def __call__(self, name, *arguments):
        result = getattr(self._cuda, name)(*arguments)
        assert result == 0, (name, result)

    def allocate(self, nbytes):
        address = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(nbytes, 1)))
        return address.value

    def wait(self):
        """Until the current stream is done."""
        self("cuEventRecord", self._event, self.stream)
        while self._cuda.cuEventQuery(self._event) != 0:
            pass

    def order(self, stream):
        """`stream` waits for the current one."""
        self("cuEventRecord", self._event, self.stream)
        self("cuStreamWaitEvent", ctypes.c_void_p(stream), self._event, 0)


driver = Driver()


class Device:
    """As CuPy's: the current one in a `with`."""

    def __init__(self, number):
        self.number, self._before = number, []

    def __enter__(self):
        self._before.append(driver.current)
        driver.current = self.number

    def __exit__(self, *_):
        driver.current = self._before.pop()


class ndarray:  # noqa: N801
    """On the GPU. Exports are counted: none may be left in the end."""

    def __init__(self, shape, dtype, base=None):
        self.shape, self.dtype, self.base = tuple(shape), dtype, base
        self.host_dtype = np.dtype(np.int16 if dtype == "bfloat16" else dtype)
        self.nbytes = int(np.prod(self.shape)) * self.host_dtype.itemsize
        self.address = driver.allocate(self.nbytes) if base is None else base.address
        self.device = Device(driver.current) if base is None else base.device
        self.strides = None  # In elements; None: row-major.
        self.is_read_only = False
        self._kept = None

    def __del__(self):
        if self.base is not None:
            return
        if driver.has_failed:
            return
        driver.wait()  # As cuMemFree does.
        driver("cuMemFree_v2", ctypes.c_uint64(self.address))

    @property
    def T(self):  # noqa: N802
        """Of two dimensions, row-major: the same memory."""
        turned = ndarray(self.shape[::-1], self.dtype, base=self)
        turned.strides = (1, self.shape[1])
        return turned

    def __dlpack_device__(self):
        return (_CUDA, self.device.number)

    def __dlpack__(self, *, stream=None, max_version=None):
        assert stream not in (None, 0), "the exchange is not ordered"
        if driver.current != self.device.number:
            raise BufferError("on another GPU than the current one")  # As torch.
        driver.order(stream)
        managed = (
            _Managed() if max_version is None else _ManagedVersioned(major=1, flags=_READ_ONLY * self.is_read_only)
        )
        shape = (ctypes.c_int64 * max(len(self.shape), 1))(*self.shape)
        strides = None if self.strides is None else (ctypes.c_int64 * len(self.shape))(*self.strides)
        code = _BFLOAT if self.dtype == "bfloat16" else _CODES[self.host_dtype.kind]
        managed.tensor = _Tensor(
            self.address, _Device(_CUDA, self.device.number), len(self.shape),
            _Type(code, 8 * self.host_dtype.itemsize, 1), shape, strides, 0,
        )  # fmt: skip
        managed.deleter = _delete
        _exported[ctypes.addressof(managed)] = (managed, shape, strides, self)
        name = b"dltensor" if max_version is None else b"dltensor_versioned"
        return _new_capsule(ctypes.addressof(managed), name, None)

    def set(self, host):
        """As a kernel that writes it: later, after what the current stream has."""
        self._kept = np.ascontiguousarray(host)
        assert self._kept.nbytes == self.nbytes
        driver(
            "cuMemcpyHtoDAsync_v2", ctypes.c_uint64(self.address), self._kept.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_size_t(self.nbytes), driver.stream,
        )  # fmt: skip

    def get(self):
        """Its elements, of bfloat16 as int16."""
        if self.strides is not None:
            return self.base.get().T
        host = np.empty(self.shape, self.host_dtype)
        driver(
            "cuMemcpyDtoHAsync_v2", host.ctypes.data_as(ctypes.c_void_p), ctypes.c_uint64(self.address),
            ctypes.c_size_t(self.nbytes), driver.stream,
        )  # fmt: skip
        driver.wait()
        return host


def empty(shape, dtype):
    """As numpy's."""
    return ndarray(shape, dtype)


def asarray(host, dtype=None):
    """As CuPy's; its elements come late."""
    array = ndarray(host.shape, dtype or str(host.dtype))
    array.set(host)
    return array


def ascontiguousarray(array):
    """As CuPy's."""
    return array if array.strides is None else asarray(np.ascontiguousarray(array.get()), array.dtype)


def exports():
    """How many tensors somebody has of us."""
    return len(_exported)
