"use strict";
{
  const tip = document.getElementById("tip");
  const known = new WeakMap();
  const read = (path) => {
    if (!known.has(path)) {
      const at = path.getAttribute("d").match(/-?[\d.]+/g).map(Number);
      known.set(path, { path, x: at.filter((_, i) => i % 2 === 0), y: at.filter((_, i) => i % 2),
        say: path.dataset.y.split("|"), where: path.dataset.x.split("|"), name: path.dataset.name });
    }
    return known.get(path);
  };
  const visible = (svg) => [...svg.querySelectorAll(".line")]
    .filter((path) => getComputedStyle(path.parentNode).display !== "none").map(read);
  const nearest = (line, x) => line.x.reduce((best, v, i) => Math.abs(v - x) < Math.abs(line.x[best] - x) ? i : best, 0);
  const hide = () => {
    tip.hidden = true;
    document.querySelectorAll(".cross").forEach((c) => c.remove());
  };
  const show = (svg, x, left, top) => {
    hide();
    const lines = visible(svg);
    if (!lines.length) return;
    const spots = lines.map((line) => ({ line, i: nearest(line, x) }));
    const first = spots.reduce((a, b) => Math.abs(b.line.x[b.i] - x) < Math.abs(a.line.x[a.i] - x) ? b : a);
    const at = first.line.x[first.i];
    const cross = document.createElementNS("http://www.w3.org/2000/svg", "path");
    cross.setAttribute("class", "cross");
    cross.setAttribute("d", `M${at} ${svg.dataset.top}V${svg.viewBox.baseVal.height - 42}`);
    svg.append(cross);
    tip.replaceChildren(svg.querySelector(".label:not(.up)").textContent + " " + first.line.where[first.i]);
    spots.filter(({ line, i }) => Math.abs(line.x[i] - at) < 12).sort((a, b) => a.line.y[a.i] - b.line.y[b.i])
      .forEach(({ line, i }) => {
        const row = tip.appendChild(document.createElement("div"));
        row.className = line.path.parentNode.getAttribute("class").split(" ")[0];
        row.appendChild(document.createElement("i")).textContent = line.name;
        row.appendChild(document.createElement("span")).textContent = line.say[i];
      });
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(left + 14, innerWidth - box.width - 4)) + "px";
    tip.style.top = Math.max(4, Math.min(top + 14, innerHeight - box.height - 4)) + "px";
    svg.dataset.at = at;
  };
  document.addEventListener("pointermove", (event) => {
    const svg = event.target.closest && event.target.closest("svg.lines");
    if (!svg) return hide();
    const box = svg.getBoundingClientRect();
    show(svg, (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width, event.clientX, event.clientY);
  });
  document.addEventListener("keydown", (event) => {
    const svg = document.activeElement, step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") return hide();
    if (!step || !svg.matches("svg.lines")) return;
    const stops = [...new Set(visible(svg).flatMap((line) => line.x))].sort((a, b) => a - b);
    const from = Number(svg.dataset.at ?? (step > 0 ? -1 : 1e9));
    const x = step > 0 ? stops.find((s) => s > from) : stops.findLast((s) => s < from);
    if (x === undefined) return;
    event.preventDefault();
    const box = svg.getBoundingClientRect();
    show(svg, x, box.left + x / svg.viewBox.baseVal.width * box.width, box.top + box.height / 2);
  });
  document.addEventListener("focusout", hide);
  const value = (row, at) => {
    const cell = row.children[at], text = cell.dataset.v ?? cell.textContent.replace("−", "-").replaceAll(",", "");
    return [Number.parseFloat(text), cell.textContent];
  };
  const compare = ([a, s], [b, t]) => isNaN(a) && isNaN(b) ? s.localeCompare(t) : isNaN(a) - isNaN(b) || a - b;
  document.addEventListener("click", (event) => {
    const head = event.target.closest("th button")?.parentNode;
    if (!head) return;
    const at = [...head.parentNode.children].indexOf(head), body = head.closest("table").tBodies[0];
    const down = head.ariaSort === "ascending";
    [...head.parentNode.children].forEach((th) => th.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...body.rows].sort((a, b) => compare(value(a, at), value(b, at)));
    body.append(...(down ? rows.reverse() : rows));
  });
}
