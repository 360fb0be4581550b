// The first view: is it up, what is stuck, and why.

import { Badge, Button, Empty, html, Meter, Panel, Sign, Sparkline, Table, When } from "./parts.js";
import { waitingIn } from "./history.js";
import { ago, count, millis, percent, perSecond, REASONS, time } from "./words.js";

const TONES = { HEALTHY: "good", WARNING: "fair", DEGRADED: "bad" };
const STATES = {
  HEALTHY: "All is well",
  WARNING: "Something needs a look",
  DEGRADED: "Degraded",
};
const CIRCUITS = { HALF_OPEN: "fair", OPEN: "bad" };
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
        <${Targets} snapshot=${snapshot} act=${act} />
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
      <div><dt>Role</dt><dd>${{ PRIMARY: "Primary", STANDBY: "Standby", ACTIVE: "Active" }[snapshot.role]}</dd></div>
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
      ${!queue.healthy && html`${" "}<${Badge} tone="bad">silent<//>`}
      ${queue.heldGroups > 0 && html`${" "}<a href="#dead-letters"><${Badge} tone="bad">${count(queue.heldGroups)} held<//></a>`}
      ${queue.stored > 0 && html`${" "}<${Badge} tone="fair">${count(queue.stored)} stored<//>`}`, "name"],
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

function Targets({ snapshot, act }) {
  const { targets, totals } = snapshot;
  const hidden = totals.targets - targets.length;
  return html`<${Panel} id="targets" title="Targets" note=${hidden > 0 ? `${count(hidden)} more` : ""}
      actions=${targets.some(isTroubled) && html`<${Button} onClick=${act.resetAllTargets}>Reset all<//>`}>
    ${targets.length
      ? html`<ul class="cards">${targets.map((target) => html`<li key=${target.origin}>
          <div class="line wrap"><span class="break">${target.origin}</span><${TargetBadges} target=${target} /></div>
          ${target.since && html`<div class="line dim"><span>opened <${When} at=${target.since} />${target.fault ? ` · fault: ${target.fault}` : ""}</span>
            <span>${target.retryAt && html`next try ${target.retryAt * 1000 > Date.now() ? html`<${When} at=${target.retryAt} />` : "with its next message"}`}</span></div>`}
          <div class="line dim"><span>${figuresOf(target).join(" · ")}</span>
            ${isTroubled(target) && html`<${Button} kind="small" label="Reset ${target.origin}" onClick=${() => act.resetTarget(target.origin)}>Reset<//>`}</div>
        </li>`)}</ul>`
      : html`<${Empty}>No target has been called yet.<//>`}
  <//>`;
}

function TargetBadges({ target }) {
  return html`<span class="badges">
    ${target.circuit !== "CLOSED" && html`<${Badge} tone=${CIRCUITS[target.circuit]}>circuit ${target.circuit.toLowerCase().replace("_", " ")}<//>`}
    ${target.silentUntil && html`<${Badge} tone="fair">silent until ${time(target.silentUntil)}<//>`}
    ${target.limit !== null && html`<${Badge} tone="fair">limited to ${count(target.limit)}<//>`}
    ${!isTroubled(target) && html`<${Badge} tone="good">ok<//>`}
  </span>`;
}

function isTroubled(target) {
  return target.circuit !== "CLOSED" || target.silentUntil !== null || target.limit !== null;
}

function figuresOf({ open, waiting, successes, failures, refusals, rejections }) {
  const rest = [[waiting, "waiting"], [failures, "failed"], [refusals, "refused"], [rejections, "not sent"]];
  return [
    `${count(open)} open`,
    `${count(successes)} answered`,
    ...rest.filter(([number]) => number > 0).map(([number, word]) => `${count(number)} ${word}`),
  ];
}
