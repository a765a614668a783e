"""What each rank does in test_with_torch.py: torch and TensorFlow in one process, each with its own tensors.

`cases_with_torch.py torch-first|tensorflow-first NAME ...`, as cases.py. TORCH_SITE: a folder that has torch, where
this environment has none.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path += [folder for folder in [os.environ.get("TORCH_SITE")] if folder]
if "torch-first" in sys.argv:
    import herring.torch
else:
    import herring.tensorflow

import numpy as np
import tensorflow as tf
import torch
from cases import close, expect, main

import herring.horovod.tensorflow as of_tf
import herring.horovod.torch as of_torch
import herring.tensorflow as plain_tf
import herring.torch
from herring.tensorflow._ops import library

torch.set_num_threads(1)


def one_job() -> None:
    """Whoever has joined it, all are in it."""
    of_torch.init()
    assert of_tf.is_initialized()
    assert of_torch.is_initialized()
    assert (of_tf.rank(), of_tf.size()) == (of_torch.rank(), of_torch.size()) == (plain_tf.rank(), plain_tf.size())


def in_turns() -> None:
    """With and without names, the same names in both, eagerly and in a graph, while the other's are in flight."""
    rank, size = of_tf.rank(), of_tf.size()
    total = size * (size + 1) / 2
    step = tf.function(lambda x: of_tf.allreduce(x, op=of_tf.Sum, name="loss"))
    for number in range(30):
        mine = torch.full([1000], (rank + 1.0) * number)
        handles = [of_torch.allreduce_async(mine, op=of_torch.Sum, name=name) for name in ("loss", None)]
        close(step(tf.fill([500], (rank + 1.0) * number)), np.full(500, total * number))
        close(of_tf.allreduce(tf.fill([7], rank + 1.0), op=of_tf.Sum), np.full(7, total))
        close(plain_tf.oob_allreduce(tf.fill([5], rank + 1.0), op="sum"), np.full(5, total))
        for handle in reversed(handles):
            close(of_torch.synchronize(handle).numpy(), np.full(1000, total * number))
        rows = np.repeat(np.arange(size), range(1, size + 1))
        close(of_torch.allgather(torch.full([rank + 1], float(rank))).numpy(), rows)
        close(of_tf.allgather(tf.fill([rank + 1], float(rank))), rows)
        close(of_torch.broadcast(torch.tensor([float(rank)]), size - 1).numpy(), [size - 1])
        close(of_tf.broadcast(tf.constant([float(rank)]), size - 1), [size - 1])
    assert library().pending() == 0


def _train_with_torch(steps: int) -> list[float]:
    """A model's weights after so many steps on all ranks' rows."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    of_torch.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = of_torch.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    rows = torch.arange(16.0).reshape(4, 4)[of_torch.rank() :: of_torch.size()] / 16
    for _ in range(steps):
        optimizer.zero_grad()
        model(rows).pow(2).mean().backward()
        optimizer.step()
    return [float(each) for parameter in model.parameters() for each in parameter.detach().flatten()]


def _train_with_tf(steps: int) -> list[float]:
    weight = tf.Variable(tf.reshape(tf.range(4.0), [4, 1]) / 4)
    rows = tf.reshape(tf.range(16.0), [4, 4])[of_tf.rank() :: of_tf.size()] / 16

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((rows @ weight) ** 2)
        weight.assign_sub(0.1 * of_tf.DistributedGradientTape(tape).gradient(loss, [weight])[0])

    for _ in range(steps):
        step()
    return [float(each) for each in tf.reshape(weight, [-1])]


def training_in_two_threads() -> None:
    """One trains with torch while the other trains with TensorFlow: bit for bit what each gives alone."""
    alone = _train_with_torch(40), _train_with_tf(40)
    results: dict[str, Any] = {}
    other = threading.Thread(target=lambda: results.update(tf=_train_with_tf(40)))
    other.start()
    results["torch"] = _train_with_torch(40)
    other.join(60)
    assert (results["torch"], results["tf"]) == alone


def process_sets() -> None:
    """One that was made with either's name serves both."""
    rank, size = of_tf.rank(), of_tf.size()
    for add, remove in (
        (of_torch.add_process_set, of_tf.remove_process_set), (of_tf.add_process_set, of_torch.remove_process_set),
    ):  # fmt: skip
        own = [add([each]) for each in range(size)]
        for _ in range(3):
            close(of_torch.allreduce(torch.tensor([rank + 1.0]), process_set=own[rank]).numpy(), [rank + 1])
            close(of_tf.allreduce(tf.constant([rank + 1.0]), process_set=own[rank]), [rank + 1])
        assert all(remove(each) for each in own)


