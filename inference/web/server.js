// Whether the server and its model are there, and what the header says of them.

import { ApiError, call, sleep } from "./api.js";
import { count, learnLabels, percent } from "./format.js";
import { setNotice } from "./notice.js";

const POLL_SECONDS = 2;
const listeners = [];
let watching = null;

/** What the model reads and answers: a label, labels or a number; the names are those of GET model. */
export const kind = { problemType: "single_label_classification", thresholds: {}, labels: [], readsPairs: false };

/** Call `listener` with what GET model says (null where it says nothing) whenever the model is there, or there again. */
export function onReady(listener) {
  listeners.push(listener);
}

/** Wait until the server is healthy, saying meanwhile why it is not. Callers share one watch. */
export function watch() {
  watching ??= untilHealthy().finally(() => (watching = null));
  return watching;
}

async function untilHealthy() {
  let health = null;
  while (!health) {
    try {
      health = (await call("health")).data;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (error.isFinal) {
        setNotice("server", error.message);
        return;
      }
      setNotice("server", `${error.message.replace(/[.…\s]*$/, ".")} Trying again …`);
      await sleep(POLL_SECONDS);
    }
  }
  setNotice("server", null);
  const model = await describeModel();
  const labels = model?.labels ?? health.labels ?? [];
  learnLabels(labels);
  Object.assign(kind, {
    problemType: model?.problem_type ?? "single_label_classification",
    thresholds: model?.thresholds ?? {},
    labels,
    readsPairs: model?.reads_pairs ?? false,
  });
  document.body.toggleAttribute("data-pairs", kind.readsPairs);
  for (const listener of listeners) listener({ labels, model });
}

async function describeModel() {
  let model = null;
  try {
    model = (await call("model")).data;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error; // an older server without the route: the page works without it
  }
  document.getElementById("facts").replaceChildren(factsOf(model ?? {}).join("  ·  "));
  return model;
}

function factsOf({ name, engine, test_accuracy: accuracy, metrics }) {
  const facts = [name, engine?.engine];
  if (Number.isFinite(accuracy)) {
    const tested = metrics?.test?.rows;
    facts.push(`${percent(accuracy)} right on ${tested ? `${count(tested)} ` : ""}test texts`);
  }
  return facts.filter(Boolean);
}
