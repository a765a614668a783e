"""An optimizer that steps with the gradients of all ranks."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from herring._errors import InvalidArgumentError
from herring.horovod._engine import info
from herring.horovod._engine.engine import Engine, home
from herring.horovod._engine.process_sets import ProcessSet, global_process_set, members_of
from herring.horovod._engine.reduce_ops import Adasum, Average
from herring.horovod.common.exceptions import HorovodInternalError
from herring.horovod.torch import _operations as operations
from herring.horovod.torch._buckets import Agreements, Bucket, Kind, Kinds, Place, agreements_on, fits, kind_of, say
from herring.horovod.torch._calls import SparseHandle
from herring.horovod.torch._compression import Compression
from herring.horovod.torch._device import moment

_TOO_MANY_PASSES = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally."
)
_ZEROED_TOO_EARLY = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
    "This is prohibited as it can cause a race condition."
)
_SYNCHRONIZED_TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can "
    "cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you use "
    "optimizer.synchronize() in your code."
)

# A smaller gradient goes by its name, where gradients are checked one by one (HERRING_CHECK_FINITE).
_SMALL_BYTES = 256 << 10

# As Herring's DDP, and for the same reasons. Each copy from a GPU costs more than a bucket does.
_CPU_BUCKET_BYTES = 5 << 20

Group = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class _Options:
    names: dict[torch.Tensor, str]
    groups: list[Group]  # Every parameter that takes a gradient is in one.
    compression: Any
    op: int
    prescale: float
    postscale: float
    sparse_as_dense: bool
    process_set: ProcessSet

    @functools.cached_property
    def how(self) -> tuple[int, float, float, ProcessSet]:
        """The last arguments of a reduction."""
        return self.op, self.prescale, self.postscale, self.process_set


@dataclass(frozen=True)
class _Reduction:
    """Of one group's gradients, on its way."""

    finish: Callable[[], list[torch.Tensor]] | None  # waits for the dense ones, where there are any
    sparse: dict[torch.Tensor, SparseHandle]
    contexts: dict[torch.Tensor, Any]  # of the gradients that finish() returns, in their order


class _Bundle:
    """One group: how many passes each parameter has to go, and what is on its way. Tensors are no keys here: to hash
    one takes a good part of the time of sending it."""

    __slots__ = ("came", "device", "dtype", "fits", "kind", "left", "made", "name", "parameters", "place", "reduction")

    def __init__(self, parameters: Group, name: str) -> None:
        self.parameters = parameters
        self.name = name
        self.left: list[int] = []
        self.made: list[Any] = []  # of several gradients on GPUs: when each one was made, on its stream
        self.place: Place | None = None  # in a bucket, once ranks have agreed on them
        # Of the last step by name: whether the gradient can be in a bucket, and when it came.
        self.fits = True
        self.came = 0
        # The handle alone, where the gradient itself is on its way by its name; of one in a bucket, that.
        self.reduction: int | _Reduction | Bucket | None = None

    def remember(self, kind: Kind) -> None:
        """What the first parameter is like now."""
        self.kind = kind
        self.dtype, self.device = self.parameters[0].dtype, self.parameters[0].device
        self.place = None

    def has_changed(self) -> bool:
        """Whether it is like something else since (model.double(), a layer that has grown)."""
        first = self.parameters[0]
        return first.shape != self.kind.shape or first.dtype != self.dtype or first.device != self.device


def _tell(gradients: weakref.ref[_Gradients], index: int, place: int, parameter: torch.Tensor) -> None:
    """A gradient has been made."""
    one = gradients()
    if one is not None:
        one.on_gradient(one.bundles[index], place, parameter)


