// The one line at the foot of the window that says what is wrong, and the field for an API key.

const ORDER = ["key", "server"]; // the first that has something to say is shown
const lines = new Map();
const bar = document.getElementById("notice");
const text = document.getElementById("notice-text");
const form = document.getElementById("key-form");
const field = document.getElementById("key");
let pendingKey = null;

/** Show `line` for `source` ("key" or "server"); null takes it away. */
export function setNotice(source, line) {
  if (line) lines.set(source, line);
  else lines.delete(source);
  const source_ = ORDER.find((name) => lines.has(name));
  const shown = source_ ? lines.get(source_) : "";
  if (text.textContent !== shown) text.textContent = shown;
  form.hidden = source_ !== "key";
  bar.hidden = !source_;
}

/** Ask the visitor for the server's API key; callers that come meanwhile share one answer. */
export function askForKey(isWrong) {
  setNotice("key", isWrong ? "The server does not accept this key." : "This server asks for an API key.");
  pendingKey ??= new Promise((resolve) => {
    form.onsubmit = (event) => {
      event.preventDefault();
      pendingKey = null;
      resolve(field.value.trim());
      field.value = "";
      setNotice("key", null);
    };
  });
  return pendingKey;
}
