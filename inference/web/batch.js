// Classifies many texts through /predict/batch: in chunks, patiently, and without letting one bad text spoil the rest.

import { ApiError, call, sleep } from "./api.js";

const CHUNK = 32; // small enough to show progress and to let single texts pass
const IN_FLIGHT = 2; // the server has the next chunk before it has finished this one
const PATIENCE_SECONDS = [1, 2, 4, 8];

/**
 * Classify `texts`: strings, or pairs of them for a model that reads pairs. `more`: what to ask for beside the answers.
 * `onAnswers(indices, answers)` gets each chunk; an answer is the server's, or {error} with the reason of a refusal.
 * `onWait(line)` says why nothing moves, null when it goes on. Rejects only when `signal` aborts.
 */
export async function classifyAll(texts, { more, signal, onAnswers, onWait }) {
  const isBlank = (text) => [text].flat().some((part) => !part.trim());
  const blank = texts.flatMap((text, i) => (isBlank(text) ? [i] : []));
  if (blank.length) onAnswers(blank, blank.map(() => ({ error: "blank: nothing to classify" })));
  const waiting = texts.flatMap((text, i) => (isBlank(text) ? [] : [i]));
  let chunkSize = CHUNK;

  // Without the text that the refusal names, or else halved, until the server takes it.
  async function classify(indices) {
    const result = await ask({ ...bodyOf(indices.map((i) => texts[i])), ...more }, { signal, onWait });
    if (Array.isArray(result)) {
      onAnswers(indices, result);
    } else if (indices.length === 1) {
      onAnswers(indices, [{ error: reasonOf(result) }]);
    } else if (accusedBy(result) < indices.length) {
      const accused = accusedBy(result);
      onAnswers([indices[accused]], [{ error: reasonOf(result) }]);
      await classify(indices.filter((_, place) => place !== accused));
    } else {
      const half = Math.ceil(indices.length / 2);
      if (["too_many_texts", "call_too_large"].includes(result.code) || result.status === 413) chunkSize = Math.min(chunkSize, half);
      await classify(indices.slice(0, half));
      await classify(indices.slice(half));
    }
  }

  async function work() {
    while (waiting.length) await classify(waiting.splice(0, chunkSize));
  }
  await Promise.all(Array.from({ length: IN_FLIGHT }, work));
}

// "texts[3] has 30000 characters …" names the fourth, and so does "text_pairs[3] …".
const ACCUSED = /^text(?:s|_pairs)\[(\d+)\]/;

function accusedBy({ status, message }) {
  return status === 422 && ACCUSED.test(message) ? Number(message.match(ACCUSED)[1]) : Infinity;
}

function reasonOf({ message }) {
  return message.replace(ACCUSED, "the text");
}

function bodyOf(texts) {
  if (typeof texts[0] === "string") return { texts };
  return { texts: texts.map(([first]) => first), text_pairs: texts.map(([, second]) => second) };
}

// The answers, or the error when waiting would not help.
async function ask(body, { signal, onWait }) {
  for (let attempt = 0; ; attempt += 1) {
    try {
      const { data } = await call("predict/batch", { body, signal });
      if (attempt) onWait(null);
      return data;
    } catch (error) {
      if (signal.aborted || !(error instanceof ApiError)) throw error;
      if (!error.isBusy && !error.isOutage) return error;
      const patience = PATIENCE_SECONDS[Math.min(attempt, PATIENCE_SECONDS.length - 1)];
      const seconds = error.retryAfter ?? patience;
      onWait(error.isOutage ? error.message : `The server is busy; going on in ${Math.ceil(seconds)} s.`);
      await sleep(seconds, signal);
    }
  }
}
