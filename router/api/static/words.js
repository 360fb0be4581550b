// Numbers, times and codes in the words that people read.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const FINE = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const CLOCK = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
const TIME = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });

export const REASONS = {
  DRAINING: "its pool is draining",
  RETRY: "waits for its next try",
  GROUP: "behind a delivery of its group",
  RATE: "waits for the rate limit",
  PERMIT: "waits for a free worker",
  SHARE: "waits for its share of the workers",
  TARGET: "waits for its target",
};

export function count(number) {
  return number < 100_000 ? WHOLE.format(number) : SHORT.format(number);
}

export function perSecond(rate) {
  return rate < 10 ? FINE.format(rate) : count(rate);
}

export function bytes(number) {
  return number < 1024 ? `${count(number)} bytes` : `${FINE.format(number / 1024)} KiB`;
}

export function percent(rate) {
  return `${FINE.format(Math.floor(rate * 1000) / 10)} %`; // 99.99 % is not 100 %
}

export function millis(ms) {
  if (ms < 1000) return `${ms < 10 ? FINE.format(ms) : WHOLE.format(ms)} ms`;
  return duration(ms / 1000);
}

export function duration(seconds) {
  if (seconds < 10) return `${FINE.format(Math.max(seconds, 0))} s`;
  if (seconds < 120) return `${WHOLE.format(seconds)} s`;
  if (seconds < 7200) return `${WHOLE.format(seconds / 60)} min`;
  if (seconds < 172_800) return `${WHOLE.format(seconds / 3600)} h`;
  return `${WHOLE.format(seconds / 86_400)} days`;
}

/** How long ago, or how far ahead; takes Unix seconds or an ISO time. */
export function ago(moment) {
  const seconds = Date.now() / 1000 - unix(moment);
  if (seconds < -1.5) return `in ${duration(Math.round(-seconds))}`;
  return seconds < 1.5 ? "just now" : `${duration(Math.round(seconds))} ago`;
}

export function clock(moment) {
  return CLOCK.format(new Date(unix(moment) * 1000));
}

/** The time of day, of what is not far away. */
export function time(moment) {
  return TIME.format(new Date(unix(moment) * 1000));
}

function unix(moment) {
  return typeof moment === "number" ? moment : Date.parse(moment) / 1000;
}
