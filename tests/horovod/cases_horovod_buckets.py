"""What each rank does in test_horovod_buckets.py: an optimizer's gradients in buckets, on ranks that differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from common import expect_error
from torch import nn

import herring
import herring.horovod.torch as hvd
from herring.horovod.common.exceptions import HorovodInternalError


def _parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]


def _optimizer(case: str, parameters: Sequence[nn.Parameter], **options: Any) -> Any:
    names = [(f"{case}.{index}", each) for index, each in enumerate(parameters)]
    return hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), names, **{"op": hvd.Sum, **options})


def _step(optimizer: Any, parameters: Sequence[nn.Parameter], value: float) -> int:
    """With gradients of that value plus the parameter's index; how many operations the step took."""
    optimizer.zero_grad()
    before = herring.stats()["ops_completed"]
    torch.stack([(each * (value + index)).sum().double() for index, each in enumerate(parameters)]).sum().backward()
    optimizer.synchronize()
    return herring.stats()["ops_completed"] - before


def _check(parameters: Sequence[nn.Parameter], total: float, count: int | None = None) -> None:
    """Their gradients: `total`, and the index for each of `count` ranks."""
    ranks = hvd.size() if count is None else count
    for index, each in enumerate(parameters):
        assert each.grad is not None
        assert each.grad.unique().tolist() == [total + index * ranks], index


def _check_count(step: int, count: int) -> None:
    """How many operations a step took, from the first one on. In the second one ends what ranks agree with, too."""
    assert step == 0 or count == 1 or (step == 1 and count == 2), (step, count)


SHAPES = ((600, 300), (7,), (), (1000, 3), (0, 4), (64, 3, 3, 3))
RANKS = sum(range(3))  # of three ranks, their numbers


def case_a_bucket_is_one_operation() -> None:
    parameters = _parameters(*SHAPES[:4])
    optimizer = _optimizer("one", parameters)
    for step in range(4):
        count = _step(optimizer, parameters, hvd.rank() + step)
        _check(parameters, RANKS + hvd.size() * step)
        _check_count(step, count)


def case_bits_are_those_of_each_gradient_by_name() -> None:
    generator = torch.Generator().manual_seed(hvd.rank())
    kinds = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    parameters = [each for dtype in kinds for each in _parameters(*SHAPES, dtype=dtype)]
    optimizers = [
        _optimizer("bits", parameters, op=hvd.Average, gradient_predivide_factor=factor) for factor in (1.0, 3.0)
    ]
    halved = _optimizer("halved", parameters, op=hvd.Average, compression=hvd.Compression.fp16)
    for optimizer, factor in ((optimizers[0], 1.0), (optimizers[1], 3.0), (halved, 0.0)):
        for step in range(3):
            values = [torch.randn(each.shape, generator=generator).to(each.dtype) for each in parameters]
            _give(optimizer, parameters, values)
            for index, (each, value) in enumerate(zip(parameters, values, strict=True)):
                if factor:
                    scale = {"prescale_factor": 1 / factor, "postscale_factor": factor}
                    alone = hvd.allreduce(value, name=f"alone.{index}", op=hvd.Average, **scale)
                else:
                    alone = hvd.allreduce(value.half(), name=f"alone.{index}", op=hvd.Average).to(value.dtype)
                assert each.grad is not None
                assert each.grad.dtype == each.dtype
                assert torch.equal(each.grad, alone), (factor, step, index)


def _give(optimizer: Any, parameters: Sequence[nn.Parameter], values: Sequence[torch.Tensor]) -> None:
    """A step of that optimizer alone, with these gradients."""
    gradients = optimizer._gradients
    for bundle, parameter, value in zip(gradients.bundles, parameters, values, strict=True):
        parameter.grad = value.clone()
        gradients.on_gradient(bundle, 0, parameter)
    optimizer.synchronize()


def case_what_a_rank_does_not_compute_counts_as_zeros() -> None:
    parameters = _parameters((400, 400), (5,), (300,))
    optimizer = _optimizer("zeros", parameters)
    for step in range(4):
        mine = [each for index, each in enumerate(parameters) if (index + step) % hvd.size() != hvd.rank()]
        optimizer.zero_grad()
        torch.stack([each.sum() for each in mine]).sum().backward()
        optimizer.synchronize()
        for each in parameters:
            assert each.grad is not None
            assert each.grad.unique().tolist() == [hvd.size() - 1]


