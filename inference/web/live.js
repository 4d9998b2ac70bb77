// The text, and its answer while one types.

import { ApiError, call, sleep } from "./api.js";
import { accentOf, difference, element, milliseconds, number, percent, points } from "./format.js";
import { Highlight, LEAST_STRENGTH, marksOf, unreadOf, withStrength, withStrengthOfNumbers } from "./highlight.js";
import { asked, doubt, onChoice, reasonOf, silence } from "./promise.js";
import { kind, watch } from "./server.js";
import { linkedTexts, offerUse } from "./use.js";
import { offerCorrection } from "./wrong.js";

const PAUSE_MS = 150; // asked once the typing pauses this long,
const LONGEST_WAIT_MS = 450; // or, when it never pauses, this often
const EXPLAIN_AFTER_SECONDS = 0.6;
const EXPLAIN_UNASKED_WORDS = 80; // an explanation costs about one forward pass a word
const NUM_WORDS = 6;
const PASSAGE_STRENGTH = 0.4;
const CLOSE_CALL = 0.2;
const MOST_BARS = 12;
const MOST_EXAMPLES = 6;
const MOST_EARLIER = 5;
const TITLES = { multi_label_classification: "Which labels fit?", regression: "What does the model say?" };

const [
  title, fieldName, field, pairField, clearButton, answer, label, confidence, remark, bars, words, why, explainButton, timing, announcer,
  exampleBox, examples, earlierBox, earlier,
] = [
  "title", "text-name", "text", "text-pair", "clear", "answer", "label", "confidence", "remark", "bars", "words", "why", "explain", "timing",
  "announce", "example-box", "examples", "earlier-box", "earlier",
].map((id) => document.getElementById(id));
const empty = { label: label.textContent, remark: remark.textContent, why: why.textContent };
const highlight = new Highlight(document.getElementById("mirror"));
const pairHighlight = new Highlight(document.getElementById("pair-mirror"));
let maxLength = null;
let current = new AbortController(); // everything under way for the text as it stands
let timer = 0;
let waitingSince = 0;
let shown = {}; // the answer
let remembered = []; // the newest first
let isOffered = false; // the text is an example that nobody has chosen: a click selects it, and typing replaces it

/** Answer what is typed from now on. */
export function startLive() {
  for (const one of [field, pairField]) {
    one.addEventListener("input", () => {
      isOffered = false;
      textChanged();
    });
    one.addEventListener("focus", () => isOffered && one.select());
    one.addEventListener("click", () => {
      if (isOffered) one.select();
      isOffered = false;
    });
    one.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !event.isComposing) setText("");
    });
  }
  clearButton.addEventListener("click", () => {
    setText("");
    field.focus();
  });
  explainButton.addEventListener("click", () => {
    explainButton.hidden = true;
    field.focus();
    // Its end is in view, and only its beginning may have been read.
    explain(typed(), current.signal).then(() => highlight.mirror.querySelector("mark")?.scrollIntoView({ block: "nearest" }));
  });
  onChoice(() => textChanged(0));
  addEventListener("hashchange", showLinked);
  showLinked();
  textChanged(); // a browser may have kept the text over a reload
}

function showLinked() {
  const { text, textPair } = linkedTexts();
  if (text) setText(text, textPair);
}

/** Put the texts into their fields, and answer them at once. */
function setText(text, textPair = "") {
  isOffered = false;
  field.value = text;
  pairField.value = textPair;
  textChanged(0);
}

/** What is asked about, as the server takes it. */
function typed() {
  return kind.readsPairs ? { text: field.value, text_pair: pairField.value } : { text: field.value };
}

function isComplete() {
  return Object.values(typed()).every((text) => text.trim());
}

/** Show bars for the model's labels, and ask again: the model is there, or there again. */
export function modelReady({ labels, model }) {
  maxLength = model?.max_length ?? null;
  const answersNumber = kind.problemType === "regression";
  bars.hidden = answersNumber;
  bars.replaceChildren(); // another model may have other thresholds
  title.textContent = TITLES[kind.problemType] ?? "Which label fits?";
  fieldName.textContent = kind.readsPairs ? "First text" : "Text";
  offerExamples(kind.readsPairs ? {} : (model?.metrics?.examples ?? {}));
  if (!isComplete() && !answersNumber) showBars(Object.fromEntries(labels.map((name) => [name, 0])), []);
  textChanged(0);
}

