"use strict";
// The search reads a leading "-" as "without". This sends --seq-length as "+seq +length": both words must occur.
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...more) {
  if (message && typeof message.data === "string" && message.type === 2) {
    const data = message.data.replace(/(^|\s)-+([a-z][\w-]*)/gi, (_, before, flag) => before + flag.split(/-+/).filter(Boolean).map(word => `+${word}`).join(" "));
    return post.call(this, { ...message, data }, ...more);
  }
  return post.call(this, message, ...more);
};
// A flag stays on one line.
document.querySelectorAll(".md-typeset code").forEach(code => code.classList.toggle("flag", /^--?[\w-]+$/.test(code.textContent)));
// Tables and dialogs that the keyboard must reach, and names for screen readers.
new MutationObserver(() => document.querySelectorAll(".md-typeset__scrollwrap").forEach(table => { table.tabIndex = 0; }))
  .observe(document.querySelector(".md-content") || document.body, { childList: true, subtree: true });
const search = document.querySelector(".md-search"), field = document.querySelector(".md-search__input");
if (search && field) search.setAttribute("aria-label", field.getAttribute("aria-label") || field.placeholder);
