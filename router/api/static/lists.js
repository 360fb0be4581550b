// The views that are lists: messages in flight, tasks, warnings, dead letters, the configuration.

import { Badge, Button, Empty, html, Meter, Panel, Table, When } from "./parts.js";
import { count, duration } from "./words.js";

const SEVERITIES = { INFO: "", WARN: "fair", ERROR: "bad", CRITICAL: "bad" };
const STATES = { DELIVERING: "good", WAITING: "fair", SETTLING: "" };
const REASONS = ["CONFIG_ERROR", "EXPIRED", "MALFORMED", "PERMANENT", "RETRIES_EXHAUSTED", "TARGET_REFUSED", "TARGET_REJECTED"];

/** Nothing yet, an error, or what `show` makes of it. */
function Loaded({ list, show }) {
  if (list.error) return html`<p class="empty bad" role="alert">${list.error}</p>`;
  return list.items === null ? html`<${Empty}>Loading…<//>` : show(list.items);
}

export function Messages({ state, act }) {
  const { search, list } = state.messages;
  const columns = [
    ["Message", (message) => html`<strong class="id">${message.messageId}</strong>`, "name"],
    ["State", (message) => html`<${Badge} tone=${STATES[message.state] ?? ""}>${message.state.toLowerCase()}<//>`],
    ["Pool", (message) => message.poolCode],
    ["Group", (message) => message.messageGroup ?? "–"],
    ["Queue", (message) => message.queueId],
    ["Attempt", (message) => count(message.attempt), "number"],
    ["Here for", (message) => duration(message.elapsedTimeMs / 1000), "number"],
    ["", (message) => html`<${Button} kind="small" label="Details of ${message.messageId}" onClick=${() => act.showMessage(message.messageId, message.queueId)}>Details<//>
      <${Button} kind="small" label="Why is ${message.messageId} not delivered yet?" onClick=${() => act.explain(message.messageId)}>Why?<//>`, "number"],
  ];
  return html`<h1>Messages in flight</h1>
    <${Panel} id="messages" title=${list.items ? `${count(list.items.length)} shown, longest first` : "In flight"}>
      <form class="filters" role="search" onSubmit=${(event) => { event.preventDefault(); act.showMessage(search.messageId, search.queue); }}>
        <label>Message id<input type="search" name="messageId" value=${search.messageId} autocomplete="off"
          placeholder="all or part of it" onInput=${(event) => act.search({ messageId: event.target.value })} /></label>
        <label>Pool<input type="search" name="poolCode" value=${search.poolCode} autocomplete="off" list="pool-codes"
          placeholder="any" onInput=${(event) => act.search({ poolCode: event.target.value })} /></label>
        <label>Queue<input type="search" name="queue" value=${search.queue} autocomplete="off" list="queue-names"
          placeholder="any" onInput=${(event) => act.search({ queue: event.target.value })} /></label>
        <datalist id="pool-codes">${state.snapshot.pools.map((pool) => html`<option key=${pool.code} value=${pool.code} />`)}</datalist>
        <datalist id="queue-names">${state.snapshot.queues.map((queue) => html`<option key=${queue.name} value=${queue.name} />`)}</datalist>
        <${Button} type="submit" label="Look up this message, in flight or not">Look up<//>
      </form>
      <${Loaded} list=${list} show=${(items) => items.length
        ? html`<${Table} label="Messages in flight" columns=${columns} rows=${items} keyOf=${(message) => `${message.queueId} ${message.brokerMessageId ?? message.messageId}`} />`
        : html`<${Empty}>${Object.values(search).some(Boolean) ? "No message in flight fits." : "Nothing is in flight."}<//>`} />
    <//>
    <${Found} state=${state} act=${act} />`;
}

const KEPT_STATES = { READY: "", SCHEDULED: "", IN_FLIGHT: "", SUCCEEDED: "good", FAILED: "bad", CANCELLED: "fair" };

/** The messages of one queue, in flight or not: only when someone asks for them. */
function Found({ state, act }) {
  const { list, next } = state.found;
  const columns = [
    ["Message", (message) => html`<strong class="id">${message.id}</strong>`, "name"],
    ["State", (message) => html`<${Badge} tone=${KEPT_STATES[message.state]}>${message.state.toLowerCase().replace("_", " ")}<//>`],
    ["Pool", (message) => message.pool ?? "–"],
    ["Group", (message) => message.group ?? "–"],
    ["Published", (message) => html`<${When} at=${message.createdAt} />`, "number"],
    ["Failures", (message) => count(message.failures), "number"],
    ["Error", (message) => html`<span class="break">${message.error ? [message.error.code, message.error.message].filter(Boolean).join(": ") : "–"}</span>`],
    ["", (message) => html`<${Button} kind="small" label="Details of ${message.id}" onClick=${() => act.showMessage(message.id, message.queue)}>Details<//>`, "number"],
  ];
  const find = (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    act.find({ queue: form.get("in").trim(), state: form.get("state"), group: form.get("group").trim() });
  };
  return html`<${Panel} id="found" title="In a queue" note="SQLite, PostgreSQL and PGMQ, newest first">
      <form class="filters" role="search" onSubmit=${find}>
        <label>In queue<input type="search" name="in" autocomplete="off" list="queue-names" placeholder="the only one" /></label>
        <label>State<select name="state"><option value="">any</option>
          ${Object.keys(KEPT_STATES).map((each) => html`<option key=${each} value=${each}>${each}</option>`)}</select></label>
        <label>Of group<input type="search" name="group" autocomplete="off" placeholder="any" /></label>
        <${Button} type="submit">Find<//>
      </form>
      ${list && html`<${Loaded} list=${list} show=${(items) => items.length
        ? html`<${Table} label="Messages in a queue" columns=${columns} rows=${items} keyOf=${(message) => `${message.id} ${message.createdAt}`} />`
        : html`<${Empty}>${next === null ? "No message of the queue fits." : "None of the newest messages fits."}<//>`} />`}
      ${list?.items && next !== null && html`<p class="more-row"><${Button} onClick=${act.findMore}>Show more<//></p>`}
    <//>`;
}

