"""Seven lessons, in their order. Each has a page in docs/lessons/, an exercise file here, and a checker."""

LESSONS = ("data_parallel", "zero1", "tensor_parallel", "pipeline")
