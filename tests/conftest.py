"""One compute thread wherever the suite computes: its processes share few cores, and OpenMP teams collapse on them."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
