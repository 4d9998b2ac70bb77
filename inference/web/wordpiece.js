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
// version of Unicode.
const CONTROL =
  "\\x00-\\x08\\x0b-\\x0c\\x0e-\\x1f\\x7f-\\x9f\\xad\\u0600-\\u0605\\u061c\\u06dd\\u070f\\u180e\\u200b-\\u200f\\u202a-" +
  "\\u202e\\u2060-\\u2064\\u2066-\\u206f\\ue000-\\uf8ff\\ufeff\\ufff9-\\ufffb\\ufffd\\u{110bd}\\u{1bca0}-\\u{1bca3}" +
  "\\u{1d173}-\\u{1d17a}\\u{e0001}\\u{e0020}-\\u{e007f}\\u{f0000}-\\u{ffffd}\\u{100000}-\\u{10fffd}";
const ACCENT =
  "\\u0300-\\u033f\\u0342\\u0345-\\u036f\\u0483-\\u0487\\u0591-\\u05bd\\u05bf\\u05c1-\\u05c2\\u05c4-\\u05c5\\u05c7" +
  "\\u0610-\\u061a\\u064b-\\u065f\\u0670\\u06d6-\\u06dc\\u06df-\\u06e4\\u06e7-\\u06e8\\u06ea-\\u06ed\\u0711\\u0730-" +
  "\\u074a\\u07a6-\\u07b0\\u07eb-\\u07f3\\u0816-\\u0819\\u081b-\\u0823\\u0825-\\u0827\\u0829-\\u082d\\u0859-\\u085b" +
  "\\u08e3-\\u0902\\u093a\\u093c\\u0941-\\u0948\\u094d\\u0951-\\u0957\\u0962-\\u0963\\u0981\\u09bc\\u09c1-\\u09c4" +
  "\\u09cd\\u09e2-\\u09e3\\u0a01-\\u0a02\\u0a3c\\u0a41-\\u0a42\\u0a47-\\u0a48\\u0a4b-\\u0a4d\\u0a51\\u0a70-\\u0a71" +
  "\\u0a75\\u0a81-\\u0a82\\u0abc\\u0ac1-\\u0ac5\\u0ac7-\\u0ac8\\u0acd\\u0ae2-\\u0ae3\\u0b01\\u0b3c\\u0b3f\\u0b41-" +
  "\\u0b44\\u0b4d\\u0b56\\u0b62-\\u0b63\\u0b82\\u0bc0\\u0bcd\\u0c00\\u0c3e-\\u0c40\\u0c46-\\u0c47\\u0c4a-\\u0c4d\\u0c55" +
  "-\\u0c56\\u0c62-\\u0c63\\u0c81\\u0cbc\\u0cbf\\u0cc6\\u0ccc-\\u0ccd\\u0ce2-\\u0ce3\\u0d01\\u0d41-\\u0d44\\u0d4d" +
  "\\u0d62-\\u0d63\\u0dca\\u0dd2-\\u0dd4\\u0dd6\\u0e31\\u0e34-\\u0e3a\\u0e47-\\u0e4e\\u0eb1\\u0eb4-\\u0eb9\\u0ebb-" +
  "\\u0ebc\\u0ec8-\\u0ecd\\u0f18-\\u0f19\\u0f35\\u0f37\\u0f39\\u0f71-\\u0f72\\u0f74\\u0f77\\u0f79-\\u0f7e\\u0f80\\u0f82" +
  "-\\u0f84\\u0f86-\\u0f87\\u0f8d-\\u0f92\\u0f94-\\u0f97\\u0f99-\\u0f9c\\u0f9e-\\u0fa1\\u0fa3-\\u0fa6\\u0fa8-\\u0fab" +
  "\\u0fad-\\u0fb8\\u0fba-\\u0fbc\\u0fc6\\u102d-\\u1030\\u1032-\\u1037\\u1039-\\u103a\\u103d-\\u103e\\u1058-\\u1059" +
  "\\u105e-\\u1060\\u1071-\\u1074\\u1082\\u1085-\\u1086\\u108d\\u109d\\u135d-\\u135f\\u1712-\\u1714\\u1732-\\u1734" +
  "\\u1752-\\u1753\\u1772-\\u1773\\u17b4-\\u17b5\\u17b7-\\u17bd\\u17c6\\u17c9-\\u17d3\\u17dd\\u180b-\\u180d\\u18a9" +
  "\\u1920-\\u1922\\u1927-\\u1928\\u1932\\u1939-\\u193b\\u1a17-\\u1a18\\u1a1b\\u1a56\\u1a58-\\u1a5e\\u1a60\\u1a62" +
  "\\u1a65-\\u1a6c\\u1a73-\\u1a7c\\u1a7f\\u1ab0-\\u1abd\\u1b00-\\u1b03\\u1b34\\u1b36-\\u1b3a\\u1b3c\\u1b42\\u1b6b-" +
  "\\u1b73\\u1b80-\\u1b81\\u1ba2-\\u1ba5\\u1ba8-\\u1ba9\\u1bab-\\u1bad\\u1be6\\u1be8-\\u1be9\\u1bed\\u1bef-\\u1bf1" +
  "\\u1c2c-\\u1c33\\u1c36-\\u1c37\\u1cd0-\\u1cd2\\u1cd4-\\u1ce0\\u1ce2-\\u1ce8\\u1ced\\u1cf4\\u1cf8-\\u1cf9\\u1dc0-" +
  "\\u1df5\\u1dfc-\\u1dff\\u20d0-\\u20dc\\u20e1\\u20e5-\\u20f0\\u2cef-\\u2cf1\\u2d7f\\u2de0-\\u2dff\\u302a-\\u302d" +
  "\\u3099-\\u309a\\ua66f\\ua674-\\ua67d\\ua69e-\\ua69f\\ua6f0-\\ua6f1\\ua802\\ua806\\ua80b\\ua825-\\ua826\\ua8c4" +
  "\\ua8e0-\\ua8f1\\ua926-\\ua92d\\ua947-\\ua951\\ua980-\\ua982\\ua9b3\\ua9b6-\\ua9b9\\ua9bc\\ua9e5\\uaa29-\\uaa2e" +
  "\\uaa31-\\uaa32\\uaa35-\\uaa36\\uaa43\\uaa4c\\uaa7c\\uaab0\\uaab2-\\uaab4\\uaab7-\\uaab8\\uaabe-\\uaabf\\uaac1" +
  "\\uaaec-\\uaaed\\uaaf6\\uabe5\\uabe8\\uabed\\ufb1e\\ufe00-\\ufe0f\\ufe20-\\ufe2f\\u{101fd}\\u{102e0}\\u{10376}-" +
  "\\u{1037a}\\u{10a01}-\\u{10a03}\\u{10a05}-\\u{10a06}\\u{10a0c}-\\u{10a0f}\\u{10a38}-\\u{10a3a}\\u{10a3f}" +
  "\\u{10ae5}-\\u{10ae6}\\u{11001}\\u{11038}-\\u{11046}\\u{1107f}-\\u{11081}\\u{110b3}-\\u{110b6}\\u{110b9}-" +
  "\\u{110ba}\\u{11100}-\\u{11102}\\u{11127}-\\u{1112b}\\u{1112d}\\u{11130}-\\u{11134}\\u{11173}\\u{11180}-" +
  "\\u{11181}\\u{111b6}-\\u{111be}\\u{111ca}-\\u{111cc}\\u{1122f}-\\u{11231}\\u{11234}\\u{11236}-\\u{11237}" +
  "\\u{112df}\\u{112e3}-\\u{112ea}\\u{11300}-\\u{11301}\\u{1133c}\\u{11340}\\u{11366}-\\u{1136c}\\u{11370}-" +
  "\\u{11374}\\u{114b3}-\\u{114b8}\\u{114ba}\\u{114bf}-\\u{114c0}\\u{114c2}-\\u{114c3}\\u{115b2}-\\u{115b5}" +
  "\\u{115bc}-\\u{115bd}\\u{115bf}-\\u{115c0}\\u{115dc}-\\u{115dd}\\u{11633}-\\u{1163a}\\u{1163d}\\u{1163f}-" +
  "\\u{11640}\\u{116ab}\\u{116ad}\\u{116b0}-\\u{116b5}\\u{116b7}\\u{1171d}-\\u{1171f}\\u{11722}-\\u{11725}" +
  "\\u{11727}-\\u{1172b}\\u{16af0}-\\u{16af4}\\u{16b30}-\\u{16b36}\\u{16f8f}-\\u{16f92}\\u{1bc9d}-\\u{1bc9e}" +
  "\\u{1d167}-\\u{1d169}\\u{1d17b}-\\u{1d182}\\u{1d185}-\\u{1d18b}\\u{1d1aa}-\\u{1d1ad}\\u{1d242}-\\u{1d244}" +
  "\\u{1da00}-\\u{1da36}\\u{1da3b}-\\u{1da6c}\\u{1da75}\\u{1da84}\\u{1da9b}-\\u{1da9f}\\u{1daa1}-\\u{1daaf}" +
  "\\u{1e8d0}-\\u{1e8d6}\\u{e0100}-\\u{e01ef}";
