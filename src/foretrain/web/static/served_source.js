// Answers the explorer from the server: waits until the hand rests, gives up what is no longer asked, and fetches
// what lies one change away in the background.
"use strict";

foretrain.servedSource = function (settings) {
  var DEBOUNCE_MS = 70, AHEAD_MS = 400, fields = foretrain.fields;
  var waiting = 0, current = null, ahead = null, later = 0, known = {};
  var usual = ["h100-sxm-80gb", "a100-sxm-80gb", "h200-sxm-141gb", "b200", "l40s", "mi300x", "l4", "rtx-4090"];

  function request(view) {
    var options = Object.assign({}, settings.options(), fields.plan(view.plan).options, {
      batch: view.batch, device: view.device, devices: view.count, precision: view.precision });
    return Object.assign({}, settings.target, { options: options });
  }

  function key(view) { return JSON.stringify(request(view)); }

  function ask(view) {
    window.clearTimeout(waiting);
    if (current) current.abort();
    if (ahead) ahead.abort();
    settings.changed(view);
    var mine = current = new AbortController();
    return new Promise(function (resolve, reject) {
      mine.signal.addEventListener("abort", function () { reject(new Error("another view was asked for")); });
      waiting = window.setTimeout(function () {
        foretrain.api.post("/v1/record", request(view), mine.signal).then(function (record) {
          known[key(view)] = { record: record };
          resolve({ record: record });
          window.clearTimeout(later);
          later = window.setTimeout(function () { fetchAround(view); }, AHEAD_MS);
        }, function (error) { resolve({ refused: error.message }); });
      }, DEBOUNCE_MS);
    });
  }

  function views(view, axis) {
    var values = axis === "device" ? [view.device].concat(usual.filter(function (one) {
      return one !== view.device && settings.choices.device.some(function (other) { return other.value === one; });
    })) : axis === "batch" ? [-2, -1, 0, 1, 2].map(function (doublings) {
      return Math.round(view.batch * Math.pow(2, doublings));
    }).filter(function (batch, i, all) { return batch >= 1 && batch % view.count === 0 && all.indexOf(batch) === i; }) : [];
    return values.map(function (value) {
      var change = {};
      change[axis] = value;
      return { value: value, view: Object.assign({}, view, change) };
    });
  }

  function fetchAround(view) {
    var mine = ahead = new AbortController(), missing = views(view, "device").concat(views(view, "batch")).filter(
      function (one) { return !known[key(one.view)]; });
    function next() {
      var one = missing.shift();
      if (mine.signal.aborted) return;
      if (!one) { settings.redraw(); return; }
      foretrain.api.post("/v1/predict", request(one.view), mine.signal).then(function (record) {
        var sizes = record.memory_by_stage_bytes || [];
        record.needed_memory_bytes = sizes.length === 1 ? record.quantities.reserved_memory_bytes : null;
        known[key(one.view)] = { record: record };
        next();
      }, function () {
        if (mine.signal.aborted) return;
        known[key(one.view)] = {};
        next();
      });
    }
    if (missing.length) next();
  }

  function along(view, axis) {
    return views(view, axis).map(function (one) {
      return { value: one.value, view: one.view, answer: known[key(one.view)] || {} };
    });
  }

  function batches(view) {
    var found = {}, unit = Math.max(1, view.count), start = settings.start.batch;
    for (var i = -24; i <= 24; i++) {
      found[Math.max(1, Math.round(start * Math.pow(2, i / 4) / unit)) * unit] = true;
    }
    return Object.keys(found).map(Number).sort(function (a, b) { return a - b; });
  }

  return { choices: settings.choices, start: settings.start, label: settings.label, ask: ask, along: along,
    batches: batches, has: function () { return true; } };
};
