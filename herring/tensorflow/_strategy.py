"""tf.distribute on Herring: one replica in each process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

import herring
from herring._errors import InvalidArgumentError
from herring.tensorflow._collectives import allgather, dense, graph_name, init
from herring.tensorflow._datasets import distribute
from herring.tensorflow._gradients import reduce_together
from herring.tensorflow._ops import broadcast_all, is_served, library

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from herring._settings import InitOptions

_OPERATIONS = {"SUM": "sum", "MEAN": "average"}


def _operation(reduce_op: Any) -> str:
    name = getattr(reduce_op, "value", reduce_op)
    if name not in _OPERATIONS:
        raise InvalidArgumentError(f"reduce_op is {reduce_op!r}; it must be SUM or MEAN")
    return _OPERATIONS[name]


def _names(kind: str, values: Sequence[Any]) -> list[str]:
    """In eager mode the order of calls matches them, in a graph their names there."""
    return [kind if tf.executing_eagerly() else f"{kind}.{graph_name(value)}" for value in values]


def _is_replica_of(strategy: Any) -> bool:
    context = tf.distribute.get_replica_context()
    return context is not None and context.strategy is strategy


def _refuse_another(strategy: Any) -> None:
    """A process trains under one strategy at a time."""
    current = tf.distribute.get_strategy() if tf.distribute.has_strategy() else strategy
    if current is not strategy:
        raise InvalidArgumentError(
            f"this process is in the scope of {type(current).__name__}: leave that scope before you use HerringStrategy"
        )


def gpu_of_process(gpus: Sequence[Any], visible: Sequence[Any], local_rank: int) -> Any | None:
    """The GPU that a process of a host with several has for itself. None where the script, or CUDA_VISIBLE_DEVICES, has
    chosen already."""
    if len(gpus) < 2 or list(visible) != list(gpus):
        return None
    return gpus[local_rank % len(gpus)]


def _take_own_gpu() -> None:
    gpu = gpu_of_process(
        tf.config.list_physical_devices("GPU"), tf.config.get_visible_devices("GPU"), herring.local_rank()
    )
    if gpu is None:
        return
    try:
        tf.config.set_visible_devices(gpu, "GPU")
    except RuntimeError:
        logging.getLogger("herring").warning(
            "TensorFlow has used its GPUs before HerringStrategy() was made, so all processes of this host share the "
            "first one. Make HerringStrategy() first, or set CUDA_VISIBLE_DEVICES for each process"
        )


class _SumOverReplicas:
    """What a variable with ON_READ is beside its own class: each process adds to its own value, and who reads it
    outside of Strategy.run() gets the sum of all. That is a collective: all processes read it."""

    def _all(self: Any, value: Any) -> Any:
        if _is_replica_of(self._herring_strategy) or self.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
            return value
        operation = "average" if self.aggregation == tf.VariableAggregation.MEAN else "sum"
        return reduce_together([value], _names("variable", [value]), operation, "variable")[0]

    def value(self: Any, *arguments: Any, **options: Any) -> Any:
        """The sum; in Strategy.run(), this process's part."""
        return self._all(super().value(*arguments, **options))  # type: ignore[misc]

    def read_value(self: Any) -> Any:
        """As value()."""
        return self._all(super().read_value())  # type: ignore[misc]

    def numpy(self: Any) -> Any:
        """This process's part: a checkpoint is written by one of them."""
        return tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype).numpy()


class _Replica(tf.distribute.ReplicaContext):  # type: ignore[misc]
    def _merge_call(self, merge_fn: Any, args: Any, kwargs: Any) -> Any:
        extended = self.strategy.extended
        extended.merging += 1
        try:
            return super()._merge_call(merge_fn, args, kwargs)
        finally:
            extended.merging -= 1


