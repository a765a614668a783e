"""What each rank does in test_horovod_fusion.py: many small tensors by name, as scripts send them."""

from __future__ import annotations

import json
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from common import expect_error

import herring
import herring.horovod.torch as hvd
from herring.horovod._engine.engine import home
from herring.horovod.torch import _operations as operations


def _tensors(prefix: str, count: int = 50) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Name, tensor and the mean over the ranks."""
    mean = (hvd.size() - 1) / 2
    made = []
    for index in range(count):
        shape = (index + 1, 3) if index % 2 else (index,)
        made.append(
            (f"{prefix}.{index}", torch.full(shape, float(hvd.rank() + index)), torch.full(shape, mean + index))
        )
    return made


def _travelled_together() -> int:
    """How many operations of the runtime were needed so far."""
    return herring.stats()["ops_completed"]


def case_any_order_on_each_rank() -> None:
    for _ in range(4):
        tensors = _tensors("any")
        random.Random(hvd.rank()).shuffle(tensors)
        handles = [hvd.allreduce_async_(tensor, name=name) for name, tensor, _ in tensors]
        random.Random(hvd.rank() + 1).shuffle(handles)
        for handle in handles:
            hvd.synchronize(handle)
        assert all(torch.equal(tensor, mean) for _, tensor, mean in tensors)


def case_they_do_travel_together() -> None:
    for turn in range(3):
        tensors = _tensors("together", 200)
        before = _travelled_together()
        handles = [hvd.allreduce_async_(tensor, name=name) for name, tensor, _ in tensors]
        for handle in handles:
            hvd.synchronize(handle)
        if turn > 0:
            assert _travelled_together() - before < 100, "each by itself"


def case_new_tensors_keep_the_old_ones() -> None:
    tensors = _tensors("new")
    handles = [hvd.allreduce_async(tensor, name=name, op=hvd.Sum) for name, tensor, _ in tensors]
    for handle, (_, tensor, mean) in zip(handles, tensors, strict=True):
        assert torch.equal(hvd.synchronize(handle), mean * hvd.size())
        assert not tensor.numel() or tensor.flatten()[0] != mean.flatten()[0] or hvd.rank() * 2 == hvd.size() - 1


def case_types_operators_and_factors() -> None:
    """The bits are those that each tensor has alone."""
    made: list[tuple[int, torch.Tensor, int, float]] = []
    for number, dtype in enumerate(
        (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8)
    ):
        for op in (hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product):
            values = torch.randint(1, 4, (37,), generator=torch.Generator().manual_seed(hvd.rank())).to(dtype)
            factor = 0.5 if dtype in (torch.float32, torch.float64) else 1.0
            made.append((number, values, op, factor))
    handles = [
        hvd.allreduce_async(
            values, name=f"kind.{number}.{op}", op=op, prescale_factor=factor, postscale_factor=2 * factor
        )
        for number, values, op, factor in made
    ]
    for handle, (_, values, op, factor) in zip(handles, made, strict=True):
        alone = hvd.allreduce(values, op=op, prescale_factor=factor, postscale_factor=2 * factor)
        assert torch.equal(hvd.synchronize(handle), alone), (values.dtype, op)


class _Derived(torch.Tensor):
    pass


def _of_all_kinds(prefix: str) -> None:
    value, total = float(hvd.rank() + 1), float(sum(range(hvd.size() + 1)))
    negative = torch._neg_view(torch.full((5,), value))
    assert negative.is_neg()
    assert negative.is_contiguous()
    kinds = {
        "negative": (negative, -total),
        "derived": (torch.full((5,), value).as_subclass(_Derived), total),
        "parameter": (torch.nn.Parameter(torch.full((5,), value)), total),
        "with gaps": (torch.full((4, 4), value).t()[:, ::2], total),
        "nine dimensions": (torch.full((1,) * 9, value), total),
        "scalar": (torch.tensor(value), total),
        "empty": (torch.empty(0), total),
    }
    handles = [hvd.allreduce_async_(each, name=f"{prefix}.{kind}", op=hvd.Sum) for kind, (each, _) in kinds.items()]
    for handle, (kind, (each, wanted)) in zip(handles, kinds.items(), strict=True):
        assert hvd.synchronize(handle) is each, kind
        assert bool((each.detach().resolve_neg() == wanted).all()), (kind, each)


def case_tensors_of_all_kinds() -> None:
    _of_all_kinds("kinds")


def case_torch_without_functions_for_dlpack() -> None:
    """As before 2.10; on one rank only, because nobody else can tell."""
    reader = operations._READER
    if hvd.rank() == 1:
        operations._READER = None
    _of_all_kinds("old")
    operations._READER = reader


def case_one_rank_comes_late_with_some() -> None:
    tensors = _tensors("late")
    early = tensors[: 25 if hvd.rank() == 1 else 50]
    handles = [hvd.allreduce_async_(tensor, name=name) for name, tensor, _ in early]
    hvd.synchronize(handles[0])  # Holds nobody up.
    if hvd.rank() == 1:
        time.sleep(0.3)
        handles += [hvd.allreduce_async_(tensor, name=name) for name, tensor, _ in tensors[25:]]
    for handle in handles[1:]:
        hvd.synchronize(handle)
    assert all(torch.equal(tensor, mean) for _, tensor, mean in tensors)


def case_in_some_steps_only() -> None:
    for step in range(6):
        tensors = [each for index, each in enumerate(_tensors("some")) if (index + step) % 3]
        handles = [hvd.allreduce_async_(tensor, name=name) for name, tensor, _ in tensors]
        for handle in handles:
            hvd.synchronize(handle)
        assert all(torch.equal(tensor, mean) for _, tensor, mean in tensors)


def case_one_rank_waits_at_once_others_do_not() -> None:
    for step in range(3):
        value = torch.full((5,), float(hvd.rank()))
        if hvd.rank() == step:
            hvd.allreduce_(value, name="mixed", op=hvd.Sum)
        else:
            hvd.synchronize(hvd.allreduce_async_(value, name="mixed", op=hvd.Sum))
        assert torch.equal(value, torch.full((5,), sum(range(hvd.size())) * 1.0))


def case_small_on_one_rank_large_on_another() -> None:
    elements = 10 if hvd.rank() == 0 else 1_000_000
    begun = time.monotonic()
    with expect_error(hvd.HorovodInternalError, "size", "float32[10]", "float32[1000000]"):
        hvd.synchronize(hvd.allreduce_async_(torch.zeros(elements), name="size"))
    assert time.monotonic() - begun < 10


def case_a_shape_differs_and_the_rest_is_whole() -> None:
    for _ in range(2):
        odd = hvd.allreduce_async_(torch.zeros(2 + hvd.rank()), name="odd.one")
        tensors = _tensors("even")
        handles = [hvd.allreduce_async_(tensor, name=name) for name, tensor, _ in tensors]
        with expect_error(hvd.HorovodInternalError, "odd.one", "float32[2]", "float32[3]", "rank 1"):
            hvd.synchronize(odd)
        for handle in handles:
            hvd.synchronize(handle)
        assert all(torch.equal(tensor, mean) for _, tensor, mean in tensors)


def case_a_dtype_differs_and_the_rest_is_whole() -> None:
    for _ in range(2):
        odd = hvd.allreduce_async_(
            torch.zeros(3, dtype=torch.float64 if hvd.rank() else torch.float32), name="odd.type"
        )
        tensors = _tensors("typed")
        handles = [hvd.allreduce_async_(tensor, name=name) for name, tensor, _ in tensors]
        with expect_error(hvd.HorovodInternalError, "odd.type", "float32[3]", "float64[3]", "rank 1"):
            hvd.synchronize(odd)
        for handle in handles:
            hvd.synchronize(handle)
        assert all(torch.equal(tensor, mean) for _, tensor, mean in tensors)


def case_a_name_in_flight_is_refused() -> None:
    one, two = torch.ones(3), torch.ones(3)
    handle = hvd.allreduce_async_(one, name="twice")
    with expect_error(ValueError, "twice", "duplicate"):
        hvd.allreduce_async_(two, name="twice")
    hvd.synchronize(handle)
    hvd.synchronize(hvd.allreduce_async_(two, name="twice"))
    large = torch.ones(1_000_000)
    handle = hvd.allreduce_async_(large, name="twice")
    with expect_error(ValueError, "twice", "duplicate"):
        hvd.allreduce_async_(two, name="twice")
    hvd.synchronize(handle)
    handle = hvd.allreduce_async_(two, name="twice")
    with expect_error(ValueError, "twice", "duplicate"):
        hvd.allreduce_async_(large, name="twice")
    hvd.synchronize(handle)


def case_memory_in_flight_is_refused() -> None:
    values = torch.ones(6)
    handle = hvd.allreduce_async_(values, name="memory.a")
    with expect_error(ValueError, "memory"):
        hvd.allreduce_async_(values[:3], name="memory.b")
    hvd.synchronize(handle)


def case_a_handle_says_when_it_is_over() -> None:
    handle = hvd.allreduce_async(torch.ones(3), name="poll", op=hvd.Sum)
    while not hvd.poll(handle):
        time.sleep(0.001)
    again = hvd.allreduce_async(torch.ones(3), name="poll", op=hvd.Sum)  # Its end was seen.
    assert torch.equal(hvd.synchronize(handle), torch.full((3,), float(hvd.size())))
    assert hvd.synchronize(handle) is None
    with expect_error(ValueError, "Handle"):
        hvd.poll(handle)
    hvd.synchronize(again)


def case_threads_have_names_of_their_own() -> None:
    errors: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for _ in range(20):
                tensors = _tensors(f"thread{thread}", 10)
                handles = [hvd.allreduce_async_(tensor, name=name) for name, tensor, _ in tensors]
                for handle in handles:
                    hvd.synchronize(handle)
                assert all(torch.equal(tensor, mean) for _, tensor, mean in tensors)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def case_sets_of_ranks_at_once() -> None:
    pairs = [hvd.add_process_set([0, 1]), hvd.add_process_set([1, 2])]
    handles: list[Any] = []
    wanted: list[tuple[torch.Tensor, float]] = []
    for process_set in pairs:
        if not process_set.included():
            continue
        for index in range(20):
            tensor = torch.full((4,), float(hvd.rank()))
            handles.append(hvd.allreduce_async_(tensor, name=f"set.{index}", op=hvd.Sum, process_set=process_set))
            wanted.append((tensor, float(sum(process_set.ranks or []))))
    for handle in handles:
        hvd.synchronize(handle)
    assert all(torch.equal(tensor, torch.full((4,), value)) for tensor, value in wanted)
    for process_set in pairs:
        hvd.remove_process_set(process_set)


def case_a_set_is_removed_at_once_where_a_rank_lacks_a_name() -> None:
    for callers in ([0], [1], [0, 1]):
        process_set = hvd.add_process_set([0, 1])
        last, missing = torch.full((4,), float(hvd.rank())), None
        if hvd.rank() in callers:
            name = "missing" if len(callers) == 1 else f"missing.{hvd.rank()}"
            missing = hvd.allreduce_async_(torch.ones(3), name=name, process_set=process_set)
        if hvd.rank() < 2:
            handle = hvd.allreduce_async_(last, name="last", op=hvd.Sum, process_set=process_set)
        before = time.monotonic()
        hvd.remove_process_set(process_set)
        assert time.monotonic() - before < 2  # 30 s where nobody is told.
        if hvd.rank() < 2:
            hvd.synchronize(handle)
            assert last.tolist() == [1] * 4
        if missing is not None:
            assert hvd.poll(missing)
            with expect_error(hvd.HorovodInternalError, "missing", "group was closed"):
                hvd.synchronize(missing)
        hvd.barrier()


def case_ranks_that_have_joined_bring_zeros() -> None:
    for turn in range(2):
        for _ in range(hvd.rank() + 1):
            tensors = [torch.ones(7) for _ in range(20)]
            handles = [hvd.allreduce_async_(each, name=f"join.{i}", op=hvd.Sum) for i, each in enumerate(tensors)]
            for handle in handles:
                hvd.synchronize(handle)
            assert all(bool((each == each[0]).all()) and each[0] >= 1 for each in tensors), turn
        assert hvd.join() == hvd.size() - 1
    tensors = _tensors("joined")
    before = _travelled_together()
    for _ in range(2):
        handles = [hvd.allreduce_async(tensor, name=name) for name, tensor, _ in tensors]
        for handle in handles:
            hvd.synchronize(handle)
    assert _travelled_together() - before < 150, "each by itself, after join()"


def case_what_a_rank_called_before_it_joined_is_no_zero() -> None:
    """Also where its tensor has yet to go alone, while the others have told it that theirs has."""
    fusions = home.current().fusions
    last = hvd.size() - 1
    for turn in range(4):
        if hvd.rank() == last:
            handle = hvd.allreduce_async_(mine := torch.ones(3), name=f"own.{turn}", op=hvd.Sum)
            start_alone = fusions.start_alone

            def start_late(*call: Any, start: Any = start_alone) -> Any:
                time.sleep(0.3)
                return start(*call)

            fusions.start_alone = start_late
            assert hvd.join() < last or hvd.size() == 1
            fusions.start_alone = start_alone
        else:
            time.sleep(0.1)  # The last rank has joined.
            handle = hvd.allreduce_async_(mine := torch.ones(3), name=f"own.{turn}", op=hvd.Sum)
        hvd.synchronize(handle)
        assert mine.tolist() == [hvd.size()] * 3, turn
        if hvd.rank() != last:
            hvd.join()


def case_lists_are_one_operation() -> None:
    tensors = _tensors("list")
    results = hvd.grouped_allreduce([tensor for _, tensor, _ in tensors], name="list")
    assert all(torch.equal(result, mean) for result, (_, _, mean) in zip(results, tensors, strict=True))
    before = _travelled_together()
    hvd.grouped_allreduce_([tensor for _, tensor, _ in tensors])
    assert _travelled_together() - before < 20
    with expect_error(hvd.HorovodInternalError, "float32[2]", "float32[3]"):
        hvd.grouped_allreduce_([torch.zeros(5), torch.zeros(2 + (hvd.rank() > 0))], name="list.odd")
    # As many elements, in other shapes.
    shapes = [(2, 3), (3, 3)] if hvd.rank() == 0 else [(3, 3), (2, 3)]
    with expect_error(hvd.HorovodInternalError, "float32[2, 3]", "float32[3, 3]"):
        hvd.grouped_allreduce_([torch.zeros(shape) for shape in shapes], name="list.swapped")
    with expect_error(hvd.HorovodInternalError, "float32[2], average", "float32[4] of a list, average"):
        if hvd.rank() == 0:
            hvd.allreduce_(torch.zeros(2), name="list.or.one")
        else:
            hvd.grouped_allreduce_([torch.zeros(2), torch.zeros(2)], name="list.or.one")


def case_the_timeline_has_them() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.json"
        hvd.start_timeline(str(path))
        handles = [hvd.allreduce_async_(torch.ones(3), name=f"line.{index}") for index in range(5)]
        # On one rank it cannot travel with others, so it goes alone on all.
        square = torch.ones(2, 2)
        handles.append(hvd.allreduce_async(square.t() if hvd.rank() == 1 else square, name="line.alone"))
        for handle in handles:
            hvd.synchronize(handle)
        hvd.stop_timeline()
        if hvd.rank() == 0:
            events = json.loads(path.read_text())
            assert sum(event["ph"] == "B" for event in events) == 6
            assert sum(event["ph"] == "E" for event in events) == 6


def case_a_step_of_the_optimizer() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(20)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for step in range(3):
        before = _travelled_together()
        optimizer.zero_grad()
        model(torch.full((4, 8), float(hvd.rank()))).square().mean().backward()
        optimizer.step()
        if step > 0:
            assert _travelled_together() - before < 40, "each of 40 by itself"
    mine = torch.cat([each.detach().view(-1) for each in model.parameters()])
    assert torch.equal(hvd.allgather(mine.view(1, -1)), mine.expand(hvd.size(), -1))


def case_nothing_is_left() -> None:
    assert not home.current().fusions.in_flight
