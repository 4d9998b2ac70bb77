// The model in the visitor's browser: files, memory and forward passes. Runs in a worker, so that the page never waits;
// local_model.js is the page's side. Needs nothing else of a browser, so that Node runs it too.

import { calibratedScores } from "./calibration.js";
import { Familiarity } from "./familiarity.js";
import { Tokenizer } from "./wordpiece.js";

const FORMAT = 4;
const CACHE = "local-model";
const PAGE_BYTES = 65536;
const STACK_BYTES = 65536; // of a thread, as deployment/compile_kernels.py gives the first one
const MODULE_BYTES = 2 ** 20; // what it begins with, as that script says too
const PASS_TOKENS = 512; // more tokens in one pass gain no speed
const MOST_THREADS = 4;
const TRIED_TOKENS = 8;
const TRIED_ROUNDS = [6, 30];
const TRIED_MILLISECONDS = 200;
const TOLERANCE = 0.05; // plain SIMD rounds twice where the others round once
// A function that returns i32x4.splat(0) and one that returns i8x16.relaxed_swizzle of two of them.
const SIMD = [0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 8, 1, 6, 0, 65, 0, 253, 17, 11];
const RELAXED = [...SIMD.slice(0, 20), 15, 1, 13, 0, 65, 0, 253, 17, 65, 0, 253, 17, 253, 128, 2, 11];

const megabytes = (bytes) => `${Math.ceil(bytes / 1e6)} MB`;
const validates = (code) => typeof WebAssembly === "object" && WebAssembly.validate(Uint8Array.from(code));

function chooseInstructions(wanted) {
  if (!validates(SIMD)) {
    throw new Error("This browser cannot run the model (it has no WebAssembly SIMD); a newer one can.");
  }
  return wanted !== "simd" && validates(RELAXED) ? "relaxed-simd" : "simd";
}

function chooseThreads(wanted) {
  // Threads share memory, which browsers allow only to pages that are isolated by their headers.
  if (!globalThis.crossOriginIsolated || typeof Worker === "undefined") return 1;
  return wanted === "auto" ? Math.min(navigator.hardwareConcurrency, MOST_THREADS) : wanted;
}

// ---------------------------------------------------------------- files

async function fetched(url, options) {
  const name = url.pathname.split("/").pop();
  let response;
  try {
    response = await fetch(url, options);
  } catch {
    throw new Error(`${name} does not load; check the connection, then reload the page.`);
  }
  if (!response.ok) throw new Error(`${name} is missing here (status ${response.status}); publish the page again.`);
  return response;
}

/** The browser's store of large files. Null where it refuses one, as in some private windows: then nothing is kept. */
async function openStore() {
  return globalThis.caches?.open(CACHE).catch(() => null) ?? null;
}

/** A file from the server, so that a new one is noticed, or without a connection the one that was there last. */
async function newest(url, store) {
  try {
    return await fetched(url, { cache: "no-cache" });
  } catch (error) {
    const kept = await store?.match(url).catch(() => undefined);
    if (!kept) throw error;
    return kept;
  }
}

async function readDescription(url, store) {
  const response = await newest(url, store);
  const copy = response.clone();
  let model;
  try {
    model = await response.json();
  } catch {
    throw new Error("model.json is cut short or is another file; publish the page again.");
  }
  if (model.format !== FORMAT) {
    throw new Error("model.json is from another version of this page; reload it, or publish it again.");
  }
  await store?.put(url, copy).catch(() => {});
  return model;
}

/** Read a file to its end, giving each part to `take` as it arrives. It is kept for the next visit. */
async function readWeights(url, { bytes }, store, take, onProgress) {
  let response = await store?.match(url).catch(() => undefined);
  let stored;
  if (!response) {
    response = await fetched(url);
    // The file's name has its hash: what it replaces is never asked for again.
    stored = store
      ?.put(url, response.clone())
      .then(() => forgetOthers(store, url))
      .catch(() => {}); // no room
  }
  let loaded = 0;
  try {
    for (const reader = response.body.getReader(); ; ) {
      const { done, value } = await reader.read();
      if (done || loaded + value.length > bytes) {
        if (!done) loaded += value.length;
        break;
      }
      take(value, loaded);
      loaded += value.length;
      onProgress?.({ loaded, total: bytes });
    }
  } catch {
    loaded = Math.min(loaded, bytes - 1);
  }
  if (loaded !== bytes) {
    await stored;
    await store?.delete(url).catch(() => {});
    throw new Error("The model's file did not arrive whole; check the connection, then reload the page.");
  }
}

