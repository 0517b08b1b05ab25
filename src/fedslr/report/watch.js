{
  const stamp = () => document.querySelector("meta[name=stamp]");
  setInterval(async () => {
    try {
      const now = await (await fetch("stamp")).text();
      if (now === stamp().content) return;
      const answer = await fetch("./");
      if (answer.status === 503) return location.reload();
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (fresh.querySelectorAll(".legend input").length !== document.querySelectorAll(".legend input").length) {
        return location.reload();
      }
      const open = [...document.querySelectorAll("details")].map((d) => d.open);
      document.querySelector("header").replaceWith(fresh.querySelector("header"));
      document.querySelector("main").replaceWith(fresh.querySelector("main"));
      document.querySelectorAll("details").forEach((d, i) => { d.open = open[i] ?? d.open; });
      stamp().content = now;
    } catch { /* the server has gone; the page stays as it is */ }
  }, 2000);
}
