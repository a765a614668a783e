"""Tensors on a GPU, which tests/torch/accelerator.cc plays: run by several ranks of one job, which share the fake."""

from __future__ import annotations

import ctypes
import functools
import random
from collections.abc import Callable
from typing import Any

import torch
from accelerator import DEVICE, IS_REAL, expect_freed, load
from common import data, expect_error

import herring
import herring.horovod.torch as hvd
from herring.horovod.torch._functions import broadcast_with_tensors

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


@functools.cache
def _gpu() -> ctypes.CDLL:
    return load()


def _there(tensor: torch.Tensor) -> torch.Tensor:
    _gpu()
    return tensor.to(DEVICE)


def _late(tensor: torch.Tensor, value: int) -> None:
    """A kernel that fills the bytes comes late on the current stream."""
    _gpu().fake_fill_later(tensor.data_ptr(), tensor.nbytes, value)


def _new_stream() -> None:
    _gpu().fake_set_stream(_gpu().fake_new_stream())


def _same(there: torch.Tensor, here: torch.Tensor, what: object) -> None:
    assert there.device.type == DEVICE, f"{what}: on {there.device}"
    came = there.cpu()
    assert came.shape == here.shape, f"{what}: {came.shape}"
    assert came.dtype == here.dtype, f"{what}: {came.dtype}"
    assert came.reshape(-1).view(torch.uint8).equal(here.reshape(-1).view(torch.uint8)), f"{what}: other bits"


def _lists(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


def case_every_collective_has_the_bits_of_the_cpu() -> None:
    rank, size = hvd.rank(), hvd.size()
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "allreduce": lambda t: hvd.allreduce(t, op=hvd.Sum),
        "scaled": lambda t: hvd.allreduce(t, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0),
        "allreduce_": lambda t: hvd.allreduce_(t.clone(), op=hvd.Max),
        "grouped_allreduce": lambda t: hvd.grouped_allreduce([t, t[:1], t[:0]], op=hvd.Sum),
        "grouped_allreduce_async_": lambda t: hvd.synchronize(
            hvd.grouped_allreduce_async_([t.clone(), t[:1].clone()], op=hvd.Min)
        ),
        "allreduce_async, no name": lambda t: hvd.synchronize(hvd.allreduce_async(t, op=hvd.Sum)),
        "allgather": lambda t: hvd.allgather(t[: rank + 1]),
        "grouped_allgather": lambda t: hvd.grouped_allgather([t, t[:, :3].contiguous()]),
        "broadcast": lambda t: hvd.broadcast(t, 1),
        "broadcast_": lambda t: hvd.broadcast_(t.clone(), 1),
        "alltoall": lambda t: hvd.alltoall(t[: 2 * size]),
        "alltoall with splits": lambda t: hvd.alltoall(t, [1] * (size - 1) + [2]),
        "reducescatter": lambda t: hvd.reducescatter(t, op=hvd.Sum, postscale_factor=2.0),
        "grouped_reducescatter": lambda t: hvd.grouped_reducescatter([t, t[:1]], op=hvd.Sum),
    }
    for dtype in DTYPES:
        for what, call in calls.items():
            if dtype == torch.bool and ("scaled" in what or "scatter" in what):
                continue
            tensor = data(rank, (2 * size + 1, 501), dtype)
            wanted, got = _lists(call(tensor)), _lists(call(_there(tensor)))
            assert len(wanted) == len(got)
            for here, there in zip(wanted, got, strict=True):
                if what == "alltoall with splits" and here.dtype == torch.int32:
                    assert there.equal(here), what
                else:
                    _same(there, here, (what, dtype))
    scalar = torch.tensor(float(rank))
    _same(hvd.allgather(_there(scalar)), hvd.allgather(scalar), "a scalar")
    columns = data(rank, (6, 10), torch.float32)[:, ::2]
    _same(hvd.allreduce(_there(data(rank, (6, 10), torch.float32))[:, ::2]), hvd.allreduce(columns), "columns")


