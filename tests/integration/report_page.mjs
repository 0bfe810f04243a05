// node report_page.mjs MODULES PAGE...: what a headless Chromium sees of each page, as one line of JSON a view.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [, , modules, shots, ...pages] = process.argv;
const load = async (name) => {
  const found = await import(pathToFileURL(createRequire(`${modules}/`).resolve(name)));
  return found.default ?? found;
};
const [chromium, puppeteer] = [await load("@sparticuz/chromium"), await load("puppeteer-core")];

// runs in the page
function look() {
  const width = document.documentElement.clientWidth;
  const shown = (e) => e.getClientRects().length > 0 && getComputedStyle(e).visibility !== "hidden" && !e.closest("thead");
  const channels = (colour) => {
    const numbers = colour.match(/-?[\d.]+(e-?\d+)?/g).map(Number);
    const [r, g, b, a = 1] = colour.startsWith("color(") ? [...numbers.slice(0, 3).map((x) => 255 * x), numbers[3]] : numbers;
    return [r, g, b, a];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[3] * top[i] + (1 - top[3]) * below[i]);
  const ground = (e) => {
    const layers = [];
    for (let at = e; at; at = at.parentElement) layers.push(channels(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((x) => (x / 255 <= 0.04045 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const faint = [], outside = [], hidden = [], broken = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].filter((n) => n.nodeType === 3 && n.data.trim()).map((n) => n.data.trim()).join(" ");
    if (!own || !shown(e) || ["SCRIPT", "STYLE", "title", "desc"].includes(e.tagName) || e.id === "tip") continue;
    const box = e.getBoundingClientRect(), style = getComputedStyle(e);
    if (box.right > width + 1 || box.left < -1) outside.push(own);
    const drawn = e.namespaceURI.endsWith("svg");
    // a number stands in the block before it
    const below = e.matches("text.in") ? channels(getComputedStyle(e.previousElementSibling).fill) : [0, 0, 0, 0];
    const back = over(below, ground(drawn ? e.closest("svg").parentElement : e));
    const [a, b] = [light(over(channels(drawn ? style.fill : style.color), back)), light(back)].sort((x, y) => y - x);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    if ((a + 0.05) / (b + 0.05) < (large ? 3 : 4.5)) faint.push(`${own.slice(0, 40)}: ${((a + 0.05) / (b + 0.05)).toFixed(2)}`);
  }
  // a label is hidden where a mark that is drawn after it lies over it
  for (const text of document.querySelectorAll("svg text:not(.in)")) {
    const own = text.getBoundingClientRect();
    for (const mark of text.closest("figure, section").querySelectorAll("rect[data-t], circle")) {
      if (!(text.compareDocumentPosition(mark) & Node.DOCUMENT_POSITION_FOLLOWING)) continue;
      const other = mark.getBoundingClientRect();
      const [x, y] = [["left", "right"], ["top", "bottom"]].map(
        ([from, to]) => Math.min(own[to], other[to]) - Math.max(own[from], other[from]));
      if (x > 2 && y > 2) { hidden.push(text.textContent); break; }
    }
  }
  for (const code of document.querySelectorAll("td code")) {
    const walker = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const node = walker.currentNode, top = (i) => {
        const range = document.createRange();
        range.setStart(node, i), range.setEnd(node, i + 1);
        return range.getBoundingClientRect().top;
      };
      for (let i = 1; i < node.data.length; i++) if (node.data[i] === "]" && top(i) !== top(i - 1)) broken.push(node.data);
    }
  }
  const scrolled = [...document.querySelectorAll(".scroll")].filter((e) => e.scrollWidth > e.clientWidth + 1);
  return {
    overflow: document.documentElement.scrollWidth - width, faint, outside, hidden, broken,
    scrolled: scrolled.map((e) => e.textContent.slice(0, 60)),
  };
}

const browser = await puppeteer.launch({
  args: [...chromium.args, "--no-sandbox"], executablePath: await chromium.executablePath(), headless: "shell",
});
for (const file of pages) {
  for (const width of [1440, 1024, 390]) {
    for (const scheme of ["light", "dark"]) {
      const page = await browser.newPage(), errors = [];
      page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
      page.on("pageerror", (error) => errors.push(String(error)));
      await page.setViewport({ width, height: 900 });
      await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
      await page.goto(pathToFileURL(file).href);
      const seen = await page.evaluate(look);
      if (shots) await page.screenshot({ path: `${shots}/${file.split("/").pop()}-${width}-${scheme}.png`, fullPage: true });
      console.log(JSON.stringify({ file, width, scheme, errors, ...seen }));
      await page.close();
    }
  }
}
await browser.close();
