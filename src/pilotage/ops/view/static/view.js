// Keys, and following a live run. Every page works without this file.
"use strict";

const body = document.body;
const help = document.getElementById("help");
const helpButton = document.getElementById("help-button");
helpButton.hidden = false;
helpButton.addEventListener("click", () => help.showModal());

function targets() {
  return [...document.querySelectorAll("[data-nav], [data-nav-block]")].filter((one) => one.offsetParent !== null);
}

function move(by) {
  const all = targets();
  if (!all.length) return;
  const at = all.indexOf(document.activeElement.closest("[data-nav], [data-nav-block]"));
  const next = all[at < 0 ? (by > 0 ? 0 : all.length - 1) : Math.min(all.length - 1, Math.max(0, at + by))];
  next.focus({ preventScroll: true });
  next.scrollIntoView({ block: next.matches("[data-nav-block]") ? "start" : "nearest" });
}

function go(address) {
  if (address) location.assign(address);
}

function search() {
  const field = document.getElementById("search");
  const run = location.pathname.match(/^\/runs\/[^/]+/);
  if (field) field.focus();
  else if (run) go(`${run[0]}/rollouts#search`);
}

const keys = {
  j: () => move(1),
  k: () => move(-1),
  ArrowDown: () => move(1),
  ArrowUp: () => move(-1),
  n: () => go(body.dataset.next),
  p: () => go(body.dataset.previous),
  u: () => go(body.dataset.up),
  "/": search,
  "?": () => help.showModal(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  if (event.target.closest("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const isList = document.activeElement.closest("[data-nav]") !== null;
  if (event.key.startsWith("Arrow") && !isList) return; // arrows scroll a page as they do everywhere
  const tab = document.querySelectorAll("[data-tab]")[Number(event.key) - 1];
  const act = keys[event.key] || (tab && (() => tab.click()));
  if (!act) return;
  event.preventDefault();
  act();
});

if (location.hash === "#search") document.getElementById("search")?.focus();

// A page of a run asks for one word; when it has changed, the page is fetched again and its parts swapped.
async function swap() {
  const answer = await fetch(location.href);
  if (!answer.ok) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  const focused = document.activeElement.getAttribute("href");
  for (const part of document.querySelectorAll("[data-swap]")) {
    const replacement = fresh.getElementById(part.id);
    if (!replacement) continue;
    const openDetails = [...part.querySelectorAll("details")].map((one) => one.open);
    part.replaceChildren(...replacement.childNodes);
    [...part.querySelectorAll("details")].forEach((one, index) => (one.open = openDetails[index] ?? one.open));
  }
  if (focused && document.activeElement === body) {
    document.querySelector(`[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }
}

async function follow(poll, pause) {
  let revision = null;
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, pause));
    if (document.hidden) continue;
    try {
      const answer = await (await fetch(poll)).json();
      if (revision !== null && revision !== answer.revision) await swap();
      revision = answer.revision;
    } catch {
      continue; // the server was stopped; it may come back
    }
  }
}

if (body.dataset.poll) follow(body.dataset.poll, Number(body.dataset.live));
else if (body.dataset.live) setInterval(() => document.hidden || swap().catch(() => {}), Number(body.dataset.live));