def case_adasum_has_the_bits_of_the_cpu() -> None:
    if hvd.size() & (hvd.size() - 1):
        return
    tensor = data(hvd.rank(), (100,), torch.float32)
    _same(hvd.allreduce(_there(tensor), op=hvd.Adasum), hvd.allreduce(tensor, op=hvd.Adasum), "adasum")


def case_ranks_with_and_without_a_gpu_mix() -> None:
    def mine(tensor: torch.Tensor) -> torch.Tensor:
        return _there(tensor) if hvd.rank() % 2 == 0 else tensor

    tensor = data(hvd.rank(), (4, 1000), torch.float32)
    for what, call in {
        "allreduce": lambda t: hvd.allreduce(t, name="mix"),
        "large": lambda t: hvd.synchronize(hvd.allreduce_async(t.repeat(200, 1), name="mix.large")),
        "fused": lambda t: hvd.synchronize(hvd.allreduce_async(t, name="mix.fused")),
        "grouped": lambda t: hvd.grouped_allreduce([t, t[:1]], name="mix.grouped")[1],
        "broadcast": lambda t: hvd.broadcast(t, hvd.size() - 1),
        "allgather": lambda t: hvd.allgather(t),
        "alltoall": lambda t: hvd.alltoall(t.repeat(hvd.size(), 1)),
        "reducescatter": lambda t: hvd.reducescatter(t),
    }.items():
        wanted = call(tensor)
        got = call(mine(tensor))
        assert got.device == mine(tensor[:1]).device, what
        assert got.cpu().equal(wanted), what


def case_what_a_late_kernel_writes_is_what_is_summed() -> None:
    _new_stream()
    rank, size = hvd.rank(), hvd.size()
    total = sum(range(size))
    for step in range(10):
        tensors = [_there(torch.zeros(20_000 * (index + 1), dtype=torch.uint8)) for index in range(4)]
        for index, tensor in enumerate(tensors):
            _late(tensor, rank + index + step)
        blocking, single, grouped, named = tensors
        handles = [
            hvd.allreduce_async_(named, name="late", op=hvd.Sum),
            hvd.allreduce_async_(single, op=hvd.Sum),
            hvd.grouped_allreduce_async_([grouped], op=hvd.Sum),
        ]
        hvd.allreduce_(blocking, op=hvd.Sum)
        for handle in reversed(handles):
            hvd.synchronize(handle)
        for index, tensor in enumerate(tensors):
            assert tensor.cpu().unique().tolist() == [total + size * (index + step)], (step, index)


def case_what_is_only_written_waits_for_kernels_too() -> None:
    _new_stream()
    for step in range(10):
        tensor = _there(torch.full((20_000,), 100 + step, dtype=torch.uint8))
        if hvd.rank() != 1:
            _late(tensor, 7)
        hvd.broadcast_(tensor, 1)
        assert tensor.cpu().unique().tolist() == [100 + step]


def case_a_result_is_used_where_it_is_waited_for() -> None:
    """Results that are made late (allgather, alltoall), and their use on the stream that waits."""
    _new_stream()
    for step in range(5):
        mine = _there(torch.zeros(10_000, dtype=torch.uint8))
        _late(mine, hvd.rank() + step)
        gathered = hvd.allgather_async(mine)
        sent = hvd.alltoall_async(mine[: 100 * hvd.size()])
        _new_stream()
        everything, (rows, counts) = hvd.synchronize(gathered), hvd.synchronize(sent)
        assert (everything + 1).cpu().unique().tolist() == [step + 1 + rank for rank in range(hvd.size())]
        assert rows.cpu().unique().tolist() == [step + rank for rank in range(hvd.size())]
        assert counts.tolist() == [100] * hvd.size()


def case_small_tensors_by_name_travel_together() -> None:
    for turn in range(4):
        count = 100
        tensors = [_there(torch.full((index + 1,), float(hvd.rank() + index))) for index in range(count)]
        order = list(range(count))
        random.Random(hvd.rank() + turn).shuffle(order)
        before = herring.stats()["ops_completed"]
        handles = {index: hvd.allreduce_async_(tensors[index], name=f"few.{index}", op=hvd.Sum) for index in order}
        random.Random(turn).shuffle(order)
        for index in order:
            assert hvd.synchronize(handles[index]) is tensors[index]
        if turn > 0:
            assert herring.stats()["ops_completed"] - before < count // 2, "each by itself"
        for index, tensor in enumerate(tensors):
            assert tensor.cpu().unique().tolist() == [sum(range(hvd.size())) + hvd.size() * index]