async function forgetOthers(store, { href }) {
  const folder = href.slice(0, href.lastIndexOf("/") + 1);
  for (const { url } of await store.keys()) {
    if (url.startsWith(folder) && url.endsWith(".bin") && url !== href) await store.delete(url);
  }
}

async function compile(instructions, threads, store) {
  const name = `kernels${instructions === "simd" ? "" : "-relaxed"}${threads > 1 ? "-threads" : ""}.wasm`;
  const url = new URL(name, import.meta.url);
  const response = await newest(url, store);
  const copy = response.clone();
  let module;
  try {
    module = await WebAssembly.compile(await response.arrayBuffer());
  } catch {
    throw new Error(`${name} is cut short or is another file; reload the page, or publish it again.`);
  }
  await store?.put(url, copy).catch(() => {});
  return module;
}

// ---------------------------------------------------------------- the model

export class LocalModel {
  /** `base` is the URL of the folder with model.json; `instructions`: "auto", or what to force: "relaxed-simd" or "simd". */
  static async open(base, { threads = "auto", instructions = "auto", onProgress } = {}) {
    const model = new LocalModel();
    model.instructions = chooseInstructions(instructions);
    model.threads = chooseThreads(threads);
    const store = await openStore();
    const compiled = compile(model.instructions, model.threads, store);
    compiled.catch(() => {}); // thrown below, unless something else is before it
    model.description = await readDescription(new URL("model.json", base), store);
    model.tokenizer = new Tokenizer(model.description.tokenizer);
    model.module = await compiled;
    try {
      model.#reserve();
    } catch {
      throw new Error(`This browser gave no memory for the model (${megabytes(model.#bytes)}); close other pages.`);
    }
    await model.#load(base, store, onProgress);
    try {
      await model.#startThreads(instructions);
      model.#check();
    } catch (error) {
      if (!(error instanceof WebAssembly.RuntimeError)) throw error;
      await store?.delete(new URL(model.description.weights.file, base)).catch(() => {});
      throw new Error("The model does not answer as it should, so its file is damaged; reload the page.");
    }
    return model;
  }

  get info() {
    const { name, problem_type: problemType, labels, thresholds, test, examples, weights, tokenizer, calibration } = this.description;
    return {
      name,
      problemType,
      labels,
      thresholds,
      test,
      examples,
      calibration,
      maxTokens: tokenizer.max_tokens,
      instructionSet: this.instructions,
      kernels: this.name,
      threads: this.threads,
      bytes: weights.bytes,
    };
  }

  /**
   * An answer for each text: its `values` in the order of the labels, calibrated if the model is, its `familiarity` (null
   * if the model cannot tell), its `tokens`, whether it was `truncated`.
   */
  classify(texts) {
    const encoded = texts.map((text, index) => {
      const cleaned = this.tokenizer.clean(text);
      if (!cleaned) {
        const error = new Error("The text is blank: there is nothing to classify.");
        throw Object.assign(error, { code: "blank_text", index });
      }
      return this.tokenizer.encode(cleaned);
    });
    const answers = [];
    for (let first = 0, end = 0; first < encoded.length; first = end) {
      for (let tokens = 0; end < encoded.length; end++) {
        tokens += encoded[end].ids.length;
        if (end > first && tokens > PASS_TOKENS) break;
      }
      const passed = encoded.slice(first, end);
      const logits = this.logits(passed.map(({ ids }) => ids));
      passed.forEach(({ ids, tokens, truncated }, i) => {
        const scores = calibratedScores(this.description.calibration, Array.from(logits[i]));
        const values = this.#answers(scores);
        if (!values.every(Number.isFinite)) throw new Error("The model answers this text with NaN.");
        answers.push({ values, familiarity: this.familiarity?.of(ids, scores) ?? null, tokens, truncated });
      });
    }
    return answers;
  }

  /** One forward pass: the scores, a Float32Array for each list of token ids. */
  logits(texts) {
    return this.#forward(texts, this.session, this.threads);
  }

