"""The style and the script of the page. The page is complete without the script."""

from __future__ import annotations

__all__ = ["SCRIPT", "STYLE"]

STYLE = """\
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2328; --quiet: #59636e;
  --line: #d1d9e0; --link: #0969da; --raised: #f6f8fa; }
@media (prefers-color-scheme: dark) { :root { --paper: #0d1117; --ink: #f0f6fc; --quiet: #9198a1;
  --line: #30363d; --link: #58a6ff; --raised: #161b22; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem 1rem 3rem; max-width: 76rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.5 system-ui, "DejaVu Sans", sans-serif; }
h1 { margin: .5rem 0 0; font-size: 1.6rem; line-height: 1.25; }
h2 { margin: 2.5rem 0 .5rem; font-size: 1.2rem; }
h3 { margin: 1.2rem 0 .3rem; font-size: 1rem; }
p { margin: .4rem 0; max-width: 46rem; }
a { color: var(--link); }
.quiet { color: var(--quiet); }
.wide { overflow-x: auto; margin: .5rem 0; }
.wide svg { display: block; width: 100%; height: auto; min-width: 34rem; max-width: 56rem; }
.wide.bars svg { min-width: 30rem; max-width: 50rem; }
code { font: .85em/1.4 ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
table { border-collapse: separate; border-spacing: 0; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .55rem; text-align: right; white-space: nowrap; font-size: .875rem; }
th { font-weight: 600; }
th.text, td.text { text-align: left; }
table.rows th, table.rows td { border-bottom: 1px solid var(--line); }
table.rows th button { all: unset; cursor: pointer; }
table.rows th button:focus-visible { outline: 2px solid var(--link); }
table.rows th[aria-sort="ascending"] button::after { content: " \\2191"; }
table.rows th[aria-sort="descending"] button::after { content: " \\2193"; }
table.heat { border-spacing: 2px; }
table.heat caption, table.rows caption { text-align: left; font-weight: 600; padding: .3rem 0; }
table.heat th { font-weight: 400; color: var(--quiet); padding: .2rem .15rem;
  text-align: center; line-height: 1.15; }
table.heat th.text { position: sticky; left: 0; background: var(--paper); color: var(--ink);
  padding-right: .7rem; text-align: left; }
table.heat td { min-width: 2.5rem; padding: .2rem .15rem; text-align: center; color: #1f2328; }
table.heat td.dark { color: #ffffff; }
table.heat td.peer { font-weight: 700; outline: 2px solid #1f2328; outline-offset: -3px; }
table.heat td:focus-visible { outline: 3px solid var(--link); }
.narrow { display: none; }
@media (max-width: 40rem) { body { padding: .5rem .6rem 2rem; } .narrow { display: block; }
  .wide.bars svg { min-width: 0; } .wide.bars { margin-bottom: 0; } }
.hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
fieldset { border: 0; padding: 0; margin: .5rem 0; }
fieldset label { margin-right: 1rem; }
details { margin: .5rem 0; }
summary { cursor: pointer; }
#tip { position: fixed; z-index: 2; max-width: 19rem; padding: .3rem .6rem; border-radius: .3rem;
  background: var(--raised); border: 1px solid var(--line); font-size: .875rem;
  pointer-events: none; }
"""

SCRIPT = """\
"use strict";
(() => {
  // Tables are sorted by the button in a column's heading.
  const value = (row, column) => {
    const cell = row.cells[column];
    const number = parseFloat(cell.dataset.value ?? "");
    return Number.isNaN(number) ? cell.textContent.trim() : number;
  };
  const compare = (one, other) =>
    typeof one === "number" && typeof other === "number" ? one - other
      : typeof one === typeof other ? one.localeCompare(other) : typeof one === "number" ? -1 : 1;
  for (const heading of document.querySelectorAll("table.rows thead th")) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const falling = heading.getAttribute("aria-sort") === "ascending";
      for (const other of heading.parentNode.cells) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", falling ? "descending" : "ascending");
      const body = heading.closest("table").tBodies[0];
      const column = heading.cellIndex;
      const sorted = [...body.rows].sort((one, other) =>
        (falling ? -1 : 1) * compare(value(one, column), value(other, column)));
      body.append(...sorted);
    });
  }

  // A selector hides one of the sides.
  const sides = document.getElementById("sides");
  if (sides) {
    sides.hidden = false;
    sides.addEventListener("change", (event) => {
      for (const part of document.querySelectorAll("[data-side]"))
        part.hidden = event.target.value !== "both" && part.dataset.side !== event.target.value;
    });
  }

  // The titles of the heat map's cells appear at once, and for a keyboard or a finger, too.
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  document.body.append(tip);
  const show = (cell) => {
    tip.textContent = cell.dataset.tip;
    tip.hidden = false;
    const box = cell.getBoundingClientRect();
    const left = Math.min(box.left, window.innerWidth - tip.offsetWidth - 8);
    const below = box.bottom + 6 + tip.offsetHeight < window.innerHeight;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${below ? box.bottom + 6 : box.top - 6 - tip.offsetHeight}px`;
  };
  for (const table of document.querySelectorAll("table.heat")) {
    // One tab stop for each table; arrows move inside it.
    const rows = [...table.tBodies[0].rows].map((row) => [...row.cells].slice(1));
    const cells = rows.flat().filter((cell) => cell.title);
    for (const cell of cells) {
      cell.dataset.tip = cell.title;
      cell.removeAttribute("title");
      cell.tabIndex = cell === cells[0] ? 0 : -1;
      for (const name of ["mouseenter", "focus"]) cell.addEventListener(name, () => show(cell));
      for (const name of ["mouseleave", "blur"])
        cell.addEventListener(name, () => { tip.hidden = true; });
    }
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    table.addEventListener("keydown", (event) => {
      if (!(event.key in steps)) return;
      event.preventDefault();
      const [down, right] = steps[event.key];
      let column = event.target.cellIndex - 1;
      let row = event.target.parentNode.sectionRowIndex;
      let next;
      do { row += down; column += right; next = rows[row]?.[column]; }
      while (next && !next.dataset.tip);
      next?.focus();
    });
  }
  addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hidden = true; });
})();
"""