def _copies() -> int:
    return 0 if IS_REAL else _gpu().fake_copies()


def _mixed(count: int, turn: int) -> list[torch.Tensor]:
    """Of sizes that are no multiples of anything."""
    dtypes = (torch.float32, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bfloat16)
    return [
        data(hvd.rank() + turn, (3 * index % 7 + 1, 37 * index % 101 + 1), dtypes[index % len(dtypes)])
        for index in range(count)
    ]


def case_small_tensors_by_name_are_copied_together() -> None:
    """A batch closes where nobody adds for a moment: a turn in which this rank is held up has more of them."""
    _gpu()
    count = 60
    copies = []
    for turn in range(4):
        here, there = _mixed(count, turn), [_there(each) for each in _mixed(count, turn)]
        before = _copies()
        handles = []
        _gpu().fake_stall(1)  # No copy ends before all are submitted, however slow this rank is.
        for index in range(count):
            # Not the same as the CPU's: these tensors are in flight at the same time.
            call = hvd.allreduce_async_ if index % 2 else hvd.allreduce_async
            handles.append(call(there[index], name=f"gpu.{index}", op=hvd.Sum, prescale_factor=2.0))
        _gpu().fake_stall(0)
        got = [hvd.synchronize(handle) for handle in handles]
        copies.append(_copies() - before)
        wanted = [
            hvd.synchronize(hvd.allreduce_async(each, name=f"cpu.{index}", op=hvd.Sum, prescale_factor=2.0))
            for index, each in enumerate(here)
        ]
        for index in range(count):
            assert (got[index] is there[index]) == bool(index % 2)
            _same(got[index], wanted[index], (turn, index))
    assert min(copies) < count, f"{copies} copies of {count} tensors; each by itself is {2 * count}"


def case_small_tensors_of_a_group_are_copied_together() -> None:
    _gpu()
    columns = data(hvd.rank(), (6, 10), torch.float32)
    for turn in range(3):
        here = [*_mixed(40, turn), data(hvd.rank(), (400_000,), torch.float32), columns[:, ::2], torch.empty(0)]
        there = [_there(each) for each in here[:40]]
        there += [_there(here[40]), _there(columns)[:, ::2], _there(here[42])]
        before = _copies()
        got = hvd.grouped_allreduce(there, name="group", op=hvd.Sum)
        copies = _copies() - before
        assert copies < 15, f"{copies} copies"
        for index, wanted in enumerate(hvd.grouped_allreduce(here, name="group on the CPU", op=hvd.Sum)):
            _same(got[index], wanted, (turn, index))
        hvd.grouped_allreduce_(there[:40], name="group in place", op=hvd.Sum)
        for index in range(40):
            _same(there[index], got[index].cpu(), (turn, index, "in place"))


def case_a_result_waits_for_no_other_one_of_its_copies() -> None:
    """What was copied together need not be ready on all ranks together."""
    for turn in range(5):
        first, second = (_there(torch.full((10,), float(hvd.rank() + turn))) for _ in range(2))
        handles = [hvd.allreduce_async_(first, name="first", op=hvd.Sum)]
        if hvd.rank() == 0:
            handles.append(hvd.allreduce_async_(second, name="second", op=hvd.Sum))
        hvd.synchronize(handles[0])
        hvd.barrier()
        if hvd.rank() != 0:
            handles.append(hvd.allreduce_async_(second, name="second", op=hvd.Sum))
        hvd.synchronize(handles[1])
        for tensor in (first, second):
            assert tensor.cpu().unique().tolist() == [sum(range(hvd.size())) + hvd.size() * turn]


