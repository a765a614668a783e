"""What each rank does in test_horovod_buckets.py: scripts that do with gradients and optimizers what they like."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import pickle
import sys
import threading
import weakref
from typing import Any

import torch
from cases_horovod_buckets import RANKS, _check, _check_count, _optimizer, _parameters, _step
from torch import nn

import herring
import herring.horovod.torch as hvd

TOTAL = 6.0  # of three ranks, each of which has its number and one


def _back(parameters: list[nn.Parameter]) -> None:
    sum((each * (hvd.rank() + 1.0)).sum() for each in parameters).backward()  # type: ignore[union-attr]


def _all(parameters: list[nn.Parameter], total: float = TOTAL) -> None:
    for each in parameters:
        assert each.grad is not None
        assert each.grad.unique().tolist() == [total], each.grad


def case_a_gradient_replaced_between_backward_and_step() -> None:
    parameters = _parameters((300, 300), (3,))
    optimizer = _optimizer("replaced", parameters)
    for step in range(5):
        optimizer.zero_grad()
        _back(parameters)
        for each in parameters:
            each.grad = None if step == 4 else each.grad.clone()
        optimizer.synchronize()
        _all(parameters)


def case_gradients_in_memory_of_the_script() -> None:
    """A flat buffer; and a list of gradients that is zeroed by hand."""
    parameters = _parameters((4,), (3,))
    optimizer = _optimizer("flat", parameters)
    flat = torch.zeros(7)
    parameters[0].grad, parameters[1].grad = flat[:4], flat[4:]
    for _ in range(4):
        flat.zero_()
        _back(parameters)
        optimizer.synchronize()
        assert flat.unique().tolist() == [TOTAL]
        _all(parameters)
    parameters = _parameters((4,), (300, 300))
    optimizer = _optimizer("list", parameters)
    _back(parameters)
    optimizer.synchronize()
    gradients = [each.grad for each in parameters]
    for _ in range(4):
        for gradient in gradients:
            gradient.zero_()
        _back(parameters)
        optimizer.synchronize()
        assert all(each.grad is gradient for each, gradient in zip(parameters, gradients, strict=True))
        _all(parameters)


def case_data_of_a_gradient_is_assigned() -> None:
    for name, sets_to_none, shapes in (
        ("one", True, ((300, 300),)), ("two", True, ((4,), (3,))), ("kept", False, ((4,), (3,))),
    ):  # fmt: skip
        parameters = _parameters(*shapes)
        optimizer = _optimizer(f"data.{name}", parameters)
        for _ in range(5):
            optimizer.zero_grad(set_to_none=sets_to_none)
            _back(parameters)
            optimizer.synchronize()
            _all(parameters)
            for each in parameters:
                each.grad.data = each.grad.data.clamp(-1, 1)


def case_memory_of_gradients_is_shared_with_processes() -> None:
    model = nn.Linear(3, 2)
    parameters = list(model.parameters())
    optimizer = _optimizer("shared", parameters)
    for step in range(6):
        optimizer.zero_grad(set_to_none=step < 4)
        _back(parameters)
        optimizer.synchronize()
        _all(parameters)
        if step in (2, 4):
            model.share_memory()


def case_a_parameter_changes_its_type_or_shape() -> None:
    changes: dict[str, Any] = {
        "double": lambda each: each.data.double(), "half": lambda each: each.data.bfloat16(),
        "shape": lambda each: torch.zeros(6),
    }  # fmt: skip
    for name, change in changes.items():
        parameters = _parameters((4,), (3,))
        optimizer = _optimizer(f"changes.{name}", parameters)
        for step in range(7):
            optimizer.zero_grad()
            before = herring.stats()["ops_completed"]
            _back(parameters)
            optimizer.synchronize()
            _all(parameters)
            assert step not in (2, 6) or herring.stats()["ops_completed"] == before + 1, "no bucket (again)"
            if step == 2:
                optimizer.zero_grad()
                for each in parameters:
                    each.data = change(each)
                assert parameters[0].grad is None


def case_backward_in_two_threads() -> None:
    parameters = _parameters(*((2000,) for _ in range(8)))
    optimizer = _optimizer("threads", parameters)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(30):
            optimizer.zero_grad()
            threads = [threading.Thread(target=_back, args=(half,)) for half in (parameters[::2], parameters[1::2])]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            optimizer.synchronize()
            _all(parameters)
    finally:
        sys.setswitchinterval(interval)


def case_calls_in_another_order_in_the_first_step() -> None:
    parameters = _parameters((4,), (3,))
    optimizer = _optimizer("calls", parameters)
    for _ in range(3):
        optimizer.zero_grad()
        _back(parameters)
        if hvd.rank() == 0:
            optimizer.synchronize()
            hvd.allreduce(torch.ones(1), name="calls")
        else:
            hvd.allreduce(torch.ones(1), name="calls")
            optimizer.synchronize()
        _all(parameters)
    first, second = _parameters((4,)), _parameters((3,))
    optimizers = [_optimizer("first", first), _optimizer("second", second)]
    for _ in range(3):
        for each in optimizers:
            each.zero_grad()
        _back(first + second)
        for each in optimizers if hvd.rank() == 0 else reversed(optimizers):
            each.synchronize()
        _all(first + second)


def case_an_optimizer_is_made_anew_on_one_rank() -> None:
    """And on all: with the same parameters it has the buckets that ranks have agreed on."""
    parameters = _parameters((4,), (300, 300))
    optimizer = _optimizer("anew", parameters)
    for step in range(8):
        if (step == 3 and hvd.rank() == 1) or step == 5:
            parameters = _parameters((4,), (300, 300))
            optimizer = _optimizer("anew", parameters)
        count = _step(optimizer, parameters, float(hvd.rank()))
        _check(parameters, RANKS)
        _check_count(step, count)


def case_an_optimizer_is_made_anew_on_one_rank_where_there_are_no_buckets() -> None:
    """Ranks have another order of parameters: they go on by name, whoever makes an optimizer. Then one order."""
    for turn in range(2):
        for step in range(6):
            if step in (0, 4) or (step == 2 and hvd.rank() == 1):
                parameters = _parameters((4,), (3,), (300, 300))
                named = [(f"turned.{index}", each) for index, each in enumerate(parameters)]
                turned = named if turn else named[hvd.rank() :] + named[: hvd.rank()]
                sgd = torch.optim.SGD([each for _, each in turned], lr=1.0)
                optimizer = hvd.DistributedOptimizer(sgd, turned, op=hvd.Sum)
            _step(optimizer, parameters, float(hvd.rank()))
            _check(parameters, RANKS)


def case_an_optimizer_is_made_anew_while_a_rank_has_joined() -> None:
    parameters = _parameters((4,), (3,))
    optimizer = _optimizer("anew.joined", parameters)
    if hvd.rank() != 2:
        for step in range(5):
            if step == 2 and hvd.rank() == 1:
                parameters = _parameters((4,), (3,))
                optimizer = _optimizer("anew.joined", parameters)
            _step(optimizer, parameters, float(hvd.rank()))
            _check(parameters, 1.0, 2)
    hvd.join()
    for step in range(3):
        count = _step(optimizer, parameters, float(hvd.rank()))
        _check(parameters, RANKS)
        _check_count(step, count)


def case_another_default_device() -> None:
    parameters = _parameters((4,), (300, 300), (5,))
    optimizer = _optimizer("default", parameters)
    for _ in range(4):
        optimizer.zero_grad()
        with torch.device("meta"):
            _back(parameters[:2])
            optimizer.synchronize()
        _all(parameters[:2])
        _all(parameters[2:], 0.0)


def case_a_copy_of_a_gradient_is_no_copy_of_its_bucket() -> None:
    parameters = _parameters((4,), (1000, 1000))
    optimizer = _optimizer("copies", parameters)
    for _ in range(3):
        _step(optimizer, parameters, float(hvd.rank()))
    assert copy.deepcopy(parameters[0].grad).untyped_storage().nbytes() == 16
    assert len(pickle.dumps(parameters[0].grad)) < 2000
    storage = parameters[0].grad.untyped_storage()
    before = bytes(storage)
    _step(optimizer, parameters, float(hvd.rank() + 1))
    assert bytes(storage) == before, "a storage that somebody has kept"


def case_memory_goes_with_the_optimizer() -> None:
    """The gradients of 30 optimizers, one after the other, are not all there at once."""

    def resident() -> int:
        ctypes.CDLL(None).malloc_trim(0)  # What is free is not the optimizers'.
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    sizes = []
    for number in range(30):
        parameters = _parameters((1000, 1000))
        optimizer = _optimizer(f"goes.{number}", parameters)
        for _ in range(3):
            _step(optimizer, parameters, float(hvd.rank()))
        bucket = weakref.ref(optimizer._gradients.bundles[0].place.bucket)
        del parameters, optimizer
        gc.collect()
        assert bucket() is None
        sizes.append(resident())
    # Of allocators that keep some: the most of the last ones beside the most of the first ones.
    assert max(sizes[20:]) - max(sizes[:10]) < 40 << 20, sizes
