// Where what the page shows comes from: a server that runs the cards, or the page itself, when it is a report.

class Refusal extends Error {
  constructor(answer) {
    super(typeof answer.detail === "string" ? answer.detail : "the server could not do it");
    this.fields = answer.fields ?? {};
    this.mistakes = answer.mistakes;
  }
}

async function ask(method, path, body) {
  const headers = body === undefined ? {} : { "Content-Type": "application/json" };
  const response = await fetch(`/api/${path}`, { method, headers, body: JSON.stringify(body) }).catch(() => {
    throw new Error("the server does not answer");
  });
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) throw new Refusal(answer);
  return answer;
}

const server = {
  isLive: true,
  pipeline: () => ask("GET", "pipeline"),
  pictures: (id) => ask("GET", `nodes/${encodeURIComponent(id)}`),
  configure: (id, values) => ask("PUT", `nodes/${encodeURIComponent(id)}/config`, values),
  cards: () => ask("GET", "cards"),
  check: (nodes) => ask("POST", "wiring/check", { nodes }),
  rewire: (nodes) => ask("PUT", "wiring", { nodes }),
  toYaml: (nodes) => ask("POST", "wiring/yaml", { nodes }),
  fromYaml: (yaml) => ask("POST", "wiring/load", { yaml }),
  step: () => ask("POST", "step"),
  run: () => ask("POST", "run"),
  reset: (workers) => ask("POST", "reset", { workers }),
  follow(onState, onLost) {
    const events = new EventSource("/api/events");
    events.onmessage = (event) => onState(JSON.parse(event.data));
    // The browser reconnects unless it was refused; then a request shows the reason.
    events.onerror = () => (events.readyState === EventSource.CLOSED ? server.pipeline().catch(onLost) : onLost(new Error("the server does not answer")));
  },
};

const report = (run) => ({
  isLive: false,
  pipeline: async () => run.pipeline,
  pictures: async (id) => run.pictures[id] ?? [],
  follow: (onState) => onState(run.state),
});

export function openSource() {
  const run = JSON.parse(document.getElementById("run").textContent);
  return run === null ? server : report(run);
}
