"""What holds for all tests, before anything imports PyTorch."""

import os
import signal
import sys

# Threads of OpenMP wait for one another at work: where processes share the cores, three quarters of all CPU time went
# into that waiting.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# The tests start hundreds of Pythons: without bytecode, as images often set it, each compiles what it imports again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A shell starts `make test &` deaf to Ctrl-C, and so would be all processes that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
