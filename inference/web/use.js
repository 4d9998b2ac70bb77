// "Use it": how a program asks what the page has just asked, and a link that holds the text.

import { hasKey } from "./api.js";

const [box, link, curl, python] = ["use", "use-link", "use-curl", "use-python"].map((id) => document.getElementById(id));
let question = {}; // as POST predict takes it

/** Write the commands when the visitor opens them. */
export function startUse() {
  box.addEventListener("toggle", show);
}

/** From now on, show how to ask this. */
export function offerUse(asked) {
  question = asked;
  if (box.open) show();
}

/** The texts that the address of the page holds: #text=... */
export function linkedTexts() {
  const held = new URLSearchParams(location.hash.slice(1));
  return { text: held.get("text") ?? "", textPair: held.get("text_pair") ?? "" };
}

function show() {
  const address = new URL("predict", document.baseURI).href;
  const { text = "", text_pair: pair } = question;
  link.href = `#${new URLSearchParams({ text, ...(pair && { text_pair: pair }) })}`;
  // A quote ends what a shell takes as it is, so each is written outside of the quotes.
  const body = JSON.stringify(question).replaceAll("'", "'\\''");
  const type = '  -H "Content-Type: application/json"';
  const key = hasKey() ? ['  -H "Authorization: Bearer $API_KEY"'] : [];
  curl.textContent = [`curl ${address}`, type, ...key, `  -d '${body}'`].join(" \\\n");
  // Strings and numbers are written alike in JSON and in Python, but not "true".
  const values = Object.entries(question).map(([name, value]) => `"${name}": ${value === true ? "True" : JSON.stringify(value)}`);
  const headers = hasKey() ? ', headers={"Authorization": f"Bearer {api_key}"}' : "";
  python.textContent = `import requests\n\nasked = {${values.join(", ")}}\nprint(requests.post("${address}", json=asked${headers}).json())`;
}
