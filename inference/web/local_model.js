// A classifier that runs in this browser, in a worker of its own. The texts go nowhere else.

const TEXTS_PER_MESSAGE = 16; // so that a single text gets in between those of a long list, and a list can be stopped

/**
 * Open the model in the folder at `base`, which inference/exporting/browser.py has written.
 *
 * `threads`: at most so many, where the page's headers allow threads; "auto" takes what this machine has.
 * `instructions`: "auto", or for measurements "relaxed-simd" without the product of four bytes, or "simd".
 * `onProgress({ loaded, total })`: bytes of the model's file.
 * Throws an Error with one sentence for the visitor.
 */
export async function openModel(base, { threads = "auto", instructions = "auto", onProgress } = {}) {
  const folder = new URL(String(base).replace(/\/?$/, "/"), document.baseURI);
  const worker = new Worker(new URL("local_worker.js", import.meta.url), { type: "module" });
  const waiting = new Map(); // by the number of the message
  let numMessages = 0;
  let failure = null;

  const fail = (message) => {
    failure = new Error(message);
    worker.terminate();
    for (const { reject } of waiting.values()) reject(failure);
    waiting.clear();
  };
  const ask = (message) => {
    if (failure) return Promise.reject(failure);
    return new Promise((resolve, reject) => {
      waiting.set(++numMessages, { resolve, reject });
      worker.postMessage({ number: numMessages, ...message });
    });
  };
  worker.onmessage = ({ data: { number, progress, result, error } }) => {
    if (progress) return onProgress?.(progress);
    const { resolve, reject } = waiting.get(number) ?? {};
    waiting.delete(number);
    if (error) reject?.(Object.assign(new Error(error.message), error));
    else resolve?.(result);
  };
  worker.onerror = (event) => {
    event.preventDefault();
    fail("The part of this page that runs the model did not load or has stopped; reload the page.");
  };

  let info;
  try {
    info = await ask({ open: { base: folder.href, options: { threads, instructions } } });
  } catch (error) {
    worker.terminate();
    throw error;
  }
  return {
    info,
    /**
     * An answer for each text, in their order: `values` in the order of the labels, the text's `familiarity` (null if the
     * model cannot tell), the `tokens` of the whole text, and whether it was `truncated` to what the model reads. A blank text is an Error with the `code` "blank_text" and
     * its `index`. Rejects as soon as `signal` aborts.
     */
    async classify(texts, { signal } = {}) {
      const answers = [];
      for (let first = 0; first < texts.length; first += TEXTS_PER_MESSAGE) {
        signal?.throwIfAborted();
        const asked = ask({ texts: texts.slice(first, first + TEXTS_PER_MESSAGE) });
        try {
          answers.push(...(await untilAborted(asked, signal)));
        } catch (error) {
          if (error.index !== undefined) error.index += first;
          throw error;
        }
      }
      return answers;
    },
    close: () => fail("The model was closed."),
  };
}

function untilAborted(promise, signal) {
  if (!signal) return promise;
  promise.catch(() => {}); // nobody may be there to hear of it
  return new Promise((resolve, reject) => {
    const stop = () => reject(signal.reason);
    signal.addEventListener("abort", stop, { once: true });
    promise.then(resolve, reject).finally(() => signal.removeEventListener("abort", stop));
  });
}
