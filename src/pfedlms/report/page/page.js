"use strict";
(() => {
  // Tables: the first click on a column sorts numbers downwards and names upwards, the next the other way.
  const valueOf = (row, at) => {
    const cell = row.cells[at], value = cell.dataset.value;
    if (value === undefined) return null;
    return value !== "" && Number.isFinite(Number(value)) ? Number(value) : value;
  };
  const compare = (a, b) =>
    typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", {numeric: true});
  const sort = (table, heading) => {
    const at = heading.cellIndex, body = table.tBodies[0], rows = [...body.rows];
    const names = rows.every((row) => typeof valueOf(row, at) !== "number");
    const before = heading.getAttribute("aria-sort");
    const up = before === "none" ? names : before === "descending";
    for (const each of heading.parentNode.cells) each.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", up ? "ascending" : "descending");
    rows.sort((one, two) => {
      const a = valueOf(one, at), b = valueOf(two, at);
      if (a === null || b === null) return (a === null) - (b === null); // what was not measured stays below
      return up ? compare(a, b) : compare(b, a);
    });
    body.append(...rows);
  };
  for (const button of document.querySelectorAll("thead button")) {
    button.addEventListener("click", () => sort(button.closest("table"), button.closest("th")));
  }

  // Light, dark, or what the system says; remembered where a page may remember.
  const themes = ["auto", "light", "dark"], toggle = document.getElementById("theme");
  const show = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    toggle.textContent = `Theme: ${theme}`;
  };
  let theme = "auto";
  try { theme = localStorage.getItem("pfedlms-theme") || "auto"; } catch { /* not from a file in every browser */ }
  show(themes.includes(theme) ? theme : "auto");
  toggle.addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    show(theme);
    try { localStorage.setItem("pfedlms-theme", theme); } catch { /* as above */ }
  });

  const link = document.getElementById("download");
  link.href = URL.createObjectURL(new Blob([document.getElementById("raw").textContent], {type: "application/json"}));

  // On paper, what can be opened is open.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const each of opened) each.open = true;
  });
  addEventListener("afterprint", () => { for (const each of opened) each.open = false; });
})();
