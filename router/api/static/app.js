// The dashboard: one state, one stream that feeds it, and views that show it.

import { Api, Gone, Problem, Refused } from "./api.js";
import { Dialog, Login } from "./dialogs.js";
import { History } from "./history.js";
import { Configuration, DeadLetters, Messages, Tasks, Warnings } from "./lists.js";
import { Overview } from "./overview.js";
import { Button, html } from "./parts.js";
import { render } from "./preact.js";
import { bytes, clock, count } from "./words.js";

const VIEWS = {
  overview: ["Overview", Overview],
  messages: ["Messages", Messages],
  tasks: ["Tasks", Tasks],
  warnings: ["Warnings", Warnings],
  "dead-letters": ["Dead letters", DeadLetters],
  configuration: ["Configuration", Configuration],
};
const PAGE = 50; // dead letters
const SHOWN = 200; // messages in flight
const LOOKED_AT = 10; // pages of a queue that have nothing to show
const SEARCHED = 1000; // the longest in flight, when looked through for a part of an id
const SCHEDULES_PAUSE = 5000; // milliseconds between two looks at the schedules
const SEARCH_PAUSE = 200; // milliseconds after a key
const TOAST = 6000;
const RETRIES = [500, 1000, 2000, 4000]; // milliseconds, the last one repeats
const GONE = "The router does not answer. These figures are old; trying again…";
const THEME = "message-router.theme";

const api = new Api();
const state = {
  view: viewOf(location.hash),
  snapshot: null,
  history: new History(),
  trouble: "", // why the figures are old
  login: null, // { scheme, isOpenId, wrong }
  dialog: null,
  toast: null, // { text, bad }
  busy: false,
  messages: { search: { messageId: "", poolCode: "", queue: "" }, list: nothingYet() },
  found: { search: { queue: "", state: "", group: "" }, list: null, next: null }, // list: none was asked for
  schedules: nothingYet(),
  batch: { id: "", list: nothingYet() },
  warnings: nothingYet(),
  letters: { list: nothingYet(), reason: "", next: null },
  held: nothingYet(), // groups
  config: nothingYet(),
  theme: localStorage.getItem(THEME) ?? "auto",
};

function nothingYet() {
  return { items: null, error: "" };
}

function viewOf(hash) {
  const name = hash.slice(1);
  return name in VIEWS ? name : "overview";
}

// Showing it.

let isDue = false;

/** Once per frame, however much has changed. */
function draw() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    render(html`<${App} />`, document.getElementById("app"));
  });
}

function App() {
  if (state.login) return html`<${Login} login=${state.login} act=${act} />`;
  const [, View] = VIEWS[state.view];
  return html`
    <a class="skip" href="#content" onClick=${skip}>To the content</a>
    <${Header} />
    ${state.trouble && html`<p class="banner" role="alert">${state.trouble}</p>`}
    <main id="content" tabindex="-1" class=${state.trouble ? "old" : ""}>
      ${state.snapshot ? html`<${View} state=${state} act=${act} />` : html`<p class="empty">Connecting…</p>`}
    </main>
    <div class="toasts" role="status">${state.toast && html`<p class="toast ${state.toast.bad ? "bad" : ""}">${state.toast.text}</p>`}</div>
    <${Dialog} dialog=${state.dialog} close=${() => set({ dialog: null })} />`;
}