// Texts that training has kept of its test rows, by name. A visitor who finds the page empty sees the first one answered.
function offerExamples(found) {
  const texts = Object.entries(found).slice(0, MOST_EXAMPLES);
  const isFirst = !examples.children.length; // not when a server is there again
  exampleBox.hidden = !texts.length;
  examples.replaceChildren(...texts.map(([name, text]) => chipOf(name, { text })));
  isOffered = isFirst && texts.length > 0 && !field.value && document.activeElement !== field;
  if (isOffered) field.value = texts[0][1];
}

const titleOf = (texts) => Object.values(texts).join(" / ");

function chipOf(name, texts) {
  const chip = element("button", { type: "button", class: "chip", title: titleOf(texts) }, name);
  chip.addEventListener("click", () => setText(texts.text, texts.text_pair));
  return element("li", {}, chip);
}

// Offer a text again that stood for a while, in place of its own beginnings.
function remember(texts) {
  const beginsIt = (one) => texts.text.startsWith(one.text) && (texts.text_pair ?? "").startsWith(one.text_pair ?? "");
  if (isOffered || chips().some(({ title }) => title === titleOf(texts))) return;
  remembered = [texts, ...remembered.filter((one) => !beginsIt(one))].slice(0, MOST_EARLIER);
  earlier.replaceChildren(...remembered.map((one) => chipOf(one.text, one)));
  earlierBox.hidden = false;
  pressChip();
}

function chips() {
  return [...examples.children, ...earlier.children].map(({ firstChild }) => firstChild);
}

function pressChip() {
  for (const chip of chips()) chip.setAttribute("aria-pressed", chip.title === titleOf(typed()));
}

function textChanged(pause = PAUSE_MS) {
  current.abort();
  current = new AbortController();
  clearTimeout(timer);
  highlight.follow(field.value);
  pairHighlight.follow(pairField.value);
  explainButton.hidden = true;
  clearButton.hidden = !field.value && !pairField.value;
  pressChip();
  offerUse({ ...typed(), ...asked() });
  offerCorrection(null);
  if (!isComplete()) {
    waitingSince = 0;
    showNothing();
    return;
  }
  answer.classList.add("stale");
  waitingSince ||= performance.now();
  const rest = waitingSince + LONGEST_WAIT_MS - performance.now();
  const { signal } = current;
  timer = setTimeout(() => {
    waitingSince = 0;
    classify(typed(), signal);
  }, Math.max(0, Math.min(pause, rest)));
}

// Whatever arrives after `signal` has aborted belongs to an older text and is dropped.
async function classify(texts, signal) {
  const result = await ask("predict", { ...texts, ...asked() }, signal);
  if (!result) return;
  showAnswer(result.data);
  offerCorrection({ text: texts.text, label: result.data.label, requestId: result.requestId });
  showTiming(result);
  const { passage } = result.data; // of a long text that was read in windows
  if (passage) highlight.show(texts.text, marksOf([{ ...passage, strength: PASSAGE_STRENGTH }], texts.text));
  const isLong = Object.values(texts).join(" ").trim().split(/\s+/).length > EXPLAIN_UNASKED_WORDS;
  answer.classList.toggle("explaining", !isLong); // the words are still those of the older text
  if (isLong) {
    showWords([]);
    if (!passage) clearMarks();
    announce(remark.textContent);
    why.textContent = "A long text takes a while.";
    explainButton.hidden = false;
  }
  await sleep(EXPLAIN_AFTER_SECONDS, signal).catch(() => {});
  if (signal.aborted) return;
  remember(texts);
  if (!isLong) await explain(texts, signal);
}

