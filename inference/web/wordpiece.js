// Text in, token ids out, for models with BERT's tokenizer: the cleaning of common/text.py, then what the model's
// tokenizer.json says. Held to both over whole data sets by tests/inference/web/test_wordpiece.py.

// What Python takes for white space and for the characters of a word; JavaScript's \s and \w differ.
const SPACE = "\\t-\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000";
const WORD = "\\p{L}\\p{N}_";

// ---------------------------------------------------------------- cleaning; the reasons are in common/text.py

const BARE =
  "#(?:3[46-9]|6[02]|0?\\p{Nd}{3,4}|64\\p{Nd}{3}|x[0-9a-fA-F]{2,4})" +
  "|quot|amp|lt|gt|nbsp|apos|hellip|[lr][sd]quo|[mn]dash|[A-Za-z](?:acute|grave|uml|tilde|cedil|circ|ring)";
const REFERENCE = new RegExp(
  `(?:&|(?:^|[${SPACE}])(?=(?:${BARE});))(?:(?:amp|#0?38);)*` +
    "(?:(#\\p{Nd}{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});)?",
  "gu",
);
const LOOSE_POSSESSIVE = new RegExp(`(?<=[${WORD}])[${SPACE}]{2}(?=#39;s(?![${WORD}]))`, "gu");
const TAG_NAMES =
  "a|abbr|b|big|blockquote|body|br|center|cite|code|del|div|em|font|h[1-6]|head|hr|html|i|iframe|img|input|ins|li|link" +
  "|meta|nobr|ol|p|pre|q|s|script|small|span|strike|strong|style|sub|sup|table|tbody|td|th|title|tr|tt|u|ul|wbr";
// Where case does not matter, Python takes the Turkish letters for i too.
const TAG = new RegExp(`</?(?:${TAG_NAMES.replaceAll("i", "[iİı]")})(?=[${SPACE}/>])([^<>]*)>`, "giu");
const UNPRINTABLE =
  /[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ud800-\udfff\ufdd0-\ufdef\ufeff\ufffe\uffff]/gu;
// As in common/text.py: a text of nothing else has nothing to read.
const INVISIBLE = new RegExp(
  `^[${SPACE}\\x00-\\x1f\\x7f-\\x9f\\xad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f\\u200b-\\u200f\\u202a-` +
    "\\u202e\\u2060-\\u206f\\u2800\\u3164\\ufe00-\\ufe0f\\ufeff\\uffa0\\ufff0-\\ufff8\\u{e0000}-\\u{e0fff}]*$",
  "u",
);
const LONE_SURROGATE = /[\ud800-\udfff]/gu;
const SPACES = new RegExp(`[${SPACE}]+`, "u");
const MAX_ROUNDS = 4;

const withoutEdges = (text) => text.split(SPACES).filter(Boolean).join(" ");

// Numbers of 128 to 159, which HTML reads as Windows' characters, and those that it drops.
const WINDOWS =
  "\u20ac\u0081\u201a\u0192\u201e\u2026\u2020\u2021\u02c6\u2030\u0160\u2039\u0152\u008d\u017d\u008f" +
  "\u0090\u2018\u2019\u201c\u201d\u2022\u2013\u2014\u02dc\u2122\u0161\u203a\u0153\u009d\u017e\u0178";
const isNoCharacter = (code) =>
  (code >= 0x1 && code <= 0x8) ||
  (code >= 0xb && code <= 0x1f && code !== 0xc && code !== 0xd) ||
  code === 0x7f ||
  (code >= 0xfdd0 && code <= 0xfdef) ||
  (code & 0xfffe) === 0xfffe;

function characterOf(code) {
  if (code >= 0x80 && code <= 0x9f) return WINDOWS[code - 0x80];
  if (code === 0 || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff)) return "\ufffd";
  return isNoCharacter(code) ? "" : String.fromCodePoint(code);
}

function cleanOnce(text, entities) {
  if (text.includes("\\")) text = text.replaceAll("\\$", "$").replaceAll("\\", " ");
  if (text.includes(";")) {
    text = text.replace(LOOSE_POSSESSIVE, " ").replace(REFERENCE, (whole, name) => {
      if (name === undefined) return "&";
      if (!name.startsWith("#")) return entities.get(name) ?? `&${name};`;
      // Digits of other scripts count as such above, but HTML knows none.
      return `&${name};`.replace(/^&#(?:[xX]([0-9a-fA-F]+)|([0-9]+));?/, (all, hex, decimal) =>
        characterOf(hex ? parseInt(hex, 16) : parseInt(decimal, 10)),
      );
    });
  }
  if (text.includes("<")) {
    text = text.replace(TAG, (tag, attributes) =>
      attributes.includes("=") || /^[ /]*$/.test(attributes) ? " " : tag,
    );
  }
  text = text.replace(UNPRINTABLE, "");
  return INVISIBLE.test(text) ? "" : withoutEdges(text);
}