function Header() {
  const warnings = Object.values(state.snapshot?.warnings ?? {}).reduce((sum, each) => sum + each, 0);
  const counts = { warnings, messages: state.snapshot?.totals.held ?? 0 };
  const live = state.trouble ? ["bad", "offline"] : state.snapshot ? ["good", "live"] : ["idle", "connecting"];
  return html`<header class="top">
    <span class="brand"><img src="/static/icon.svg" alt="" width="28" height="28" /> message-router</span>
    <nav aria-label="Views">${Object.entries(VIEWS).map(([name, [title]]) => html`
      <a key=${name} href="#${name}" aria-current=${name === state.view ? "page" : undefined}>${title}
        ${counts[name] > 0 && html` <span class="pill ${name}">${count(counts[name])}</span>`}</a>`)}</nav>
    <span class="tools">
      <span class="live ${live[0]}">${live[1]}</span>
      <${Button} kind="icon" label="Theme: ${state.theme}" onClick=${act.nextTheme}>${{ auto: "◐", light: "☀", dark: "☾" }[state.theme]}<//>
      ${api.hasCredentials && html`<${Button} kind="small" onClick=${act.signOut}>Sign out<//>`}
    </span>
  </header>`;
}

function skip(event) {
  event.preventDefault(); // the hash names the view
  document.getElementById("content").focus();
}

function set(change) {
  Object.assign(state, change);
  draw();
}

// Feeding it: one stream, for as long as the page can be seen.

let stop = null; // ends the stream that runs

async function watch() {
  const mine = (stop = new AbortController());
  for (let retry = 0; !mine.signal.aborted && state.login === null; retry += 1) {
    try {
      for await (const snapshot of api.snapshots(mine.signal)) {
        retry = 0;
        receive(snapshot ?? state.snapshot);
      }
    } catch (error) {
      if (error instanceof Problem) set({ trouble: `${error.message}. Trying again…` });
      else if (!mine.signal.aborted) meet(error);
    }
    if (!mine.signal.aborted && state.login === null) {
      await pause(RETRIES[Math.min(retry, RETRIES.length - 1)]);
    }
  }
}

function receive(snapshot) {
  if (snapshot === null) return;
  const before = state.snapshot;
  state.history.add(snapshot, performance.now() / 1000);
  set({ snapshot, trouble: "" });
  if (before === null) refreshAll();
  else refreshChanged(before, snapshot);
}

function refreshAll() {
  loadWarnings();
  loadLetters();
  loadHeld();
  loadConfig();
  loadMessages();
  loadTasks();
}

/** Lists are fetched when the snapshot says that they have changed, and someone looks at them. */
function refreshChanged(before, now) {
  if (now.marks.warnings !== before.marks.warnings) loadWarnings();
  if (now.marks.letters !== before.marks.letters) loadDecided();
  else if (heldIn(now) !== heldIn(before)) loadHeld();
  if (now.syncedAt !== before.syncedAt) loadConfig();
  if (state.view === "messages") loadMessages();
  if (state.view === "tasks") loadTasks();
}

function heldIn(snapshot) {
  return snapshot.queues.reduce((sum, queue) => sum + queue.heldGroups, 0);
}

function meet(error) {
  if (error instanceof Refused) {
    stop.abort();
    set({ login: { scheme: error.scheme, isOpenId: error.isOpenId, wrong: api.hasCredentials } });
  } else if (error instanceof Gone) {
    set({ trouble: GONE });
  } else if (error instanceof Problem) {
    tell(error.message, true);
  } else {
    throw error;
  }
}

function pause(milliseconds) {
  return new Promise((done) => setTimeout(done, milliseconds));
}

// The lists.

async function load(call, keep) {
  try {
    keep({ items: await call(), error: "" });
  } catch (error) {
    if (error instanceof Problem) keep({ items: null, error: error.message });
    else meet(error);
  }
  draw();
}

function loadWarnings() {
  return load(() => api.get("/warnings"), (list) => (state.warnings = list));
}

function loadConfig() {
  return load(() => api.get("/config"), (list) => (state.config = list));
}

let schedulesLoadedAt = 0;

function loadTasks() {
  const now = performance.now();
  if (schedulesLoadedAt === 0 || now - schedulesLoadedAt >= SCHEDULES_PAUSE) {
    schedulesLoadedAt = now;
    load(() => api.get("/schedules"), (list) => (state.schedules = list));
  }
  const { id, list } = state.batch;
  if (id && list.items?.state !== "COMPLETE") loadBatch(id);
}

function loadBatch(id) {
  return load(
    () => api.get(`/batches/${encoded(id)}`),
    (list) => id === state.batch.id && (state.batch.list = list), // an answer about an older one is no use
  );
}

function loadMessages() {
  const wanted = { ...state.messages.search };
  const isCurrent = () => JSON.stringify(wanted) === JSON.stringify(state.messages.search);
  return load(
    () => findMessages(wanted),
    (list) => isCurrent() && (state.messages.list = list), // an answer to an older search is no use
  );
}

/** The router finds whole ids wherever they are; parts of one are looked for among the longest. */
async function findMessages({ messageId, poolCode, queue }) {
  const ask = (more) => api.get(`/monitoring/in-flight-messages?${new URLSearchParams({ poolCode, queue, ...more })}`);
  const text = messageId.trim();
  if (!text) return ask({ limit: SHOWN });
  const exact = await ask({ messageId: text, limit: SHOWN });
  if (exact.length) return exact;
  const longest = await ask({ limit: SEARCHED });
  return longest.filter((message) => message.messageId.toLowerCase().includes(text.toLowerCase())).slice(0, SHOWN);
}

/** A page may be empty and not the last: the router reads a bounded number of messages for each. */
async function findInQueue(cursor) {
  const items = [];
  for (let page = 0; page < LOOKED_AT && cursor !== null && !items.length; page += 1) {
    const answer = await api.get(`/messages?${new URLSearchParams({ ...state.found.search, limit: PAGE, cursor })}`);
    items.push(...answer.items);
    cursor = answer.next;
  }
  state.found.next = cursor;
  return items;
}

function loadLetters() {
  return load(() => fetchLetters(""), (list) => (state.letters.list = list));
}

function loadHeld() {
  return load(() => api.get(`/groups?held=true&limit=${PAGE}`), (list) => (state.held = list));
}

/** What people decide about: letters, and the groups that some of them hold. */
function loadDecided() {
  return Promise.all([loadLetters(), loadHeld()]);
}

async function fetchLetters(cursor) {
  const query = new URLSearchParams({ limit: PAGE, reason: state.letters.reason, cursor });
  const page = await api.get(`/dead-letters?${query}`);
  state.letters.next = page.next;
  return page.items;
}

// What people do.

let searching = null;
let toasting = null;

function tell(text, bad = false) {
  clearTimeout(toasting);
  toasting = setTimeout(() => set({ toast: null }), TOAST);
  set({ toast: { text, bad } });
}

/** Do it, say so, and show what it changed. */
async function change(method, path, done, reload) {
  set({ busy: true });
  try {
    const answer = await api.call(method, path);
    tell(typeof done === "function" ? done(answer) : done);
  } catch (error) {
    meet(error);
  }
  set({ busy: false });
  await reload();
}

const nothing = () => {};
const encoded = encodeURIComponent;

const act = {
  acknowledge: (id) => change("POST", `/warnings/${encoded(id)}/acknowledge`, "Acknowledged.", loadWarnings),
  acknowledgeAll: () => change("POST", "/warnings/acknowledge-all", "All acknowledged.", loadWarnings),
  resetTarget: (origin) => change("POST", `/monitoring/targets/${encoded(origin)}/reset`, `${origin} is reset.`, nothing),
  resetAllTargets: () => change("POST", "/monitoring/targets/reset-all", "All targets are reset.", nothing),
  reload: () => change("POST", "/config/reload", (answer) => `Reloaded: ${answer.changes.join("; ") || "nothing changed"}.`, loadConfig),

  search(change) {
    Object.assign(state.messages.search, change);
    clearTimeout(searching);
    searching = setTimeout(loadMessages, SEARCH_PAUSE);
    draw();
  },

  find(search) {
    state.found = { search, list: nothingYet(), next: null };
    return load(() => findInQueue(""), (list) => search === state.found.search && (state.found.list = list));
  },

  findMore() {
    const { search, list } = state.found;
    return load(
      async () => [...list.items, ...(await findInQueue(state.found.next))],
      (more) => search === state.found.search && (state.found.list = more),
    );
  },

  async explain(id) {
    try {
      const answer = await api.get(`/monitoring/explain?${new URLSearchParams({ message: id })}`);
      const { text, ...facts } = answer;
      set({ dialog: { title: "Why is it not delivered yet?", text, facts: factsOf(facts) } });
    } catch (error) {
      meet(error);
    }
  },

  async showMessage(id, queue) {
    const text = id.trim();
    if (!text) return;
    try {
      const answer = await api.get(`/messages/${encoded(text)}?${new URLSearchParams({ queue })}`);
      set({ dialog: { title: "Message", facts: messageFacts(answer) } });
    } catch (error) {
      meet(error);
    }
  },

  showBatch(id) {
    set({ batch: { id, list: nothingYet() } });
    return loadBatch(id);
  },

  filterLetters(reason) {
    Object.assign(state.letters, { reason, list: nothingYet() });
    loadLetters();
  },

  moreLetters() {
    const before = state.letters.list.items;
    return load(
      async () => [...before, ...(await fetchLetters(state.letters.next))],
      (list) => (state.letters.list = list),
    );
  },

  replay(letter) {
    const force = letter.replayedAt ? "?force=true" : "";
    const run = () => change("POST", `/dead-letters/${letter.id}/replay${force}`, "Replayed: it is back in its queue.", loadDecided);
    const again = letter.replayedAt ? " It was replayed before: its target may see it twice." : "";
    const text = `${letter.messageId} goes back to the end of ${letter.queue} and is delivered again.${again}`;
    set({ dialog: { title: "Replay this message?", text, action: { name: "Replay", run } } });
  },

  discard(letter) {
    const run = () => change("DELETE", `/dead-letters/${letter.id}`, "Discarded.", loadDecided);
    const text = `${letter.messageId ?? "The message"} from ${letter.queue} is deleted for good. Nobody has accepted it.`;
    set({ dialog: { title: "Discard this message?", text, danger: true, action: { name: "Discard", run } } });
  },

  release(held) {
    const text = `${held.group} of ${held.queue} goes on without ${held.messageId}, which stays a dead letter.`;
    decide("release", held, text, { title: "Release this group?", name: "Release", done: "Released: the group goes on." });
  },

  discardHeld(held) {
    const text = `${held.messageId} is deleted for good, and ${held.group} of ${held.queue} goes on without it. Nobody has accepted it.`;
    decide("discard", held, text, { title: "Discard what holds this group?", name: "Discard", done: "Discarded: the group goes on.", danger: true });
  },

  signInWithPassword(user, password) {
    api.signInWithPassword(user, password);
    enter();
  },

  signInWithToken(token) {
    api.signInWithToken(token);
    enter();
  },

  signOut() {
    stop.abort();
    api.signOut();
    set({ snapshot: null, history: new History(), trouble: "" });
    watch();
  },

  nextTheme() {
    const theme = { auto: "light", light: "dark", dark: "auto" }[state.theme];
    localStorage.setItem(THEME, theme);
    set({ theme });
    applyTheme();
  },
};

/** Ask first; then decide about a held group. */
function decide(what, { queue, pool, group }, text, { title, name, done, danger }) {
  const path = `/groups/${what}?${new URLSearchParams({ queue, pool, group })}`;
  set({ dialog: { title, text, danger, action: { name, run: () => change("POST", path, done, loadDecided) } } });
}

const TIMES = ["createdAt", "notBefore", "startedAt", "endedAt"];

function messageFacts({ payloadBytes, result, resultOmitted, error, ...facts }) {
  for (const name of TIMES) facts[name] = facts[name] && clock(facts[name]);
  return factsOf({
    ...facts,
    payload: payloadBytes > 0 ? bytes(payloadBytes) : "none",
    result: resultOmitted ? "too long to be kept" : result === null ? null : JSON.stringify(result, null, 2),
    error: error && [error.code, error.message].filter(Boolean).join(": "),
  });
}

function factsOf(answer) {
  return Object.entries(answer)
    .map(([name, value]) => [name, Array.isArray(value) ? value.join("\n") : value])
    .filter(([, value]) => value !== null && value !== "");
}

function enter() {
  set({ login: null });
  watch();
}

function applyTheme() {
  document.documentElement.dataset.theme = state.theme;
}

addEventListener("hashchange", () => {
  set({ view: viewOf(location.hash), dialog: null });
  if (state.view === "messages") loadMessages();
  if (state.view === "tasks") loadTasks();
  document.title = `${VIEWS[state.view][0]} · message-router`;
  document.querySelector(`nav a[href="#${state.view}"]`)?.scrollIntoView({ inline: "center", block: "nearest" });
});

document.addEventListener("visibilitychange", () => {
  stop.abort();
  if (!document.hidden && state.login === null) watch(); // hidden: nobody watches, nothing is sent
});

applyTheme();
draw();
watch();
