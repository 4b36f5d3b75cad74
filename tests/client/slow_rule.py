"""A rule whose module never ends to load."""

import time

time.sleep(3600)
