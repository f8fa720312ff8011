// The page looks at itself: every mark must be there once, with the number of the record, inside its chart. What it finds
// goes into an attribute of the root element, where a test reads it.
(() => {
  const wrong = window.reportErrors;
  const expected = JSON.parse(document.getElementById("marks").textContent);
  let count = 0;
  for (const [id, marks] of Object.entries(expected)) {
    const svg = document.getElementById(id);
    if (!svg) { wrong.push(`${id} is not there`); continue; }
    const box = svg.viewBox.baseVal;
    const drawn = [...svg.querySelectorAll("[data-key]")];
    if (drawn.length !== marks.length) wrong.push(`${id} has ${drawn.length} marks instead of ${marks.length}`);
    for (const { key, value } of marks) {
      const mark = drawn.find((e) => e.dataset.key === key && Number(e.dataset.value) === value);
      if (!mark) { wrong.push(`${id} lacks ${key} = ${value}`); continue; }
      const b = mark.getBBox();
      if (b.x < 0 || b.y < 0 || b.x + b.width > box.width || b.y + b.height > box.height) wrong.push(`${id}: ${key} is outside`);
      count += 1;
    }
  }
  const page = document.documentElement;
  if (page.scrollWidth > page.clientWidth + 1) wrong.push(`wider than the window: ${page.scrollWidth} > ${page.clientWidth}`);
  page.dataset.check = wrong.length ? wrong.join("; ") : `ok ${count}`;
})();
