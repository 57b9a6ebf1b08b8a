// Keeps a view (what is looked at) in the fragment of the page's address, so that a link restores it.
"use strict";

foretrain.view = (function () {
  function read(text) {
    var view = {};
    (text || "").replace(/^#/, "").split("&").forEach(function (pair) {
      var at = pair.indexOf("=");
      if (at < 1) return;
      try {
        view[decodeURIComponent(pair.slice(0, at))] = decodeURIComponent(pair.slice(at + 1));
      } catch (error) {
        return; // a link that was cut: the rest of it still counts
      }
    });
    return view;
  }

  function write(view) {
    return "#" + Object.keys(view).filter(function (name) {
      return view[name] !== undefined && view[name] !== null && view[name] !== "";
    }).map(function (name) {
      return encodeURIComponent(name) + "=" + encodeURIComponent(String(view[name]));
    }).join("&");
  }

  // What of a fragment is a choice, over a view that is one; anything else is left as it was.
  function chosen(start, given, choices) {
    var view = Object.assign({}, start);
    ["device", "count", "precision", "plan"].forEach(function (name) {
      var found = (choices[name] || []).filter(function (one) {
        return String(one.value) === String(given[name]);
      })[0];
      if (found) view[name] = found.value;
    });
    var batch = Number(given.batch);
    if (isFinite(batch) && batch >= 1) view.batch = Math.round(batch);
    return view;
  }

  function replace(view) {
    var text = write(view);
    if (text === window.location.hash) return;
    try {
      window.history.replaceState(null, "", text);
    } catch (error) {
      window.location.replace(text); // documents of no origin have no history of their own
    }
  }

  return { chosen: chosen, read: read, replace: replace, write: write };
})();
