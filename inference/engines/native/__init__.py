"""Own kernels: a whole int8 classifier in one call; see kernels.c."""
