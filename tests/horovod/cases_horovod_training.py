"""What each rank does in test_horovod_training.py: optimizers, batch normalization, state, elastic names."""

from __future__ import annotations

import copy
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from common import expect_error
from torch import nn

import herring
import herring.horovod.torch as hvd
from herring import UnavailableError
from herring.horovod.common.exceptions import HorovodInternalError

BATCH = 6


def _model(seed: int = 7) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def _batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(BATCH, 10, generator=generator), torch.randn(BATCH, 3, generator=generator)


def _loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x, y = _batch(step, rank)
    return nn.functional.mse_loss(model(x), y)


def _single(steps: int = 4, passes: int = 1) -> nn.Module:
    """The same training in one process, on all ranks' batches."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(passes):
            losses = [_loss(model, step * passes + part, rank) for rank in range(hvd.size())]
            (sum(losses) / hvd.size()).backward()
        optimizer.step()
    return model


def _train(optimizer: Any, model: nn.Module, steps: int = 4, passes: int = 1) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(passes):
            _loss(model, step * passes + part, hvd.rank()).backward()
        optimizer.step()


def _check(model: nn.Module, single: nn.Module, tolerance: float = 1e-5) -> None:
    for mine, theirs in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    bits = [each.detach().numpy().tobytes() for each in model.parameters()]
    assert hvd.allgather_object(bits) == [bits] * hvd.size(), "ranks have other bits"


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def case_trains_as_one_process_does() -> None:
    model = _model(seed=hvd.rank())
    _sgd(model)
    reference = _model()
    model.load_state_dict(reference.state_dict()) if hvd.rank() == 0 else None
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(_sgd(model), named_parameters=model.named_parameters())
    assert isinstance(optimizer, torch.optim.SGD)
    _train(optimizer, model)
    _check(model, _single())


def case_each_option_trains_the_same_model() -> None:
    options: list[dict[str, Any]] = [
        {"named_parameters": None},
        {"groups": 2},
        {"gradient_predivide_factor": 4.0},
        {"sparse_as_dense": True},
    ]
    single = _single()
    for option in options:
        model = _model()
        _train(hvd.DistributedOptimizer(_sgd(model), **option), model)
        _check(model, single)
    model = _model()
    pairs = [[model[0].weight, model[0].bias], [model[4].weight]]
    _train(hvd.DistributedOptimizer(_sgd(model), model.named_parameters(), groups=pairs), model)
    _check(model, single)
    model = _model()
    compressed = hvd.DistributedOptimizer(_sgd(model), compression=hvd.Compression.fp16)
    _train(compressed, model)
    _check(model, single, 5e-3)


def case_gradients_add_up_over_passes() -> None:
    model = _model()
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters(), backward_passes_per_step=2)
    _train(optimizer, model, passes=2)
    _check(model, _single(passes=2))
    for part in range(2):
        _loss(model, part, 0).backward()
    with expect_error(AssertionError, "backward_passes_per_step"):
        _loss(model, 2, 0).backward()
    with expect_error(AssertionError, "race condition"):
        optimizer.zero_grad()
    optimizer.synchronize()


def case_synchronize_before_step() -> None:
    model = _model()
    optimizer = hvd.DistributedOptimizer(_sgd(model))
    for step in range(4):
        optimizer.zero_grad()
        _loss(model, step, hvd.rank()).backward()
        optimizer.synchronize()
        gradients = [each.grad.clone() for each in model.parameters()]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        with optimizer.skip_synchronize():
            optimizer.step()
        assert all(torch.equal(a, b.grad) for a, b in zip(gradients, model.parameters(), strict=True))
    _check(model, _single())
    _loss(model, 0, hvd.rank()).backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert any("skip_synchronize" in str(each.message) for each in caught)


def case_a_closure_and_a_scheduler() -> None:
    model, single = _model(), _model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    alone = torch.optim.SGD(single.parameters(), lr=0.1)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (optimizer, alone)]
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = _loss(model, step, hvd.rank())
            loss.backward()
            return loss

        optimizer.step(closure)
        alone.zero_grad()
        (sum(_loss(single, step, rank) for rank in range(hvd.size())) / hvd.size()).backward()
        alone.step()
        for each in schedules:
            each.step()
    _check(model, single)


def case_parts_that_only_some_ranks_use() -> None:
    """A rank without a gradient counts as zeros; nobody waits for it."""
    parts = nn.ModuleList([nn.Linear(2, 1, bias=False) for _ in range(hvd.size())])
    hvd.broadcast_parameters(parts.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parts.parameters(), lr=1.0), parts.named_parameters())
    before = [each.weight.clone() for each in parts]
    parts[hvd.rank()](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for part, old in zip(parts, before, strict=True):
        torch.testing.assert_close(part.weight, old - 1.0 / hvd.size())


def case_sparse_gradients() -> None:
    results = []
    for as_dense in (False, True):
        torch.manual_seed(3)
        table = nn.Embedding(6, 2, sparse=True)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=0.5), table.named_parameters(), sparse_as_dense=as_dense
        )
        for _ in range(2):
            optimizer.zero_grad()
            table(torch.tensor([hvd.rank(), 5])).sum().backward()
            optimizer.step()
        results.append(table.weight.detach().clone())
    torch.testing.assert_close(*results)
    torch.manual_seed(3)
    start = nn.Embedding(6, 2).weight.detach()
    torch.testing.assert_close(results[0][5], start[5] - 1.0)
    torch.testing.assert_close(results[0][0], start[0] - 1.0 / hvd.size())


def case_adasum() -> None:
    rank = hvd.rank()
    orthogonal = torch.zeros(hvd.size())
    orthogonal[rank] = 2.0
    assert hvd.allreduce(orthogonal, op=hvd.Adasum).tolist() == [2.0] * hvd.size()  # added
    same = torch.tensor([3.0, -1.0])
    torch.testing.assert_close(hvd.allreduce(same, op=hvd.Adasum), same)  # averaged
    torch.manual_seed(0)
    vectors = torch.randn(hvd.size(), 50, dtype=torch.float64)

    def pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * (1 - a.dot(b) / (2 * a.dot(a))) + b * (1 - a.dot(b) / (2 * b.dot(b)))

    level = list(vectors)
    while len(level) > 1:
        level = [pair(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    result = hvd.synchronize(hvd.allreduce_async(vectors[rank].clone(), op=hvd.Adasum, name="adasum"))
    torch.testing.assert_close(result, level[0])
    model = _model()
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters(), op=hvd.Adasum)
    first = _loss(model, 0, rank).item()
    for _ in range(10):
        optimizer.zero_grad()
        _loss(model, 0, rank).backward()
        optimizer.step()
    assert hvd.allreduce(_loss(model, 0, rank).detach()).item() < first + 0.5
    bits = [each.detach().numpy().tobytes() for each in model.parameters()]
    assert hvd.allgather_object(bits) == [bits] * hvd.size()


def case_bad_arguments() -> None:
    model = _model()
    with expect_error(ValueError, "not named", "shape"):
        hvd.DistributedOptimizer(_sgd(model), [("only", model[0].weight)])
    with expect_error(ValueError, "unique", "twice"):
        hvd.DistributedOptimizer(_sgd(model), [("twice", each) for each in model.parameters()])
    with expect_error(ValueError, "tuples"):
        hvd.DistributedOptimizer(_sgd(model), model.parameters())
    with expect_error(ValueError, "backward_passes_per_step"):
        hvd.DistributedOptimizer(_sgd(model), backward_passes_per_step=0)
    with expect_error(ValueError, "predivide"):
        hvd.DistributedOptimizer(_sgd(model), op=hvd.Sum, gradient_predivide_factor=2.0)
    with expect_error(ValueError, "once"):
        hvd.DistributedOptimizer(_sgd(model), groups=[[model[0].weight], [model[0].weight]])


def case_gradients_are_in_shared_memory() -> None:
    """From the second step on. And who keeps one from a step before keeps its values: the next step's are elsewhere."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(600, 600, bias=False), nn.Linear(600, 600, bias=False))
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters())
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    places = set()
    for step in range(8):
        optimizer.zero_grad(set_to_none=step != 5)
        before = herring.stats()["zero_copy_ops"]
        model(torch.full((2, 600), float(hvd.rank() + step + 1))).square().mean().backward()
        optimizer.synchronize()
        if step > 0:
            assert herring.stats()["zero_copy_ops"] == before + 1, "both in one operation"
        gradient = model[0].weight.grad
        if step == 2:
            kept.append((gradient, gradient.clone()))
        elif step == 3:
            kept.append((gradient.view(-1), gradient.clone().view(-1)))
        elif step == 6:
            kept.append((torch.from_numpy(gradient.detach().numpy()), gradient.clone()))
        if step > 0:
            places.add(gradient.data_ptr())
        del gradient
        with optimizer.skip_synchronize():
            optimizer.step()
    assert all(torch.equal(then, now) for then, now in kept)
    assert len(places) == 4, "one for each step whose gradient was kept, and the last"


