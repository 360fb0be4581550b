// The first view: is it up, what is stuck, and why.

import { Badge, Button, Empty, html, Meter, Panel, Sign, Sparkline, Table, When } from "./parts.js";
import { waitingIn } from "./history.js";
import { ago, count, millis, percent, perSecond, REASONS } from "./words.js";

const TONES = { HEALTHY: "good", WARNING: "fair", DEGRADED: "bad" };
const STATES = {
  HEALTHY: "All is well",
  WARNING: "Something needs a look",
  DEGRADED: "Degraded",
};
const BREAKERS = { CLOSED: "good", HALF_OPEN: "fair", OPEN: "bad" };
const GOOD_RATE = 0.9;

export function Overview({ state, act }) {
  const { snapshot, history } = state;
  return html`
    <${Status} snapshot=${snapshot} />
    <${Figures} snapshot=${snapshot} history=${history} />
    <div class="columns">
      <div>
        <${Pools} snapshot=${snapshot} history=${history} />
        <${Queues} snapshot=${snapshot} history=${history} />
      </div>
      <div>
        <${Groups} groups=${snapshot.groups} />
        <${Breakers} snapshot=${snapshot} act=${act} />
      </div>
    </div>`;
}

function Status({ snapshot }) {
  const tone = snapshot.shuttingDown ? "fair" : TONES[snapshot.status];
  const word = snapshot.shuttingDown ? "Shutting down" : STATES[snapshot.status];
  return html`<section class="status ${tone}" aria-label="Overall state">
    <${Sign} tone=${tone} />
    <div>
      <h1>${word}</h1>
      ${snapshot.issues.length
        ? html`<ul>${snapshot.issues.map((issue) => html`<li key=${issue}>${issue}</li>`)}</ul>`
        : html`<p>Every queue is consumed and every pool does its work.</p>`}
    </div>
    <dl>
      <div><dt>Role</dt><dd>${snapshot.role === "PRIMARY" ? "Primary" : "Standby"}</dd></div>
      <div><dt>Started</dt><dd><${When} at=${snapshot.startedAt} /></dd></div>
      <div><dt>Last sync</dt><dd>${snapshot.syncedAt ? html`<${When} at=${snapshot.syncedAt} />` : "not yet"}</dd></div>
    </dl>
  </section>`;
}

function Figures({ snapshot, history }) {
  const { totals } = snapshot;
  const waiting = waitingIn(snapshot);
  return html`<section class="figures" aria-label="Key figures">
    <${Figure} name="Delivered per second" value=${perSecond(history.recent("delivered"))}
      more="${count(totals.delivered)} since start" points=${history.points("delivered")} />
    <${Figure} name="In flight" value=${count(totals.held)}
      more="in ${count(totals.pools)} ${totals.pools === 1 ? "pool" : "pools"}" points=${history.points("held")} />
    <${Figure} name="Waiting in queues" value=${waiting === null ? "–" : count(waiting)}
      more="${count(totals.received)} received" points=${history.points("waiting")} />
    <${Figure} name="Dead letters" value=${count(totals.deadLettered)} tone=${totals.deadLettered ? "bad" : ""}
      more="since start · ${count(totals.returned)} returned to queues" href="#dead-letters" />
  </section>`;
}

function Figure({ name, value, more, points, tone, href }) {
  const content = html`<span class="name">${name}</span><span class="value ${tone}">${value}</span>
    <span class="more">${more}</span>${points && html`<${Sparkline} points=${points} />`}`;
  return href ? html`<a class="figure-card" href=${href}>${content}</a>` : html`<div class="figure-card">${content}</div>`;
}

function Pools({ snapshot, history }) {
  const hidden = snapshot.totals.pools - snapshot.pools.length;
  const columns = [
    ["Pool", (pool) => html`<strong>${pool.code}</strong>${" "}<${PoolBadges} pool=${pool} />`, "name"],
    ["Workers", (pool) => html`<${Meter} label="Workers of ${pool.code}" value=${pool.workers} most=${pool.limit} tone="calm" />`],
    ["Buffer", (pool) => html`<${Meter} label="Buffer of ${pool.code}" value=${pool.queued} most=${pool.capacity} />`],
    ["Per second", (pool) => perSecond(history.recent(`pool ${pool.code} rate`)), "number"],
    ["Success", (pool) => html`<${Success} of=${pool} />`, "number"],
    ["p95", (pool) => (pool.p95Ms ? millis(pool.p95Ms) : "–"), "number"],
    ["Latency", (pool) => html`<${Sparkline} points=${history.points(`pool ${pool.code} latency`)} />`, "chart"],
  ];
  return html`<${Panel} id="pools" title="Pools" note=${hidden > 0 ? `the ${snapshot.pools.length} busiest of ${count(snapshot.totals.pools)}` : ""}>
    ${snapshot.pools.length
      ? html`<${Table} label="Pools" columns=${columns} rows=${snapshot.pools} keyOf=${(pool) => pool.code} />`
      : html`<${Empty}>No pool has been needed yet.<//>`}
  <//>`;
}