/** Schedules with their next run, and one batch. */
export function Tasks({ state, act }) {
  const columns = [
    ["Schedule", (each) => html`<strong class="id">${each.name}</strong>`, "name"],
    ["When", (each) => each.cron ?? `every ${duration(each.everySeconds)}`],
    ["Time zone", (each) => each.timezone],
    ["Queue", (each) => each.queue],
    ["Next run", (each) => (each.nextRun === null ? "never" : Date.parse(each.nextRun) > Date.now() ? html`<${When} at=${each.nextRun} />` : "now"), "number"],
    ["Last run", (each) => (each.lastRun ? html`<${When} at=${each.lastRun} />` : "–"), "number"],
  ];
  const { id, list } = state.batch;
  const look = (event) => {
    event.preventDefault();
    act.showBatch(new FormData(event.target).get("batchId").trim());
  };
  return html`<h1>Tasks</h1>
    <${Panel} id="schedules" title="Schedules">
      <${Loaded} list=${state.schedules} show=${(items) => items.length
        ? html`<${Table} label="Schedules" columns=${columns} rows=${items} keyOf=${(each) => each.name} />`
        : html`<${Empty}>The configuration has no schedules.<//>`} />
    <//>
    <${Panel} id="batch" title="Batch" note=${id || "by its id"}>
      <form class="filters" role="search" onSubmit=${look}>
        <label>Batch id<input type="search" name="batchId" autocomplete="off" required /></label>
        <${Button} type="submit">Show<//>
      </form>
      ${id && html`<${Loaded} list=${list} show=${(batch) => html`<${Batch} batch=${batch} />`} />`}
    <//>`;
}

const BATCH_STATES = { OPEN: "fair", RUNNING: "", COMPLETE: "good" };