def case_gradients_add_up_in_place() -> None:
    """Without zero_grad(), and with one that sets to zero: .grad is the bucket's memory then, too."""
    parameters = _parameters((300, 300), (4,))
    optimizer = _optimizer("add", parameters)
    for step in range(4):
        optimizer.zero_grad(set_to_none=step == 0)
        torch.stack([each.sum() for each in parameters]).sum().backward()
        optimizer.synchronize()
        _check([parameters[0]], float(hvd.size()))
    assert optimizer.zero_grad(set_to_none=False) is None
    for each in parameters:
        assert each.grad is not None
        each.grad.fill_(1.0 / hvd.size())
    torch.stack([each.sum() for each in parameters]).sum().backward()
    optimizer.synchronize()
    torch.testing.assert_close(parameters[1].grad, torch.full((4,), 1.0 + hvd.size()))


def case_several_passes_a_step() -> None:
    parameters = _parameters((300, 300), (4,))
    optimizer = _optimizer("passes", parameters, backward_passes_per_step=3)
    for step in range(3):
        optimizer.zero_grad()
        for number in range(3):
            torch.stack([(each * (hvd.rank() + step + number)).sum() for each in parameters]).sum().backward()
        optimizer.synchronize()
        _check([parameters[0]], float(3 * RANKS + hvd.size() * (3 * step + 3)))


def case_memory_order_of_channels_last() -> None:
    """Of all ranks; then of some of them alone, whose gradients cannot lie side by side."""
    for name, is_last in (("all", True), ("some", hvd.rank() > 0)):
        order = torch.channels_last if is_last else torch.contiguous_format
        layers = [nn.Parameter(torch.zeros(4, 3, 5, 5).to(memory_format=order)), *_parameters((9,))]
        optimizer = _optimizer(f"order.{name}", layers)
        value = torch.arange(300.0).view(4, 3, 5, 5)
        for step in range(3):
            optimizer.zero_grad()
            before = herring.stats()["ops_completed"]
            ((layers[0] * value * (hvd.rank() + 1)).sum() + layers[1].sum()).backward()
            optimizer.synchronize()
            count = herring.stats()["ops_completed"] - before
            gradient = layers[0].grad
            assert gradient is not None
            assert torch.equal(gradient, value * (RANKS + 3))
            if name == "all" and step > 0:
                _check_count(step, count)
                assert gradient.is_contiguous(memory_format=torch.channels_last)


def case_another_order_of_parameters_on_each_rank() -> None:
    """Names match, so they are reduced by name, as before there were buckets."""
    parameters = _parameters((300, 300), (4,), (5,))
    named = [(f"order.{index}", each) for index, each in enumerate(parameters)]
    turned = named[hvd.rank() :] + named[: hvd.rank()]
    sgd = torch.optim.SGD([each for _, each in turned], lr=1.0)
    optimizer = hvd.DistributedOptimizer(sgd, turned, op=hvd.Sum)
    for step in range(3):
        _step(optimizer, parameters, hvd.rank() + step)
        _check(parameters, RANKS + hvd.size() * step)


def case_sparse_gradients_go_by_name_beside_buckets() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    dense = _parameters((300, 300), (5,))
    optimizer = _optimizer("sparse", [table.weight, *dense])
    for step in range(3):
        optimizer.zero_grad()
        (table(torch.tensor([hvd.rank(), 9])).sum() + sum((each * (step + 1)).sum() for each in dense)).backward()
        optimizer.synchronize()
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse
        rows = table.weight.grad.to_dense()[:, 0].tolist()
        assert rows == [1.0] * 3 + [0.0] * 6 + [3.0], rows
        for each in dense:
            assert each.grad is not None
            assert each.grad.unique().tolist() == [float(hvd.size() * (step + 1))]


def case_what_turns_sparse_later_is_sparse_afterwards() -> None:
    table = nn.Embedding(10, 4)
    dense = _parameters((5,))
    optimizer = _optimizer("turns", [table.weight, *dense])
    for step in range(4):
        table.sparse = step >= 2 and hvd.rank() == 1
        optimizer.zero_grad()
        (table(torch.tensor([hvd.rank(), 9])).sum() + dense[0].sum()).backward()
        optimizer.synchronize()
        gradient = table.weight.grad
        assert gradient is not None
        assert gradient.is_sparse == table.sparse
        assert gradient.to_dense()[:, 0].tolist() == [1.0] * 3 + [0.0] * 6 + [3.0]


