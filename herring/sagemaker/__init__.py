"""Jobs on Amazon SageMaker, with servers in an instance group of their own (docs/sagemaker.md).

    from herring.sagemaker import Herring
    ModelTrainer(..., distributed=Herring(server_group="servers", secret_arn="arn:aws:secretsmanager:..."))

`python -m herring.sagemaker` does the same on each host where a job is not made by the SDK's version 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from herring.sagemaker._config import Herring

__all__ = ["Herring"]


def __getattr__(name: str) -> Any:
    """The class needs SageMaker's SDK, which the training containers do not have."""
    if name != "Herring":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from herring.sagemaker._config import Herring

    return Herring
