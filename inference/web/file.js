// A whole file: chosen or dropped, planned, classified, downloaded.

import { classifyAll } from "./batch.js";
import { Table, decode, isBinary } from "./csv.js";
import { accentOf, count, element, joined, number, percent, rows } from "./format.js";
import { asked, onChoice } from "./promise.js";
import { kind, onReady } from "./server.js";

const MAX_BYTES = 64 * 1024 * 1024;
const NUM_PREVIEW = 6;
const NUM_REFUSED = 50;
const SHOW_EVERY_MS = 100;
const EARLY_MS = 1000;
const WITHOUT_LABEL = { uncertain: "not sure", unfamiliar: "unfamiliar" }; // by why

const $ = (id) => document.getElementById(id);
let file = null; // the File under work
let table = null;
let choices = [];
let running = null; // AbortController of the run under way
let downloadUrl = "";

/** Take files from now on. */
export function startFile() {
  $("choose").addEventListener("click", () => $("file-input").click());
  $("file-input").addEventListener("change", ({ target }) => open(target.files[0]));
  acceptDrops();
  $("has-header").addEventListener("change", ({ target }) => {
    table.hasHeader = target.checked;
    showPlan();
  });
  for (const id of ["column", "pair-column"]) $(id).addEventListener("change", showSample);
  $("plan").addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  $("cancel").addEventListener("click", () => running.abort());
  for (const id of ["forget", "again"]) $(id).addEventListener("click", startOver);
  onReady(showHint);
  onChoice(showHint);
}

function showHint() {
  const names = columnsOf(asked());
  const number = ["one more column", "two more columns", "three more columns", "four more columns"][names.length - 1];
  const what = kind.readsPairs ? "CSV with a column for each text." : "CSV, or plain text with one text per line.";
  const list = new Intl.ListFormat("en").formatToParts(names);
  const parts = list.map(({ type, value }) => (type === "element" ? element("em", {}, value) : value));
  $("file-hint").replaceChildren(`${what} You get it back with ${number}: `, ...parts, ".");
}

// As inference/bulk/rows_out.py: what a model adds to each row; `more` is what was asked for beside the answer.
function columnsOf(more) {
  const decided = { multi_label_classification: ["labels"], regression: ["value"] }[kind.problemType];
  return decided ?? ["label", "confidence", ...(more.max_error ? ["abstained"] : []), ...(more.coverage ? ["set"] : [])];
}

function cellsOf(answer, more) {
  if (!isAnswered(answer)) return columnsOf(more).map(() => "");
  if (answer.value !== undefined) return [Number(answer.value.toPrecision(7))];
  if (answer.labels) return [joined(answer.labels, kind.labels)];
  const { label, confidence, abstained, set } = answer;
  const cells = { label: label ?? "", confidence: confidence.toFixed(4), abstained: abstained ?? "" };
  return columnsOf(more).map((name) => cells[name] ?? joined(set, kind.labels));
}

function isAnswered(answer) {
  return Boolean(answer) && answer.error === undefined;
}

// Anywhere on the page: a file dropped beside the zone would make the browser leave.
function acceptDrops() {
  let depth = 0; // dragenter and dragleave come for every element on the way
  const hover = (change) => {
    depth = Math.max(0, depth + change);
    $("file").classList.toggle("hover", depth > 0);
  };
  const holdsFile = ({ dataTransfer }) => dataTransfer?.types.includes("Files");
  addEventListener("dragenter", (event) => holdsFile(event) && hover(1));
  addEventListener("dragleave", (event) => holdsFile(event) && hover(-1));
  addEventListener("dragover", (event) => holdsFile(event) && event.preventDefault());
  addEventListener("drop", (event) => {
    if (!holdsFile(event)) return;
    event.preventDefault();
    hover(-depth);
    if (!running) open(event.dataTransfer.files[0]);
  });
}

function show(part) {
  for (const id of ["drop", "plan", "run"]) $(id).hidden = id !== part;
}

function startOver() {
  $("file-input").value = "";
  show("drop");
  $("choose").focus();
}

async function open(chosen) {
  if (!chosen) return;
  file = chosen;
  $("drop-error").textContent = "";
  try {
    if (file.size > MAX_BYTES) throw new Error(`${file.name} is larger than 64 MB: split it.`);
    const bytes = await file.arrayBuffer();
    if (isBinary(bytes)) throw new Error(`${file.name} is not a text file.`);
    table = new Table(decode(bytes), isCsv(file));
    if (!table.records.length) throw new Error(`${file.name} is empty.`);
    if (kind.readsPairs && table.width < 2) {
      throw new Error(`${file.name} has one column: the model reads two texts together, each from its own.`);
    }
  } catch (error) {
    $("drop-error").textContent = error.message;
    show("drop");
    return;
  }
  $("has-header").checked = table.hasHeader;
  showPlan();
  show("plan");
  $("start").focus();
}

