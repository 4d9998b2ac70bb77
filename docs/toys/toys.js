// Four toys about distributed training. Each is a function that returns numbers, and a view that draws only these
// numbers. tests/docs/test_toys.py compares the numbers with what the project's own Python computes.
// A classic script without imports, because browsers load no modules from file://.
"use strict";
{
  const range = (count) => Array.from({ length: count }, (_, index) => index);
  const modulo = (number, size) => ((number % size) + size) % size;

  // --- Ring all-reduce, as learn/by_hand/ring_all_reduce.py ---

  const NUM_ELEMENTS = 9;
  const BYTES_PER_ELEMENT = 8; // int64

  /** First and last-plus-one element of each chunk, as Tensor.tensor_split: the first chunks get one more. */
  function chunkBounds(ranks) {
    const [size, rest] = [Math.floor(NUM_ELEMENTS / ranks), NUM_ELEMENTS % ranks];
    return range(ranks).map((chunk) => {
      const start = chunk * size + Math.min(chunk, rest);
      return [start, start + size + (chunk < rest ? 1 : 0)];
    });
  }

  /** What every rank holds before and after each of the 2 (N - 1) steps; rank r starts with 1 to 9, times 10^r. */
  function ring(ranks) {
    const bounds = chunkBounds(ranks);
    let held = range(ranks).map((rank) => range(NUM_ELEMENTS).map((index) => (index + 1) * 10 ** rank));
    let bytes = range(ranks).map(() => 0);
    const states = [{ phase: "before", sent: null, received: null, held, bytes }];
    for (const phase of ["reduce-scatter", "all-gather"]) {
      const adds = phase === "reduce-scatter";
      for (const step of range(ranks - 1)) {
        // After the reduce-scatter, rank r holds the whole sum of chunk r + 1, so that is the first to be passed on.
        const sent = range(ranks).map((rank) => modulo(rank + (adds ? 0 : 1) - step, ranks));
        const received = sent.map((chunk) => modulo(chunk - 1, ranks));
        const before = held;
        held = before.map((own, rank) => {
          const incoming = before[modulo(rank - 1, ranks)];
          const [start, stop] = bounds[received[rank]];
          return own.map((value, index) => {
            if (index < start || index >= stop) return value;
            return adds ? value + incoming[index] : incoming[index];
          });
        });
        bytes = bytes.map((sum, rank) => sum + (bounds[sent[rank]][1] - bounds[sent[rank]][0]) * BYTES_PER_ELEMENT);
        states.push({ phase, sent, received, held, bytes });
      }
    }
    return states;
  }

  // --- Memory under ZeRO, as zero_states in training/planning/memory.py ---

  const STATES = ["weights", "gradients", "optimizer state"];
  const STAGES = ["stage 0 (DDP)", "stage 1", "stage 2", "stage 3"];
  const PRECISIONS = [
    ["fp32, or bf16 by autocast: 4 + 4 + 8", [4, 4, 8]],
    ["16-bit weights with fp32 copies: 2 + 2 + 12", [2, 2, 12]],
    ["everything in 16 bits: 2 + 2 + 4", [2, 2, 4]],
  ];
  const MODELS = [
    [66e6, "66 million (DistilBERT)"],
    [335e6, "335 million (BERT-large)"],
    [1.5e9, "1.5 billion (GPT-2 XL)"],
    [7.5e9, "7.5 billion"],
    [13e9, "13 billion"],
    [70e9, "70 billion"],
    [175e9, "175 billion (GPT-3)"],
  ];

  /** Bytes of weights, gradients and optimizer state on each rank; `each`: bytes per parameter of the three. */
  function zero(parameters, ranks, stage, each) {
    // Stage 1 shards the optimizer state, stage 2 the gradients too, stage 3 the weights too.
    return each.map((size, state) => (size * parameters) / (stage >= 3 - state ? ranks : 1));
  }

  // --- Pipeline schedules, as training/parallelism/schedules.py and timeline.py ---

  const SCHEDULES = {
    gpipe: { title: "GPipe", stagesPerRank: 1 },
    "1f1b": { title: "1F1B", stagesPerRank: 1 },
    interleaved: { title: "Interleaved 1F1B", stagesPerRank: 2 },
    zero_bubble: { title: "Interleaved zero-bubble", stagesPerRank: 2 },
  };
  // F forward, B backward, or the halves of B: I for the gradients of inputs, W for those of weights.
  const COSTS = { F: 1, B: 2, I: 1, W: 1 };

  /** Why a schedule cannot run this many micro-batches, or null. */
  function refusal(schedule, ranks, microBatches) {
    const what = `${microBatches} micro-batches: the ${schedule} schedule over ${ranks} ranks`;
    if (schedule !== "gpipe" && microBatches < ranks) return `${what} needs at least ${ranks} micro-batches.`;
    const rounds = Math.max(1, Math.floor(microBatches / ranks));
    if (SCHEDULES[schedule].stagesPerRank > 1 && microBatches % rounds) {
      return `${what} runs in ${rounds} rounds of equal size; use a multiple of ${ranks}.`;
    }
    return null;
  }

  function orderWithOneStage(schedule, rank, ranks, microBatches) {
    // 1F1B runs just enough forward passes ahead to fill the pipeline behind it, then one backward per forward.
    const ahead = Math.min(microBatches, schedule === "gpipe" ? microBatches : ranks - rank);
    const action = (kind) => (microBatch) => ({ stage: rank, kind, microBatch });
    const [forward, backward] = ["F", "B"].map((kind) => range(microBatches).map(action(kind)));
    const steady = forward.slice(ahead).flatMap((next, index) => [backward[index], next]);
    return [...forward.slice(0, ahead), ...steady, ...backward.slice(microBatches - ahead)];
  }

  function orderWithTwoStages(schedule, rank, ranks, microBatches) {
    const splits = schedule === "zero_bubble";
    const perRound = Math.floor(microBatches / Math.max(1, Math.floor(microBatches / ranks)));
    const passes = 2 * microBatches;
    const warmup = Math.min(passes, perRound + (splits ? 1 : 2) * (ranks - 1 - rank));
    // A round of micro-batches goes through one of the rank's stages, then through the other one.
    const turn = (pass) => Math.floor(pass / perRound) % 2;
    const seen = {};
    const next = (kind, stage) => {
      const microBatch = (seen[kind + stage] ??= 0);
      seen[kind + stage] += 1;
      return { stage, kind, microBatch };
    };
    const order = [];
    const postponed = []; // gradients of weights, which nobody waits for: they fill the bubble
    for (const pass of range(passes + warmup)) {
      if (pass < passes) order.push(next("F", rank + ranks * turn(pass)));
      if (pass < warmup) continue;
      const backward = next(splits ? "I" : "B", rank + ranks * (1 - turn(pass - warmup)));
      order.push(backward);
      if (!splits) continue;
      postponed.push({ ...backward, kind: "W" });
      if (pass - warmup >= rank) order.push(postponed.shift());
    }
    return [...order, ...postponed];
  }

  /** The boxes of each rank over time: a pass starts when its rank is free and its input is there. */
  function pipeline(schedule, ranks, microBatches) {
    const refused = refusal(schedule, ranks, microBatches);
    if (refused) return { refused };
    const { stagesPerRank } = SCHEDULES[schedule];
    const order = stagesPerRank > 1 ? orderWithTwoStages : orderWithOneStage;
    const waiting = range(ranks).map((rank) => order(schedule, rank, ranks, microBatches));
    const lastStage = ranks * stagesPerRank - 1;
    const boxes = range(ranks).map(() => []);
    const done = new Map(); // when a pass ended; I counts as B, because both give the stage before the same thing
    const key = (stage, kind, microBatch) => `${stage} ${kind === "I" ? "B" : kind} ${microBatch}`;
    const needs = ({ stage, kind, microBatch }) => {
      if (kind === "F") return stage ? [key(stage - 1, "F", microBatch)] : [];
      if (kind === "W") return [key(stage, "B", microBatch)];
      return [key(stage, "F", microBatch), ...(stage < lastStage ? [key(stage + 1, "B", microBatch)] : [])];
    };
    while (waiting.some((actions) => actions.length)) {
      for (const rank of range(ranks)) {
        while (waiting[rank].length && needs(waiting[rank][0]).every((need) => done.has(need))) {
          const action = waiting[rank].shift();
          const free = boxes[rank].at(-1)?.end ?? 0;
          const start = Math.max(free, ...needs(action).map((need) => done.get(need)));
          const end = start + COSTS[action.kind];
          boxes[rank].push({ ...action, start, end });
          done.set(key(action.stage, action.kind, action.microBatch), end);
        }
      }
    }
    const duration = Math.max(...boxes.map((own) => own.at(-1).end));
    const busy = boxes.flat().reduce((sum, box) => sum + box.end - box.start, 0);
    const kept = boxes.map((own) => mostKept(own) / stagesPerRank);
    return { boxes, duration, bubble: 1 - busy / (ranks * duration), kept };
  }

  /** For how many passes a rank keeps activations at most: from the forward pass to the end of the backward pass. */
  function mostKept(boxes) {
    let [kept, most] = [0, 0];
    for (const { kind } of boxes) {
      kept += { F: 1, I: 0 }[kind] ?? -1;
      most = Math.max(most, kept);
    }
    return most;
  }

  // --- Who sees which rows ---

  /** torch.randperm(count) with a generator of this seed: the Mersenne Twister MT19937. */
  function randperm(count, seed) {
    const state = new Uint32Array(624);
    state[0] = seed;
    for (let i = 1; i < 624; i++) state[i] = Math.imul(1812433253, state[i - 1] ^ (state[i - 1] >>> 30)) + i;
    let place = 624;
    const random = () => {
      if (place === 624) {
        for (let i = 0; i < 624; i++) {
          const mixed = (state[i] & 0x80000000) | (state[(i + 1) % 624] & 0x7fffffff);
          state[i] = state[(i + 397) % 624] ^ (mixed >>> 1) ^ (mixed & 1 ? 0x9908b0df : 0);
        }
        place = 0;
      }
      let bits = state[place++];
      bits ^= bits >>> 11;
      bits ^= (bits << 7) & 0x9d2c5680;
      bits ^= (bits << 15) & 0xefc60000;
      return (bits ^ (bits >>> 18)) >>> 0;
    };
    const order = range(count);
    for (let i = 0; i < count - 1; i++) {
      const other = i + (random() % (count - i));
      [order[i], order[other]] = [order[other], order[i]];
    }
    return order;
  }

  /**
   * The rows of each rank in each step of an epoch.
   *
   * `sampler`: torch's DistributedSampler with seed 0, as learn/by_hand/batches.py uses it. It deals the shuffled rows
   * out like cards and repeats the first ones until all ranks have the same number. The last step is dropped if it has
   * too few rows.
   * `shares`: as rank_share in training/data/batching.py. Each rank takes consecutive rows of the global batch; nothing
   * is repeated or dropped, so the last shares may differ in size.
   */
  function rows(count, ranks, rowsPerRank, epoch, rule) {
    const order = randperm(count, epoch);
    const globalBatch = ranks * rowsPerRank;
    if (rule === "shares") {
      return range(Math.ceil(count / globalBatch)).map((step) => {
        const batch = order.slice(step * globalBatch, (step + 1) * globalBatch);
        const edge = (rank) => roundHalfToEven((rank / ranks) * batch.length);
        return {
          dropped: false,
          ranks: range(ranks).map((rank) =>
            batch.slice(edge(rank), edge(rank + 1)).map((row) => ({ row, repeated: false })),
          ),
        };
      });
    }
    const perRank = Math.ceil(count / ranks);
    return range(Math.ceil(perRank / rowsPerRank)).map((step) => ({
      dropped: (step + 1) * globalBatch > count,
      ranks: range(ranks).map((rank) =>
        range(Math.min(rowsPerRank, perRank - step * rowsPerRank)).map((index) => {
          const place = rank + (step * rowsPerRank + index) * ranks;
          return { row: order[place % count], repeated: place >= count };
        }),
      ),
    }));
  }

  function roundHalfToEven(number) {
    const below = Math.floor(number);
    if (number - below !== 0.5) return Math.round(number);
    return below % 2 ? below + 1 : below;
  }

  window.toys = { ring, zero, pipeline, rows };

  // --- Views ---

  const SVG = "http://www.w3.org/2000/svg";

  function fill(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) if (value !== null) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }
  const html = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
  const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
  const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

  /** A number with its digits that are no zero set off: digit r of a sum is what rank r added. */
  function digits(value, width) {
    const cells = [...String(value).padStart(width)].map((digit) => (digit === "0" ? html("s", {}, digit) : digit));
    return html("div", {}, ...cells);
  }

  function drawRing({ ranks, step }) {
    const states = ring(ranks);
    const { phase, sent, received, held, bytes } = states[step];
    const head = range(ranks).map((chunk) => html("th", { scope: "col" }, `chunk ${chunk}`));
    const cells = (rank) =>
      chunkBounds(ranks).map(([start, stop], chunk) => {
        const values = held[rank].slice(start, stop);
        const isWhole = values.every((value, index) => value === states.at(-1).held[0][start + index]);
        const classes = { whole: isWhole, received: received?.[rank] === chunk, sent: sent?.[rank] === chunk };
        const named = Object.keys(classes).filter((name) => classes[name]);
        return html("td", { class: named.join(" ") }, ...values.map((value) => digits(value, ranks)));
      });
    const title = (rank) => html("th", { scope: "row" }, `rank ${rank}`);
    const body = range(ranks).map((rank) => html("tr", {}, title(rank), ...cells(rank)));
    const table = html(
      "table",
      { class: "toy-ring" },
      html("thead", {}, html("tr", {}, html("td"), ...head)),
      html("tbody", {}, ...body),
    );
    const number = ((step - 1) % (ranks - 1)) + 1;
    const copies = phase === "all-gather";
    table.classList.toggle("copies", copies);
    const receives = copies ? "keeps it in place of its own (=)" : "adds it to its own (+)";
    const told =
      phase === "before"
        ? "Nothing is sent yet. The ranks hold 1 to 9, times 1, 10, 100 and so on, so the digits of a sum tell you which ranks are in it."
        : `Step ${number} of ${ranks - 1} of the ${phase}: each rank sends a chunk (↓) to the next rank, the last ` +
          `one to rank 0, which ${receives}. Green chunks are sums over all ranks.`;
    return [[table], `${told} Bytes sent by each rank: ${bytes.join(", ")}.`];
  }

  const gib = (bytes) => {
    const value = bytes / 2 ** 30;
    const digits = value < 10 ? { maximumSignificantDigits: 2 } : { maximumFractionDigits: 0 };
    return `${value.toLocaleString("en", digits)} GiB`;
  };

  function drawZero({ parameters, ranks, stage, precision }) {
    const [count, each] = [MODELS[parameters][0], PRECISIONS[precision][1]];
    const all = range(4).map((number) => zero(count, 2 ** ranks, number, each));
    const sum = (bytes) => bytes.reduce((total, one) => total + one, 0);
    const bars = STAGES.map((name, number) =>
      html(
        "div",
        { class: `toy-bar${number === stage ? " chosen" : ""}`, "data-stage": number },
        html("span", {}, name),
        html(
          "span",
          { class: "toy-track" },
          ...all[number].map((bytes, state) =>
            html("i", { class: `state-${state}`, style: `width: ${(100 * bytes) / sum(all[0])}%` }),
          ),
        ),
        html("b", {}, gib(sum(all[number]))),
      ),
    );
    const key = STATES.map((name, state) =>
      html("li", {}, html("i", { class: `state-${state}` }), `${name}: `, html("b", {}, gib(all[stage][state]))),
    );
    const total = gib(sum(all[stage]));
    const on = `On ${plural(2 ** ranks, "rank")}`;
    const told = `${on}, ${STAGES[stage]} needs ${total} per rank, plus activations and buffers.`;
    return [[html("div", { class: "toy-bars" }, ...bars), html("ul", { class: "toy-key" }, ...key)], told];
  }

  const KINDS = { F: "forward", B: "backward", I: "gradients of inputs", W: "gradients of weights" };
  const LABEL_WIDTH = 54;
  const ROW_HEIGHT = 26;
  const DIGIT_WIDTH = 8;

  function drawPipeline({ schedule, ranks, microBatches }, width) {
    const result = pipeline(schedule, ranks, microBatches);
    if (result.refused) return [[], result.refused];
    // One scale for all schedules, in forward passes through all stages of a rank, so that the shortest is the fastest.
    const inPasses = (name, time) => time / SCHEDULES[name].stagesPerRank;
    const longest = Object.keys(SCHEDULES).reduce(
      (most, name) => Math.max(most, inPasses(name, pipeline(name, ranks, microBatches).duration ?? 0)),
      0,
    );
    const unit = (width - LABEL_WIDTH) / longest;
    const x = (time) => LABEL_WIDTH + inPasses(schedule, time) * unit;
    const drawn = result.boxes.map((boxes, rank) =>
      svg(
        "g",
        { "data-rank": rank, transform: `translate(0 ${rank * ROW_HEIGHT})` },
        svg("text", { x: 0, y: 17, class: "toy-name" }, `rank ${rank}`),
        svg("rect", { x: x(0), y: 1, width: x(result.duration) - x(0), height: ROW_HEIGHT - 4, class: "bubble" }),
        ...boxes.flatMap((box) => {
          const [left, right] = [x(box.start), x(box.end)];
          const number = String(box.microBatch);
          const shade = `${box.kind} ${box.stage >= ranks ? "second" : ""}`;
          const title = svg("title", {}, `stage ${box.stage}, micro-batch ${number}: ${KINDS[box.kind]}`);
          const place = { x: left, y: 1, width: right - left, height: ROW_HEIGHT - 4 };
          const isNarrow = right - left < number.length * DIGIT_WIDTH + 1;
          const rect = svg("rect", { ...place, class: shade, "stroke-width": isNarrow ? 0.3 : 1 }, title);
          if (isNarrow) return [rect];
          return [rect, svg("text", { x: (left + right) / 2, y: 17, class: "toy-number" }, number)];
        }),
      ),
    );
    const height = ranks * ROW_HEIGHT;
    const { title, stagesPerRank } = SCHEDULES[schedule];
    const stages = stagesPerRank > 1 ? `${ranks * stagesPerRank} stages on ` : "";
    const bubble = `bubble ${(result.bubble * 100).toFixed(1)}%`;
    const told = `${title}: ${stages}${ranks} ranks, ${microBatches} micro-batches, ${bubble}`;
    const picture = svg("svg", { width, height, role: "img", "aria-label": told }, ...drawn);
    const shown = Object.keys(KINDS).filter((kind) => result.boxes.flat().some((box) => box.kind === kind));
    const key = shown.map((kind) => html("li", {}, html("i", { class: kind }), KINDS[kind]));
    key.push(html("li", {}, html("i", { class: "bubble" }), "waiting: the bubble"));
    if (stagesPerRank > 1) key.push(html("li", {}, html("i", { class: "F second" }), "pale: a rank's second stage"));
    const kept = `Micro-batches whose activations each rank keeps at most: ${result.kept.join(", ")}.`;
    return [[picture, html("ul", { class: "toy-key" }, ...key)], `${told}. ${kept}`];
  }

  function drawRows({ count, ranks, rowsPerRank, epoch, rule }) {
    const steps = rows(count, ranks, rowsPerRank, epoch, rule);
    const chip = ({ row, repeated }) =>
      html("span", { class: repeated ? "repeated" : null, title: repeated ? "a repeated row" : null }, String(row));
    const body = steps.map((step, number) =>
      html(
        "tr",
        { class: step.dropped ? "dropped" : null },
        html("th", { scope: "row" }, `step ${number}`, step.dropped ? html("small", {}, " dropped") : ""),
        ...step.ranks.map((own, rank) =>
          html("td", { class: `rank-${rank}` }, ...(own.length ? own.map(chip) : [html("em", {}, "none")])),
        ),
      ),
    );
    const head = range(ranks).map((rank) => html("th", { scope: "col" }, `rank ${rank}`));
    const table = html(
      "table",
      { class: "toy-rows" },
      html("thead", {}, html("tr", {}, html("td"), ...head)),
      html("tbody", {}, ...body),
    );
    const trained = steps.filter((step) => !step.dropped);
    const seen = trained.flatMap((step) => step.ranks.flat().map((one) => one.row));
    const distinct = new Set(seen).size;
    const told = `This epoch trains on ${plural(seen.length, "row")} in ${plural(trained.length, "step")}`;
    return [[table], `${told}: ${seen.length - distinct} repeated, ${count - distinct} of ${count} left out.`];
  }

  const TOYS = {
    ring: {
      controls: [
        { name: "ranks", label: "ranks", min: 2, max: 5, value: 4 },
        { name: "step", label: "step", min: 0, max: ({ ranks }) => 2 * (ranks - 1), value: 0, buttons: true },
      ],
      draw: drawRing,
    },
    zero: {
      controls: [
        {
          name: "parameters",
          label: "parameters",
          min: 0,
          max: MODELS.length - 1,
          value: 3,
          text: (value) => MODELS[value][1],
        },
        { name: "ranks", label: "ranks", min: 0, max: 10, value: 3, text: (value) => String(2 ** value) },
        { name: "stage", label: "ZeRO stage", min: 0, max: 3, value: 1 },
        {
          name: "precision",
          label: "bytes per parameter",
          options: PRECISIONS.map(([text], index) => [index, text]),
          value: 0,
        },
      ],
      draw: drawZero,
    },
    pipeline: {
      controls: [
        {
          name: "schedule",
          label: "schedule",
          options: Object.entries(SCHEDULES).map(([name, { title }]) => [name, title]),
          value: "1f1b",
        },
        { name: "ranks", label: "ranks", min: 2, max: 8, value: 4 },
        { name: "microBatches", label: "micro-batches", min: 1, max: 16, value: 8 },
      ],
      draw: drawPipeline,
    },
    rows: {
      controls: [
        {
          name: "rule",
          label: "rows are divided by",
          options: [
            ["sampler", "DistributedSampler"],
            ["shares", "this project's trainer"],
          ],
          value: "sampler",
        },
        { name: "count", label: "rows", min: 4, max: 40, value: 22 },
        { name: "ranks", label: "ranks", min: 1, max: 6, value: 4 },
        { name: "rowsPerRank", label: "rows per rank and step", min: 1, max: 4, value: 2 },
        { name: "epoch", label: "epoch", min: 0, max: 9, value: 0 },
      ],
      draw: drawRows,
    },
  };

  /** Build a toy in its place: controls, what they change, and a line that screen readers read out. */
  function mount(place) {
    const { controls, draw } = TOYS[place.dataset.toy];
    const drawing = html("div", { class: "toy-drawing" });
    const status = html("p", { role: "status" });
    const fields = new Map();
    const input = () =>
      Object.fromEntries(
        controls.map(({ name, value }) => {
          const chosen = fields.get(name).value;
          return [name, typeof value === "number" ? Number(chosen) : chosen];
        }),
      );
    const redraw = () => {
      for (const { name, max, text = String } of controls) {
        const field = fields.get(name);
        if (typeof max === "function") field.max = max(input());
        const output = field.parentElement.querySelector("output");
        if (!output) continue;
        output.value = text(field.value);
        field.setAttribute("aria-valuetext", output.value);
      }
      const [children, told] = draw(input(), drawing.clientWidth || 320); // 0 while the page is hidden
      drawing.replaceChildren(...children);
      if (status.textContent !== told) status.textContent = told;
    };
    const build = ({ name, label, min, max, value, options, buttons }) => {
      const field = options
        ? html("select", { name }, ...options.map(([key, text]) => html("option", { value: key }, text)))
        : html("input", { type: "range", name, min, max: typeof max === "number" ? max : 100 });
      field.value = value;
      field.addEventListener("input", redraw);
      fields.set(name, field);
      const control = html("label", {}, html("span", {}, label), ...(options ? [] : [html("output")]), field);
      if (!buttons) return [control];
      const button = (text, by) => {
        const pressed = html("button", { type: "button" }, text);
        pressed.addEventListener("click", () => {
          field.value = Number(field.value) + by; // a range stays within its bounds
          redraw();
        });
        return pressed;
      };
      return [control, html("div", { class: "toy-buttons" }, button("◂ back", -1), button("next ▸", 1))];
    };
    place.replaceChildren(html("div", { class: "toy-controls" }, ...controls.flatMap(build)), drawing, status);
    redraw();
    let width = drawing.clientWidth;
    new ResizeObserver(() => {
      if (drawing.clientWidth === width) return;
      width = drawing.clientWidth;
      redraw();
    }).observe(drawing);
  }

  document.querySelectorAll("[data-toy]").forEach(mount);
}