def case_ranks_join_before_and_after_their_first_step() -> None:
    parameters = _parameters((300, 300), (4,))
    optimizer = _optimizer("join", parameters)
    for turn in range(3):
        steps = (hvd.rank() + turn) % hvd.size()  # 0, 1 and 2, in turns
        for step in range(steps):
            active = [rank for rank in range(hvd.size()) if (rank + turn) % hvd.size() > step]
            _step(optimizer, parameters, float(hvd.rank()))
            _check(parameters, sum(active), len(active))
        hvd.join()
    for step in range(3):
        count = _step(optimizer, parameters, float(hvd.rank()))
        _check(parameters, RANKS)
        _check_count(step, count)


def case_a_first_step_that_fails_is_an_error_everywhere() -> None:
    shape = (5,) if hvd.rank() == 1 else (4,)
    parameters = _parameters((3,), shape)
    optimizer = _optimizer("fails", parameters)
    with expect_error(HorovodInternalError, "fails.1", "rank"):
        _step(optimizer, parameters, 1.0)
    with expect_error(HorovodInternalError, "fails.1"):  # Gradients are those of this rank alone.
        optimizer.step()
    parameters = _parameters((3,), (4,))
    optimizer = _optimizer("fails", parameters)
    for _ in range(3):
        _step(optimizer, parameters, float(hvd.rank()))
        _check(parameters, RANKS)


def case_who_keeps_all_gradients_keeps_their_values() -> None:
    """And no more memory than they need, from the fourth time on."""
    parameters = _parameters((300, 300), (4,))
    optimizer = _optimizer("keeps", parameters)
    kept = []
    for step in range(8):
        _step(optimizer, parameters, float(hvd.rank() + step))
        kept.append(parameters[1].grad)
    for step, each in enumerate(kept):
        assert each is not None
        assert each.unique().tolist() == [RANKS + hvd.size() * (step + 1)], step
    sizes = [each.untyped_storage().nbytes() for each in kept if each is not None]
    assert sizes[-2:] == [16, 16], sizes


def case_a_gradient_with_a_graph_of_its_own() -> None:
    parameters = _parameters((3,), (4,))
    with torch.no_grad():
        for each in parameters:
            each.add_(2.0)
    optimizer = _optimizer("graph", parameters)
    for _ in range(3):
        optimizer.zero_grad()
        sum((each**3).sum() for each in parameters).backward(create_graph=True)  # type: ignore[union-attr]
        optimizer.synchronize()
        _check([parameters[0]], 12.0 * hvd.size())


def case_groups_and_another_compression_go_as_before() -> None:
    class Own(hvd.Compression.none):  # type: ignore[misc, name-defined]
        """One of the user's own."""

    for name, options in (("groups", {"groups": 1}), ("own", {"compression": Own})):
        parameters = _parameters((300,), (4,))
        optimizer = _optimizer(name, parameters, **options)
        for step in range(3):
            _step(optimizer, parameters, float(hvd.rank() + step))
            _check(parameters, RANKS + hvd.size() * step)


def case_two_optimizers_take_turns() -> None:
    """As with a generator and a discriminator: the names are their places, which are the same."""
    both = [_parameters((300, 300), (4,)) for _ in range(2)]
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(each, lr=1.0), op=hvd.Sum) for each in both]
    for step in range(3):
        for number, (optimizer, parameters) in enumerate(zip(optimizers, both, strict=True)):
            _step(optimizer, parameters, float(hvd.rank() + number))
            _check(parameters, RANKS + hvd.size() * number)
            assert step < 3


def case_process_sets_have_buckets_of_their_own() -> None:
    pair = hvd.add_process_set([0, 2])
    parameters = _parameters((300, 300), (4,))
    optimizer = _optimizer("pair", parameters, process_set=pair)
    for _ in range(3):
        count = _step(optimizer, parameters, float(hvd.rank()))
        if pair.included():
            _check(parameters, 2.0, 2)
        else:
            assert count == 0
            _check(parameters, 1.0, 1)
    hvd.remove_process_set(pair)


def case_the_optimizer_outlives_the_job() -> None:
    """hvd.init() again: other memory, agreed again. The last case: others' process sets and names are gone after it."""
    parameters = _parameters((300, 300), (4,))
    optimizer = _optimizer("again", parameters)
    for _ in range(2):
        for step in range(3):
            count = _step(optimizer, parameters, float(hvd.rank()))
            _check(parameters, RANKS)
            _check_count(step, count)
        hvd.shutdown()
        hvd.init()
