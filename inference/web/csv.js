// Reads CSV (RFC 4180 and what people make of it) or a text a line, and writes it back with columns appended.

const DELIMITERS = [",", ";", "\t", "|"];
const TEXT_COLUMNS = ["text", "headline", "sentence", "content", "article", "body"];
const PAIR_COLUMNS = ["text_pair", "question", "answer", "premise", "hypothesis", "sentence1", "sentence2"];
const HEADER_WORDS = new Set([...TEXT_COLUMNS, ...PAIR_COLUMNS, "title", "description", "label", "class", "class index", "category", "id"]);
const LONGEST_HEADER = 40;

/**
 * A file's rows: `records` of {cells, raw}, where raw is the record just as it stood.
 * `isCsv` false means that each line is one text.
 */
export class Table {
  constructor(source, isCsv) {
    this.mark = source.startsWith("\ufeff") ? "\ufeff" : "";
    const body = source.slice(this.mark.length);
    this.isCsv = isCsv;
    this.newline = body.includes("\r\n") ? "\r\n" : "\n";
    this.delimiter = isCsv ? guessDelimiter(body) : ",";
    this.records = isCsv ? parse(body, this.delimiter) : lines(body);
    this.width = this.records.reduce((width, { cells }) => Math.max(width, cells.length), 1);
    this.hasHeader = isCsv && looksLikeHeader(this.records);
  }

  get header() {
    return this.hasHeader ? this.records[0].cells : [];
  }

  get rows() {
    return this.hasHeader ? this.records.slice(1) : this.records;
  }

  /** Where a text may come from, the likeliest first: {name, columns}. */
  textColumns() {
    const names = this.header.map((name) => name.trim().toLowerCase());
    const single = Array.from({ length: this.width }, (_, i) => ({ name: this.columnName(i), columns: [i] }));
    const lengths = meanLengths(this.rows, this.width);
    const rank = ({ columns: [i] }) => {
      const known = TEXT_COLUMNS.indexOf(names[i]);
      return known < 0 ? TEXT_COLUMNS.length + 1 / (1 + lengths[i]) : known;
    };
    const choices = single.sort((a, b) => rank(a) - rank(b));
    const both = ["title", "description"].map((name) => names.indexOf(name));
    if (both.includes(-1)) return choices;
    const joined = { name: both.map((i) => this.columnName(i)).join(" + "), columns: both };
    return names.includes("text") ? [choices[0], joined, ...choices.slice(1)] : [joined, ...choices];
  }

  columnName(i) {
    return this.header[i]?.trim() || `column ${i + 1}`;
  }

  /** The text of each row. */
  texts(columns) {
    return this.rows.map(({ cells }) => columns.map((i) => (cells[i] ?? "").trim()).filter(Boolean).join(" "));
  }

  /** The file again with columns appended; every original record stays as it was, to the character. */
  withColumns(names, values) {
    const taken = new Set(this.header.map((name) => name.trim().toLowerCase()));
    const clash = names.some((name) => taken.has(name));
    const titles = clash ? names.map((name) => `predicted_${name}`) : names;
    const out = this.rows.map((record, i) => this.extended(record, values[i]));
    if (this.hasHeader) out.unshift(this.extended(this.records[0], titles));
    else if (!this.isCsv) out.unshift(["text", ...titles].join(","));
    return `${this.mark}${out.join(this.newline)}${this.newline}`;
  }

  extended({ cells, raw }, added) {
    const gaps = this.delimiter.repeat(this.width - cells.length);
    return [raw + gaps, ...added.map((cell) => quote(String(cell), this.delimiter))].join(this.delimiter);
  }
}

/** Decode a file's bytes: UTF-8, UTF-16 with its mark, else the Windows code page of western Europe. */
export function decode(bytes) {
  const [first, second] = new Uint8Array(bytes, 0, Math.min(2, bytes.byteLength));
  if (first === 0xff && second === 0xfe) return new TextDecoder("utf-16le").decode(bytes);
  if (first === 0xfe && second === 0xff) return new TextDecoder("utf-16be").decode(bytes);
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    return new TextDecoder("windows-1252").decode(bytes);
  }
}