def case_others_get_what_this_rank_does_not_wait_for() -> None:
    for turn in range(5):
        tensor = _there(torch.full((10,), float(turn)))
        handle = hvd.allreduce_async_(tensor, name="quiet", op=hvd.Sum)
        if hvd.rank() == 0:
            hvd.broadcast(torch.ones(3), 1, name="the others are done")
        hvd.synchronize(handle)
        if hvd.rank() != 0:
            hvd.broadcast(torch.ones(3), 1, name="the others are done")
        assert tensor.cpu().unique().tolist() == [hvd.size() * turn]


def case_small_tensors_of_several_streams() -> None:
    for step in range(5):
        handles = {}
        for index in range(12):
            if index % 3 == 0:
                _new_stream()
            tensor = _there(torch.zeros(3_000, dtype=torch.uint8))
            _late(tensor, 1 + index + step)
            handles[index] = hvd.allreduce_async_(tensor, name=f"stream.{index}", op=hvd.Sum)
        _new_stream()
        for index in reversed(range(12)):
            result = hvd.synchronize(handles[index])
            assert (result + 1).cpu().unique().tolist() == [hvd.size() * (1 + index + step) + 1]


def case_a_name_is_free_when_somebody_has_seen_its_end() -> None:
    tensor = _there(torch.ones(4))
    handle = hvd.allreduce_async_(tensor, name="twice", op=hvd.Sum)
    with expect_error(ValueError, "allreduce.twice", "in flight already"):
        hvd.allreduce_async(_there(torch.ones(4)), name="twice", op=hvd.Sum)
    hvd.synchronize(handle)
    assert (
        hvd.synchronize(hvd.allreduce_async_(tensor, name="twice", op=hvd.Sum)).cpu().tolist()
        == [hvd.size() ** 2.0] * 4
    )


def case_what_ranks_disagree_about_is_told_by_name() -> None:
    tensor = _there(torch.full((4 + hvd.rank(),), 3.0))
    fine = _there(torch.ones(4))
    handles = [hvd.allreduce_async_(tensor, name="uneven", op=hvd.Sum)]
    handles.append(hvd.allreduce_async_(fine, name="even", op=hvd.Sum))
    with expect_error(hvd.HorovodInternalError, "uneven", "float32[4]", "float32[5]"):
        hvd.synchronize(handles[0])
    assert hvd.synchronize(handles[1]).cpu().tolist() == [float(hvd.size())] * 4


def case_one_rank_sends_it_alone() -> None:
    """A name that travels with others here and alone there."""
    for turn in range(3):
        tensor = _there(torch.full((10,), 1.0 + turn))
        if hvd.rank() == 0:
            hvd.allreduce_(tensor, name="alone", op=hvd.Sum)
        else:
            hvd.synchronize(hvd.allreduce_async_(tensor, name="alone", op=hvd.Sum))
        assert tensor.cpu().tolist() == [hvd.size() * (1.0 + turn)] * 10


def case_poll_is_true_when_the_tensor_is_there() -> None:
    for step in range(5):
        tensor = _there(torch.full((5_000,), step, dtype=torch.uint8))
        _late(tensor, 1 + step)
        for name in ("polled", None):
            handle = hvd.allreduce_async(tensor, name=name, op=hvd.Sum)
            while not hvd.poll(handle):
                pass
            assert hvd.synchronize(handle).cpu().unique().tolist() == [hvd.size() * (1 + step)]
            assert hvd.synchronize(handle) is None, "asked for before"


def _model(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 3))


def case_a_model_trains_to_the_bits_of_the_cpu() -> None:
    for number, options in enumerate(
        ({}, {"groups": 2}, {"op": hvd.Sum, "compression": hvd.Compression.fp16}, {"gradient_predivide_factor": 2.0})
    ):
        trained = []
        for place in ("cpu", DEVICE):
            _gpu()
            model = _model(hvd.rank()).to(place)
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            names = [(f"{number}.{place}.{name}", each) for name, each in model.named_parameters()]
            optimizer = hvd.DistributedOptimizer(optimizer, names, **options)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            for step in range(3):
                batch = data(hvd.rank(), (8, 20), torch.float32, step).to(place)
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
            hvd.broadcast_optimizer_state(optimizer, root_rank=1)
            trained.append([each.detach() for each in model.parameters()])
        for here, there in zip(*trained, strict=True):
            if IS_REAL:  # The model's own products have other bits there.
                torch.testing.assert_close(there.cpu(), here, rtol=1e-2, atol=1e-3)
            else:
                _same(there, here, (number, options))