const PUNCTUATION =
  "\\x21-\\x2f\\x3a-\\x40\\x5b-\\x60\\x7b-\\x7e\\xa1\\xa7\\xab\\xb6-\\xb7\\xbb\\xbf\\u037e\\u0387\\u055a-\\u055f\\u0589-" +
  "\\u058a\\u05be\\u05c0\\u05c3\\u05c6\\u05f3-\\u05f4\\u0609-\\u060a\\u060c-\\u060d\\u061b\\u061e-\\u061f\\u066a-" +
  "\\u066d\\u06d4\\u0700-\\u070d\\u07f7-\\u07f9\\u0830-\\u083e\\u085e\\u0964-\\u0965\\u0970\\u0af0\\u0df4\\u0e4f\\u0e5a" +
  "-\\u0e5b\\u0f04-\\u0f12\\u0f14\\u0f3a-\\u0f3d\\u0f85\\u0fd0-\\u0fd4\\u0fd9-\\u0fda\\u104a-\\u104f\\u10fb\\u1360-" +
  "\\u1368\\u1400\\u166d-\\u166e\\u169b-\\u169c\\u16eb-\\u16ed\\u1735-\\u1736\\u17d4-\\u17d6\\u17d8-\\u17da\\u1800-" +
  "\\u180a\\u1944-\\u1945\\u1a1e-\\u1a1f\\u1aa0-\\u1aa6\\u1aa8-\\u1aad\\u1b5a-\\u1b60\\u1bfc-\\u1bff\\u1c3b-\\u1c3f" +
  "\\u1c7e-\\u1c7f\\u1cc0-\\u1cc7\\u1cd3\\u2010-\\u2027\\u2030-\\u2043\\u2045-\\u2051\\u2053-\\u205e\\u207d-\\u207e" +
  "\\u208d-\\u208e\\u2308-\\u230b\\u2329-\\u232a\\u2768-\\u2775\\u27c5-\\u27c6\\u27e6-\\u27ef\\u2983-\\u2998\\u29d8-" +
  "\\u29db\\u29fc-\\u29fd\\u2cf9-\\u2cfc\\u2cfe-\\u2cff\\u2d70\\u2e00-\\u2e2e\\u2e30-\\u2e42\\u3001-\\u3003\\u3008-" +
  "\\u3011\\u3014-\\u301f\\u3030\\u303d\\u30a0\\u30fb\\ua4fe-\\ua4ff\\ua60d-\\ua60f\\ua673\\ua67e\\ua6f2-\\ua6f7\\ua874" +
  "-\\ua877\\ua8ce-\\ua8cf\\ua8f8-\\ua8fa\\ua8fc\\ua92e-\\ua92f\\ua95f\\ua9c1-\\ua9cd\\ua9de-\\ua9df\\uaa5c-\\uaa5f" +
  "\\uaade-\\uaadf\\uaaf0-\\uaaf1\\uabeb\\ufd3e-\\ufd3f\\ufe10-\\ufe19\\ufe30-\\ufe52\\ufe54-\\ufe61\\ufe63\\ufe68" +
  "\\ufe6a-\\ufe6b\\uff01-\\uff03\\uff05-\\uff0a\\uff0c-\\uff0f\\uff1a-\\uff1b\\uff1f-\\uff20\\uff3b-\\uff3d\\uff3f" +
  "\\uff5b\\uff5d\\uff5f-\\uff65\\u{10100}-\\u{10102}\\u{1039f}\\u{103d0}\\u{1056f}\\u{10857}\\u{1091f}\\u{1093f}" +
  "\\u{10a50}-\\u{10a58}\\u{10a7f}\\u{10af0}-\\u{10af6}\\u{10b39}-\\u{10b3f}\\u{10b99}-\\u{10b9c}\\u{11047}-" +
  "\\u{1104d}\\u{110bb}-\\u{110bc}\\u{110be}-\\u{110c1}\\u{11140}-\\u{11143}\\u{11174}-\\u{11175}\\u{111c5}-" +
  "\\u{111c9}\\u{111cd}\\u{111db}\\u{111dd}-\\u{111df}\\u{11238}-\\u{1123d}\\u{112a9}\\u{114c6}\\u{115c1}-" +
  "\\u{115d7}\\u{11641}-\\u{11643}\\u{1173c}-\\u{1173e}\\u{12470}-\\u{12474}\\u{16a6e}-\\u{16a6f}\\u{16af5}" +
  "\\u{16b37}-\\u{16b3b}\\u{16b44}\\u{1bc9f}\\u{1da87}-\\u{1da8b}";
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
