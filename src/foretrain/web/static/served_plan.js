// A search for the best plans of a job, with its Pareto front.
"use strict";

foretrain.planTab = function (panel, context) {
  var el = foretrain.dom.el, show = foretrain.dom.show, fields = foretrain.fields, last = null;
  var target = fields.target("plan-model", "resnet50");
  var inputs = {
    batch: fields.number("plan-batch", 1024), size: fields.number("plan-size", "", { placeholder: "the model's own" }),
    steps: fields.number("plan-steps", 10000), most: fields.number("plan-most", 16),
    deadline: el("input", { type: "text", id: "plan-deadline", placeholder: "none, or such as 24h" }),
    budget: fields.number("plan-budget", "", { placeholder: "none" }),
    precision: fields.select("plan-precision", fields.plain(fields.PRECISIONS), "amp-bf16"),
    objective: fields.select("plan-objective", [{ value: "", label: "by the goal" }].concat(fields.plain(["time", "cost", "energy"])), ""),
  };
  var words = { batch: "Global batch", size: "Sequence or image size", steps: "Steps", most: "Devices, at most", deadline: "Deadline",
    budget: "Budget in $", precision: "Precision", objective: "Best is" };
  var usual = ["h100-sxm-80gb", "a100-sxm-80gb"];
  var kinds = el("select", { id: "plan-kinds", multiple: true, size: "5" }, context.choices.device.filter(function (one) {
    return one.value !== "cpu";
  }).map(function (one) {
    return el("option", { value: one.value, selected: usual.indexOf(one.value) >= 0 }, one.label);
  }));
  var answer = el("div", { class: "content" });
  var errand = foretrain.api.errand({ label: "Progress of the search", done: draw });

  function ask(event) {
    event.preventDefault();
    var asked = target.read();
    if (!asked) return;
    var chosen = Array.prototype.filter.call(kinds.options, function (one) { return one.selected; });
    asked.options = { batch: Number(inputs.batch.value) || 32, precision: inputs.precision.value };
    if (inputs.steps.value) asked.options.steps = Number(inputs.steps.value);
    asked.kinds = chosen.map(function (one) { return one.value; });
    if (inputs.most.value) asked.max_devices = Number(inputs.most.value);
    if (inputs.deadline.value.trim()) asked.deadline = inputs.deadline.value.trim();
    if (inputs.budget.value) asked.budget = Number(inputs.budget.value);
    if (inputs.objective.value) asked.objective = inputs.objective.value;
    show(answer, []);
    fields.readsTokens(asked).then(function (tokens) {
      if (inputs.size.value) asked.options[tokens ? "sequence" : "image"] = Number(inputs.size.value);
      errand.begin("/v1/plan", asked);
    });
  }

  function draw(found) {
    last = found;
    var planner = foretrain.planner(found.shown, { link: function (words) { return el("span", {}, words); },
      same: function () { return false; }, view: function () { return {}; } });
    var body = el("div", { class: "body" });
    show(answer, el("section", { id: "found-plans" }, [el("div", { class: "head" }, el("h2", {}, "The best plans")), body]));
    show(body, planner(Math.max(240, body.clientWidth || 700)));
  }

  show(panel, el("main", {}, [el("h1", {}, "Plan: which devices, how many, and how to split the work"),
    el("form", { class: "box", on: { submit: ask } }, [target.nodes,
      el("div", { class: "grid" }, Object.keys(inputs).map(function (one) {
        return fields.labelled(words[one], inputs[one].id, inputs[one]);
      }).concat([fields.labelled("Devices to choose from", "plan-kinds", kinds)])),
      el("div", { class: "buttons" }, el("button", { type: "submit", class: "primary" }, "Search"))]), errand.node, answer]));
  return { redraw: function () { if (last) draw(last); } };
};
