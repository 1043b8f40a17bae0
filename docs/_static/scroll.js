// What is wider than the page fades where it goes on; above tables and pictures stands that it scrolls.
document.addEventListener("DOMContentLoaded", () => {
  const wide = ".pst-scrollable-table-container, p:has(> img.picture), div.highlight > pre";
  for (const box of document.querySelectorAll(`.bd-article :is(${wide})`)) {
    const hint = document.createElement("div");
    hint.className = "scroll-hint";
    hint.textContent = "scrolls sideways \u2192";
    hint.setAttribute("aria-hidden", "true");
    if (box.tagName !== "PRE") box.before(hint);
    const look = () => {
      const hidden = box.scrollWidth - box.clientWidth;
      hint.hidden = hidden < 8;
      box.classList.toggle("goes-on", hidden - box.scrollLeft >= 8);
      if (hidden >= 8) box.tabIndex = 0; // arrow keys scroll it
    };
    box.addEventListener("scroll", look, { passive: true });
    new ResizeObserver(look).observe(box);
    for (const image of box.querySelectorAll("img")) image.addEventListener("load", look);
    look();
  }
});