async function explain(texts, signal) {
  answer.classList.add("explaining");
  const result = await ask("explain", texts, signal);
  if (signal.aborted) return;
  answer.classList.remove("explaining");
  if (!result) {
    words.replaceChildren();
    clearMarks();
    return;
  }
  const { data } = result;
  const all = [...data.words, ...(data.pair_words ?? [])]; // of a pair the strongest word of both counts
  const weighed = data.value === undefined ? withStrength(all, explainedShare(data)) : withStrengthOfNumbers(all);
  const marks = marksOf(weighed.slice(0, data.words.length), texts.text);
  if (data.truncated && !data.pair_words) marks.push(...unreadOf(data.words, texts.text));
  highlight.show(texts.text, marks);
  if (data.pair_words) pairHighlight.show(texts.text_pair, marksOf(weighed.slice(data.words.length), texts.text_pair));
  // Where the model does not answer, the words are those of the likeliest label.
  const explained = data.explained ?? (shown.abstained ? likeliest(data) : undefined);
  showWords(weighed, { ...data, explained });
  announce(shown.abstained ? remark.textContent : wordList());
}

/** Tell a screen reader the answer and one thing about it. */
function announce(line) {
  const share = confidence.textContent && `, ${confidence.textContent}`;
  announcer.textContent = `${headline(shown)}${share}. ${line}`;
}

function clearMarks() {
  highlight.show(field.value, []);
  pairHighlight.show(pairField.value, []);
}

function likeliest({ probabilities }) {
  return Object.keys(probabilities).reduce((best, name) => (probabilities[name] > probabilities[best] ? name : best));
}

function explainedShare({ explained, confidence: share, probabilities }) {
  return explained === undefined ? share : probabilities[explained];
}

/** The answer in a few words. */
function headline(data) {
  const { label: winner, labels, value } = data;
  if (silence(data)) return silence(data);
  if (value !== undefined) return number(value);
  return labels ? labels.join(", ") || "No label" : winner;
}

/** Ask the server, waiting while it is busy; undefined when the text has changed or the server refused it. */
async function ask(path, body, signal) {
  for (;;) {
    try {
      const result = await call(path, { body, signal });
      return signal.aborted ? undefined : result;
    } catch (error) {
      if (signal.aborted) return undefined;
      if (!(error instanceof ApiError)) throw error;
      // Asks again through modelReady: the model is there again, or it is another one, with other promises.
      if (error.isOutage || error.code === "no_guarantee") watch();
      else if (path === "explain") why.textContent = error.message;
      else {
        setRemark(error.message, true); // the older answer stays, paler, so that nothing moves
        announcer.textContent = error.message;
      }
      if (!error.isBusy) return undefined;
      await sleep(error.retryAfter ?? 1, signal).catch(() => {});
      if (signal.aborted) return undefined;
    }
  }
}

function setRemark(line, isError = false) {
  remark.textContent = line;
  remark.classList.toggle("error", isError);
  answer.classList.toggle("stale", isError);
}

function showNothing() {
  document.body.removeAttribute("data-accent");
  answer.classList.remove("silent", "explaining");
  label.textContent = empty.label;
  confidence.textContent = "";
  setRemark(kind.readsPairs && (field.value || pairField.value) ? "Both texts are read together." : empty.remark);
  for (const bar of bars.children) setBar(bar, 0, false);
  words.replaceChildren();
  why.textContent = empty.why;
  timing.replaceChildren();
  announcer.textContent = "";
}

function showAnswer(data) {
  shown = data;
  const isAnswered = !data.abstained;
  const named = isAnswered ? [data.label] : data.abstained === "uncertain" ? (data.set ?? []) : [];
  const given = data.labels ?? (data.label === undefined ? kind.labels : named);
  answer.classList.toggle("silent", !isAnswered);
  if (given.length && isAnswered) document.body.dataset.accent = accentOf(given[0]);
  else document.body.removeAttribute("data-accent");
  label.textContent = headline(data);
  confidence.textContent = data.confidence === undefined || !isAnswered ? "" : percent(data.confidence);
  if (data.probabilities) showBars(data.probabilities, given);
  setRemark(data.abstained ? reasonOf(data) : doubt(data) || remarkOn(data));
}