class _Extended(tf.compat.v1.distribute.StrategyExtended):  # type: ignore[misc]
    """What tf.distribute.Strategy asks of an implementation. The names are TensorFlow's."""

    def __init__(self, container: Any) -> None:
        super().__init__(container)
        self._variables = 0
        self.merging = 0  # Calls of merge_call() that run.

    # Variables.

    def _create_variable(self, next_creator: Callable[..., Any], **arguments: Any) -> Any:
        """Each process has its own, and all begin with the value that the one of rank 0 has."""
        self._variables += 1
        label = f"initial.{self._variables}.{arguments.get('name')}"
        given = arguments.get("initial_value")

        def initial() -> Any:
            value = given() if callable(given) else given
            value = tf.convert_to_tensor(value, arguments.get("dtype"))
            return broadcast_all([value], [label], 0)[0] if is_served(value) else value

        if given is not None and herring.size() > 1:
            arguments["initial_value"] = initial
        variable = next_creator(**arguments)
        if arguments.get("synchronization") == tf.VariableSynchronization.ON_READ:
            kind = type(variable)
            variable.__class__ = type(kind.__name__, (_SumOverReplicas, kind), {"__module__": kind.__module__})
            variable._herring_strategy = self._container_strategy()
        return variable

    def value_container(self, value: Any) -> Any:
        return value

    def read_var(self, variable: Any) -> Any:
        return tf.identity(variable)

    def _update(self, variable: Any, function: Any, args: Any, kwargs: Any, group: bool) -> Any:
        result = function(variable, *args, **(kwargs or {}))
        return result if group else tf.nest.map_structure(self._local_results, result)

    def _update_non_slot(self, colocate_with: Any, function: Any, args: Any, kwargs: Any, group: bool) -> Any:
        del colocate_with
        result = function(*args, **(kwargs or {}))
        return result if group else tf.nest.map_structure(self._local_results, result)

    def non_slot_devices(self, variables: Any) -> Any:
        return min(variables, key=lambda variable: variable.name)

    # Replicas.

    def _call_for_each_replica(self, function: Any, args: Any, kwargs: Any) -> Any:
        with _Replica(self._container_strategy(), replica_id_in_sync_group=herring.rank()):
            result = function(*args, **(kwargs or {}))
        return tf.nest.map_structure(self._decided_by_all, result) if self.merging > 0 else result

    def _decided_by_all(self, value: Any) -> Any:
        """Whether gradients are finite, for example: where replicas part, what one of them alone calls meets nobody."""
        if not tf.is_tensor(value) or value.dtype != tf.bool or value.shape.rank != 0:
            return value
        value = tf.cast(value, tf.uint8)
        return tf.cast(reduce_together([value], _names("decision", [value]), "min", "decision")[0], tf.bool)

    def _get_local_replica_id(self, replica_id_in_sync_group: Any) -> int:
        del replica_id_in_sync_group
        return 0

    @property
    def _num_replicas_in_sync(self) -> int:
        return herring.size()

    @property
    def worker_devices(self) -> tuple[str, ...]:
        return ("/device:CPU:0",)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        return self.worker_devices

    def _in_multi_worker_mode(self) -> bool:
        return True

    @property
    def should_checkpoint(self) -> bool:
        return herring.rank() == 0

    @property
    def should_save_summary(self) -> bool:
        return herring.rank() == 0

    # Reductions.

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        del destinations, options
        flat = [dense(each) for each in tf.nest.flatten(value)]
        reduced = reduce_together(flat, _names("reduce", flat), _operation(reduce_op), "reduce")
        return tf.nest.pack_sequence_as(value, reduced)

    def _batch_reduce_to(self, reduce_op: Any, pairs: Any, options: Any) -> list[Any]:
        del options
        values = [dense(value) for value, _ in pairs]
        return reduce_together(values, _names("reduce", values), _operation(reduce_op), "reduce")

    def _broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        del destinations
        return tensor

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> Any:
        del destinations, options
        value = dense(value)
        others = [dimension for dimension in range(value.shape.rank) if dimension != axis]
        order = [axis, *others]
        back = [order.index(dimension) for dimension in range(value.shape.rank)]
        return tf.transpose(allgather(tf.transpose(value, order)), back)

    # Data.

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        del options
        return distribute(dataset, herring.rank(), herring.size())

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        del options
        size = herring.size()
        return dataset_fn(tf.distribute.InputContext(size, herring.rank(), size))

    def _experimental_distribute_values_from_function(self, value_fn: Any) -> Any:
        return value_fn(tf.distribute.experimental.ValueContext(herring.rank(), herring.size()))


class HerringStrategy(tf.distribute.Strategy):  # type: ignore[misc]
    """A tf.distribute.Strategy whose replicas are the job's processes, one in each: for Keras 3's fit and for loops.

    >>> strategy = herring.tensorflow.HerringStrategy()         # under herringrun, mpirun or srun
    >>> with strategy.scope():
    ...     model = keras.Sequential([...])
    ...     model.compile(optimizer="sgd", loss="mse", jit_compile=False)
    >>> model.fit(x, y, batch_size=64 * strategy.num_replicas_in_sync)

    Variables that are created in scope() begin on all processes with the values of rank 0. A batch is that of all
    processes together; each takes its share of the rows. Gradients are summed, an epoch's metrics are those of all
    data. On a host with several GPUs a process uses that of its local rank, where the script has not chosen. What
    differs from training in one process: docs/tensorflow.md.

    Args:
        settings: As herring.init() takes them. Without a job, this joins it.
    """

    def __init__(self, **settings: Unpack[InitOptions]) -> None:
        _refuse_another(self)
        if not herring.is_initialized():
            init(**settings)
        elif settings:
            raise InvalidArgumentError(
                f"herring is initialized already; {', '.join(sorted(settings))} cannot be set now: give them to init()"
            )
        library().attach()
        _take_own_gpu()
        super().__init__(_Extended(self))

    def scope(self) -> Any:
        """Within it variables are the strategy's. Raises InvalidArgumentError within another strategy's."""
        _refuse_another(self)
        return super().scope()
