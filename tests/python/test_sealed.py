"""What other ranks send is unpickled only where the job's secret has sealed it: unpickling runs what the bytes say."""

import os
import pickle
import re
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

import herring
import herring.elastic
from herring._sealed import Seal, load, pack, unpack

SOURCES = Path(herring.__file__).parent


class Hostile:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_what_was_sealed_comes_back():
    seal = Seal("secret", b"job 1")
    sealed = seal.close(b"data", "broadcast", 3)
    assert bytes(Seal("secret", b"job 1").open(sealed, "broadcast", 3)) == b"data"
    assert seal.open_length(seal.close_length(7 << 40, "broadcast", 3), "broadcast", 3) == 7 << 40


def test_any_change_is_refused_before_anything_runs(tmp_path):
    """Who can send on the job's network does not have its secret."""
    mark = tmp_path / "executed"
    body = pickle.dumps(Hostile(mark))
    seal = Seal("secret", b"job 1")
    sealed = seal.close(body, "broadcast", 3)
    forged = [bytes(32) + body, os.urandom(32) + body, body, b"", sealed[:31], sealed[:-1], sealed + b"\0"]
    forged += [bytes(b ^ (1 << at % 8) if i == at else b for i, b in enumerate(sealed)) for at in range(len(sealed))]
    for each in forged:
        with pytest.raises(herring.ProtocolError, match="the object from rank 3 does not carry that rank's seal"):
            load(seal.open(each, "broadcast", 3))
    others = [
        (Seal("other", b"job 1"), "broadcast", 3),
        (Seal("", b"job 1"), "broadcast", 3),
        (Seal("secret", b"job 2"), "broadcast", 3),
        (seal, "allgather", 3),
        (seal, "broadcast", 2),
        (seal, "broadcast: length", 3),
    ]
    for other, purpose, rank in others:
        with pytest.raises(herring.ProtocolError, match=f"rank {rank}"):
            load(other.open(sealed, purpose, rank))
    assert not mark.exists()
    with pytest.raises(OSError, match="executed"):  # The bytes would have done it.
        load(seal.open(seal.close(pickle.dumps(Hostile(mark / "executed")), "b", 1), "b", 1))


def test_the_secret_itself_is_no_key():
    import hashlib
    import hmac

    seal = Seal("secret", b"")
    assert seal.close(b"", "", 0) != hmac.digest(b"secret", b"", hashlib.sha256)
    assert b"secret" not in seal._key


VALUES = [
    None,
    {"step": 3, "rate": 0.1, (1, 2): [b"x", "y"], "nested": OrderedDict(a=1)},
    np.arange(1000.0).reshape(10, 100),
    {"f": np.asfortranarray(np.ones((3, 4))), "cut": np.arange(10)[::2], "none": np.empty((0, 3)), "zero": np.array(5)},
    {"objects": np.array([{}, None], dtype=object), "names": np.array(["a", "bc"])},
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_come_through_and_numbers_are_not_pickled(value):
    body, arrays = pack(value)
    assert sum(each.size for each in arrays) >= (8000 if isinstance(value, np.ndarray) else 0)
    assert len(body) < 1000
    room, finish = unpack(memoryview(body))
    for to, each in zip(room, arrays, strict=True):
        to[:] = each
    np.testing.assert_equal(finish(), value)


def test_an_array_that_came_can_be_written_and_stays_one():
    shared = np.arange(3.0)
    shared.flags.writeable = False
    body, arrays = pack([shared, shared])
    room, finish = unpack(memoryview(body))
    room[0][:] = arrays[0]
    assert len(room) == 1
    one, other = finish()
    one[0] = 7
    assert other is one


def test_torch_tensors_come_through():
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20))
    kinds = (torch.bfloat16, torch.bool, torch.complex64, torch.int8)
    state = {
        "model": model.state_dict(),
        "kinds": [torch.ones(3, 2).to(each) for each in kinds],
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "strided": torch.arange(12.0).reshape(3, 4).t(),
        "part": torch.arange(100.0)[10:20],
    }
    body, arrays = pack(state)
    assert len(arrays) >= 12
    room, finish = unpack(memoryview(body))
    for to, each in zip(room, arrays, strict=True):
        to[:] = each
    got = finish()
    assert list(got["model"]) == list(state["model"])
    assert got["model"]._metadata == state["model"]._metadata
    for name, each in state["model"].items():
        assert torch.equal(got["model"][name], each)
    for name in ("scalar", "empty", "parameter", "strided", "part"):
        assert torch.equal(got[name], state[name])
        assert (type(got[name]), got[name].dtype, got[name].shape, got[name].requires_grad) == (
            type(state[name]),
            state[name].dtype,
            state[name].shape,
            state[name].requires_grad,
        )
    for mine, each in zip(got["kinds"], state["kinds"], strict=True):
        assert torch.equal(mine, each)
    got["scalar"] += 1


def test_nothing_else_unpickles():
    """A new place where bytes of others are unpickled must come through the seal, or be named here with its reason."""
    allowed = {
        "_sealed.py",
        "horovod/_engine/launch.py",  # Files in a folder that nobody else can read or write.
    }
    loads = re.compile(
        r"\b(?:pickle|cloudpickle|dill|marshal)\.loads?\(|Unpickler|torch\.load\(|allow_pickle=True|shelve"
    )
    found = {str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.py") if loads.search(path.read_text())}
    assert found == allowed


def test_a_hostile_peer_runs_nothing(job, tmp_path):
    """Rank 1's place is taken by somebody who can send whatever he likes, but does not have the secret."""
    mark = tmp_path / "executed"
    results = job.run(receive_or_forge, 2, {"mark": str(mark)}, timeout=60)
    assert not mark.exists()
    assert results[0] == [["ProtocolError", True]] * 2 + [{"step": 5}]


def receive_or_forge(mark):
    herring.init()
    outcomes = []
    for way in ("no secret", "no seal"):
        if herring.rank() == 1:
            send_forged(mark, way)
            continue
        try:
            herring.elastic.broadcast_object(None, root=1)
        except herring.ProtocolError as error:
            outcomes.append([type(error).__name__, "rank 1" in str(error)])
    # And the job goes on.
    outcomes.append(herring.elastic.broadcast_object({"step": 5} if herring.rank() == 1 else None, root=1))
    return outcomes


def send_forged(mark, way):
    purpose = "herring.elastic.broadcast_object"
    body, _ = pack(Hostile(mark))
    stranger = Seal("", b"")
    length = stranger.close_length(len(body) + 32, purpose, 1) if way == "no secret" else bytes(40)
    herring.broadcast_(np.frombuffer(bytearray(length), np.uint8), 1)


@pytest.mark.parametrize("way", ["length", "data"])
def test_what_is_changed_on_the_way_is_refused(job, tmp_path, way):
    """The seal is right, the bytes are not: of the number that memory is made for, or of the pickle itself."""
    results = job.run(receive_changed, 2, {"way": way}, timeout=60)
    assert results[0] == "ProtocolError"


def receive_changed(way):
    herring.init()
    real, calls = herring.elastic.broadcast_, []

    def broadcast(array, root, **more):
        result = real(array, root, **more)
        calls.append(array.size)
        if len(calls) == (1 if way == "length" else 2):
            array[-1] ^= 1
        return result

    if herring.rank() == 0:
        herring.elastic.broadcast_ = broadcast
    try:
        value = herring.elastic.broadcast_object({"weights": np.ones(10)} if herring.rank() == 1 else None, root=1)
    except herring.ProtocolError as error:
        return type(error).__name__
    except herring.HerringError:
        return "left alone"
    return str(value)
