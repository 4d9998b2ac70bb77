// One engine in a worker of its own, for benchmarks/browser.py. Answers { open } with its facts and { passes } with the
// milliseconds of each pass over the same token ids.

let forward = null;

async function openOurs({ base, threads, instructions }) {
  const { LocalModel } = await import("./local_worker.js");
  globalThis.onmessage = receive; // that module answers a page's messages otherwise
  const model = await LocalModel.open(base, { threads, instructions });
  return { facts: model.info, run: (ids) => Array.from(model.logits([ids])[0]) };
}

async function openOnnxRuntime({ base, threads }) {
  const ort = await import("./ort/ort.wasm.min.mjs");
  ort.env.wasm.numThreads = threads;
  ort.env.wasm.wasmPaths = new URL("ort/", import.meta.url).href;
  const session = await ort.InferenceSession.create(new URL("model.onnx", base).href, { graphOptimizationLevel: "all" });
  const tensor = (values) => new ort.Tensor("int64", BigInt64Array.from(values, BigInt), [1, values.length]);
  let inputs = null;
  const run = async (ids) => {
    inputs ??= { input_ids: tensor(ids), attention_mask: tensor(ids.map(() => 1)) };
    const outputs = await session.run(inputs);
    return Array.from(Object.values(outputs)[0].data);
  };
  return { facts: { inputs: session.inputNames, threads }, run };
}

async function receive({ data: { open, passes } }) {
  try {
    if (open) {
      const { facts, run } = await (open.engine === "ours" ? openOurs(open) : openOnnxRuntime(open));
      forward = () => run(open.ids);
      return postMessage({ facts, logits: await forward() });
    }
    const times = [];
    for (let pass = 0; pass < passes; pass++) {
      const began = performance.now();
      await forward();
      times.push(performance.now() - began);
    }
    postMessage({ times });
  } catch (error) {
    postMessage({ error: error.message });
  }
}

globalThis.onmessage = receive;
