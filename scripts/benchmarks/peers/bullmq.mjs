// The client of BullMQ: `node bullmq.mjs publish|consume OPTIONS`, figures as JSON on stdout.
// Installed beside the package, since Node.js looks for it above this file.
import { writeFileSync } from "node:fs";
import { Queue, Worker } from "bullmq";

const [what, text] = process.argv.slice(2);
const options = JSON.parse(text);
const connection = { host: "127.0.0.1", port: options.port, maxRetriesPerRequest: null };
// Synchronous, since the process ends behind it.
const answer = (figures) => writeFileSync(1, JSON.stringify(figures));
const now = () => performance.timeOrigin + performance.now();

async function publish() {
  const queue = new Queue("bench", { connection });
  await queue.waitUntilReady();
  const latencyMs = [];
  const begunAt = performance.now();
  const seconds = () => (performance.now() - begunAt) / 1000;
  const limit = options.count ?? Infinity;
  let asked = 0;
  async function run() {
    while (asked < limit && (options.seconds === null || seconds() < options.seconds)) {
      if (options.perS && asked >= options.perS * seconds()) {
        const waitMs = ((asked + 1) / options.perS - seconds()) * 1000;
        await new Promise((resolve) => setTimeout(resolve, Math.max(0, waitMs)));
        continue;
      }
      asked += 1;
      const sentAt = performance.now();
      const due = Math.floor(Date.now()) + options.delayMs;
      const data = { due, filler: "x".repeat(170) };
      await queue.add("message", data, { delay: options.delayMs, removeOnComplete: true });
      latencyMs.push(performance.now() - sentAt);
    }
  }
  await Promise.all(Array.from({ length: options.inFlight }, run));
  const took = seconds();
  await queue.close();
  answer({ seconds: took, latencyMs });
}

async function consume() {
  const receivedMs = [];
  const dueMs = [];
  let lastAt = performance.now();
  const worker = new Worker(
    "bench",
    async (job) => {
      receivedMs.push(now());
      dueMs.push(job.data.due);
      lastAt = performance.now();
    },
    { connection, concurrency: 200 },
  );
  while (dueMs.length < options.count && performance.now() - lastAt < options.idleMaxS * 1000) {
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  await worker.close();
  answer({ receivedMs, dueMs });
}

await (what === "publish" ? publish() : consume());
process.exit(0);
