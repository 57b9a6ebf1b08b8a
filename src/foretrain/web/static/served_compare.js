// Two configurations side by side, and why they differ.
"use strict";

foretrain.compareTab = function (panel, context) {
  var el = foretrain.dom.el, show = foretrain.dom.show, format = foretrain.format, fields = foretrain.fields;
  var sections = foretrain.sections, current = null;
  var answer = el("div", { class: "content", "aria-live": "polite" });
  var sides = [side("a", "A", { model: "resnet50", device: "a100-sxm-80gb", batch: 256, count: 8 }),
    side("b", "B", { model: "resnet50", device: "h100-sxm-80gb", batch: 256, count: 8 })];
  var button = el("button", { type: "submit", class: "primary" }, "Compare");

  function side(id, name, start) {
    var target = fields.target("compare-" + id + "-model", start.model);
    var inputs = {
      batch: fields.number("compare-" + id + "-batch", start.batch),
      device: fields.select("compare-" + id + "-device", context.choices.device, start.device),
      count: fields.select("compare-" + id + "-count", fields.plain(fields.COUNTS), start.count),
      precision: fields.select("compare-" + id + "-precision", fields.plain(fields.PRECISIONS), "amp-bf16"),
      plan: fields.select("compare-" + id + "-plan", fields.PLANS, "data-parallel"),
    };
    var words = { batch: "Global batch", device: "Device", count: "Devices", precision: "Precision", plan: "Plan" };
    return {
      node: el("fieldset", { class: "side" }, [el("legend", {}, name), target.nodes,
        Object.keys(inputs).map(function (one) {
          return fields.labelled(words[one], "compare-" + id + "-" + one, inputs[one]);
        })]),
      read: function () {
        var found = target.read();
        if (!found) return null;
        found.options = Object.assign({ batch: Number(inputs.batch.value) || 1, device: inputs.device.value,
          devices: Number(inputs.count.value), precision: inputs.precision.value }, fields.plan(inputs.plan.value).options);
        return found;
      },
    };
  }

  function ask(event) {
    if (event) event.preventDefault();
    var a = sides[0].read(), b = sides[1].read();
    if (!a || !b) return;
    if (current) current.abort();
    current = new AbortController();
    panel.setAttribute("aria-busy", "true");
    foretrain.api.post("/v1/explain", { a: a, b: b }, current.signal).then(draw, function (error) {
      if (error.name === "AbortError") return;
      show(answer, el("section", {}, el("p", { class: "warning" }, error.message)));
    }).then(function () { panel.removeAttribute("aria-busy"); });
  }

  function draw(found) {
    var rows = [["time per step", "step_time_s", format.seconds], ["samples per second", "samples_per_s", format.rate],
      ["memory reserved", "reserved_memory_bytes", format.bytes]];
    function estimate(one) { return one.cost_usd ? format.dollars(one.cost_usd.median) : "unknown"; }
    function fits(one) { var verdict = sections.verdict(one); return el("span", { class: "badge " + verdict.kind }, verdict.word); }
    var body = rows.filter(function (row) {
      return found.a.quantities[row[1]] && found.b.quantities[row[1]];
    }).map(function (row) {
      var a = found.a.quantities[row[1]], b = found.b.quantities[row[1]];
      return { cells: [row[0], cell(a, row[2]), cell(b, row[2]), format.signed(b.median / a.median - 1)] };
    });
    body.push({ cells: ["memory", fits(found.a), fits(found.b), ""] });
    body.push({ cells: ["price of an hour", found.a.price_usd_per_hour === null ? "unknown" : format.dollars(found.a.price_usd_per_hour),
      found.b.price_usd_per_hour === null ? "unknown" : format.dollars(found.b.price_usd_per_hour), ""] });
    if (found.a.cost_usd && found.b.cost_usd) body.push({ cells: ["cost", estimate(found.a), estimate(found.b),
      format.signed(found.b.cost_usd.median / found.a.cost_usd.median - 1)] });
    show(answer, [
      box("Side by side", [el("ul", { class: "plain lead-list" }, found.summary.map(function (line) { return el("li", {}, line + "."); })),
        sections.table("Side by side", ["", "A", "B", "B against A"], body, 1)]),
      box("What the time of a step goes to", changes("Seconds of a step", found.step_s, format.seconds)),
      box("What the memory of the fullest rank goes to", changes("Memory", found.memory_bytes, format.bytes)),
      box("What differs in the jobs", sections.table("Fields that differ", ["field", "A", "B"],
        Object.keys(found.fields).map(function (name) {
          return { cells: [name, words(found.fields[name].a), words(found.fields[name].b)] };
        }), 9)),
    ]);
  }

  function cell(one, form) {
    return el("span", {}, [form(one.median), el("small", { class: "dim" }, form(one.low) + " to " + form(one.high))]);
  }

  function words(value) { return value === null ? "not given" : typeof value === "object" ? JSON.stringify(value) : String(value); }

  function box(title, children) { return el("section", {}, [el("div", { class: "head" }, el("h2", {}, title)), children]); }

  function changes(caption, parts, form) {
    return sections.table(caption, ["part", "A", "B", "difference", "of the difference"], Object.keys(parts).map(function (name) {
      var one = parts[name], sign = one.difference > 0 ? "+" : one.difference < 0 ? "-" : "";
      return { cells: [name, form(one.a), form(one.b), sign + form(Math.abs(one.difference)),
        one.share === null || one.share === undefined ? "" : format.percent(one.share)] };
    }), 1);
  }

  show(panel, el("main", {}, [el("h1", {}, "Compare two configurations"), el("form", { class: "box", on: { submit: ask } }, [
    el("div", { class: "sides" }, [sides[0].node, sides[1].node]), el("div", { class: "buttons" }, button)]), answer]));
  return { shown: function () { if (!answer.firstChild) ask(); } };
};
