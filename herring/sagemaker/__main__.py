"""`python -m herring.sagemaker`: on each host of a training job that SageMaker's SDK version 3 has not made."""

import argparse
import sys

from herring.sagemaker._driver import launch
from herring.sagemaker._plan import Options


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m herring.sagemaker",
        description="Starts this host's part of a SageMaker training job: workers, or a server if the host is in "
        "the server group. The list of hosts comes from SM_* or /opt/ml/input/config/resourceconfig.json.",
    )
    parser.add_argument("--server-group", metavar="NAME", help="the instance group that runs servers (default: none)")
    parser.add_argument("--processes", type=int, metavar="P", help="workers on each host (default: SM_NUM_GPUS, or 1)")
    parser.add_argument("--secret-arn", metavar="ARN", help="a secret of AWS Secrets Manager: the job's secret")
    parser.add_argument("worker_command", nargs="+", metavar="command", help="what each worker runs, after --")
    args = parser.parse_args()
    return launch(Options(args.server_group, args.processes, args.secret_arn), args.worker_command)


if __name__ == "__main__":
    sys.exit(main())
