"""What all tests share."""

from __future__ import annotations

import os

# Before torch is imported, and for child processes too: the models are tiny, and threads that wait for each other
# cost ten times what they save once another process is at work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