/** Whether these bytes are no text: a byte of zero is in most other files, and in no text but UTF-16 with its mark. */
export function isBinary(bytes) {
  const start = new Uint8Array(bytes, 0, Math.min(1024, bytes.byteLength));
  const isWide = start[0] + start[1] === 0x1fd; // ff fe or fe ff
  return !isWide && start.includes(0);
}

function quote(cell, delimiter) {
  return cell.includes(delimiter) || /["\r\n]/.test(cell) ? `"${cell.replaceAll('"', '""')}"` : cell;
}

function lines(source) {
  const all = source.split(/\r\n|\n|\r/);
  while (all.length && !all.at(-1).trim()) all.pop();
  return all.map((line) => ({ cells: [line], raw: quote(line, ",") }));
}

function parse(source, delimiter) {
  const records = [];
  let end = source.length; // blank lines at the end are no rows
  while (end && "\r\n".includes(source[end - 1])) end -= 1;
  const plain = new RegExp(`[^\\r\\n${delimiter === "|" ? "\\|" : delimiter}]*`, "y");
  for (let at = 0; at < end; ) {
    const start = at;
    const cells = [];
    let isWhole = true;
    for (;;) {
      const cell = readCell(source, at, plain);
      cells.push(cell.value);
      isWhole &&= cell.isWhole;
      at = cell.end;
      if (source[at] !== delimiter) break;
      at += 1;
    }
    const raw = isWhole ? source.slice(start, at) : cells.map((cell) => quote(cell, delimiter)).join(delimiter);
    records.push({ cells, raw });
    at += source.startsWith("\r\n", at) ? 2 : 1;
  }
  return records;
}

function readCell(source, at, plain) {
  const rest = (from) => {
    plain.lastIndex = from;
    return plain.exec(source)[0];
  };
  if (source[at] !== '"') {
    const value = rest(at);
    return { value, end: at + value.length, isWhole: true };
  }
  let value = "";
  for (let from = at + 1; ; ) {
    const close = source.indexOf('"', from);
    if (close < 0) break;
    if (source[close + 1] !== '"') {
      const stray = rest(close + 1); // "abc"def: kept, as spreadsheets do
      return { value: value + source.slice(from, close) + stray, end: close + 1 + stray.length, isWhole: true };
    }
    value += source.slice(from, close + 1);
    from = close + 2;
  }
  const literal = rest(at); // a quote that nothing closes is a letter, else it would swallow the rest of the file
  return { value: literal, end: at + literal.length, isWhole: false };
}

function guessDelimiter(source) {
  const [first] = source.replaceAll(/"[^"]*"/g, "").split(/[\r\n]/, 1);
  const counts = DELIMITERS.map((delimiter) => first.split(delimiter).length);
  return DELIMITERS[counts.indexOf(Math.max(...counts))];
}

function meanLengths(records, width) {
  const sample = records.slice(0, 200);
  return Array.from({ length: width }, (_, i) => {
    return sample.reduce((sum, { cells }) => sum + (cells[i] ?? "").length, 0) / Math.max(1, sample.length);
  });
}

function looksLikeHeader(records) {
  if (records.length < 2) return false;
  const names = records[0].cells.map((cell) => cell.trim().toLowerCase());
  if (names.some((name) => HEADER_WORDS.has(name))) return true;
  if (names.some((name) => !name || name.length > LONGEST_HEADER || /^[\d.,%-]+$/.test(name))) return false;
  const lengths = meanLengths(records.slice(1), names.length);
  const longest = lengths.indexOf(Math.max(...lengths));
  return new Set(names).size === names.length && lengths[longest] > 2 * names[longest].length;
}
