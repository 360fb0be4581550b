// Small pieces that all views are made of. Values become text nodes, never markup.

import htm from "./htm.js";
import { h } from "./preact.js";
import { ago, clock } from "./words.js";

export const html = htm.bind(h);

const SHAPES = {
  good: "M5 12.5l4.5 4.5L19 7.5",
  fair: "M12 7v6M12 16.6v.4",
  bad: "M7.5 7.5l9 9M16.5 7.5l-9 9",
  idle: "M7 12h10",
};

/** State is never told by colour alone: the sign has a shape, and words stand beside it. */
export function Sign({ tone }) {
  return html`<svg class="sign ${tone}" viewBox="0 0 24 24" aria-hidden="true">
    <circle cx="12" cy="12" r="11" /><path d=${SHAPES[tone]} />
  </svg>`;
}

export function Badge({ tone, children }) {
  return html`<span class="badge ${tone}">${children}</span>`;
}

export function Meter({ label, value, most, tone = "" }) {
  const share = most > 0 ? Math.min(value / most, 1) : 0;
  const full = share >= 0.9 ? "fair" : "";
  return html`<span class="meter ${tone || full}" role="meter" aria-label=${label}
      aria-valuemin="0" aria-valuemax=${most} aria-valuenow=${value} aria-valuetext="${value} of ${most}">
    <span class="track"><span class="fill" style=${{ width: `${share * 100}%` }}></span></span>
    <span class="figure">${value}<small> / ${most}</small></span>
  </span>`;
}

const WIDTH = 120;
const HEIGHT = 32;
const SHORTEST = 30; // seconds that the whole width stands for

/** The last minutes as a line. Gaps are seconds in which nothing happened. */
export function Sparkline({ points }) {
  const known = points.filter((point) => point !== null);
  const top = Math.max(...known, 0) || 1;
  const room = Math.max(points.length, SHORTEST);
  const step = WIDTH / (room - 1);
  const from = room - points.length;
  const place = (point, index) =>
    `${((from + index) * step).toFixed(1)} ${(HEIGHT - 2 - (point / top) * (HEIGHT - 5)).toFixed(1)}`;
  const line = points.map((point, index) => (point === null ? null : place(point, index))).filter(Boolean);
  const area = line.length > 1 ? `M${line[0].split(" ")[0]} ${HEIGHT}L${line.join("L")}V${HEIGHT}Z` : "";
  return html`<svg class="spark" viewBox="0 0 ${WIDTH} ${HEIGHT}" preserveAspectRatio="none" aria-hidden="true">
    <path class="area" d=${area} /><path class="line" d=${line.length > 1 ? `M${line.join("L")}` : ""} />
  </svg>`;
}

export function When({ at }) {
  return html`<time title=${clock(at)}>${ago(at)}</time>`;
}

export function Panel({ title, note, actions, children, id }) {
  return html`<section class="panel" aria-labelledby="${id}-title">
    <header><h2 id="${id}-title">${title}</h2>${note && html`<span class="note">${note}</span>`}
      ${actions && html`<div class="actions">${actions}</div>`}</header>
    ${children}
  </section>`;
}

export function Empty({ children }) {
  return html`<p class="empty">${children}</p>`;
}

/** `columns`: [heading, cell(row), class]. On a phone each row becomes a card with its headings. */
export function Table({ label, columns, rows, keyOf }) {
  return html`<div class="scroll"><table aria-label=${label}>
    <thead><tr>${columns.map(([heading, , kind]) => html`<th scope="col" class=${kind}>${heading}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${keyOf(row)}>
      ${columns.map(([heading, cell, kind]) => html`<td class=${kind} data-heading=${heading}>${cell(row)}</td>`)}
    </tr>`)}</tbody>
  </table></div>`;
}

export function Button({ onClick, children, kind = "", label, disabled = false, type = "button" }) {
  return html`<button type=${type} class="button ${kind}" onClick=${onClick} aria-label=${label} disabled=${disabled}>${children}</button>`;
}