def case_optimizer_state() -> None:
    kinds = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD, torch.optim.LBFGS)
    for kind in kinds:
        torch.manual_seed(hvd.rank())
        model = _model(seed=hvd.rank())
        optimizer = kind(model.parameters(), lr=0.1 * (hvd.rank() + 1))
        if hvd.rank() == 0:  # The others have no state yet.

            def closure(model: nn.Module = model) -> torch.Tensor:
                loss = _loss(model, 0, 0)
                loss.backward()
                return loss

            optimizer.step(closure)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        state = optimizer.state_dict()
        everywhere = hvd.allgather_object(state)
        assert all(_same(each, everywhere[0]) for each in everywhere), kind
        assert state["param_groups"][0]["lr"] == 0.1


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def case_sync_batch_norm() -> None:
    """As BatchNorm over all ranks' batches, which are of different sizes: outputs, gradients, running statistics."""
    torch.manual_seed(1)
    whole = torch.randn(sum(range(2, hvd.size() + 2)), 4, 5, dtype=torch.float64) * 3 + 10
    parts = whole.split([rank + 2 for rank in range(hvd.size())])
    for affine, momentum in ((True, 0.1), (False, None)):
        norms = [
            nn.BatchNorm1d(4, affine=affine, momentum=momentum).double(),
            hvd.SyncBatchNorm(4, affine=affine, momentum=momentum).double(),
        ]
        inputs = [whole.clone().requires_grad_(), parts[hvd.rank()].clone().requires_grad_()]
        outputs = []
        for norm, x in zip(norms, inputs, strict=True):
            for _ in range(2):
                out = norm(x)
            (out.square() * torch.arange(4.0)[None, :, None]).sum().backward()
            outputs.append(out)
        index = hvd.rank()
        torch.testing.assert_close(outputs[1], outputs[0].split([r + 2 for r in range(hvd.size())])[index])
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad.split([r + 2 for r in range(hvd.size())])[index])
        torch.testing.assert_close(norms[1].running_mean, norms[0].running_mean)
        torch.testing.assert_close(norms[1].running_var, norms[0].running_var)
        if affine:
            total = hvd.allreduce(norms[1].weight.grad, op=hvd.Sum)
            torch.testing.assert_close(total, norms[0].weight.grad)
        norms[1].eval()
        norms[0].eval()
        torch.testing.assert_close(norms[1](parts[index]), norms[0](parts[index]))


