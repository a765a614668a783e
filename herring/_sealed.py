"""Objects between ranks: pickled, and never unpickled before their seal is checked.

Unpickling executes what the bytes say. So they carry an HMAC-SHA256 under a key made of the job's secret; who can only
send on the job's network does not have that. docs/security.md says what the secret is worth, and what is not sealed.

What is sealed is: what it is for, who sent it, and the bytes. In a job without a rendezvous the key is of that job
alone, so what another job with the same secret has sent is refused; what this job itself sent earlier is not.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import pickle
import struct
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from herring._errors import ProtocolError
from herring._job import WorkerJob

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from herring._context import Session

__all__ = ["LENGTH_BYTES", "Seal", "load", "pack", "seal_of", "unpack"]

_LABEL = b"herring: objects between ranks, 1"
_SEAL_BYTES = 32
_LENGTH = struct.Struct("<Q")
LENGTH_BYTES = _SEAL_BYTES + _LENGTH.size
"""Of a sealed length."""


class Seal:
    """Makes and checks seals of one job."""

    def __init__(self, secret: str, job: bytes) -> None:
        self._key = hmac.digest(secret.encode(), _LABEL + job, "sha256")

    def _mac(self, data: bytes | memoryview, purpose: str, sender: int) -> bytes:
        text = purpose.encode()
        mac = hmac.new(self._key, struct.pack("<QQ", sender, len(text)) + text, hashlib.sha256)
        mac.update(data)
        return mac.digest()

    def close(self, data: bytes, purpose: str, sender: int) -> bytes:
        """The seal, then the data. `sender`: this rank."""
        return self._mac(data, purpose, sender) + data

    def open(self, sealed: bytes | memoryview, purpose: str, sender: int) -> memoryview:
        """The data. Raises ProtocolError where rank `sender` has not sealed just this for this purpose."""
        view = memoryview(sealed)
        mac, data = view[:_SEAL_BYTES], view[_SEAL_BYTES:]
        if not hmac.compare_digest(mac, self._mac(data, purpose, sender)):
            raise ProtocolError(
                f"{purpose}: the object from rank {sender} does not carry that rank's seal: it was changed on the way, "
                "or somebody outside the job has sent it; nothing of it was used"
            )
        return data

    def close_length(self, length: int, purpose: str, sender: int) -> bytes:
        """LENGTH_BYTES long, to be sent before what is so long: memory is not made for a stranger's number."""
        return self.close(_LENGTH.pack(length), f"{purpose}: length", sender)

    def open_length(self, sealed: bytes | memoryview, purpose: str, sender: int) -> int:
        """As open()."""
        [length] = _LENGTH.unpack(self.open(sealed, f"{purpose}: length", sender))
        return int(length)


def seal_of(session: Session) -> Seal:
    """That of the job that this process is in.

    A rendezvous gives each generation an id of its own, which ranks learn at different moments: there the secret alone
    tells jobs apart.
    """
    job = session.job
    name = b"job %d" % job.client.job_id if isinstance(job, WorkerJob) else b"rendezvous"
    return Seal(session.config.secret, name)


def load(data: memoryview, buffers: list[Any] | None = None) -> Any:
    """Unpickles what open() has returned, and nothing else."""
    return pickle.loads(data, buffers=buffers)


def pack(value: Any) -> tuple[bytes, list[npt.NDArray[np.uint8]]]:
    """A value as bytes to be sealed, and the large data in it (numpy's arrays, torch's CPU tensors) as they lie in
    memory: numbers need neither a copy nor a pickle."""
    import numpy as np

    buffers: list[npt.NDArray[np.uint8]] = []

    def keep(buffer: pickle.PickleBuffer) -> None:
        raw = buffer.raw()
        array = np.frombuffer(raw, np.uint8) if raw.nbytes else np.empty(0, np.uint8)
        buffers.append(array if array.flags.writeable else array.copy())

    stream = io.BytesIO()
    _Pickler(stream, keep).dump(value)
    body = stream.getvalue()
    sizes = struct.pack(f"<{1 + len(buffers)}Q", len(buffers), *(each.size for each in buffers))
    return sizes + body, buffers


def unpack(data: memoryview) -> tuple[list[npt.NDArray[np.uint8]], Callable[[], Any]]:
    """The inverse of pack(), for what open() has returned: memory to be filled, and what then gives the value."""
    import numpy as np

    [count] = _LENGTH.unpack_from(data)
    sizes = struct.unpack_from(f"<{count}Q", data, _LENGTH.size)
    buffers = [np.empty(size, np.uint8) for size in sizes]
    return buffers, lambda: load(data[_LENGTH.size * (1 + count) :], list(buffers))


class _Pickler(pickle.Pickler):
    """Takes plain CPU tensors as memory, as numpy's arrays are taken."""

    def __init__(self, stream: io.BytesIO, keep: Callable[[pickle.PickleBuffer], None]) -> None:
        super().__init__(stream, protocol=5, buffer_callback=keep)
        self._torch = sys.modules.get("torch")
        self._ndarray = getattr(sys.modules.get("numpy"), "ndarray", None)

    def reducer_override(self, value: Any) -> Any:
        """For pickle."""
        if type(value) is self._ndarray and not value.flags.writeable:
            return value.copy().__reduce_ex__(5)  # Who gets it may write it, as with every pickle.
        torch = self._torch
        if torch is None or type(value) is not torch.Tensor or not _is_plain(torch, value):
            return NotImplemented
        flat = value.reshape(-1).view(torch.uint8).numpy()
        return _tensor_of, (pickle.PickleBuffer(flat), value.dtype, tuple(value.shape))


def _is_plain(torch: Any, tensor: Any) -> bool:
    """Nothing but its numbers would be lost, and no other tensor shares them."""
    return bool(
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.numel() > 0
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_quantized
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        and not tensor.__dict__
    )


def _tensor_of(buffer: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    import torch

    return torch.frombuffer(buffer, dtype=dtype).reshape(shape)
