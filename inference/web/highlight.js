// Colours words behind a textarea: a mirror of its text with the same metrics, its letters transparent.

import { element } from "./format.js";

/**
 * Marks are {start, end, strength, against} in UTF-16 units of the text, in order, not overlapping;
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
    for (const { start, end, strength, against } of marks) {
      const mark = element("mark", against ? { class: "against" } : {}, text.slice(start, end));
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
 * Turn the server's words into marks.
 * Its offsets count code points, JavaScript's count UTF-16 units: they part at the first emoji.
 */
export function marksOf(words, text) {
  const units = [0];
  for (const character of text) units.push(units.at(-1) + character.length);
  const strongest = strongestOf(words);
  return words
    .map(({ start, end, weight }) => ({
      start: units[start],
      end: units[end],
      strength: Math.abs(weight) / strongest,
      against: weight < 0,
    }))
    .filter(({ start, end, strength }) => end > start && strength >= 0.12)
    .sort((a, b) => a.start - b.start);
}

/** The weight that gets full colour: never so small that noise would shine. */
export function strongestOf(words) {
  return Math.max(0.02, ...words.map(({ weight }) => Math.abs(weight)));
}
