"use strict";
// The page is complete without this script: it adds the theme button, the tooltip, selection, sorting, filtering and zoom.
(() => {
  const root = document.documentElement;
  root.classList.add("scripted");

  const remembered = () => { try { return localStorage.getItem("ridgeline-theme"); } catch { return null; } };
  const fromHash = () => (["#dark", "#light"].includes(location.hash) ? location.hash.slice(1) : null);
  const setTheme = (theme) => { if (theme) root.dataset.theme = theme; };
  setTheme(fromHash() || remembered());
  addEventListener("hashchange", () => setTheme(fromHash()));

  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const one = (selector) => document.querySelector(selector);

  function startTheme() {
    one("#theme").addEventListener("click", () => {
      const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      setTheme(dark ? "light" : "dark");
      try { localStorage.setItem("ridgeline-theme", root.dataset.theme); } catch { /* a file opened without storage keeps no theme */ }
    });
  }

  function startColours() {
    for (const button of all("[data-colour-by]")) {
      button.addEventListener("click", () => {
        root.dataset.colour = button.dataset.colourBy;
        for (const other of all("[data-colour-by]")) other.setAttribute("aria-pressed", String(other.dataset.colourBy === root.dataset.colour));
      });
    }
  }

  // Rows, circles and bars of one op share data-i, its place in execution order.
  const rowOf = new Map();
  const keys = [];

  function tipFor(index) {
    const row = rowOf.get(String(index));
    if (!row) return null;
    const box = document.createDocumentFragment();
    const title = document.createElement("b");
    title.textContent = row.cells[1].textContent;
    const list = document.createElement("div");
    keys.forEach((name, at) => {
      const text = row.cells[at].textContent.trim();
      if (at < 2 || !text || text === "–") return;
      for (const part of [name, text]) list.append(Object.assign(document.createElement("span"), { textContent: part }));
    });
    box.append(title, list);
    return box;
  }

  function showTip(index, x, y) {
    const tip = one("#tip");
    const content = tipFor(index);
    if (!content) return;
    tip.replaceChildren(content);
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, x + 16 + width > innerWidth ? x - width - 16 : x + 16)}px`;
    tip.style.top = `${Math.max(8, Math.min(y + 14, innerHeight - height - 8))}px`;
  }

  const hideTip = () => { one("#tip").hidden = true; };

  function mark(index) {
    for (const element of all(".at")) element.classList.remove("at");
    for (const element of all(`[data-i="${index}"]`)) element.classList.add("at");
  }

  function select(index) {
    const row = rowOf.get(String(index));
    if (!row) return;
    if (row.hidden || row.classList.contains("view")) clearFilters(row.classList.contains("view"));
    mark(index);
    row.scrollIntoView({ block: "center" });
  }

  function startOps() {
    for (const row of all("#op-table tbody tr[data-i]")) rowOf.set(row.dataset.i, row);
    for (const head of all("#op-table th")) keys.push(head.textContent.trim());
    // Native titles would show a second tooltip over ours.
    for (const title of all(".op > title, .point > title")) title.remove();
    document.addEventListener("pointermove", (event) => {
      const element = event.target instanceof Element ? event.target.closest("svg [data-i]") : null;
      if (element) showTip(element.dataset.i, event.clientX, event.clientY);
      else hideTip();
    });
    document.addEventListener("click", (event) => {
      const element = event.target instanceof Element ? event.target.closest("[data-i]") : null;
      if (!element) return;
      if (element.tagName === "TR") mark(element.dataset.i);
      else { hideTip(); select(element.dataset.i); }
    });
  }

  function startKeys() {
    const chart = one("#roofline-chart");
    if (!chart) return;
    const circles = all(".op", chart);
    let at = -1;
    chart.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (step && circles.length) {
        event.preventDefault();
        at = (at + step + circles.length) % circles.length;
        mark(circles[at].dataset.i);
        const box = circles[at].getBoundingClientRect();
        showTip(circles[at].dataset.i, box.right, box.bottom);
      } else if (event.key === "Enter" && at >= 0) {
        hideTip();
        select(circles[at].dataset.i);
      }
    });
    chart.addEventListener("blur", hideTip);
  }

  function filterRows() {
    const words = one("#find").value.toLowerCase().split(/\s+/).filter(Boolean);
    const [bottleneck, kind] = ["#only-bottleneck", "#only-kind"].map((selector) => one(selector).value);
    const { columns, rows } = data;
    const place = Object.fromEntries(columns.map((name, index) => [name, index]));
    let shown = 0;
    for (const [index, row] of rowOf) {
      const values = rows[index];
      const text = `${values[place.layer]} ${values[place.name]} ${values[place.kind]} ${values[place.bottleneck]} ${values[place.cause]}`.toLowerCase();
      const fits = words.every((word) => text.includes(word)) && (!bottleneck || values[place.bottleneck] === bottleneck) && (!kind || values[place.kind] === kind);
      row.hidden = !fits;
      if (fits && (!row.classList.contains("view") || root.classList.contains("with-views"))) shown += 1;
    }
    one("#shown").textContent = `${shown.toLocaleString("en")} of ${rowOf.size.toLocaleString("en")} rows`;
  }

  function clearFilters(withViews) {
    one("#find").value = "";
    for (const selector of ["#only-bottleneck", "#only-kind"]) one(selector).value = "";
    if (withViews) { root.classList.add("with-views"); one("#views").checked = true; }
    filterRows();
  }

  let data = null;

  function sortBy(head) {
    const key = head.dataset.key;
    const column = data.columns.indexOf(key);
    const value = (index) => (key === "order" ? Number(index) : data.rows[index][column]);
    const textual = ["layer", "kind", "bottleneck", "cause"].includes(key);
    const before = head.getAttribute("aria-sort");
    const ascending = before ? before === "descending" : textual || key === "order";
    for (const other of all("#op-table th[aria-sort]")) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    const sign = ascending ? 1 : -1;
    const order = [...rowOf.keys()].sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === null || y === null) return (x === null) - (y === null);
      return sign * (textual ? x.localeCompare(y, "en", { numeric: true }) : x - y) || a - b;
    });
    one("#op-table tbody").append(...order.map((index) => rowOf.get(index)));
  }

  function startTable() {
    if (!rowOf.size) return;
    for (const head of all("#op-table th[data-key]")) {
      head.tabIndex = 0;
      head.addEventListener("click", () => sortBy(head));
      head.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sortBy(head); } });
    }
    for (const selector of ["#find", "#only-bottleneck", "#only-kind"]) one(selector).addEventListener("input", filterRows);
    one("#views")?.addEventListener("change", (event) => { root.classList.toggle("with-views", event.target.checked); filterRows(); });
    filterRows();
  }

  function seconds(value) {
    for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) if (value >= scale) return `${Number((value / scale).toPrecision(4))} ${unit}`;
    return `${Number((value * 1e9).toPrecision(4))} ns`;
  }

  function drawTicks(inner, zoom) {
    const end = Number(inner.dataset.end);
    const raw = end / (8 * zoom);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999);
    const spans = [];
    for (let index = 0; index * step < end * (1 - 0.04 / zoom); index += 1) {
      const span = Object.assign(document.createElement("span"), { textContent: seconds(index * step) });
      span.style.left = `${(100 * index * step) / end}%`;
      spans.push(span);
    }
    inner.querySelector(".ticks").replaceChildren(...spans);
  }

  function startTimeline() {
    const scroller = one(".gantt-scroll");
    if (!scroller) return;
    const inner = scroller.firstElementChild;
    let zoom = 1;
    const zoomTo = (wanted, at = scroller.clientWidth / 2) => {
      const next = Math.min(Math.max(wanted, 1), 128);
      const fixed = (scroller.scrollLeft + at) / (scroller.clientWidth * zoom);
      zoom = next;
      inner.style.width = `${100 * zoom}%`;
      scroller.scrollLeft = fixed * scroller.clientWidth * zoom - at;
      drawTicks(inner, zoom);
    };
    for (const button of all("[data-zoom]")) button.addEventListener("click", () => zoomTo(zoom * Number(button.dataset.zoom)));
    scroller.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      zoomTo(zoom * (event.deltaY < 0 ? 1.25 : 0.8), event.clientX - scroller.getBoundingClientRect().left);
    }, { passive: false });
  }

  document.addEventListener("DOMContentLoaded", () => {
    data = JSON.parse(one("#data").textContent);
    for (const start of [startTheme, startColours, startOps, startKeys, startTable, startTimeline]) start();
  });
})();