def case_ranks_with_and_without_a_gpu_train_together() -> None:
    """Gradients of all sizes: those that travel with others, and those that go by themselves."""
    _gpu()
    shapes = [(600, 600), (300, 300), (7,), (), (1000, 3)]
    place = DEVICE if hvd.rank() % 2 == 0 else "cpu"
    layers = [torch.nn.Parameter(torch.zeros(shape).to(place)) for shape in shapes]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(layers, lr=1.0), [(f"mixed.{i}", each) for i, each in enumerate(layers)], op=hvd.Sum
    )
    for step in range(3):
        optimizer.zero_grad()
        sum((each * (hvd.rank() + i + step)).sum() for i, each in enumerate(layers)).backward()  # type: ignore[union-attr]
        optimizer.step()
    for i, layer in enumerate(layers):
        wanted = -float(sum(rank + i + step for rank in range(hvd.size()) for step in range(3)))
        assert layer.detach().cpu().unique().tolist() == [wanted], (i, wanted)


def case_gradients_come_on_several_streams() -> None:
    """Of a group, which is one call; and of a bucket, which is one operation from the second step on."""
    for groups in (1, None):
        layers = [torch.nn.Parameter(_there(torch.zeros(30_000))) for _ in range(3)]
        names = [(f"layer.{groups}.{i}", each) for i, each in enumerate(layers)]
        sgd = torch.optim.SGD(layers, lr=1.0)
        optimizer = hvd.DistributedOptimizer(sgd, names, groups=groups, op=hvd.Sum)
        bundles = optimizer._gradients.bundles
        for step in range(5):
            before = herring.stats()["ops_completed"]
            for place, layer in enumerate(layers):
                _new_stream()
                layer.grad = torch.zeros_like(layer)
                _late(layer.grad, 63)  # 0x3f3f3f3f is a number.
                bundle, index = (bundles[0], place) if groups else (bundles[place], 0)
                optimizer._gradients.on_gradient(bundle, index, layer)
            _new_stream()
            optimizer.synchronize()
            for layer in layers:
                value = torch.tensor([0x3F3F3F3F], dtype=torch.int32).view(torch.float32)
                assert layer.grad is not None
                assert layer.grad.cpu().unique().equal(value * hvd.size())
            if groups is None and step > 1:  # What ranks agree with may end in the second one.
                assert herring.stats()["ops_completed"] == before + 1


def case_gradients_go_through_calls() -> None:
    def gradients(place: str) -> list[torch.Tensor]:
        tensor = data(hvd.rank(), (2 * hvd.size(), 3), torch.float32).to(place).requires_grad_()
        loss = (
            hvd.allreduce(tensor, op=hvd.Sum).square().sum()
            + hvd.allgather(tensor).square().sum()
            + hvd.broadcast(tensor, 0).square().sum()
            + hvd.alltoall(tensor).square().sum()
            + hvd.reducescatter(tensor).square().sum()
        )
        loss.backward()
        assert tensor.grad is not None
        return [tensor.grad]

    _gpu()
    assert torch.allclose(gradients(DEVICE)[0].cpu(), gradients("cpu")[0])


def case_objects_with_tensors_come_to_the_gpu() -> None:
    state = {"here": torch.ones(3) * hvd.rank(), "there": _there(torch.ones(3) * (hvd.rank() + 1)), "step": hvd.rank()}
    came = broadcast_with_tensors(state, 0, "state")
    assert came["here"].tolist() == [0.0] * 3
    _same(came["there"], torch.ones(3), "of rank 0")
    assert came["step"] == 0


