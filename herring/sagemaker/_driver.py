"""Runs this host's part of a SageMaker training job."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from herring._errors import HerringError, UnavailableError
from herring._launch import supervise
from herring._launch._commands import Command
from herring.sagemaker._plan import Cluster, Options, Start, plan, read_cluster, read_options, worker_command

__all__ = ["launch", "main", "read_secret"]

_RESOURCE_CONFIG = Path("/opt/ml/input/config/resourceconfig.json")
_FAILURE = Path("/opt/ml/output/failure")


def main() -> int:
    """As the driver of SageMaker's SDK; the exit code."""
    try:
        return _run(read_options(os.environ), worker_command(os.environ, sys.executable))
    except HerringError as error:
        return _fail(str(error))


def launch(options: Options, command: Sequence[str]) -> int:
    """With that command for the workers; the exit code."""
    try:
        return _run(options, command)
    except HerringError as error:
        return _fail(str(error))


def read_secret(arn: str) -> str:
    """The text of that secret of AWS Secrets Manager. Raises UnavailableError, which says what to do."""
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as error:
        raise UnavailableError(f"secret_arn needs boto3 in the image (pip install boto3): {error}") from error
    parts = arn.split(":")
    region = parts[3] if len(parts) > 3 and parts[3] else os.environ.get("AWS_REGION")
    try:
        client = boto3.client("secretsmanager", region_name=region)
        text = str(client.get_secret_value(SecretId=arn).get("SecretString") or "")
    except (BotoCoreError, ClientError) as error:
        raise UnavailableError(
            f"the secret {arn} cannot be read: {error}. The job's role needs secretsmanager:GetSecretValue on it"
        ) from error
    if not text.strip():
        raise UnavailableError(f"the secret {arn} has no text (SecretString): put a random one there")
    return text.strip()


def _run(options: Options, command: Sequence[str]) -> int:
    text = ""
    with contextlib.suppress(OSError):
        text = _RESOURCE_CONFIG.read_text(encoding="utf-8")
    cluster = read_cluster(os.environ, text, options.server_group)
    secret = os.environ.get("HERRING_SECRET", "")
    if not secret and options.secret_arn:
        secret = read_secret(options.secret_arn)
    starts = plan(os.environ, cluster, options, secret, sys.executable, command)
    _say(_summary(cluster, starts, bool(secret)))
    code = _start(starts)
    return code if code == 0 else _fail(f"{cluster.here} ended with exit status {code}", code)


def _start(starts: Sequence[Start]) -> int:
    """Until all have ended, or one has failed."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "GROUP_RANK")}
    cores = max(1, len(os.sched_getaffinity(0)) // len(starts))
    base = {"OMP_NUM_THREADS": str(cores), **env}
    return supervise({start.name: Command(start.arguments, {**base, **start.environment}) for start in starts})


def _summary(cluster: Cluster, starts: Sequence[Start], has_secret: bool) -> str:
    names = ", ".join(start.name for start in starts)
    servers = f"servers on {', '.join(cluster.servers)}" if cluster.servers else "servers inside the workers"
    warning = ""
    if not has_secret and len(cluster.workers) + len(cluster.servers) > 1:
        warning = ". There is no secret: anyone who can reach these hosts' ports can join the job. Set secret_arn"
    return f"{cluster.here} runs {names}; workers on {', '.join(cluster.workers)}, {servers}{warning}"


def _fail(text: str, code: int = 1) -> int:
    """SageMaker shows what is in that file as the job's reason."""
    _say(text)
    with contextlib.suppress(OSError):
        if _FAILURE.parent.is_dir() and not _FAILURE.exists():
            _FAILURE.write_text(f"herring.sagemaker: {text}\n", encoding="utf-8")
    return code


def _say(text: str) -> None:
    print(f"herring.sagemaker: {text}", file=sys.stderr, flush=True)