  #forward(texts, session, threads) {
    const labels = this.description.labels.length;
    const starts = [0];
    for (const ids of texts) starts.push(starts.at(-1) + ids.length);
    const numbers = Int32Array.from([...starts, ...texts.flat()]);
    const place = this.#allocate(numbers.byteLength + 4 * texts.length * labels);
    new Int32Array(this.memory.buffer, place, numbers.length).set(numbers);
    const answers = place + numbers.byteLength;
    const ids = place + 4 * starts.length;
    const failed = this.kernels.forward(session, ids, place, texts.length, threads, answers);
    const found = new Float32Array(this.memory.buffer, answers, texts.length * labels).slice();
    this.kernels.free(place);
    if (failed) throw new Error("This browser gave no more memory for the model; close other pages, or try fewer texts.");
    return texts.map((_, i) => found.subarray(i * labels, (i + 1) * labels));
  }

  // The model as it will lie in memory: its file, with room for the word embeddings at twice their size.
  get #bytes() {
    const { bytes, words } = this.description.weights;
    return bytes + words.rows * words.width;
  }

  #reserve() {
    const pages = (bytes) => Math.ceil(bytes / PAGE_BYTES);
    const shared = this.threads > 1;
    // Shared memory sets its largest size aside: passes take up to 30 kB per token.
    const passes = 2 ** 26 + 2 ** 15 * this.description.tokenizer.max_tokens;
    const maximum = shared ? pages(MODULE_BYTES + this.#bytes + passes) : 65535;
    this.memory = new WebAssembly.Memory({ initial: pages(MODULE_BYTES), maximum, shared });
    this.kernels = new WebAssembly.Instance(this.module, { env: { memory: this.memory } }).exports;
    this.kernels._initialize?.();
    this.place = this.#allocate(this.#bytes);
  }

  #allocate(bytes) {
    const place = this.kernels.aligned_alloc(64, Math.ceil(bytes / 64) * 64) >>> 0;
    if (!place) throw new Error("This browser gave no more memory for the model; close other pages, or try fewer texts.");
    return place;
  }

  async #load(base, store, onProgress) {
    const { weights, pointers } = this.description;
    const { rows, width } = weights.words;
    const memory = new Uint8Array(this.memory.buffer);
    // What follows the structures and tables lies further back, where widen_words wants the bytes of the words.
    const put = (part, at) => memory.set(part, this.place + at + (at < weights.image ? 0 : rows * width));
    const take = (part, at) => {
      const cut = Math.max(0, Math.min(part.length, weights.image - at));
      put(part.subarray(0, cut), at);
      put(part.subarray(cut), at + cut);
    };
    await readWeights(new URL(weights.file, base), weights, store, take, onProgress);
    this.#readFamiliarity();
    const words = this.place + weights.image;
    this.kernels.prepare_weights(this.place + weights.int8, weights.image - weights.int8);
    this.kernels.widen_words(words, words + 2 * rows * width, rows, width);
    // In the file an address counts from its beginning.
    const view = new DataView(this.memory.buffer);
    for (const at of pointers) view.setUint32(this.place + at, view.getUint32(this.place + at, true) + this.place, true);
  }

  // The end of the file is the table of familiarity, if there is one.
  #readFamiliarity() {
    const { calibration, problem_type: problemType } = this.description;
    const record = calibration?.familiarity;
    if (!record) return;
    const end = this.place + this.#bytes;
    // A copy: the memory moves when it grows.
    const table = new Uint8Array(this.memory.buffer).slice(end - record.vocabulary - 2 ** record.bits, end);
    this.familiarity = new Familiarity(record, table, problemType);
  }

  /** Of the kernels in the module, the fastest here. A browser that computes one of them wrongly does not use it. */
  #chooseKernels(wanted) {
    const names = [];
    for (let name; (name = this.kernels.instruction_set(names.length)); ) names.push(name);
    if (wanted !== "auto") return names.at(-1);
    if (names.length > 1) {
      const ids = this.tokenizer.encode(this.tokenizer.clean(this.description.check.text)).ids.slice(0, TRIED_TOKENS);
      const tried = names.map((name) => ({ name, ...this.#open(name, 0), logits: null, milliseconds: Infinity }));
      // In turns, since the browser improves the code meanwhile.
      const [fewest, most] = TRIED_ROUNDS;
      const end = performance.now() + TRIED_MILLISECONDS;
      for (let round = 0; round < most && (round < fewest || performance.now() < end); round++) {
        for (const one of tried) {
          const began = performance.now();
          one.logits = String(this.#forward([ids], one.session, 1)[0]);
          one.milliseconds = Math.min(one.milliseconds, performance.now() - began);
        }
      }
      const { logits } = tried.at(-1);
      const right = tried.filter((one) => one.logits === logits);
      names[0] = right.reduce((a, b) => (b.milliseconds < a.milliseconds ? b : a)).name;
      for (const { pool, session } of tried) {
        this.kernels.close_pool(pool);
        this.kernels.close_session(session);
      }
    }
    return names[0];
  }

  #open(name, helpers) {
    const pool = this.kernels.open_pool(this.place, helpers, name);
    const session = pool && this.kernels.open_session(pool);
    if (!session) throw new Error("This browser gave no memory for the model; close other pages.");
    return { pool, session };
  }

  async #startThreads(wanted) {
    const name = this.#chooseKernels(wanted);
    this.session = this.#open(name, this.threads - 1).session;
    const helpers = Array.from({ length: this.threads - 1 }, (_, number) => this.#startHelper(number));
    try {
      await Promise.all(helpers);
    } catch {
      // Some browsers start no worker from a worker. A pool of its own waits for nobody.
      this.threads = 1;
      this.session = this.#open(name, 0).session;
    }
    const memory = new Uint8Array(this.memory.buffer);
    this.name = String.fromCharCode(...memory.slice(name, memory.indexOf(0, name)));
  }

  #startHelper(number) {
    const { module, memory } = this;
    const stack = this.#allocate(STACK_BYTES) + STACK_BYTES;
    const worker = new Worker(import.meta.url, { type: "module" });
    return new Promise((resolve, reject) => {
      worker.onmessage = resolve;
      worker.onerror = reject;
      worker.postMessage({ help: { module, memory, stack, number } });
    });
  }

  // A known text: a damaged file or a browser that computes wrongly shows, and the browser has optimised the code. The
  // answers are those before calibration.
  #check() {
    const { text, answers, spread } = this.description.check;
    const { ids } = this.tokenizer.encode(this.tokenizer.clean(text));
    const found = this.#answers(Array.from(this.logits([ids])[0]));
    const isNear = found.every((one, i) => Math.abs(one - answers[i]) <= TOLERANCE * spread);
    if (!isNear || found.length !== answers.length) throw new WebAssembly.RuntimeError("another answer");
  }

  // As common/problem_types.py: what scores mean.
  #answers(scores) {
    switch (this.description.problem_type) {
      case "single_label_classification":
        return softmax(scores);
      case "multi_label_classification":
        return scores.map((score) => (Number.isFinite(score) ? (1 + Math.tanh(score / 2)) / 2 : NaN));
      case "regression":
        return scores;
    }
    throw new Error(`This page does not know models of the kind ${this.description.problem_type}; reload it.`);
  }
}

