"""The other servers, one file each; they run in a separate Python (`--peer_python`)."""
