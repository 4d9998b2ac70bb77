"""How fast this machine multiplies int8 matrices: the most that any server of the same model could reach on it.

The encoder's own shapes (four projections and the two of the feed-forward, unsigned activations with signed weights,
sums in int32) run back to back through several libraries on all cores; nothing else is done, no attention, softmax,
normalisation, tokens or HTTP. Once as one chain on all cores, and once as a chain a core, which wait for nobody.
Started as `python -m benchmarks.serving.limit WIDTH FEED_FORWARD CORES SECONDS`, it prints one JSON line, operations a
second by library and by number of rows and chains.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from threading import Barrier

import numpy as np

ROWS = (416, 1664)  # eight texts of 52 tokens, and four times that: no library gains from more
Pass = Callable[[], object]
Shapes = list[tuple[int, int]]
Make = Callable[[Shapes, int, int], Pass]


def block_shapes(width: int, feed_forward: int) -> Shapes:
    """Inputs and outputs of a block's matrix products."""
    return [*[(width, width)] * 4, (width, feed_forward), (feed_forward, width)]


def torch_pass(shapes: Shapes, rows: int, threads: int) -> Pass:
    """oneDNN by way of torch's quantised linear layers, weights packed beforehand."""
    import torch

    torch.set_num_threads(threads)
    torch.backends.quantized.engine = "onednn"
    generator = torch.Generator().manual_seed(0)
    inputs, packed = {}, []
    for taken, given in shapes:
        numbers = torch.randint(0, 255, (rows, taken), generator=generator, dtype=torch.uint8)
        inputs[taken] = torch._make_per_tensor_quantized_tensor(numbers, 0.02, 128)
        weight = torch.quantize_per_tensor(torch.randn(given, taken, generator=generator), 0.02, 0, torch.qint8)
        packed.append((taken, torch.ops.quantized.linear_prepack(weight, None)))
    return lambda: [torch.ops.quantized.linear(inputs[taken], weight, 0.1, 128) for taken, weight in packed]


def onnxruntime_pass(shapes: Shapes, rows: int, threads: int) -> Pass:
    """MatMulInteger of onnxruntime, weights packed by the session."""
    import onnx
    import onnxruntime as ort
    from onnx import TensorProto, helper

    random = np.random.default_rng(0)
    names = [f"y{i}" for i in range(len(shapes))]
    nodes = [helper.make_node("MatMulInteger", [f"x{k}", f"w{i}"], [names[i]]) for i, (k, _) in enumerate(shapes)]
    weights = [
        onnx.numpy_helper.from_array(random.integers(-127, 127, shape, dtype=np.int8), f"w{i}")
        for i, shape in enumerate(shapes)
    ]
    inputs = {f"x{k}": random.integers(0, 255, (rows, k), dtype=np.uint8) for k, _ in shapes}
    graph = helper.make_graph(
        nodes,
        "block",
        [helper.make_tensor_value_info(name, TensorProto.UINT8, value.shape) for name, value in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.INT32, None) for name in names],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, inputs)


def openvino_pass(shapes: Shapes, rows: int, threads: int) -> Pass:
    """OpenVINO's int8 matrix products: quantised activations, int8 weights, quantised again for the next one."""
    import openvino as ov
    from openvino import opset13 as op

    random = np.random.default_rng(0)

    def quantized(node: ov.Node) -> ov.Node:
        low, high = (op.constant(np.float32(limit)) for limit in (-3.0, 3.0))
        return op.fake_quantize(node, low, high, low, high, 256)

    start = op.parameter([rows, shapes[0][0]], np.float32)
    node = quantized(start)
    for taken, given in shapes:
        weight = op.convert(op.constant(random.integers(-127, 127, (given, taken), dtype=np.int8)), np.float32)
        scaled = op.multiply(weight, op.constant(np.full((given, 1), 1e-3, dtype=np.float32)))
        node = quantized(op.matmul(node, scaled, False, True))
    settings = {"NUM_STREAMS": "1", "INFERENCE_NUM_THREADS": threads, "ENABLE_CPU_PINNING": False}
    request = ov.Core().compile_model(ov.Model([node], [start]), "CPU", settings).create_infer_request()
    numbers = random.standard_normal((rows, shapes[0][0]), dtype=np.float32)
    return lambda: request.infer([numbers], share_inputs=True, share_outputs=True)


LIBRARIES = {
    "oneDNN (torch)": torch_pass,
    "onnxruntime MatMulInteger": onnxruntime_pass,
    "OpenVINO": openvino_pass,
}


def main() -> None:
    """Measure every library that is installed."""
    width, feed_forward, cores = map(int, sys.argv[1:4])
    seconds = float(sys.argv[4])
    shapes = block_shapes(width, feed_forward)
    rates: dict[str, dict[str, float]] = {}
    for name, make in LIBRARIES.items():
        try:
            rates[name] = {
                f"{rows} rows, {chains} × {cores // chains}": measure(
                    make, shapes, rows, chains, cores // chains, seconds
                )
                for rows in ROWS
                for chains in sorted({1, cores})
            }
        except ImportError:
            continue  # not installed: the others stand for it
    print(json.dumps(rates))


def measure(make: Make, shapes: Shapes, rows: int, chains: int, threads: int, seconds: float) -> float:
    """Operations a second of all chains together, each at the median of its passes."""
    ready = Barrier(chains)

    def chain(_: int) -> float:
        run = make(shapes, rows, threads)  # here, because torch keeps its number of threads by thread
        run()
        ready.wait()
        times = []
        end = time.perf_counter() + seconds
        while (before := time.perf_counter()) < end:
            run()
            times.append(time.perf_counter() - before)
        return sum(2 * rows * taken * given for taken, given in shapes) / median(times)

    with ThreadPoolExecutor(chains) as pool:
        return sum(pool.map(chain, range(chains)))


if __name__ == "__main__":
    main()
