"""What holds for all tests, before anything imports PyTorch."""

import os

# Threads of OpenMP wait for one another at work: where processes share the cores, three quarters of all CPU time went
# into that waiting.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
