"""The other servers, one file each; they run in a Python of their own (`--peer_python`)."""
