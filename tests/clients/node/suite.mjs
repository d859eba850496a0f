// What the suites of JavaScript clients share. node_client.py starts `baton up` and sets BATON_PLACE.
// A check prints one line: `pass`, `FAIL`, or `skip` with the reason.

import { setTimeout as sleep } from "node:timers/promises";

export const FACTS =
  "Alice lives in Paris. Bob has a dog named Rex. The red box holds a key. Carol plays the violin. What does the red box hold?";
export const ANSWER = "The red box holds a key.";
const HOME_MS = 5000;
const checks = [];

export const place = JSON.parse(process.env.BATON_PLACE);

export class Skip extends Error {}

/** Registers a check. The check returns the text of its line. */
export function check(title, run) {
  checks.push([title, run]);
}

export function expect(condition, what) {
  if (!condition) throw new Error(what);
}

export function equal(found, wanted, what = "") {
  expect(JSON.stringify(found) === JSON.stringify(wanted), `${what} ${JSON.stringify(found)}, not ${JSON.stringify(wanted)}`);
}

export function scriptedOrSkip() {
  if (!place.scripted) throw new Skip("only with `baton up`: the scripted engine is not behind this router");
  return place.scripted;
}

/** Checks that a call rejects, and returns the error. */
export async function rejection(call) {
  try {
    await call();
  } catch (error) {
    return error;
  }
  throw new Error("no error");
}

async function metric(address, pattern) {
  const text = await (await fetch(`${address}/metrics`)).text();
  return [...text.matchAll(new RegExp(`^${pattern}\\S* (\\S+)$`, "gm"))].reduce((sum, found) => sum + Number(found[1]), 0);
}

async function aborted() {
  const pattern = 'vllm:request_success_total\\{[^}]*finished_reason="abort"';
  const counts = await Promise.all(place.engines.map((engine) => metric(engine, pattern)));
  return counts.reduce((sum, count) => sum + count, 0);
}

async function held() {
  for (const name of ["baton_router_requests_in_flight", "baton_router_settlements_in_flight"]) {
    if (place.admin && (await metric(place.admin, name))) return name;
  }
  for (const engine of place.engines) {
    const kv = await (await fetch(`${engine}/debug/kv`)).json();
    const blocks = kv.blocks.active + kv.blocks.leased + kv.blocks.landing;
    if (blocks || kv.leases.live || Object.values(kv.requests).some(Boolean)) return `${engine}: ${JSON.stringify(kv)}`;
  }
  return null;
}

/** Waits until the router has no request, and no engine holds or leases a block. No lease may have expired. */
export async function everythingHome() {
  const deadline = Date.now() + HOME_MS;
  for (let what; (what = await held()); await sleep(20)) expect(Date.now() < deadline, `not home after ${HOME_MS} ms: ${what}`);
  for (const engine of place.engines) equal(await metric(engine, "vllm:nixl_num_kv_expired_reqs"), 0, "leases have expired:");
  const router = place.admin ? "nothing in flight at the router" : "the router's admin address is not known";
  return `${router}, ${place.engines.length ? `every block of ${place.engines.length} engines is home` : "engines are not known"}`;
}

/** Leaves `count` calls midway. Each must be aborted in the decode engine, and nothing remains. */
export async function cancels(count, call) {
  const before = await aborted();
  let home;
  for (let number = 0; number < count; number++) {
    await call();
    home = await everythingHome();
  }
  if (place.engines.length && place.builtIn) equal((await aborted()) - before, count, "aborted in the engine:");
  return `${count} times; ${home}`;
}

/** Waits until the decode engine, which is the last, works on a request. */
export async function running() {
  const deadline = Date.now() + HOME_MS;
  while (place.engines.length) {
    const kv = await (await fetch(`${place.engines.at(-1)}/debug/kv`)).json();
    if (kv.requests.running) return;
    expect(Date.now() < deadline, `no request reached the engine within ${HOME_MS} ms`);
  }
}

/** Runs all checks and ends the process. */
export async function main() {
  let [failed, skipped] = [0, 0];
  for (const [title, run] of checks) {
    const started = performance.now();
    try {
      const found = await run();
      console.log(`pass  ${title} (${((performance.now() - started) / 1000).toFixed(2)} s): ${found}`);
    } catch (error) {
      if (error instanceof Skip) {
        skipped += 1;
        console.log(`skip  ${title}: ${error.message}`);
        continue;
      }
      failed += 1;
      console.log(`FAIL  ${title}: ${error}`);
      console.error(error);
    }
  }
  console.log(`${checks.length} checks, ${failed} failed, ${skipped} skipped`);
  process.exit(failed ? 1 : 0);
}