def case_process_set_optimizer() -> None:
    first = hvd.add_process_set([0])
    model = _model()
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters(), process_set=first)
    _loss(model, 0, 0).backward()
    expected = copy.deepcopy([each.grad for each in model.parameters()])
    optimizer.step()
    assert all(torch.equal(a, b.grad) for a, b in zip(expected, model.parameters(), strict=True))
    hvd.remove_process_set(first)


def case_elastic_state_and_sampler() -> None:
    model = _model(seed=hvd.rank())
    optimizer = _sgd(model)
    sampler = hvd.elastic.ElasticSampler(list(range(21)), shuffle=True)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=hvd.rank(), batch=0)
    seen: list[int] = []

    @hvd.elastic.run
    def train(state: Any) -> str:
        assert state.epoch == 0, "rank 0's"
        for number, index in enumerate(state.sampler):
            seen.append(index)
            state.sampler.record_batch(number, 1)
            state.batch += 1
            if number == 2:
                state.commit()
        state.batch = 1000
        state.restore()
        return "done"

    assert train(state) == "done"
    assert state.batch == 3
    everything = [index for each in hvd.allgather_object(seen) for index in each]
    assert set(everything) == set(range(21))
    left = [index for each in hvd.allgather_object(list(state.sampler)) for index in each]
    done = [index for each in hvd.allgather_object(seen[:3]) for index in each]
    assert set(left) == set(range(21)) - set(done), "what is left after going back"
    bits = model[0].weight.detach().numpy().tobytes()
    assert hvd.allgather_object(bits) == [bits] * hvd.size()

    @hvd.elastic.run
    def fails(state: Any) -> None:
        state.batch = 77
        raise HorovodInternalError("rank 3 is gone")

    with expect_error(UnavailableError, "rank 3 is gone", "last commit"):
        fails(state)
    assert state.batch == 3


def case_timeline() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.json"
        hvd.start_timeline(str(path), mark_cycles=True)
        hvd.allreduce(torch.ones(3), name="on_the_timeline")
        hvd.synchronize(hvd.allgather_async(torch.ones(3), name="too"))
        hvd.stop_timeline()
        hvd.allreduce(torch.ones(3), name="not_any_more")
        if hvd.rank() != 0:
            assert not path.exists()
            return
        events = json.loads(path.read_text())
    rows = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    spans = [(rows[each["tid"]], each["name"], each["ph"]) for each in events if each["ph"] in "BE"]
    assert ("allreduce.on_the_timeline", "ALLREDUCE", "B") in spans
    assert ("allgather.too", "ALLGATHER", "E") in spans
    assert "not_any_more" not in str(rows)


def case_init_again() -> None:
    hvd.init()
    together = hvd.allreduce_async_(torch.ones(2), name="together")
    alone = hvd.broadcast_async_(torch.ones(2), 0, name="alone")
    hvd.shutdown()
    assert not hvd.is_initialized()
    for unasked in (together, alone):
        with expect_error(hvd.HorovodInternalError, "hvd.shutdown()"):
            hvd.synchronize(unasked)
    with expect_error(ValueError, "hvd.init()"):
        hvd.rank()
    hvd.init()  # Its handles are not those that are void.
    assert float(hvd.synchronize(hvd.allreduce_async_(torch.ones(2), name="together"))[0]) == 1
    with expect_error(hvd.HorovodInternalError, "hvd.shutdown()"):
        hvd.synchronize(together)
    hvd.shutdown()
    assert os.environ["RANK"]