def case_a_joined_rank_counts_as_zeros() -> None:
    last = hvd.size() - 1
    if hvd.rank() == last:
        handle = hvd.allreduce_async_(_there(torch.ones(5)), name="before", op=hvd.Sum)
        hvd.join()
        assert hvd.synchronize(handle).cpu().tolist() == [float(hvd.size())] * 5
        return
    handle = hvd.allreduce_async_(_there(torch.ones(5)), name="before", op=hvd.Sum)
    for _ in range(3):
        tensor = _there(torch.ones(5))
        hvd.allreduce_(tensor, name="joined", op=hvd.Sum)
        assert tensor.cpu().tolist() == [float(last)] * 5
        tensor = _there(torch.ones(5))
        hvd.synchronize(hvd.allreduce_async_(tensor, name="joined.async", op=hvd.Sum))
        assert tensor.cpu().tolist() == [float(last)] * 5
    assert hvd.synchronize(handle).cpu().tolist() == [float(hvd.size())] * 5
    hvd.join()


def case_bad_calls_are_sentences() -> None:
    here, there = torch.ones(4), _there(torch.ones(4))
    both = ("all tensors of a call must be on one device", DEVICE)
    with expect_error(ValueError, "allreduce", *both):
        hvd.grouped_allreduce([there, here])
    with expect_error(ValueError, "allreduce", *both):
        hvd.grouped_allreduce([here, there])
    with expect_error(ValueError, "allgather", *both):
        hvd.grouped_allgather([here, there])
    with expect_error(ValueError, "the tensor is on meta", "use tensor.cpu()"):
        hvd.allreduce(torch.ones(4, device="meta"))
    with expect_error(ValueError, "complex64 is not supported"):
        hvd.allreduce(_there(torch.ones(4, dtype=torch.complex64)))
    with expect_error(ValueError, "takes at least one dimension"):
        hvd.reducescatter(_there(torch.tensor(1.0)))
    with expect_error(ValueError, "cannot be divided equally"):
        hvd.alltoall(_there(torch.ones(hvd.size() + 1)))
    sparse = torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1), (3,)).to("meta")
    with expect_error(ValueError, "sparse tensors work on the CPU", "sparse_as_dense=True"):
        hvd.sparse_allreduce_async(sparse, "sparse", hvd.Sum)
    with expect_error(ValueError, "the tensor is on meta"):
        hvd.allreduce_async(sparse, name="sparse by name", op=hvd.Sum)
    for call in (hvd.allreduce, hvd.allgather, lambda t: hvd.allreduce_async(t, name="captured")):
        _gpu().fake_capture(1)
        with expect_error(RuntimeError, "being captured into a graph", "outside of the capture"):
            call(there)
        _gpu().fake_capture(0)
    handle = hvd.allreduce_async(there, name="twice", op=hvd.Sum)
    with expect_error(ValueError, "allreduce.twice", "duplicate name"):
        hvd.allreduce_async(there, name="twice", op=hvd.Sum)
    assert hvd.synchronize(handle).cpu().tolist() == [float(hvd.size())] * 4
    hvd.synchronize(hvd.allreduce_async(there, name="twice", op=hvd.Sum))
    with expect_error(hvd.HorovodInternalError, "differ"):
        hvd.synchronize(hvd.allreduce_async(_there(torch.ones(4 + hvd.rank())), name="differ", op=hvd.Sum))
    hvd.allreduce(there)


def case_memory_lives_as_long_as_its_copies() -> None:
    gpu = _gpu()
    hvd.allreduce(_there(torch.ones(4)))
    before = gpu.fake_allocated()
    for turn in range(10):
        hvd.allreduce_async(_there(torch.ones(40_000)), name=f"dropped.{turn}")
        hvd.allreduce_async(_there(torch.ones(40_000)))
        hvd.grouped_allreduce_async_([_there(torch.ones(40_000)), _there(torch.ones(3))])
    from herring.horovod.torch._operations import handles

    for handle in list(handles._operations):
        hvd.synchronize(handle)
    hvd.barrier()
    expect_freed(gpu, before)


def case_zz_a_real_gpu_would_have_had_nothing_to_punish() -> None:
    _gpu().fake_run_all()
    fault = _gpu().fake_fault().decode()
    assert not fault, fault
