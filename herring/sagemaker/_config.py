"""What `ModelTrainer(distributed=...)` takes."""

from __future__ import annotations

from pathlib import Path
from typing import Optional  # Annotations of pydantic's, read at run time.

from herring._errors import missing_package

try:
    from sagemaker.train.distributed import DistributedConfig
except ImportError as error:
    raise missing_package("herring.sagemaker.Herring", "'sagemaker>=3'", error) from error

__all__ = ["Herring"]


class Herring(DistributedConfig):  # type: ignore[misc]  # The SDK has no types.
    """Herring in a training job: workers on all instances, or servers on those of one instance group.

    Parameters:
        server_group: Name of the instance group that runs servers, one on each instance; the others train. None: the
            servers are inside the workers.
        process_count_per_node: Worker processes on each training instance. None: one for each GPU, or one.
        secret_arn: A secret of AWS Secrets Manager whose text is the job's secret; the job's role has to be allowed
            secretsmanager:GetSecretValue.
    """

    server_group: Optional[str] = None  # noqa: UP045
    process_count_per_node: Optional[int] = None  # noqa: UP045
    secret_arn: Optional[str] = None  # noqa: UP045

    @property
    def driver_dir(self) -> str:
        """The folder that the SDK copies to every host."""
        return str(Path(__file__).with_name("driver"))

    @property
    def driver_script(self) -> str:
        """What every host runs."""
        return "herring_driver.py"
