// Talks to the server that this page came from, or in a page without a server to the model in this browser (local.js).
// Every address is relative to the page, so any path prefix works.

import { askForKey } from "./notice.js";

let apiKey = ""; // in memory only: gone with the page

/** A request that did not end in an answer; its message is one line for people. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = "", retryAfter = null, isFinal = false } = {}) {
    super(message);
    Object.assign(this, { status, code, retryAfter, isFinal });
  }

  /** Whether the server or its model is away, rather than this request being at fault. */
  get isOutage() {
    return this.status === 0 || this.status === 502 || this.code === "model_unavailable";
  }

  /** Whether the server asks to come back later, and waiting helps. */
  get isBusy() {
    return !this.isOutage && (this.status === 429 || this.status === 503) && this.code !== "call_too_large";
  }
}

/** Whether the server wanted a key, and has one. */
export function hasKey() {
  return apiKey !== "";
}

let answerHere = null;

/** From now on, let `answer` do what `call` says. */
export function answerWith(answer) {
  answerHere = answer;
}

/**
 * GET `path`, or POST `body` to it.
 * Returns the answer, the milliseconds it took and what they are, the server's own share of them, and the id of the request.
 * Waits for the visitor's API key where the server wants one.
 */
export async function call(path, { body, signal } = {}) {
  if (answerHere) return answerHere(path, { body, signal });
  for (;;) {
    const started = performance.now();
    const usedKey = apiKey;
    const { response, data } = await send(path, body, signal);
    if (response.status === 401) {
      if (usedKey === apiKey) apiKey = await newKey(usedKey !== "");
      signal?.throwIfAborted();
      continue;
    }
    if (!response.ok) throw refusal(response, data);
    const milliseconds = performance.now() - started;
    const requestId = response.headers.get("X-Request-ID");
    return { data, milliseconds, where: "round trip", parts: serverParts(response), requestId };
  }
}

// A header carries nothing beyond ASCII: not the typographic quotes that a key may have got in a chat or a document.
async function newKey(isWrong) {
  const key = await askForKey(isWrong);
  return /^[\x20-\x7e]*$/.test(key) ? key : newKey(true);
}

async function send(path, body, signal) {
  const headers = apiKey ? { Authorization: `Bearer ${apiKey}` } : {};
  const options = { headers, signal, cache: "no-store" };
  if (body !== undefined) {
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
    headers["Content-Type"] = "application/json";
  }
  let response;
  try {
    response = await fetch(path, options);
    return { response, data: JSON.parse(await response.text()) };
  } catch (error) {
    signal?.throwIfAborted();
    // A proxy's page instead of our JSON: the status says more than its text.
    if (error instanceof SyntaxError) return { response, data: null };
    throw new ApiError("The server does not answer.");
  }
}

function refusal(response, data) {
  const { code = "", message } = data?.error ?? {};
  const reason = message ?? (typeof data?.error === "string" ? data.error : `The server answered ${response.status}.`);
  return new ApiError(reason, { status: response.status, code, retryAfter: secondsToWait(response) });
}

function secondsToWait(response) {
  const value = response.headers.get("Retry-After");
  if (value === null) return null;
  const seconds = /^\s*\d+\s*$/.test(value) ? Number(value) : (Date.parse(value) - Date.now()) / 1000;
  return Number.isFinite(seconds) ? Math.max(0, seconds) : null;
}

// Server-Timing: tokenize;dur=0.2, forward;dur=7.9;desc="int8"  ->  [["tokenize", 0.2], ["forward", 7.9]]
function serverParts(response) {
  const header = response.headers.get("Server-Timing") ?? "";
  return [...header.matchAll(/([\w-]+)[^,]*?;\s*dur=([\d.]+)/g)].map(([, name, dur]) => [name, Number(dur)]);
}

/** Resolve after `seconds`; reject as soon as `signal` aborts. */
export function sleep(seconds, signal) {
  return new Promise((resolve, reject) => {
    const stop = () => {
      clearTimeout(timer);
      reject(signal.reason);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", stop);
      resolve();
    }, seconds * 1000);
    if (signal?.aborted) stop();
    else signal?.addEventListener("abort", stop, { once: true });
  });
}
