// node run_in_node.mjs INSTRUCTIONS: opens a model as its worker does and answers, in Node. Reads {base, texts, asked} from
// standard input: the URL of the model's folder, texts, and a list of what is asked for beside the answers; prints the
// model's facts, the answers, the logits' bits of each text alone, and the predictions for each that is asked for.
import { readFile } from "node:fs/promises";
import { text } from "node:stream/consumers";

const fetchRemote = globalThis.fetch;
globalThis.fetch = async (url, options) => {
  if (new URL(url).protocol !== "file:") return fetchRemote(url, options);
  try {
    return new Response(await readFile(new URL(url)));
  } catch {
    return new Response("", { status: 404 });
  }
};
const { LocalModel } = await import("../../../inference/web/local_worker.js");
const { meaning } = await import("../../../inference/web/answering.js");
const { base, texts, asked } = JSON.parse(await text(process.stdin));
try {
  const model = await LocalModel.open(base, { instructions: process.argv[2] });
  const encoded = texts.map((one) => model.tokenizer.encode(model.tokenizer.clean(one)));
  const bits = encoded.map(({ ids }) => [...new Uint32Array(Float32Array.from(model.logits([ids])[0]).buffer)]);
  const answers = model.classify(texts);
  const predictions = asked.map((one) => answers.map((answer) => meaning(model.info, answer, one)));
  console.log(JSON.stringify({ info: model.info, answers, bits, predictions }));
} catch (error) {
  console.log(JSON.stringify({ error: error.message, code: error.code, index: error.index }));
}
