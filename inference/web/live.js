// The text, and its answer while one types.

import { ApiError, call, sleep } from "./api.js";
import { accentOf, difference, element, milliseconds, number, percent, points } from "./format.js";
import { Highlight, LEAST_STRENGTH, marksOf, withStrength, withStrengthOfNumbers } from "./highlight.js";
import { setNotice } from "./notice.js";
import { asked, onChoice, reasonOf, silence } from "./promise.js";
import { kind, watch } from "./server.js";
import { offerCorrection } from "./wrong.js";

const PAUSE_MS = 150; // asked once the typing pauses this long,
const LONGEST_WAIT_MS = 450; // or, when it never pauses, this often
const EXPLAIN_AFTER_SECONDS = 0.6;
const EXPLAIN_UNASKED_WORDS = 80; // an explanation costs about one forward pass a word
const NUM_WORDS = 6;
const PASSAGE_STRENGTH = 0.4;
const CLOSE_CALL = 0.2;
const MOST_BARS = 12;
const NEWS_LABELS = "World,Sports,Business,Sci/Tech";

const [
  title, fieldName, field, pairField, clearButton, answer, label, confidence, remark, bars, words, why, explainButton, timing, announcer,
] = [
  "title", "text-name", "text", "text-pair", "clear", "answer", "label", "confidence", "remark", "bars", "words", "why", "explain", "timing",
  "announce",
].map((id) => document.getElementById(id));
const empty = { label: label.textContent, remark: remark.textContent, why: why.textContent };
const highlight = new Highlight(document.getElementById("mirror"));
const pairHighlight = new Highlight(document.getElementById("pair-mirror"));
let maxLength = null;
let current = new AbortController(); // everything under way for the text as it stands
let timer = 0;
let waitingSince = 0;
let shown = {}; // the answer

/** Answer what is typed from now on. */
export function startLive() {
  for (const one of [field, pairField]) {
    one.addEventListener("input", () => textChanged());
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
    explain(typed(), current.signal);
  });
  onChoice(() => textChanged(0));
  textChanged(); // a browser may have kept the text over a reload
}

/** Put `text` into the field, empty that of the second text, and answer it at once. */
export function setText(text) {
  field.value = text;
  pairField.value = "";
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
  const isNews = !kind.readsPairs && labels.join() === NEWS_LABELS; // of which the examples are
  document.getElementById("of-news").hidden = !isNews;
  if (isNews && kind.problemType === "single_label_classification") title.textContent = "What kind of news is this?";
  fieldName.textContent = kind.readsPairs ? "First text" : isNews ? "Headline or article" : "Text";
  if (isComplete()) textChanged(0);
  else if (!answersNumber) showBars(Object.fromEntries(labels.map((name) => [name, 0])), []);
}

function textChanged(pause = PAUSE_MS) {
  current.abort();
  current = new AbortController();
  clearTimeout(timer);
  highlight.follow(field.value);
  pairHighlight.follow(pairField.value);
  explainButton.hidden = true;
  clearButton.hidden = !field.value && !pairField.value;
  setNotice("request", null);
  offerCorrection(null);
  if (!isComplete()) {
    waitingSince = 0;
    showNothing();
    return;
  }
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
  if (Object.values(texts).join(" ").trim().split(/\s+/).length > EXPLAIN_UNASKED_WORDS) {
    showWords([]);
    why.textContent = "A long text takes a while.";
    explainButton.hidden = false;
    return;
  }
  await sleep(EXPLAIN_AFTER_SECONDS, signal).then(() => explain(texts, signal), () => {});
}

async function explain(texts, signal) {
  answer.classList.add("explaining");
  const result = await ask("explain", texts, signal);
  answer.classList.remove("explaining");
  if (!result) return;
  const { data } = result;
  const all = [...data.words, ...(data.pair_words ?? [])]; // of a pair the strongest word of both counts
  const weighed = data.value === undefined ? withStrength(all, explainedShare(data)) : withStrengthOfNumbers(all);
  highlight.show(texts.text, marksOf(weighed.slice(0, data.words.length), texts.text));
  if (data.pair_words) pairHighlight.show(texts.text_pair, marksOf(weighed.slice(data.words.length), texts.text_pair));
  // Where the model does not answer, the words are those of the likeliest label.
  const explained = data.explained ?? (shown.abstained ? likeliest(data) : undefined);
  showWords(weighed, { ...data, explained });
  const share = confidence.textContent && `, ${confidence.textContent}`;
  announcer.textContent = `${headline(shown)}${share}. ${shown.abstained ? remark.textContent : wordList()}`;
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
      else setNotice("request", error.message);
      if (!error.isBusy) return undefined;
      await sleep(error.retryAfter ?? 1, signal).catch(() => {});
      if (signal.aborted) return undefined;
      setNotice("request", null);
    }
  }
}

function showNothing() {
  document.body.removeAttribute("data-accent");
  answer.classList.remove("silent");
  label.textContent = empty.label;
  confidence.textContent = "";
  remark.textContent = kind.readsPairs && (field.value || pairField.value) ? "Both texts are read together." : empty.remark;
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
  remark.textContent = data.abstained ? reasonOf(data) : remarkOn(data);
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
  const deciding = list
    .filter(({ strength }) => strength >= LEAST_STRENGTH)
    .sort((a, b) => b.strength - a.strength)
    .slice(0, NUM_WORDS);
  words.replaceChildren(
    ...deciding.map(({ word, weight, strength, against }) => {
      const parts = [element("span", {}, word), element("b", {}, value === undefined ? points(weight) : difference(weight))];
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
