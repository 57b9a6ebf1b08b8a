// Asks the server: one way to send, to say what is wrong, and to follow what takes long.
"use strict";

foretrain.api = (function () {
  var KEY = "foretrain-token", POLL_MS = 400;

  function token() {
    try { return window.sessionStorage.getItem(KEY) || ""; } catch (error) { return ""; }
  }

  function setToken(text) {
    try {
      if (text) window.sessionStorage.setItem(KEY, text);
      else window.sessionStorage.removeItem(KEY);
    } catch (error) { /* kept nowhere then */ }
  }

  function ask(method, path, settings) {
    settings = settings || {};
    var headers = { accept: "application/json" }, given = token();
    if (given) headers.authorization = "Bearer " + given;
    if (settings.kind) headers["content-type"] = settings.kind;
    return window.fetch(path, { method: method, headers: headers, body: settings.body, signal: settings.signal,
      credentials: "omit", redirect: "error" }).then(function (answer) {
      return answer.text().then(function (text) {
        var document = null;
        try { document = JSON.parse(text); } catch (error) { document = null; }
        if (answer.ok && document) return document;
        var words = document && document.error ? document.error : "the server answered " + answer.status;
        if (answer.status === 401) words += "; give it under Token, above";
        throw new Error(words);
      });
    }, function (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("the server does not answer");
    });
  }

  function post(path, document, signal) {
    return ask("POST", path, { body: JSON.stringify(document), kind: "application/json", signal: signal });
  }

  // A box that begins a job, shows how far it is, and can cancel it.
  function errand(settings) {
    var el = foretrain.dom.el, show = foretrain.dom.show, job = null, mine = 0;
    var words = el("p", { class: "dim", role: "status" });
    var bar = el("progress", { max: "1", "aria-label": settings.label });
    var cancel = el("button", { type: "button", class: "small", on: { click: function () {
      if (job) ask("DELETE", "/v1/jobs/" + job).catch(function (error) { said(error.message, true); });
    } } }, "Cancel");
    var box = el("div", { class: "errand" }, [words, bar, cancel]);
    bar.hidden = cancel.hidden = true;

    function said(text, bad) {
      words.textContent = text;
      words.className = bad ? "warning" : "dim";
    }

    function over() {
      job = null;
      bar.hidden = cancel.hidden = true;
    }

    function follow(number) {
      if (number !== mine || !job) return;
      ask("GET", "/v1/jobs/" + job).then(function (found) {
        if (number !== mine) return;
        var progress = found.progress || {};
        if (found.state === "waiting" || found.state === "running") {
          var counted = progress.total ? " " + (progress.done || 0).toLocaleString("en-US") + " of " +
            progress.total.toLocaleString("en-US") : "";
          said(found.state === "waiting" ? "Waiting for a free worker" : (progress.what || "Working") + counted);
          if (progress.total) bar.value = (progress.done || 0) / progress.total;
          else bar.removeAttribute("value");
          window.setTimeout(function () { follow(number); }, POLL_MS);
        } else {
          over();
          if (found.state === "done") { said(""); settings.done(found.result); }
          else said(found.state === "cancelled" ? "Cancelled." : found.error || "It failed.", true);
        }
      }).catch(function (error) { over(); said(error.message, true); });
    }

    return { node: box, said: said, begin: function (path, document) {
      var number = ++mine;
      said("Asking the server");
      bar.hidden = cancel.hidden = false;
      bar.removeAttribute("value");
      post(path, document).then(function (begun) {
        job = begun.id;
        follow(number);
      }).catch(function (error) { over(); said(error.message, true); });
    } };
  }

  return { ask: ask, errand: errand, get: function (path, signal) { return ask("GET", path, { signal: signal }); },
    post: post, setToken: setToken, token: token };
})();