function isCsv({ name, type }) {
  return /\.(csv|tsv|tab)$/i.test(name) || (!/\.txt$/i.test(name) && /csv|tab-separated/.test(type));
}

function showPlan() {
  choices = table.textColumns();
  $("column").replaceChildren(...choices.map(({ name }, i) => element("option", { value: i }, name)));
  $("pair-column").replaceChildren(...choices.map(({ name }, i) => element("option", { value: i }, name)));
  if (kind.readsPairs) {
    // The two that hold the most text, in their order in the file.
    const [first, second] = [0, 1].sort((a, b) => choices[a].columns[0] - choices[b].columns[0]);
    [$("column").value, $("pair-column").value] = [first, second];
  }
  $("column-field").hidden = choices.length === 1;
  $("header-field").hidden = !table.isCsv;
  $("file-name").replaceChildren(element("b", {}, file.name), ` ${rows(table.rows.length)}`);
  $("start").textContent = `Classify ${rows(table.rows.length)}`;
  $("start").disabled = !table.rows.length;
  showSample();
}

function planned() {
  const [first, second] = ["column", "pair-column"].map((id) => table.texts(choices[$(id).value]?.columns ?? []));
  return kind.readsPairs ? first.map((text, i) => [text, second[i]]) : first;
}

function showSample() {
  $("sample").replaceChildren(...planned().slice(0, 3).map((text) => previewRow(text)));
}

function previewRow(text, ...extra) {
  const shown = [text].flat().map((part) => part.slice(0, 300) || "(blank)").join(" | ");
  return element("li", {}, ...extra, element("span", { class: "excerpt", dir: "auto" }, shown));
}

async function run() {
  const texts = planned();
  const answers = new Array(texts.length).fill(null);
  const more = asked();
  const state = { texts, answers, more, done: 0, wait: null, started: performance.now(), ended: 0, timer: null };
  running = new AbortController();
  showStart();
  try {
    await classifyAll(texts, {
      more,
      signal: running.signal,
      onWait: (line) => showProgressSoon(Object.assign(state, { wait: line })),
      onAnswers: (indices, chunk) => {
        indices.forEach((row, i) => (answers[row] = chunk[i]));
        state.done += indices.length;
        showProgressSoon(Object.assign(state, { wait: null }));
      },
    });
  } catch (error) {
    running.abort(); // the other chunk in flight, too
    if (error.name !== "AbortError") throw error;
  } finally {
    showEnd(Object.assign(state, { ended: performance.now(), wait: null }));
    running = null;
  }
}

function showStart() {
  show("run");
  $("run-name").replaceChildren(element("b", {}, file.name));
  for (const id of ["download", "again", "refused"]) $(id).hidden = true;
  $("cancel").hidden = false;
  for (const id of ["shares", "legend", "preview"]) $(id).replaceChildren();
  $("cancel").focus();
}

// Many chunks may end at once; the page is drawn for all of them together.
function showProgressSoon(state) {
  state.timer ??= setTimeout(() => {
    state.timer = null;
    if (!state.ended) showProgress(state);
  }, SHOW_EVERY_MS);
}

function showProgress({ done, texts, answers, wait, started }) {
  const elapsed = performance.now() - started;
  const left = Math.ceil(((texts.length - done) * elapsed) / 1000 / Math.max(1, done));
  const isEarly = elapsed < EARLY_MS; // too early to tell
  $("progress").value = texts.length ? done / texts.length : 1;
  $("pace").textContent = `${count(done)} of ${rows(texts.length)}`;
  $("run-state").textContent = wait ?? (isEarly ? "Classifying …" : `About ${count(left)} s left.`);
  showTally(answers);
}

function showTally(answers) {
  const [tally, silent] = [new Map(), new Map()];
  const add = (map, name) => map.set(name, (map.get(name) ?? 0) + 1);
  let numRefused = 0;
  for (const answer of answers) {
    if (answer?.error) numRefused += 1;
    else if (answer?.abstained) add(silent, WITHOUT_LABEL[answer.abstained]);
    else if (answer?.value === undefined && answer) {
      for (const label of answer.labels ?? [answer.label]) add(tally, label);
    }
  }
  const sorted = [...tally].sort((a, b) => accentOf(a[0]) - accentOf(b[0]));
  // Rows may have several labels, which then share the bar.
  const whole = Math.max(answers.length, numRefused + [...sorted, ...silent].reduce((sum, [, some]) => sum + some, 0));
  const segment = (some, attributes) => {
    const part = element("span", attributes);
    part.style.setProperty("--share", some / whole);
    return part;
  };
  $("shares").hidden = kind.problemType === "regression";
  $("shares").replaceChildren(
    ...sorted.map(([label, some]) => segment(some, { "data-accent": accentOf(label) })),
    ...[...silent.values()].map((some) => segment(some, { class: "silent" })),
    ...(numRefused ? [segment(numRefused, { class: "refused" })] : []),
  );
  $("legend").replaceChildren(
    ...sorted.map(([label, some]) => {
      return element("li", { "data-accent": accentOf(label) }, `${label} `, element("b", {}, count(some)));
    }),
    ...[...silent].map(([why, some]) => element("li", { class: "silent" }, `${why} `, element("b", {}, count(some)))),
    ...(numRefused ? [element("li", { class: "refused" }, "no answer ", element("b", {}, count(numRefused)))] : []),
    ...numbersOf(answers),
  );
}

