"""Horovod's numbers of reductions, the same for every framework."""

from __future__ import annotations

from herring._errors import InvalidArgumentError

Average = 0
"""Reduction: the average over the ranks."""
Sum = 1
"""Reduction: the sum over the ranks."""
Adasum = 2
"""Reduction: Adasum, an average that takes account of how much the gradients agree."""
Min = 3
"""Reduction: the least value of any rank."""
Max = 4
"""Reduction: the largest value of any rank."""
Product = 5
"""Reduction: the product over the ranks."""
_ALL = (Average, Sum, Adasum, Min, Max, Product)
OPS = {Average: "average", Sum: "sum", Min: "min", Max: "max", Product: "product"}


def reduce_op(op: int | None, average: bool | None) -> int:
    """The op that the two arguments mean together. Raises InvalidArgumentError where both are given."""
    if op is not None:
        if average is not None:
            raise InvalidArgumentError("The op parameter supersedes average. Please provide only one of them.")
        if op not in _ALL:
            raise InvalidArgumentError(f"op is {op!r}; it must be hvd.Average, Sum, Adasum, Min, Max or Product")
        return op
    return Sum if average is False else Average
