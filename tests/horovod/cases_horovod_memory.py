"""What each rank does in test_horovod_memory.py: tensors in memory of hvd.empty_like(), reduced by their names."""

from __future__ import annotations

import random
from typing import Any

import torch
from common import expect_error

import herring.horovod.torch as hvd
from herring.horovod._engine.engine import home

# Every fifth is too large to travel with others, if it were elsewhere.
LIKE = {f"p.{i}": torch.empty(700, 500) if i % 5 == 0 else torch.empty(i % 4, i + 1) for i in range(25)}
LIKE |= {"half": torch.empty(9, dtype=torch.bfloat16), "scalar": torch.empty(())}


def in_place(set_id: int = 0) -> int:
    """Buckets so far that were the tensors' own memory."""
    return home.current().fusions.by_set[set_id].counters()[1]


def reduce_all(tensors: dict[str, torch.Tensor], *, ranks: list[int] | None = None, **options: Any) -> None:
    """In an order of this rank's own; all elements must be the sum over the ranks."""
    ranks = list(range(hvd.size())) if ranks is None else ranks
    for index, tensor in enumerate(tensors.values()):
        tensor.fill_(float(hvd.rank() + 1 + index % 3))
    order = list(tensors)
    random.shuffle(order)
    handles = [hvd.allreduce_async_(tensors[name], name=name, op=hvd.Sum, **options) for name in order]
    for handle, name in zip(handles, order, strict=True):
        assert hvd.synchronize(handle) is tensors[name]
    factor = options.get("prescale_factor", 1.0) * options.get("postscale_factor", 1.0)
    for index, (name, tensor) in enumerate(tensors.items()):
        wanted = factor * sum(rank + 1 + index % 3 for rank in ranks)
        assert bool((tensor == wanted).all()), (name, wanted, tensor)


def case_they_are_reduced_where_they_lie() -> None:
    memory = hvd.empty_like(LIKE)
    assert list(memory) == list(LIKE)
    for name, tensor in memory.items():
        assert (tensor.shape, tensor.dtype) == (LIKE[name].shape, LIKE[name].dtype)
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
    for _ in range(5):
        reduce_all(memory)
    assert in_place() > 0


def case_some_ranks_ask_for_memory_and_others_do_not() -> None:
    for asks in (0, 1):
        named = {f"{asks}.{name}": each for name, each in LIKE.items()}
        has = (hvd.rank() == 0) == (asks == 0)
        tensors = hvd.empty_like(named) if has else {name: torch.empty_like(each) for name, each in named.items()}
        for _ in range(4):
            reduce_all(tensors)


def case_other_tensors_by_the_same_names() -> None:
    memory = hvd.empty_like(LIKE)
    for step in range(6):
        tensors = dict(memory)
        if step % 2 == hvd.rank() % 2:
            tensors |= {name: torch.empty_like(tensors[name]) for name in ("p.5", "p.6", "p.24")}
        reduce_all(tensors)


def case_memory_for_the_same_names_again() -> None:
    for _ in range(3):
        memory = hvd.empty_like(reversed(LIKE.items()))
        for _ in range(3):
            reduce_all(memory)
        del memory


def case_factors() -> None:
    memory = hvd.empty_like(LIKE)
    for step in range(6):
        reduce_all(memory, postscale_factor=0.5, prescale_factor=1.0 if step < 3 else 4.0)


def case_some_tensors_in_some_steps() -> None:
    memory = hvd.empty_like(LIKE)
    for step in range(8):
        chosen = random.Random(step).sample(list(LIKE), 18)
        reduce_all({name: memory[name] for name in LIKE if name in chosen})


def case_sets_of_ranks() -> None:
    process_set = hvd.add_process_set([0, 2])
    if process_set.included():
        memory = hvd.empty_like(LIKE, process_set=process_set)
        for _ in range(4):
            reduce_all(memory, ranks=[0, 2], process_set=process_set)
        set_id = process_set.process_set_id
        assert set_id is not None
        assert in_place(set_id) > 0
    reduce_all(hvd.empty_like({f"all.{name}": each for name, each in LIKE.items()}))
    hvd.remove_process_set(process_set)


def case_ranks_that_have_joined_bring_zeros() -> None:
    memory = hvd.empty_like(LIKE)
    for _ in range(2):
        for _ in range(hvd.rank() + 2):
            for tensor in memory.values():
                tensor.fill_(1.0)
            handles = [hvd.allreduce_async_(tensor, name=name, op=hvd.Sum) for name, tensor in memory.items()]
            for handle in handles:
                hvd.synchronize(handle)
            assert all(bool((each == each.view(-1)[0]).all()) for each in memory.values() if each.numel())
        assert hvd.join() == hvd.size() - 1
    reduce_all(memory)


def case_a_shape_that_differs_is_named() -> None:
    memory = hvd.empty_like(LIKE)
    for step in range(4):
        if step < 2:
            reduce_all(memory)
            continue
        handles = {}
        for name, tensor in memory.items():
            tensor.fill_(1.0)
            is_odd = name in ("p.10", "p.11") and hvd.rank() == 1
            handles[name] = hvd.allreduce_async_(tensor.view(-1)[:7] if is_odd else tensor, name=name, op=hvd.Sum)
        for name, handle in handles.items():
            if name in ("p.10", "p.11"):
                with expect_error(hvd.HorovodInternalError, name, "float32[7]"):
                    hvd.synchronize(handle)
            else:
                hvd.synchronize(handle)
                assert bool((memory[name] == hvd.size()).all()), name


def case_a_copy_of_one_is_no_copy_of_all() -> None:
    memory = hvd.empty_like(LIKE)
    assert memory["p.1"].untyped_storage().nbytes() < 100


def case_it_outlives_the_job() -> None:
    memory = hvd.empty_like(LIKE)
    reduce_all(memory)
    hvd.shutdown()
    assert bool((memory["p.0"] == memory["p.0"][0, 0]).all())
    memory["p.0"].fill_(1.0)
    hvd.init()
    for _ in range(3):
        reduce_all(memory)


def case_a_name_that_comes_twice_is_refused() -> None:
    tensor = torch.empty(3)
    with expect_error(ValueError, "'a' comes twice"):
        hvd.empty_like([("a", tensor), ("a", tensor)])
    assert hvd.empty_like([]) == {}
