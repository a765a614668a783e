"""What every host of a training job runs, from the folder that SageMaker's SDK has copied there."""

import sys

if __name__ == "__main__":
    try:
        from herring.sagemaker._driver import main
    except ImportError as error:
        sys.exit(f"herring.sagemaker: Herring is not in this image ({error}): install it there with pip")
    sys.exit(main())
