"""Sets the clock of a Python process and of its children again and again, by up to a day to either side.

Python imports it before anything else where this directory is first in PYTHONPATH.
"""

import random
import time

_true_time = time.time


def _time() -> float:
    return _true_time() + random.choice((-86_400.0, -1.0, 0.0, 3_600.0, 86_400.0))


time.time = _time