def join() -> None:
    """Who has no data left takes part in the reductions of both."""
    rank, size = of_tf.rank(), of_tf.size()
    for leave in (of_torch.join, of_tf.join):
        for number in range(3 * rank):
            active = size - sum(3 * each <= number for each in range(size))
            close(of_torch.allreduce(torch.ones(3), op=of_torch.Sum, name="joined").numpy(), np.full(3, active))
            close(of_tf.allreduce(tf.ones([3]), op=of_tf.Sum, name="joined"), np.full(3, active))
            close(of_tf.allreduce(tf.ones([2]), op=of_tf.Sum), np.full(2, active))
        assert int(leave()) == size - 1


def torch_distributed() -> None:
    """The backend beside TensorFlow's operations, and its end, which is not that of the job."""
    rank, size = of_tf.rank(), of_tf.size()
    torch.distributed.init_process_group("herring")
    model = herring.torch.parallel.DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
    step = tf.function(lambda x: plain_tf.oob_allreduce(x, op="sum", name="beside"))
    for _ in range(10):
        value = torch.full([10], rank + 1.0)
        work = torch.distributed.all_reduce(value, async_op=True)
        close(step(tf.ones([3])), np.full(3, size))
        work.wait()
        close(value.numpy(), np.full(10, size * (size + 1) / 2))
        model(torch.full([1, 3], rank + 1.0)).sum().backward()
    close(model.module.weight.grad.numpy(), np.full((1, 3), 10 * (size + 1) / 2))
    torch.distributed.destroy_process_group()
    close(plain_tf.oob_allreduce(tf.ones([2]), op="sum"), np.full(2, size))


def a_mismatch_in_one_leaves_the_other() -> None:
    rank, size = of_tf.rank(), of_tf.size()
    expect(of_torch.HorovodInternalError, lambda: of_torch.allreduce(torch.ones(2 + rank), name="w"), "[2]", "[3]", "w")
    close(of_tf.allreduce(tf.ones([3]), op=of_tf.Sum, name="w"), np.full(3, size))
    expect(tf.errors.FailedPreconditionError, lambda: of_tf.allreduce(tf.ones([2 + rank]), name="w"), "[2]", "[3]", "w")
    close(of_torch.allreduce(torch.ones(3), op=of_torch.Sum, name="w").numpy(), np.full(3, size))


def starting_again() -> None:
    """Either's shutdown() ends the job for both, and either's init() begins it again for both."""
    size = of_tf.size()
    for stop, start in ((of_tf.shutdown, of_torch.init), (of_torch.shutdown, of_tf.init)):
        step = tf.function(lambda: of_tf.allreduce(tf.ones([2]), op=of_tf.Sum, name="again"))
        close(step(), [size] * 2)
        stop()
        assert not of_torch.is_initialized()
        assert not of_tf.is_initialized()
        expect(ValueError, lambda: of_torch.allreduce(torch.ones(1)), "init()")
        expect(ValueError, lambda: of_tf.allreduce(tf.ones([1])), "init()")
        start()
        close(step(), [size] * 2)
        close(of_torch.allreduce(torch.ones(2), op=of_torch.Sum).numpy(), [size] * 2)


if __name__ == "__main__":
    of_tf.init()
    main(sys.argv[2:], globals())
