// Answers what the page asks with the model in this browser, in the shapes in which a server would answer.

import { meaning, placeOfBest } from "./answering.js";
import { ApiError } from "./api.js";
import { openModel } from "./local_model.js";
import { element } from "./format.js";

const MOST_EXPLAINING_TEXTS = 64; // a longer text is explained in groups of words
const MEGABYTE = 1e6;
const SHOWN_STEPS = 10;

let opened = null;

/** The model, opened at the first call. If it does not open, the reason is for good: a reload may help. */
function model() {
  if (opened) return opened;
  keepPage();
  opened = openModel(document.body.dataset.model, { onProgress: showProgress }).catch((error) => {
    throw new ApiError(error.message, { isFinal: true });
  });
  return opened;
}

/** Keeps the page's files for a visit without a connection. Without it, as in some private windows, the page works too. */
async function keepPage() {
  try {
    await navigator.serviceWorker?.register("service_worker.js");
  } catch (error) {
    console.info(`This page will not open without a connection: ${error.message}`);
  }
}

let shownStep = -1;

function showProgress({ loaded, total }) {
  const step = Math.floor((loaded / total) * SHOWN_STEPS); // each change is read out to those who listen
  if (step === shownStep) return;
  shownStep = step;
  const megabytes = (bytes) => (bytes / MEGABYTE).toFixed(0);
  const line = `Loading the model into this browser: ${megabytes(loaded)} of ${megabytes(total)} MB.`;
  const bar = element("progress", { value: loaded / total, "aria-hidden": "true" });
  document.getElementById("remark").replaceChildren(bar, ` ${line}`);
  document.getElementById("announce").textContent = line;
}

const ANSWERS = {
  health: async ({ info }) => ({ labels: info.labels }),
  model: async ({ info }) => ({
    ...info,
    problem_type: info.problemType,
    thresholds: Object.fromEntries(info.labels.map((label, i) => [label, info.thresholds[i]])),
    max_length: info.maxTokens,
    calibrated: Boolean(info.calibration),
    engine: { engine: engineOf(info) },
    test_accuracy: info.test.accuracy,
    metrics: { test: info.test, examples: info.examples },
  }),
  predict: async (found, { text, ...asked }, signal) => render(found, (await found.classify([text], { signal }))[0], asked),
  "predict/batch": async (found, { texts, ...asked }, signal) =>
    (await found.classify(texts, { signal })).map((one) => render(found, one, asked)),
  explain: (found, { text }, signal) => explain(found, text, signal),
};

/** Like `call` of api.js. */
export async function answer(path, { body, signal } = {}) {
  const started = performance.now();
  const found = await model();
  signal?.throwIfAborted();
  let data;
  try {
    data = await ANSWERS[path](found, body, signal);
  } catch (error) {
    signal?.throwIfAborted();
    if (error.code !== "blank_text") throw new ApiError(error.message, { status: error.code ? 422 : 500, code: error.code });
    const name = path === "predict/batch" ? `texts[${error.index}]` : "text";
    throw new ApiError(`${name} is blank: there is nothing to classify`, { status: 422, code: error.code });
  }
  return { data, milliseconds: performance.now() - started, where: "in this browser", parts: [] };
}

function engineOf({ instructionSet, threads }) {
  const count = threads > 1 ? `, ${threads} threads` : "";
  return `int8 in this browser (WebAssembly ${instructionSet.replace("-", " ").replace("simd", "SIMD")}${count})`;
}

function render({ info }, answer, asked) {
  return { ...meaning(info, answer, asked), truncated: answer.truncated, num_tokens: answer.tokens };
}

// The answer to a text without any word: nothing speaks for any label, and no number is the usual one.
function withoutWords({ problemType, labels }, value) {
  return { regression: value, multi_label_classification: 0.5 }[problemType] ?? 1 / labels.length;
}

// As inference/http/routes/explain.py: leave out each word, or group of words, and see how far the answer falls.
async function explain(found, text, signal) {
  const spans = [...text.matchAll(/\S+/g)].map(({ 0: word, index }) => [index, index + word.length]);
  const { maxTokens, labels, problemType } = found.info;
  const numRead = Math.min(spans.length, maxTokens); // a word has at least one token
  const size = Math.max(1, Math.ceil(numRead / (MOST_EXPLAINING_TEXTS - 1)));
  const shortened = [];
  for (let first = 0; first < numRead; first += size) {
    const after = Math.min(first + size, numRead);
    const end = spans[Math.min(after + maxTokens, spans.length) - 1][1];
    shortened.push({ count: after - first, rest: text.slice(0, spans[first][0]) + text.slice(spans[after - 1][1], end) });
  }
  const [whole] = await found.classify([text], { signal });
  const without = await classifySome(found, shortened.map(({ rest }) => rest), signal);
  const place = placeOfBest(whole.values);
  const value = whole.values[place];
  const weights = shortened.flatMap(({ count }, i) => {
    const left = without[i]?.values[place] ?? withoutWords(found.info, value);
    return Array(count).fill((value - left) / count);
  });
  const places = inCharacters(text, spans);
  const words = places.map(([word, start, end], i) => ({ word, start, end, weight: weights[i] ?? 0 }));
  const explained = problemType === "multi_label_classification" ? { explained: labels[place] } : {};
  return { ...render(found, whole), ...explained, words };
}

/** An answer for each text, undefined for those in which nothing is left to read. */
async function classifySome(found, texts, signal) {
  const answers = Array(texts.length);
  let asked = [...texts.keys()];
  while (asked.length) {
    try {
      const some = await found.classify(asked.map((i) => texts[i]), { signal });
      some.forEach((one, place) => (answers[asked[place]] = one));
      break;
    } catch (error) {
      if (error.code !== "blank_text") throw error;
      asked = asked.filter((_, place) => place !== error.index);
    }
  }
  return answers;
}

/** Words with their places in Unicode characters, as a server counts, from places in UTF-16 units. */
function inCharacters(text, spans) {
  let [units, characters] = [0, 0];
  const until = (end) => {
    characters += [...text.slice(units, end)].length;
    units = end;
    return characters;
  };
  return spans.map(([start, end]) => [text.slice(start, end), until(start), until(end)]);
}