function cleanNews(text, entities) {
  for (let round = 0; round < MAX_ROUNDS; round++) {
    const cleaned = cleanOnce(text, entities);
    if (cleaned === text) return cleaned;
    text = cleaned;
  }
  return cleanOnce(text.replaceAll(";", " ").replaceAll("<", " "), entities);
}

// ---------------------------------------------------------------- tokenising

// The tokenizer's classes of characters, printed by tests/inference/web/unicode_tables.py: a browser's own follow its
// version of Unicode. In hexadecimal, the distance from the range before, and how many more follow: "41-19 5" are A to Z
// and _. Written out they would be a fifth of the page's code.
function codesOf(list) {
  let code = 0;
  const ranges = list.split(" ").map((range) => {
    const [distance, more = "0"] = range.split("-");
    const first = (code += parseInt(distance, 16));
    code += parseInt(more, 16);
    return `\\u{${first.toString(16)}}-\\u{${code.toString(16)}}`;
  });
  return ranges.join("");
}
const CONTROL = codesOf(
  "0-8 3-1 2-11 60-20 e 553-5 17 c1 32 10ff 7fd-4 1b-4 32-4 2-9 bf91-18ff 600 fa-2 2 10c0 abe3-3 14d0-7 c2e87 1f-5f " +
  "ff81-fffd 3-fffd",
);
const ACCENT = codesOf(
  "300-3f 3 3-2a 114-4 10a-2c 2 2-1 2-1 2 49-a 31-14 11 66-6 3-5 3-1 2-3 24 1f-1a 5c-a 3b-8 23-3 2-8 2-2 2-4 2c-2 " +
  "88-1f 38 2 5-7 5 4-6 b-1 1e 3b 5-3 9 15-1 1e-1 3a 5-1 5-1 3-2 4 1f-1 4 c-1 3a 5-4 2-1 5 15-1 1e 3b 3 2-3 9 9 c-1 " +
  "1f 3e d 33 3e-2 6-1 3-3 8-1 c-1 1e 3b 3 7 6-1 15-1 1e 40-3 9 15-1 67 8-2 2 5b 3-6 d-7 63 3-5 2-1 c-5 4b-1 1c 2 2 " +
  "38-1 2 3 2-5 2 2-2 2-1 6-5 2-3 2-3 2-3 2-3 2-3 2-b 2-2 a 67-3 2-5 2-1 3-1 1a-1 5-2 11-3 e 3-1 7 10 2c0-2 3b3-2 " +
  "1e-2 1e-1 1f-1 41-1 2-6 9 3-a a 2e-2 9c 77-2 5-1 a 7-2 dc-1 3 3b 2-6 2 2 3-7 7-9 3 31-d 43-3 31 2-4 2 6 29-8 d-1 " +
  "21-3 3-1 2-2 39 2-1 4 2-2 3b-7 3-1 99-2 2-c 2-6 5 7 4-1 c7-35 7-3 2d1-c 5 4-b bff-2 8e 61-1f 22b-3 6c-1 75d5 5-9 " +
  "21-1 51-1 111 4 5 1a-1 9e 1c-11 35-7 1a-a 2f-2 31 3-3 3 29 44-5 3-1 3-1 d 9 30 34 2-2 3-1 6-1 2 2b-1 9 ef 3 5 " +
  "4f31 2e2-f 11-f 3ce e3 96-4 687-2 2-1 6-3 29-2 5 a6-1 51b 37-e 39-2 32-3 3-1 46-2 25-4 2 3-4 3f d-1 35-8 c-2 63-2 " +
  "3 2-1 a8 4-7 16-1 3b 4 26-6 4-4 13f-5 2 5-1 2-1 ef-3 7-1 2-1 1c-1 56-7 3 2-1 6b 2 3-5 2 66-2 3-3 2-4 53c5-4 3c-6 " +
  "459-3 4d0b-1 14c9-2 12-7 3-6 1f-3 95-2 7bc-36 5-31 9 f 17-4 2-e e21-6 c182a-ef",
);
const PUNCTUATION = codesOf(
  "21-e b-6 1b-5 1b-3 23 6 4 b-1 4 4 2bf 9 1d3-5 2a-1 34 2 3 3 2d-1 15-1 2-1 e 3-1 4b-3 67 2c-d ea-2 37-e 20 106-1 b " +
  "180 304 5b b-1 a9-e 2 26-3 48 4b-4 5-1 70-5 ac 265-8 98 26d-1 2d-1 4f-2 48-1 9e-2 2-2 26-a 13a-1 d9-1 81-6 2-5 " +
  "ad-6 9c-3 3c-4 3f-1 41-7 c 33d-17 9-13 2-c 2-b 1f-1 f-1 27a-3 1e-1 43e-d 50-1 20-9 194-15 40-3 21-1 2fc-3 2-1 71 " +
  "90-2e 2-12 1bf-2 5-9 3-b 11 d 63 5b 7403-1 10e-2 64 b 74-5 17d-3 57-1 29-2 2 32-1 30 62-c 11-1 7d-3 7f-1 11-1 fa " +
  "5153-1 d1-9 17-22 2-d 2 5 2-1 96-2 2-5 2-3 b-1 4-1 1b-2 2 1c 2 2-6 19b-2 29d 31 19f 2e8 c8 20 111-8 27 71-6 43-6 " +
  "5a-3 4ab-6 6e-1 2-3 7f-3 31-1 50-4 4 e 2-2 59-5 6c 21d fb-16 6a-2 f9-2 d32-4 45fa-1 86 42-4 9 515b 1de8-4",
);
const IDEOGRAPH =
  /[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\u{20000}-\u{2a6df}\u{2a700}-\u{2b73f}\u{2b740}-\u{2b81f}\u{2b920}-\u{2ceaf}\u{2f800}-\u{2fa1f}]/gu;
