"""``python -m herring``: the same as ``herring``."""

import sys

from herring._cli import main

if __name__ == "__main__":
    sys.exit(main())
