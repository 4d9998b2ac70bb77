// Colours words behind a textarea: a mirror of its text with the same metrics, its letters transparent.

import { element } from "./format.js";

const LEAST_STRONGEST = Math.log(2); // full colour takes a word that at least halves or doubles the odds
/** Words below this share of full colour say nothing worth showing. */
export const LEAST_STRENGTH = 0.15;

/**
 * Marks are {start, end, strength, against, unread} in UTF-16 units of the text, in order, not overlapping;
 * strength runs from 0 to 1.
 */
export class Highlight {
  constructor(mirror) {
    this.mirror = mirror;
    this.text = "";
    this.marks = [];
  }

  /** Follow an edit: marks outside of the changed stretch stay with their words. */
  follow(text) {
    const shortest = Math.min(text.length, this.text.length);
    let head = 0;
    while (head < shortest && text[head] === this.text[head]) head += 1;
    let tail = 0;
    while (tail < shortest - head && text.at(-1 - tail) === this.text.at(-1 - tail)) tail += 1;
    const shift = text.length - this.text.length;
    const kept = this.marks.flatMap((mark) => {
      if (mark.end <= head) return [mark];
      if (mark.start < this.text.length - tail) return [];
      return [{ ...mark, start: mark.start + shift, end: mark.end + shift }];
    });
    this.show(text, kept, true);
  }

  /** Show `text` with `marks`; stale ones, which wait for a new answer, are paler. */
  show(text, marks, isStale = false) {
    this.text = text;
    this.marks = marks;
    const nodes = [];
    let at = 0;
    for (const { start, end, strength, against, unread } of marks) {
      const kind = unread ? "unread" : against ? "against" : "";
      const mark = element("mark", kind ? { class: kind } : {}, text.slice(start, end));
      mark.style.setProperty("--strength", strength.toFixed(3));
      nodes.push(text.slice(at, start), mark);
      at = end;
    }
    // A newline at the very end takes a line in the textarea; in the mirror only with something after it.
    this.mirror.replaceChildren(...nodes, `${text.slice(at)}\u200b`);
    this.mirror.classList.toggle("stale", isStale);
  }
}

/**
 * Say of each word how strongly it speaks for the label (0 to 1) or against it.
 * Compared as log-odds, for a model that is 99% sure barely moves in probability whatever is left out.
 */
export function withStrength(words, confidence) {
  const evidence = words.map(({ weight }) => logOdds(confidence) - logOdds(confidence - weight));
  return relativeTo(Math.max(LEAST_STRONGEST, ...evidence.map(Math.abs)), words, evidence);
}

/** Say of each word how strongly it raises the number (0 to 1) or lowers it, compared with the strongest. */
export function withStrengthOfNumbers(words) {
  const evidence = words.map(({ weight }) => weight);
  return relativeTo(Math.max(...evidence.map(Math.abs)) || 1, words, evidence);
}

function relativeTo(strongest, words, evidence) {
  return words.map((word, i) => ({
    ...withoutPunctuation(word),
    strength: Math.abs(evidence[i]) / strongest,
    against: evidence[i] < 0,
  }));
}

function withoutPunctuation(word) {
  const [, before, bare, after] = word.word.match(/^(\p{P}*)(.*?)(\p{P}*)$/su);
  if (!bare) return word;
  return { ...word, word: bare, start: word.start + [...before].length, end: word.end - [...after].length };
}

/**
 * Turn words with strength into marks.
 * The server's offsets count code points, JavaScript's count UTF-16 units: they part at the first emoji.
 */
export function marksOf(words, text) {
  const units = [0];
  for (const character of text) units.push(units.at(-1) + character.length);
  return words
    .filter(({ strength }) => strength >= LEAST_STRENGTH)
    .map((word) => ({ ...word, start: units[word.start], end: units[word.end] }));
}

/**
 * The mark of what a truncated text has after the last word that was read: leaving out a word that the model does not
 * read changes nothing at all, so its weight is exactly 0. None where no word changes anything, as in one word repeated.
 */
export function unreadOf(words, text) {
  const last = words.findLast(({ weight }) => weight !== 0);
  if (!last) return [];
  const start = [...text].slice(0, last.end).join("").length;
  return [{ start, end: text.length, strength: 0, unread: true }];
}

function logOdds(share) {
  const inside = Math.min(1 - 1e-6, Math.max(1e-6, share));
  return Math.log(inside / (1 - inside));
}
