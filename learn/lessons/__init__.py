"""Seven lessons, in their order.

Each has a page in docs/lessons/, an exercise file here, and a checker.
"""

LESSONS = ("ring", "data_parallel", "rows", "buckets", "zero1", "tensor_parallel", "pipeline")