const BLANK = "\\t-\\r\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000"; // Unicode's
const BLANKS = new RegExp(`[${BLANK}]`, "gu");
const CONTROLS = new RegExp(`[${CONTROL}]`, "gu");
const ACCENTS = new RegExp(`[${ACCENT}]`, "gu");
const PARTS = new RegExp(`[${PUNCTUATION}]|[^${BLANK}${PUNCTUATION}]+`, "gu");
const isPlain = (text) => /^[\x20-\x7e]*$/.test(text);

export class Tokenizer {
  /** `settings`: the `tokenizer` of a model.json, as inference/exporting/browser.py writes it. */
  constructor(settings) {
    this.settings = settings;
    this.vocabulary = new Map(settings.vocabulary.map((piece, id) => [piece, id]));
    this.entities = new Map(Object.entries(settings.entities));
    // Not Math.max(...): a call takes fewer arguments than a multilingual vocabulary has pieces.
    this.longest = settings.vocabulary.reduce((most, piece) => Math.max(most, piece?.length ?? 0), 0);
    // Such as "[SEP]", which is one token also where a text spells it out. The longest first.
    const added = Object.keys(settings.added).sort((a, b) => b.length - a.length);
    const literal = (name) => name.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&");
    this.added = new RegExp(added.length ? `(${added.map(literal).join("|")})` : "(?!)", "u");
    this.known = new Map(); // ids of words that have come before
  }

  /** A text as it is tokenised; empty if there is nothing to read. */
  clean(text) {
    if (this.settings.cleaning === "news") return cleanNews(text, this.entities);
    return INVISIBLE.test(text) ? "" : text.replace(LONE_SURROGATE, "\ufffd");
  }

  /** The ids of a cleaned text, cut to what the model reads, and how many the whole text has. */
  encode(cleaned) {
    const { added, before, after, max_tokens: most } = this.settings;
    const inside = [];
    // Split by a pattern with a group: every other part is what the group matched.
    cleaned.split(this.added).forEach((part, i) => {
      if (i % 2) inside.push(added[part]);
      else for (const word of this.normalised(part).match(PARTS) ?? []) inside.push(...this.pieces(word));
    });
    const room = most - before.length - after.length;
    const tokens = inside.length + before.length + after.length;
    return { ids: [...before, ...inside.slice(0, room), ...after], tokens, truncated: inside.length > room };
  }

  normalised(text) {
    const { lowercase, clean_text: clean, handle_chinese_chars: spaced, strip_accents: strip } = this.settings;
    if (isPlain(text)) return lowercase ? text.toLowerCase() : text;
    if (clean) text = text.replace(CONTROLS, "").replace(BLANKS, " ");
    if (spaced) text = text.replace(IDEOGRAPH, " $& ");
    if (strip) text = text.normalize("NFD").replace(ACCENTS, "");
    // JavaScript writes a capital sigma at the end of a word as ς, the tokenizer never.
    return lowercase ? text.replaceAll("Σ", "σ").toLowerCase() : text;
  }

  pieces(word) {
    const known = this.known.get(word);
    if (known) return known;
    const ids = this.wordpiece(word);
    if (this.known.size >= 20_000) this.known.clear();
    this.known.set(word, ids);
    return ids;
  }

  // From the left, the longest piece that the vocabulary has, each time.
  wordpiece(word) {
    const { unknown, prefix, max_characters: most } = this.settings;
    const characters = Array.from(word);
    if (characters.length > most) return [unknown];
    const ids = [];
    for (let start = 0; start < characters.length; ) {
      let end = Math.min(characters.length, start + this.longest);
      let id;
      for (; end > start; end--) {
        id = this.vocabulary.get((start ? prefix : "") + characters.slice(start, end).join(""));
        if (id !== undefined) break;
      }
      if (id === undefined) return [unknown];
      ids.push(id);
      start = end;
    }
    return ids;
  }
}
