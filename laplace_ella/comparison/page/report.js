"use strict";

// --- sorting -------------------------------------------------------------------------

/** What a cell is sorted by: a number in columns of numbers, else a text; null is last. */
function keyOf(row, index, numeric) {
  const value = row.cells[index].dataset.value;
  if (value === undefined) return null;
  return numeric ? Number(value) : value;
}

function compareKeys(a, b) {
  if (typeof a === "number") return a - b;
  return a.localeCompare(b, undefined, { numeric: true });
}

/** Sort by the column of a button: its own first direction, then the other one. */
function sortBy(button) {
  const header = button.closest("th");
  const table = header.closest("table");
  const first = button.dataset.first ?? "ascending";
  const second = first === "ascending" ? "descending" : "ascending";
  const direction = header.getAttribute("aria-sort") === first ? second : first;
  const sign = direction === "ascending" ? 1 : -1;
  const numeric = header.classList.contains("number");
  const body = table.tBodies[0];
  const keyed = [...body.rows].map((row) => [keyOf(row, header.cellIndex, numeric), row]);
  keyed.sort(([a], [b]) => {
    if (a === null || b === null) return (a === null) - (b === null);
    return sign * compareKeys(a, b);
  });
  body.append(...keyed.map(([, row]) => row));
  for (const other of header.parentElement.cells) other.setAttribute("aria-sort", "none");
  header.setAttribute("aria-sort", direction);
}

for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => sortBy(button));
}

// --- light and dark ------------------------------------------------------------------

const theme = document.getElementById("theme");
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen === undefined ? systemIsDark.matches : chosen === "dark";
}

/** The button says what it does: the colours that it would change to. */
function nameTheme() {
  const next = isDark() ? "Light" : "Dark";
  theme.textContent = next;
  theme.setAttribute("aria-label", `${next} colours`);
}

theme.addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  nameTheme();
});
systemIsDark.addEventListener("change", nameTheme);
nameTheme();
theme.hidden = false;
