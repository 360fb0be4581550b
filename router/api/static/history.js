// What the router does per second, worked out from one snapshot to the next, and its last minutes.

const KEPT = 120; // points, one a second

export class History {
  #last = null;
  #series = new Map();

  /** Note a snapshot; `at` in seconds. A beat is the last snapshot once more. */
  add(snapshot, at) {
    const before = this.#last;
    this.#last = { snapshot, at };
    if (before === null || snapshot.startedAt !== before.snapshot.startedAt) {
      this.#series.clear(); // another process: its counters start again
      return;
    }
    const seconds = Math.max(at - before.at, 0.001);
    this.#push("delivered", (snapshot.totals.delivered - before.snapshot.totals.delivered) / seconds);
    this.#push("waiting", waitingIn(snapshot));
    this.#push("held", snapshot.totals.held);
    const pools = byKey(before.snapshot.pools, "code");
    for (const pool of snapshot.pools) this.#addPool(pool, pools.get(pool.code), seconds);
    const queues = byKey(before.snapshot.queues, "name");
    for (const queue of snapshot.queues) this.#addQueue(queue, queues.get(queue.name), seconds);
  }

  points(name) {
    return this.#series.get(name) ?? [];
  }

  /** The mean of the last few points: a single second jumps too much to be read. */
  recent(name) {
    const points = this.points(name).slice(-5).filter((point) => point !== null);
    return points.length ? points.reduce((sum, point) => sum + point, 0) / points.length : 0;
  }

  #addPool(pool, before, seconds) {
    const done = ended(pool) - ended(before);
    this.#push(`pool ${pool.code} rate`, done / seconds);
    const spent = pool.requestSeconds - (before?.requestSeconds ?? 0);
    const requests = pool.requests - (before?.requests ?? 0);
    this.#push(`pool ${pool.code} latency`, requests > 0 ? (1000 * spent) / requests : null);
  }

  #addQueue(queue, before, seconds) {
    this.#push(`queue ${queue.name} rate`, (ended(queue) - ended(before)) / seconds);
  }

  #push(name, point) {
    const points = this.#series.get(name) ?? [];
    points.push(point);
    if (points.length > KEPT) points.shift();
    this.#series.set(name, points);
  }
}

/** In all queues that tell; null: none does. */
export function waitingIn(snapshot) {
  const known = snapshot.queues.filter((queue) => queue.waiting !== null);
  return known.length ? known.reduce((sum, queue) => sum + queue.waiting, 0) : null;
}

function ended(counted) {
  return counted ? counted.succeeded + counted.failed + counted.transient : 0;
}

function byKey(items, key) {
  return new Map(items.map((item) => [item[key], item]));
}
