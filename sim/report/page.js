"use strict";
// Cells open and close their runs; arrow keys move between cells. Without this script the same links jump to the runs.
(() => {
  document.documentElement.classList.add("js");
  const runOf = (link) => document.getElementById(link.hash.slice(1)).closest("details");
  const cells = [...document.querySelectorAll("a.cell")];
  const cellsOf = new Map(); // by run: a run may stand in several tables
  for (const cell of cells) {
    const run = runOf(cell);
    cellsOf.set(run, [...(cellsOf.get(run) || []), cell]);
  }
  const opened = new Map(); // which cell or link opened a run, to go back to

  const mark = (run) => {
    for (const cell of cellsOf.get(run) || []) cell.setAttribute("aria-expanded", String(run.open));
  };
  const show = (run, by) => {
    run.open = true;
    if (by) opened.set(run, by);
    const summary = run.querySelector("summary");
    summary.scrollIntoView({ block: "nearest" });
    summary.focus();
  };
  const close = (run) => {
    run.open = false;
    const back = opened.get(run) || (cellsOf.get(run) || [])[0];
    if (back) back.focus();
  };

  for (const cell of cells) {
    cell.setAttribute("role", "button");
    cell.setAttribute("aria-expanded", "false");
    cell.addEventListener("click", (event) => {
      event.preventDefault();
      const run = runOf(cell);
      if (run.open) close(run);
      else show(run, cell);
    });
    cell.addEventListener("keydown", (event) => {
      if (event.key === " ") {
        event.preventDefault();
        cell.click();
      }
      const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      if (!step) return;
      event.preventDefault();
      const place = cell.closest("td");
      let row = place.parentElement.rowIndex, column = place.cellIndex;
      const rows = cell.closest("table").rows;
      do {
        row += step[0];
        column += step[1];
        const next = rows[row] && rows[row].cells[column] && rows[row].cells[column].querySelector("a.cell");
        if (next) return next.focus();
      } while (rows[row] && rows[row].cells[column]);
    });
  }
  for (const run of document.querySelectorAll("details.run")) {
    run.addEventListener("toggle", () => mark(run));
    run.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close(run);
    });
  }
  // Links to a run from other tables, and the address that the page was opened with.
  const follow = () => {
    const inside = /^#run-\d+$/.test(location.hash) && document.getElementById(location.hash.slice(1));
    if (inside) show(inside.closest("details"), null);
  };
  addEventListener("hashchange", follow);
  for (const link of document.querySelectorAll('a[href^="#run-"]:not(.cell)'))
    link.addEventListener("click", (event) => {
      event.preventDefault();
      show(runOf(link), link);
    });
  follow();

  for (const button of document.querySelectorAll(".copy"))
    button.addEventListener("click", async () => {
      const code = button.previousElementSibling;
      const range = document.createRange();
      range.selectNodeContents(code);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
      } catch {
        button.textContent = "Selected";
      }
    });
})();
