// Predictors beside the runs that the server keeps: errors, coverage, by family, and every run.
"use strict";

foretrain.leaderboardTab = function (panel) {
  var el = foretrain.dom.el, show = foretrain.dom.show, format = foretrain.format, fields = foretrain.fields, last = null;
  var COLORS = ["accent", "backward", "optimizer", "recomputed", "network"];
  var names = el("input", { type: "text", id: "board-predictors", placeholder: "the usual ones" });
  var device = el("input", { type: "text", id: "board-device", placeholder: "all" });
  var model = el("input", { type: "text", id: "board-model", placeholder: "all, or such as resnet*" });
  var quantity = fields.select("board-quantity", [{ value: "step_time_s", label: "time per step" },
    { value: "peak_memory_bytes", label: "memory at peak" }, { value: "total_time_s", label: "time of the training" }], "step_time_s");
  var answer = el("div", { class: "content" });
  var errand = foretrain.api.errand({ label: "Progress of the comparison", done: draw });

  function ask(event) {
    if (event) event.preventDefault();
    var asked = { quantity: quantity.value };
    var chosen = names.value.split(",").map(function (one) { return one.trim(); }).filter(Boolean);
    if (chosen.length) asked.predictors = chosen;
    if (device.value.trim()) asked.device = device.value.trim();
    if (model.value.trim()) asked.model = model.value.trim();
    errand.begin("/v1/leaderboard", asked);
  }

  function share(value) { return value === null ? "" : format.percent(value, 1); }

  function draw(found) {
    last = found;
    var form = found.quantity.slice(-2) === "_s" ? format.seconds : format.bytes, width = Math.max(240, (answer.clientWidth || 700) - 40);
    if (!found.runs) {
      show(answer, el("section", {}, el("p", {}, "No run that is kept measured this. Upload some under Runs.")));
      return;
    }
    function learned(name) {
      return found.learned_here.indexOf(name) >= 0 ? el("span", {}, [name, el("small", { class: "dim" }, "learned here, perhaps from these very runs")]) : name;
    }
    var families = {};
    found.predictors.forEach(function (one) { one.families.forEach(function (own) {
      (families[own.family] = families[own.family] || {})[one.predictor] = own;
    }); });
    var board = found.predictors.map(function (one, i) {
      return { chosen: i === 0, cells: [learned(one.predictor), one.n.toLocaleString("en-US"), share(one.median_ape), share(one.mape),
        one.bias === null ? "" : format.signed(one.bias), share(one.coverage), one.unsupported ? one.unsupported.toLocaleString("en-US") : ""] };
    });
    var measured = found.rows.map(function (row) { return row.measured; });
    var ends = [Math.min.apply(null, measured), Math.max.apply(null, measured)].map(function (value) { return { x: value, y: value }; });
    var shown = found.predictors.slice(0, COLORS.length);
    show(answer, [
      box("On " + found.runs.toLocaleString("en-US") + " measured runs", [foretrain.sections.table("Leaderboard",
        ["predictor", "runs", "median error", "mean error", "bias", "in the 80% interval", "not forecast"], board, 1),
        found.reasons.length ? el("ul", { class: "plain" }, found.reasons.map(function (one) {
          return el("li", {}, one.runs + " runs not forecast by " + one.reason);
        })) : null]),
      box("Predicted against measured", [foretrain.charts.curves({ width: width, height: 340, nameX: "measured", roundX: true, formatX: form, formatY: form,
        label: "Predicted against measured", series: shown.map(function (one, i) {
          return { name: one.predictor, color: COLORS[i], line: false, band: false, points: found.rows.filter(function (row) {
            return row.predictor === one.predictor;
          }).slice(0, 400).map(function (row) {
            return { x: row.measured, y: row.predicted, title: row.run + ": measured " + form(row.measured) + ", predicted " + form(row.predicted) };
          }) };
        }).concat(ends[0].x < ends[1].x ? [{ name: "as measured", color: "grey", points: ends, dashed: true, dots: false, band: false }] : []) }),
      el("ul", { class: "legend inline" }, shown.map(function (one, i) {
        return el("li", {}, [el("span", { class: "dot c-" + COLORS[i], "aria-hidden": "true" }), el("span", {}, one.predictor)]);
      }).concat([el("li", { class: "dim" }, "dashed: as measured")]))]),
      box("Median error by family", foretrain.sections.table("By family", ["family"].concat(found.predictors.map(function (one) { return one.predictor; })),
        Object.keys(families).map(function (name) {
          return { cells: [name].concat(found.predictors.map(function (one) {
            var own = families[name][one.predictor];
            return own ? share(own.median_ape) + " of " + own.n : "";
          })) };
        }), 1)),
      box("Run by run", el("details", {}, [el("summary", {}, "The first " + Math.min(200, found.rows.length) + " comparisons"),
        foretrain.sections.table("Runs", ["run", "predictor", "measured", "predicted", "80% interval", "error"], found.rows.slice(0, 200).map(function (row) {
          return { cells: [row.run, row.predictor, form(row.measured), form(row.predicted), form(row.low) + " to " + form(row.high), format.signed(row.error)] };
        }), 2)])),
    ]);
  }

  function box(title, children) { return el("section", {}, [el("div", { class: "head" }, el("h2", {}, title)), children]); }

  show(panel, el("main", {}, [el("h1", {}, "Leaderboard of predictors"), el("form", { class: "box", on: { submit: ask } }, [
    el("div", { class: "grid" }, [fields.labelled("Quantity", "board-quantity", quantity), fields.labelled("Predictors", "board-predictors", names),
      fields.labelled("Model", "board-model", model), fields.labelled("Device", "board-device", device)]),
    el("div", { class: "buttons" }, el("button", { type: "submit", class: "primary" }, "Score"))]), errand.node, answer]));
  return { redraw: function () { if (last) draw(last); } };
};
