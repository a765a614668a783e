"""``python -m herring._launch``: the same as ``herringrun``."""

import sys

from herring._launch import main

sys.exit(main())
