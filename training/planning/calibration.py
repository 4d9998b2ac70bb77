"""Calibration: what hardware reaches of its peak. Every constant that is not from a data sheet or a formula."""

from __future__ import annotations

# Share of the peak that a large matrix product reaches, and the smallest dimension at which half of that is left:
# share = MATRIX_SHARE * s / (s + HALF_DIMENSION), s = the smallest of rows, columns and inner dimension per GPU.
MATRIX_SHARE = 0.72
HALF_DIMENSION = 128
# The same for attention scores inside a fused kernel (FlashAttention-2, arXiv 2307.08691, figures 4 to 6).
ATTENTION_SHARE = 0.50
# Share of the memory bandwidth that element-wise kernels and the optimizer reach.
MEMORY_SHARE = 0.80
# Share of a link's bandwidth that collectives of large messages reach.
LINK_SHARE = 0.75
NETWORK_SHARE = 0.80
# Share of the collectives' time that runs beside computation where a strategy overlaps the two at all.
OVERLAP_SHARE = 0.90
# While a collective runs beside it, computation slows by this share of the collective's time.
CONTENTION = 0.10
# Bytes read and written by element-wise kernels of one block, forward, per token and byte of the computing dtype:
# this many passes over the hidden width and over the feed-forward's width. Backward: twice.
HIDDEN_PASSES = 26
INTERMEDIATE_PASSES = 6
# Kernels that a block launches forward, and the seconds that the processor takes for each.
KERNELS_PER_BLOCK = 40
LAUNCH_SECONDS = 6e-6
# Bytes of every local parameter that clipping and AdamW read and write: gradient norm 4, AdamW 28, zeroing 4.
OPTIMIZER_BYTES = 36
# Of the memory, what CUDA's context, NCCL's buffers and cuBLAS' workspaces take, and the share lost to fragmentation.
RESERVED_BYTES = 2 * 2**30
FRAGMENTATION = 0.04
# Bytes per second that one node writes to shared storage: a parallel file system over one 100 Gb/s port, at half rate.
STORAGE_BANDWIDTH = 6e9