function softmax(scores) {
  const largest = Math.max(...scores);
  const exponentials = scores.map((score) => Math.exp(score - largest));
  const sum = exponentials.reduce((a, b) => a + b);
  return exponentials.map((e) => e / sum);
}

// ---------------------------------------------------------------- as a worker

/** A thread of the kernels: it sleeps in the module until a pass wants it, and never comes back. */
function help({ module, memory, stack, number }) {
  const kernels = new WebAssembly.Instance(module, { env: { memory } }).exports;
  kernels.__stack_pointer.value = stack;
  postMessage("ready");
  kernels.run_thread(number);
}

async function answer({ number, open, texts }) {
  if (!open) return opened.then((model) => model.classify(texts));
  const onProgress = (progress) => postMessage({ number, progress });
  opened = LocalModel.open(open.base, { ...open.options, onProgress });
  return (await opened).info;
}

let opened;
if (typeof WorkerGlobalScope !== "undefined" && globalThis instanceof WorkerGlobalScope) {
  globalThis.onmessage = async ({ data }) => {
    if (data.help) return help(data.help);
    try {
      postMessage({ number: data.number, result: await answer(data) });
    } catch (error) {
      const { message, code, index } = error;
      postMessage({ number: data.number, error: { message, code, index } });
    }
  };
}