class _Gradients:
    """Starts the reduction of each gradient as soon as backward has made it, and waits for all of them."""

    def __init__(self, options: _Options, backward_passes_per_step: int) -> None:
        self.options = options
        self.passes = backward_passes_per_step
        self._lock = threading.RLock()  # Backward may run in several threads.
        self.bundles = [_Bundle(group, options.names[group[0]]) for group in options.groups]
        self._on_the_way: list[_Bundle] = []
        self._failure: HorovodInternalError | None = None  # of the step before, until there are new gradients
        self._is_plain = options.compression is Compression.none
        self._device = torch.device("cpu")  # of the first parameter
        self._engine: weakref.ref[Engine] | None = None  # in which there is:
        self._agreements: Agreements | None = None
        self._kinds: Kinds = ()
        self._has_buckets = False  # It knows which; there may be none.
        self.reset()
        if options.process_set.included():
            myself = weakref.ref(self)  # A parameter does not keep its optimizer, nor that one's buckets.
            for index, bundle in enumerate(self.bundles):
                for place, parameter in enumerate(bundle.parameters):
                    hook = functools.partial(_tell, myself, index, place)
                    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def reset(self) -> None:
        """As before the first backward pass; what is on its way arrives first, for nothing."""
        for bundle in self._on_the_way:
            reduction, bundle.reduction = bundle.reduction, None
            with contextlib.suppress(HorovodInternalError):
                if isinstance(reduction, int):
                    operations.handles.synchronize(reduction)
                elif isinstance(reduction, Bucket):
                    reduction.drop()
                elif reduction is not None:
                    if reduction.finish is not None:
                        reduction.finish()
                    for handle in reduction.sparse.values():
                        handle()
        self._on_the_way.clear()
        for bundle in self.bundles:
            bundle.left = [self.passes] * len(bundle.parameters)
            bundle.made.clear()

    @property
    def is_reducing(self) -> bool:
        return bool(self._on_the_way)

    def on_gradient(self, bundle: _Bundle, place: int, parameter: torch.Tensor) -> None:
        with self._lock:
            left = bundle.left
            if left[place] <= 0:
                raise AssertionError(_TOO_MANY_PASSES)
            left[place] -= 1
            if len(left) > 1 and not parameter.is_cpu:
                bundle.made.append(moment(parameter.device))
            if not any(left):
                self._start(bundle)

    def synchronize(self) -> None:
        """Every gradient is that of all ranks afterwards; one that this rank did not compute counts as zeros."""
        if self._failure is not None:
            raise self._failure  # Some gradients are those of this rank alone.
        if self.options.process_set.included():
            try:
                self._synchronize()
            except HorovodInternalError as error:
                self._failure = error
                self.reset()
                raise
        self.reset()

    @torch.no_grad()
    def _synchronize(self) -> None:
        for bundle in self.bundles:
            if bundle.reduction is None:
                with self._lock:
                    self._start(bundle)
        wait = operations.handles.synchronize
        for bundle in self._on_the_way:
            reduction = bundle.reduction
            if isinstance(reduction, int):
                self._keep(bundle.parameters[0], wait(reduction))
            elif isinstance(reduction, Bucket):
                reduction.finish(self._keep)
            elif reduction is not None:
                self._finish(reduction)
            bundle.reduction = None
        self._on_the_way.clear()

    def _start(self, bundle: _Bundle) -> None:
        if not self._on_the_way:
            self._failure = None
            self._begin_step()
        self._on_the_way.append(bundle)
        if bundle.place is not None:
            bundle.reduction = bundle.place.bucket
            bundle.place.bucket.put(bundle.place)
            return
        gradient = bundle.parameters[0].grad
        bundle.came = len(self._on_the_way)
        bundle.fits = len(bundle.parameters) == 1 and fits(bundle.parameters[0], gradient, self._device)
        if self._is_plain and len(bundle.parameters) == 1 and gradient is not None and not gradient.is_sparse:
            bundle.reduction = operations.all_reduce_async(gradient, gradient, bundle.name, *self.options.how)
        else:
            bundle.reduction = self._start_otherwise(bundle)
        if not self._has_buckets and len(self._on_the_way) == len(self.bundles):
            assert self._agreements is not None
            self._agreements.ask(self._kinds, self._say)  # which of them go in buckets from now on

    @torch.no_grad()
    def _start_otherwise(self, bundle: _Bundle) -> _Reduction:
        options = self.options
        for made in bundle.made:
            made.block_current_stream()
        bundle.made.clear()
        sparse: dict[torch.Tensor, SparseHandle] = {}
        contexts: dict[torch.Tensor, Any] = {}
        sent = []
        for parameter in bundle.parameters:
            gradient = parameter.grad
            if gradient is None:
                gradient = parameter.grad = torch.zeros_like(parameter)
            if gradient.is_sparse and not options.sparse_as_dense:
                name = options.names[parameter]
                sparse[parameter] = SparseHandle(gradient, name, options.op, options.process_set)
                continue
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            compressed, contexts[parameter] = options.compression.compress(dense)
            sent.append(compressed)
        finish = None
        if sent:
            finish = operations.all_reduce_in_place(sent, bundle.name, *options.how)
        return _Reduction(finish, sparse, contexts)

    def _begin_step(self) -> None:
        """Looks whether job and parameters are those of the step before, and takes what ranks have agreed on."""
        engine, process_set = home.current(), self.options.process_set
        is_known = self._engine is not None and self._engine() is engine
        if not is_known or any(each.has_changed() for each in self.bundles):
            self._engine, self._has_buckets = weakref.ref(engine), False
            self._device = self.bundles[0].parameters[0].device
            for bundle in self.bundles:
                bundle.remember(self._kind_of(bundle))
            self._kinds = tuple(bundle.kind for bundle in self.bundles)
            self._agreements = agreements_on([bundle.name for bundle in self.bundles], process_set)
        if self._has_buckets:
            return
        assert self._agreements is not None
        answer = self._agreements.answer(self._kinds)
        if answer is not None:
            self._has_buckets = True
            for indices in answer.buckets:
                self._make_bucket([self.bundles[index] for index in indices])

    def _say(self) -> list[int]:
        engine = home.current()
        is_first = members_of(self.options.process_set).index == 0
        size = self._bucket_bytes(engine) if is_first and not _is_checked(engine) else 0
        fitting = [self._fits(bundle) for bundle in self.bundles]
        return say(self._kinds, fitting, [bundle.came for bundle in self.bundles], size)

    def _bucket_bytes(self, engine: Engine) -> int:
        size = engine.fusions.bucket_bytes
        return min(size, _CPU_BUCKET_BYTES) if self._device.type == "cpu" else size

    def _kind_of(self, bundle: _Bundle) -> Kind:
        parameter = bundle.parameters[0]
        is_halved = self.options.compression is Compression.fp16 and parameter.dtype.is_floating_point
        return kind_of(parameter, bundle.name, torch.float16 if is_halved else parameter.dtype)

    def _fits(self, bundle: _Bundle) -> bool:
        if _is_checked(home.current()) and bundle.parameters[0].nbytes <= _SMALL_BYTES:
            return False  # By its name, so that it travels with others all the same.
        return bundle.fits and self.options.compression in (Compression.none, Compression.fp16)

    def _make_bucket(self, bundles: Sequence[_Bundle]) -> None:
        def start(memory: torch.Tensor, name: str) -> operations.Started:
            one = [memory]
            return operations.all_reduce(one, one, name, *self.options.how)

        bucket = Bucket([each.parameters[0] for each in bundles], [each.kind for each in bundles], start)
        for bundle, place in zip(bundles, bucket.places, strict=True):
            bundle.place = place

    @torch.no_grad()
    def _finish(self, reduction: _Reduction) -> None:
        for parameter, handle in reduction.sparse.items():
            parameter.grad = handle()
        if reduction.finish is None:
            return
        for (parameter, context), result in zip(reduction.contexts.items(), reduction.finish(), strict=True):
            self._keep(parameter, self.options.compression.decompress(result, context))

    def _keep(self, parameter: torch.Tensor, reduced: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is reduced:
            return
        assert gradient is not None
        with torch.no_grad():
            if gradient.is_sparse:
                parameter.grad = reduced.to_sparse()
            elif reduced.data_ptr() != gradient.data_ptr():
                gradient.copy_(reduced)


def _is_checked(engine: Engine) -> bool:
    """For NaN, gradient by gradient: none shares a bucket then."""
    return engine.session.config.check_finite == "on"


class _Distributed(Optimizer):
    """Mixed in before the user's optimizer class."""

    _gradients: _Gradients
    _synchronized = False
    _should_synchronize = True

    def synchronize(self) -> None:
        """Waits for the gradients of all ranks. step() does so by itself; call it to look at gradients before, and
        then step() within skip_synchronize()."""
        self._gradients.synchronize()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it, step() takes the gradients as they are."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From the next backward pass on."""
        self._gradients.passes = passes
        self._gradients.reset()

    @property
    def backward_passes_per_step(self) -> int:
        """How many backward passes add up before gradients are reduced."""
        return self._gradients.passes

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        return self._gradients.options.names

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps with the gradients of all ranks; with those of each call of `closure`, where one is given."""
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(_SYNCHRONIZED_TWICE, stacklevel=2)
            if closure is None:
                self.synchronize()
            else:
                closure = self._synchronizing(closure)
        self._synchronized = False
        result = super().step(closure)
        self._synchronized = False
        return result

    def _synchronizing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def synchronized() -> Any:
            loss = closure()
            self._gradients.synchronize()
            return loss

        return synchronized

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's own. Raises AssertionError while gradients are being reduced."""
        if self._gradients.is_reducing:
            raise AssertionError(_ZEROED_TOO_EARLY)
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the optimizer's own; gradients on their way are forgotten."""
        self._gradients.reset()
        self._synchronized = False
        super().load_state_dict(state_dict)


class _AdasumDistributed(Optimizer):
    """Mixed in likewise: each rank steps by itself, and the steps are combined by Adasum."""

    _options: _Options

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        return self._options.names

    def synchronize(self) -> None:
        """Does nothing: there is nothing to wait for before step()."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raises AssertionError: a step has to be synchronized."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Says nothing here: gradients add up until step()."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Combines what each rank's own step would change."""
        parameters = [parameter for group in self._options.groups for parameter in group]
        before = [parameter.detach().clone() for parameter in parameters]
        result = super().step(closure)
        compression = self._options.compression
        on_the_way = []
        for parameter, start in zip(parameters, before, strict=True):
            sent, context = compression.compress(parameter.detach() - start)
            operation = operations.all_reduce(
                [sent], [sent], self._options.names[parameter], Adasum, 1.0, 1.0, self._options.process_set
            )
            on_the_way.append((operation, context))
        for parameter, start, (operation, context) in zip(parameters, before, on_the_way, strict=True):
            parameter.copy_(start + compression.decompress(operation.wait()[0], context))
        return result


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The optimizer, as an instance of a subclass of its class that steps with the gradients of all ranks.

    Args:
        optimizer: Is not to be used by itself any more; what it has kept so far, the new one has too.
        named_parameters: model.named_parameters(): names by which ranks match gradients. Without it, their places.
        compression: hvd.Compression.fp16 halves what is sent.
        backward_passes_per_step: Gradients add up over so many passes before they are reduced (they are not divided).
        op: Average, Sum, or Adasum (then steps are combined, not gradients).
        gradient_predivide_factor: For Average: divided by it before the sum, the rest after.
        num_groups: The older name of `groups`.
        groups: A number of groups, or lists of parameters, that are each reduced as one operation.
        sparse_as_dense: Reduce sparse gradients as dense ones.
        process_set: Ranks that train together; on others the gradients stay as they are.

    Raises ValueError for values that do not go together and for parameters without a name.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise InvalidArgumentError("gradient_predivide_factor not supported with op != Average")
    if backward_passes_per_step <= 0:
        raise InvalidArgumentError("backward_passes_per_step must be > 0")
    if num_groups != 0:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    names = _names(optimizer, named_parameters)
    trained = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    divide = gradient_predivide_factor
    options = _Options(
        names, _groups(trained, groups), compression, op, 1.0 / divide, divide, sparse_as_dense, process_set
    )
    is_adasum = op == Adasum and info.size() > 1
    base: type[Any] = _AdasumDistributed if is_adasum else _Distributed
    kind: Any = type(type(optimizer).__name__, (base, type(optimizer)), {"__module__": __name__})
    wrapped = kind.__new__(kind)
    # A scheduler made before has put a step() of its own on the instance, which would call the old one.
    wrapped.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    if is_adasum:
        wrapped._options = options
    else:
        wrapped._gradients = _Gradients(options, backward_passes_per_step)
    return wrapped


def _names(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    places = {
        parameter: f"noname.{i}.{j}"
        for i, group in enumerate(optimizer.param_groups)
        for j, parameter in enumerate(group["params"])
    }
    if named_parameters is None:
        return places
    pairs = list(named_parameters)
    if any(not isinstance(each, tuple) for each in pairs):
        raise InvalidArgumentError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise InvalidArgumentError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}"
        )
    names = {parameter: name for name, parameter in pairs}
    unnamed = [f"{place} of shape {list(each.shape)}" for each, place in places.items() if each not in names]
    if unnamed:
        raise InvalidArgumentError(
            "named_parameters was specified, but one or more model parameters were not named: "
            f"{', '.join(unnamed).replace('noname', 'parameter')}"
        )
    return names


def _groups(trained: list[torch.Tensor], groups: int | Sequence[Sequence[torch.Tensor]] | None) -> list[Group]:
    if groups is None:
        return [(each,) for each in trained]
    if isinstance(groups, int):
        if groups <= 0:
            raise InvalidArgumentError("groups should be a positive integer or a list of list of torch.Tensor.")
        size = -(-len(trained) // groups) or 1
        return [tuple(trained[start : start + size]) for start in range(0, len(trained), size)]
    members = [each for group in groups for each in group]
    if any(not isinstance(each, torch.Tensor) for each in members):
        raise InvalidArgumentError("groups must consist of torch.Tensor.")
    if len({id(each) for each in members}) != len(members):
        raise InvalidArgumentError("A parameter can only appear once in groups.")
    wanted, grouped = {id(each) for each in trained}, {id(each) for each in members}
    made = [tuple(each for each in group if id(each) in wanted) for group in groups]
    return [group for group in made if group] + [(each,) for each in trained if id(each) not in grouped]