function Batch({ batch }) {
  const ended = batch.succeeded + batch.failed + batch.cancelled;
  return html`<ul class="cards wide"><li>
    <div class="line"><span><strong class="id">${batch.id}</strong> <${Badge} tone=${BATCH_STATES[batch.state]}>${batch.state.toLowerCase()}<//></span>
      <span class="dim">${batch.callbackPublishedAt ? html`callback published <${When} at=${batch.callbackPublishedAt} />` : "no callback yet"}</span></div>
    <p><${Meter} label="Messages that have ended" value=${ended} most=${batch.size} tone="good" /></p>
    <div class="line dim"><span>${batch.queue} · ${count(batch.total)} of ${count(batch.size)} published</span>
      <span>${count(batch.succeeded)} succeeded, ${count(batch.failed)} failed, ${count(batch.cancelled)} cancelled</span></div>
  </li></ul>`;
}

export function Warnings({ state, act }) {
  const list = state.warnings;
  const open = (list.items ?? []).filter((warning) => !warning.acknowledged).length;
  return html`<h1>Warnings</h1>
    <${Panel} id="warnings" title="${count(open)} to look at" note="kept for 8 hours"
        actions=${open > 0 && html`<${Button} onClick=${act.acknowledgeAll}>Acknowledge all<//>`}>
      <${Loaded} list=${list} show=${(items) => items.length
        ? html`<ul class="cards wide">${items.map((warning) => html`<${Warning} key=${warning.id} warning=${warning} act=${act} />`)}</ul>`
        : html`<${Empty}>No warnings. Enjoy the quiet.<//>`} />
    <//>`;
}

function Warning({ warning, act }) {
  return html`<li class=${warning.acknowledged ? "seen" : ""}>
    <div class="line"><span><${Badge} tone=${SEVERITIES[warning.severity]}>${warning.severity}<//> <strong>${warning.code}</strong>
        ${warning.count > 1 && html`<span class="dim"> × ${count(warning.count)}</span>`}</span>
      <span class="dim"><${When} at=${warning.lastSeen} /></span></div>
    <p class="break">${warning.message}</p>
    <div class="line dim"><span>${warning.source}</span>
      ${warning.acknowledged
        ? html`<span>acknowledged</span>`
        : html`<${Button} kind="small" label="Acknowledge ${warning.code}: ${warning.message}" onClick=${() => act.acknowledge(warning.id)}>Acknowledge<//>`}</div>
  </li>`;
}

export function DeadLetters({ state, act }) {
  const { list, reason, next } = state.letters;
  return html`<h1>Dead letters</h1>
    <${HeldGroups} list=${state.held} act=${act} />
    <${Panel} id="letters" title=${list.items ? `${count(list.items.length)}${next ? "+" : ""} kept` : "Kept"} note="newest first">
      <form class="filters" onSubmit=${(event) => event.preventDefault()}>
        <label>Reason<select value=${reason} onChange=${(event) => act.filterLetters(event.target.value)}>
          <option value="">any</option>${REASONS.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}
        </select></label>
      </form>
      <${Loaded} list=${list} show=${(items) => items.length
        ? html`<ul class="cards wide">${items.map((letter) => html`<${Letter} key=${letter.id} letter=${letter} act=${act} />`)}</ul>`
        : html`<${Empty}>${reason ? "None for this reason." : "None: everything was accepted."}<//>`} />
      ${next && html`<p class="more-row"><${Button} onClick=${act.moreLetters}>Show more<//></p>`}
    <//>`;
}

/** Groups of strict queues that a dead letter holds: only while there are some. */
function HeldGroups({ list, act }) {
  if (!list.error && !list.items?.length) return null;
  const columns = [
    ["Group", (held) => html`<strong class="id">${held.group}</strong>`, "name"],
    ["Queue", (held) => held.queue],
    ["Pool", (held) => held.pool],
    ["Held by", (held) => html`<span class="id">${held.messageId}</span>`],
    ["Error", (held) => html`<span class="break">${held.error || "–"}</span>`],
    ["Messages", (held) => count(held.messages), "number"],
    ["Since", (held) => html`<${When} at=${held.since} />`, "number"],
    ["", (held) => html`<${Button} kind="small" label="Release ${held.group}" onClick=${() => act.release(held)}>Release<//>
      <${Button} kind="small danger" label="Discard ${held.messageId}, which holds ${held.group}" onClick=${() => act.discardHeld(held)}>Discard<//>`, "number"],
  ];
  return html`<${Panel} id="held" title="Held groups" note="nothing of them is delivered until you decide, longest first">
    <${Loaded} list=${list} show=${(items) => html`<${Table} label="Held groups" columns=${columns} rows=${items}
      keyOf=${(held) => `${held.queue} ${held.pool} ${held.group}`} />`} />
  <//>`;
}