function numbersOf(answers) {
  const values = answers.flatMap((answer) => (answer?.value === undefined ? [] : [answer.value]));
  if (!values.length) return [];
  const [least, most, sum] = values.reduce(
    ([low, high, total], one) => [Math.min(low, one), Math.max(high, one), total + one],
    [Infinity, -Infinity, 0],
  );
  const facts = { mean: sum / values.length, lowest: least, highest: most };
  return Object.entries(facts).map(([name, value]) => element("li", {}, `${name} `, element("b", {}, number(value))));
}

function showEnd(state) {
  const { texts, answers, more, done, started, ended } = state;
  showProgress(state);
  const refused = answers.flatMap((answer, i) => (answer?.error ? [[i, answer.error]] : []));
  const seconds = (ended - started) / 1000;
  $("run-state").textContent =
    done < texts.length
      ? `Cancelled. ${rows(done)} of ${count(texts.length)} are done and can be downloaded.`
      : `Done in ${seconds.toFixed(1)} s, ${count(Math.round(done / Math.max(seconds, 0.001)))} rows per second.`;
  $("announce").textContent = $("run-state").textContent;
  $("cancel").hidden = true;
  $("again").hidden = false;
  offerDownload(answers, more);
  showRefused(refused);
  // The least sure are the ones to check. Several labels and numbers have no confidence, and stay in their order.
  const answered = answers.flatMap((answer, i) => (isAnswered(answer) ? [i] : []));
  answered.sort((a, b) => (answers[a].confidence ?? 0) - (answers[b].confidence ?? 0)).splice(NUM_PREVIEW);
  $("preview").replaceChildren(...answered.map((i) => previewRow(texts[i], ...tagOf(answers[i]))));
  ($("download").hidden ? $("again") : $("download")).focus();
}

function tagOf({ label, labels, value, confidence, abstained }) {
  const blank = element("span", { class: "share" }); // the texts stay below each other
  if (abstained) return [element("span", { class: "tag silent" }, WITHOUT_LABEL[abstained]), blank];
  if (value !== undefined) return [element("span", { class: "tag" }, number(value))];
  if (labels) return [tagsOf(labels)];
  const tag = element("span", { class: "tag", "data-accent": accentOf(label) }, label);
  return [tag, element("span", { class: "share" }, percent(confidence))];
}

function tagsOf(labels) {
  const names = labels.map((label) => element("span", { "data-accent": accentOf(label) }, label));
  return element("span", { class: "tag several" }, ...(names.length ? names : ["none"]));
}

function showRefused(refused) {
  $("refused").hidden = !refused.length;
  $("refused-title").textContent = `${rows(refused.length)} without an answer`;
  const first = table.hasHeader ? 2 : 1; // as a spreadsheet counts
  const items = refused.slice(0, NUM_REFUSED).map(([i, reason]) => element("li", {}, `Row ${count(i + first)}: ${reason}`));
  if (refused.length > NUM_REFUSED) items.push(element("li", {}, `… and ${count(refused.length - NUM_REFUSED)} more`));
  $("refused-rows").replaceChildren(...items);
}

function offerDownload(answers, more) {
  const hasErrors = !answers.every(isAnswered);
  const values = answers.map((answer) => {
    const cells = cellsOf(answer, more);
    return hasErrors ? [...cells, answer ? (answer.error ?? "") : "not classified: cancelled"] : cells;
  });
  const csv = table.withColumns([...columnsOf(more), ...(hasErrors ? ["error"] : [])], values);
  URL.revokeObjectURL(downloadUrl);
  downloadUrl = URL.createObjectURL(new Blob([csv], { type: "text/csv;charset=utf-8" }));
  $("download").href = downloadUrl;
  $("download").download = `${file.name.replace(/\.[^.]*$/, "")}.labelled.${table.delimiter === "\t" ? "tsv" : "csv"}`;
  $("download").hidden = !answers.some(Boolean);
}