function PoolBadges({ pool }) {
  return html`
    ${pool.draining && html`<${Badge} tone="fair">draining<//>`}
    ${pool.ratePerMinute && html`<${Badge} tone=${pool.waitsForRate ? "fair" : ""}>≤ ${count(pool.ratePerMinute)}/min<//>`}
    ${pool.retrying > 0 && html`<${Badge} tone="fair">${pool.retrying} between tries<//>`}`;
}

function Success({ of }) {
  if (!of.succeeded && !of.failed) return "–";
  return html`<span class=${of.successRate < GOOD_RATE ? "bad" : ""}>${percent(of.successRate)}</span>`;
}

function Queues({ snapshot, history }) {
  const hidden = snapshot.totals.queues - snapshot.queues.length;
  const columns = [
    ["Queue", (queue) => html`<${Sign} tone=${queue.healthy ? "good" : "bad"} /> <strong>${queue.name}</strong>
      ${!queue.healthy && html`${" "}<${Badge} tone="bad">silent<//>`}`, "name"],
    ["Waiting", (queue) => (queue.waiting === null ? "–" : count(queue.waiting)), "number"],
    ["Per second", (queue) => perSecond(history.recent(`queue ${queue.name} rate`)), "number"],
    ["Delivered", (queue) => count(queue.succeeded), "number"],
    ["Failed", (queue) => count(queue.failed), "number"],
    ["Success", (queue) => html`<${Success} of=${queue} />`, "number"],
    ["Connections", (queue) => count(queue.connections), "number"],
  ];
  return html`<${Panel} id="queues" title="Queues" note=${hidden > 0 ? `the ${snapshot.queues.length} longest of ${count(snapshot.totals.queues)}` : ""}>
    ${snapshot.queues.length
      ? html`<${Table} label="Queues" columns=${columns} rows=${snapshot.queues} keyOf=${(queue) => queue.name} />`
      : html`<${Empty}>No queue is consumed.<//>`}
  <//>`;
}

function Groups({ groups }) {
  return html`<${Panel} id="groups" title="Groups that wait longest">
    ${groups.length
      ? html`<ul class="cards">${groups.map((group) => html`<li key="${group.pool} ${group.group}">
          <div class="line"><strong class="break">${group.group}</strong><span class="age">${ago(group.since).replace(" ago", "")}</span></div>
          <div class="line dim"><span>${REASONS[group.reason] ?? group.reason}</span>
            <span>${count(group.waiting)} in ${group.pool}</span></div>
        </li>`)}</ul>`
      : html`<${Empty}>No group waits.<//>`}
  <//>`;
}

function Breakers({ snapshot, act }) {
  const { breakers, totals } = snapshot;
  const hidden = totals.breakers - breakers.length;
  const troubled = breakers.some((breaker) => breaker.state !== "CLOSED");
  return html`<${Panel} id="breakers" title="Circuit breakers" note=${hidden > 0 ? `${hidden} more` : ""}
      actions=${troubled && html`<${Button} onClick=${act.resetAllBreakers}>Reset all<//>`}>
    ${breakers.length
      ? html`<ul class="cards">${breakers.map((breaker) => html`<li key=${breaker.name}>
          <div class="line"><span class="break">${breaker.name}</span>
            <${Badge} tone=${BREAKERS[breaker.state]}>${breaker.state.toLowerCase().replace("_", " ")}<//></div>
          <div class="line dim"><span>${count(breaker.successes)} ok · ${count(breaker.failures)} failed${breaker.rejections ? ` · ${count(breaker.rejections)} rejected` : ""}</span>
            ${breaker.state !== "CLOSED" && html`<${Button} kind="small" label="Reset ${breaker.name}" onClick=${() => act.resetBreaker(breaker.name)}>Reset<//>`}</div>
        </li>`)}</ul>`
      : html`<${Empty}>No target has been called yet.<//>`}
  <//>`;
}