function remarkOn(data) {
  const { label: winner, labels, confidence: share, probabilities, truncated, num_tokens: numTokens, passage } = data;
  if (passage && !truncated) return `${numTokens} tokens read; the coloured passage decided.`;
  if (truncated) {
    const limit = maxLength && !passage ? `first ${maxLength} tokens` : "beginning";
    return `Long text${numTokens ? ` (${numTokens} tokens)` : ""}: only the ${limit} decided.`;
  }
  if (winner === undefined) {
    const what = labels ? (labels.length ? "" : "No label reaches its threshold. ") : `${kind.labels[0]}. `;
    return `${what}${numTokens ? `${numTokens} tokens read.` : ""}`;
  }
  const rivals = Object.entries(probabilities).filter(([name]) => name !== winner);
  const [rival, next] = rivals.reduce((best, one) => (one[1] > best[1] ? one : best), ["", 0]);
  if (rival && share - next < CLOSE_CALL) return `A close call with ${rival}.`;
  return numTokens ? `${numTokens} tokens read.` : "";
}

// A mark on a bar is the threshold from which on the label is given.
function showBars(probabilities, given) {
  let names = Object.keys(probabilities);
  if (names.length > MOST_BARS) {
    names = names.sort((a, b) => probabilities[b] - probabilities[a]).slice(0, MOST_BARS);
  }
  if (names.join("\n") !== [...bars.children].map((bar) => bar.dataset.label).join("\n")) {
    bars.replaceChildren(...names.map(newBar));
  }
  names.forEach((name, i) => setBar(bars.children[i], probabilities[name], given.includes(name)));
}

function newBar(name) {
  const track = element("span", { class: "track" }, element("span", { class: "fill" }));
  const threshold = kind.thresholds[name];
  if (kind.problemType === "multi_label_classification" && threshold !== undefined) {
    const mark = element("span", { class: "threshold", title: `given if at least ${percent(threshold)}` });
    mark.style.setProperty("--threshold", threshold);
    track.append(mark);
  }
  const attributes = { "data-label": name, "data-accent": accentOf(name) };
  return element("li", attributes, element("span", { class: "name" }, name), track, element("span", { class: "share" }));
}

function setBar(bar, share, isWinner) {
  bar.classList.toggle("winner", isWinner);
  bar.style.setProperty("--share", share.toFixed(4));
  bar.lastChild.textContent = share ? percent(share) : "";
}

function showWords(list, { value, explained } = {}) {
  const deciding = merged(list)
    .filter(({ strength }) => strength >= LEAST_STRENGTH)
    .sort((a, b) => b.strength - a.strength)
    .slice(0, NUM_WORDS);
  words.replaceChildren(
    ...deciding.map(({ word, weight, strength, against, times }) => {
      const name = element("bdi", {}, times > 1 ? `${word} ×${times}` : word);
      const parts = [name, element("b", {}, value === undefined ? points(weight) : difference(weight))];
      const item = element("li", against ? { class: "against" } : {}, ...parts);
      item.style.setProperty("--strength", strength.toFixed(3));
      return item;
    }),
  );
  const unit = value === undefined ? "points of probability" : kind.labels[0];
  why.textContent = deciding.length
    ? `In ${unit}${explained === undefined ? "" : ` of ${explained}`} lost without the word.`
    : "No single word decides.";
}

// A word that a text repeats is one entry: "this ×3".
function merged(list) {
  const found = new Map();
  for (const { word, weight, strength, against } of list) {
    const name = `${against} ${word.toLowerCase()}`;
    const { weight: others = 0, strength: most = 0, times = 0 } = found.get(name) ?? {};
    found.set(name, { word, weight: weight + others, strength: Math.max(strength, most), against, times: times + 1 });
  }
  return [...found.values()];
}

function wordList() {
  const speaking = [...words.children].filter((item) => !item.classList.contains("against")).slice(0, 3);
  return speaking.length ? `Decided by: ${speaking.map((item) => item.firstChild.textContent).join(", ")}.` : "";
}

function showTiming({ milliseconds: total, where, parts }) {
  const named = parts.map(([name, value]) => [name === "total" ? "server" : name.replaceAll(/[_-]/g, " "), value]);
  const rows = [[where, total], ...named.sort((a, b) => (b[0] === "server") - (a[0] === "server"))];
  timing.replaceChildren(
    ...rows.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, milliseconds(value)))),
  );
}