function Letter({ letter, act }) {
  const name = letter.messageId ?? `letter ${letter.id}`;
  return html`<li class=${letter.replayedAt ? "seen" : ""}>
    <div class="line"><span><strong class="id">${name}</strong> <${Badge} tone="bad">${letter.reason}<//>
        ${letter.httpStatus && html` <${Badge}>HTTP ${letter.httpStatus}<//>`}
        ${letter.replayedAt && html` <${Badge} tone="good">replayed<//>`}</span>
      <span class="dim"><${When} at=${letter.deadAt} /></span></div>
    ${letter.target && html`<p class="break">${letter.target}</p>`}
    ${letter.error && html`<p class="dim break">${letter.error}</p>`}
    ${letter.reply && html`<pre class="reply">${letter.reply}</pre>`}
    <div class="line dim"><span>${letter.queue}${letter.pool ? ` → ${letter.pool}` : ""} · ${count(letter.failures)} ${letter.failures === 1 ? "failure" : "failures"}, ${count(letter.requests)} ${letter.requests === 1 ? "request" : "requests"}</span>
      <span class="actions">
        ${letter.reason !== "MALFORMED" && html`<${Button} kind="small" label="Replay ${name}" onClick=${() => act.replay(letter)}>Replay<//>`}
        <${Button} kind="small danger" label="Discard ${name}" onClick=${() => act.discard(letter)}>Discard<//>
      </span></div>
  </li>`;
}

export function Configuration({ state, act }) {
  const reload = html`<${Button} onClick=${act.reload} disabled=${state.busy}>Reload now<//>`;
  return html`<h1>Configuration</h1>
    <${Loaded} list=${state.config} show=${(config) => html`
      <${Panel} id="sync" title="Last sync" actions=${reload}
          note=${config.lastSync ? html`<${When} at=${config.lastSync} />` : "not yet"}>
        ${config.sources.length
          ? html`<ul class="cards wide">${config.sources.map((source) => html`<li key=${source.name}>
              <div class="line"><span class="break">${source.name}</span>
                <${Badge} tone=${source.error ? "bad" : "good"}>${source.error ? "failed" : "ok"}<//></div>
              ${source.error && html`<p class="bad break">${source.error}</p>`}
            </li>`)}</ul>`
          : html`<${Empty}>No source is set: the router runs on its embedded queue.<//>`}
      <//>
      <${Panel} id="config-queues" title="Queues"><${Settings} label="Queues" of=${config.queues} names=${["queueName", "queueUri"]} /><//>
      <${Panel} id="config-pools" title="Pools"><${Settings} label="Pools" of=${config.processingPools} names=${["code", "concurrency", "rateLimitPerMinute"]} /><//>`} />`;
}

/** Any settings at all, the well-known ones first. */
function Settings({ label, of, names }) {
  if (!of.length) return html`<${Empty}>None.<//>`;
  const all = [...new Set([...names, ...of.flatMap(Object.keys)])];
  const columns = all.map((name) => [name, (entry) => setting(entry[name]), name === names[0] ? "name" : ""]);
  return html`<${Table} label=${label} columns=${columns} rows=${of} keyOf=${(entry) => entry[names[0]]} />`;
}

function setting(value) {
  if (value === undefined || value === null) return "–";
  return html`<span class="break">${typeof value === "object" ? JSON.stringify(value) : String(value)}</span>`;
}
