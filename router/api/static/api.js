// The way to the router: credentials, calls, and the stream of snapshots.

const KEPT_AS = "message-router.authorization"; // for this tab only: gone when it is closed
const PATIENCE = 30_000; // milliseconds for one call
const SILENCE = 5000; // milliseconds without a sign of life: the stream beats every second

/** The router does not answer. */
export class Gone extends Error {}

/** The router asks for credentials; `scheme` is the kind that it wants. */
export class Refused extends Error {
  constructor(challenge) {
    super("credentials are needed");
    this.scheme = challenge.split(" ", 1)[0].toLowerCase();
    this.isOpenId = challenge.includes('scope="openid"');
  }
}

/** The router answers, and says no. Its text is the router's own. */
export class Problem extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

export class Api {
  #authorization = sessionStorage.getItem(KEPT_AS);

  get hasCredentials() {
    return this.#authorization !== null;
  }

  signInWithPassword(user, password) {
    const bytes = new TextEncoder().encode(`${user}:${password}`);
    this.#keep(`Basic ${btoa(String.fromCharCode(...bytes))}`);
  }

  signInWithToken(token) {
    this.#keep(`Bearer ${token.trim()}`);
  }

  signOut() {
    this.#authorization = null;
    sessionStorage.removeItem(KEPT_AS);
  }

  get(path) {
    return this.call("GET", path);
  }

  async call(method, path) {
    const answer = await this.#fetch(method, path, AbortSignal.timeout(PATIENCE));
    return answer.json().catch(isGone);
  }

  /** Snapshots as they come; null for a beat, which says that nothing has changed. */
  async *snapshots(stop) {
    const silence = new AbortController();
    const unlessSilent = (step) => {
      const timer = setTimeout(() => silence.abort(), SILENCE);
      return step.finally(() => clearTimeout(timer));
    };
    const signal = AbortSignal.any([stop, silence.signal]);
    const answer = await unlessSilent(this.#fetch("GET", "/events", signal));
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await unlessSilent(reader.read().catch(isGone));
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        if (event.startsWith("data: ")) yield JSON.parse(event.slice(6));
        else yield null;
      }
    }
  }

  #keep(authorization) {
    this.#authorization = authorization;
    sessionStorage.setItem(KEPT_AS, authorization);
  }

  async #fetch(method, path, signal) {
    const headers = this.hasCredentials ? { Authorization: this.#authorization } : {};
    // "omit": else the browser would put its own password dialogue over ours.
    const options = { method, headers, signal, credentials: "omit", cache: "no-store" };
    const answer = await fetch(path, options).catch(isGone);
    if (answer.status === 401) throw new Refused(answer.headers.get("WWW-Authenticate") ?? "");
    if (!answer.ok) throw new Problem(answer.status, await detailOf(answer));
    return answer;
  }
}

function isGone() {
  throw new Gone("the router does not answer");
}

async function detailOf(answer) {
  const problem = await answer.json().catch(() => ({}));
  return problem.detail ?? `HTTP ${answer.status}`;
}
