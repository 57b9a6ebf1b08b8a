// What if a cluster were scheduled otherwise: policies on a trace that is pasted, or on jobs that are made.
"use strict";

foretrain.scheduleTab = function (panel) {
  var el = foretrain.dom.el, show = foretrain.dom.show, format = foretrain.format, fields = foretrain.fields;
  var cluster = el("input", { type: "text", id: "schedule-cluster", value: "16x4xv100" });
  var made = el("input", { type: "text", id: "schedule-made", value: "jobs=300,gap=60s,median=20min,spread=1.2" });
  var trace = el("textarea", { id: "schedule-trace", rows: "5", class: "launch", spellcheck: "false", placeholder: "a trace in a format that foretrain schedule reads" });
  var errors = el("input", { type: "text", id: "schedule-errors", value: "0, 0.3" });
  var seeds = fields.number("schedule-seeds", 1);
  var policies = el("input", { type: "text", id: "schedule-policies", value: "fifo, backfill, srtf, tiresias" });
  var answer = el("div", { class: "content" });
  var errand = foretrain.api.errand({ label: "Progress of the simulations", done: draw });

  function list(text) { return text.split(",").map(function (one) { return one.trim(); }).filter(Boolean); }

  function ask(event) {
    event.preventDefault();
    var asked = { cluster: cluster.value.trim(), policies: list(policies.value), seeds: Number(seeds.value) || 1,
      errors: list(errors.value).map(Number) };
    if (trace.value.trim()) asked.trace = trace.value;
    else asked.generate = made.value.trim();
    show(answer, []);
    errand.begin("/v1/schedule", asked);
  }

  function draw(found) {
    var groups = {}, order = [];
    found.results.forEach(function (one) {
      var key = one.policy + "|" + one.error;
      if (!groups[key]) { groups[key] = []; order.push(key); }
      groups[key].push(one);
    });
    function mean(list, name) {
      return list.reduce(function (sum, one) { return sum + one[name]; }, 0) / list.length;
    }
    var best = Math.min.apply(null, order.map(function (key) { return mean(groups[key], "average_jct_s"); }));
    var worst = Math.max.apply(null, order.map(function (key) { return mean(groups[key], "average_jct_s"); }));
    var rows = order.map(function (key) {
      var own = groups[key], average = mean(own, "average_jct_s");
      return { chosen: average === best, cells: [own[0].policy, own[0].error ? "about " + format.percent(own[0].error) + " off" : "exact",
        format.seconds(average), format.seconds(mean(own, "p95_jct_s")), format.seconds(mean(own, "average_queueing_s")),
        format.seconds(mean(own, "makespan_s")), format.percent(mean(own, "utilization")), format.rate(mean(own, "preemptions"))] };
    });
    show(answer, el("section", {}, [el("div", { class: "head" }, el("h2", {}, "Policies on " + found.trace.jobs.toLocaleString("en-US") + " jobs")),
      el("div", { class: "meters", role: "img", "aria-label": "Average time of a job to its end, by policy" }, order.map(function (key) {
        var own = groups[key], average = mean(own, "average_jct_s");
        return el("div", { class: "meter" }, [el("span", {}, own[0].policy + (own[0].error ? ", estimates " + format.percent(own[0].error) + " off" : "")),
          el("div", { class: "fall" }, el("span", { style: { left: "0", width: (100 * average / worst).toFixed(1) + "%" } })), el("b", {}, format.seconds(average))]);
      })),
      foretrain.sections.table("Policies", ["policy", "estimates", "average time to the end", "95% end within", "average wait", "all done after", "use of GPUs", "preemptions"], rows, 2),
      foretrain.sections.note("Time from when a job arrives to when it ends. The best average is marked." + (seeds.value > 1 ? " Means of " + seeds.value + " seeds." : "")) ]));
  }

  show(panel, el("main", {}, [el("h1", {}, "Schedule: what if the cluster were run otherwise"),
    el("form", { class: "box", on: { submit: ask } }, [el("div", { class: "grid" }, [
      fields.labelled("Cluster (nodes x GPUs x device)", "schedule-cluster", cluster),
      fields.labelled("Policies", "schedule-policies", policies),
      fields.labelled("Jobs to make", "schedule-made", made),
      fields.labelled("Error of estimates that policies see", "schedule-errors", errors),
      fields.labelled("Seeds", "schedule-seeds", seeds)]),
      el("details", { class: "pasted" }, [el("summary", {}, "or paste a trace"), el("label", { for: "schedule-trace", class: "hidden" }, "Trace"), trace]),
      el("div", { class: "buttons" }, el("button", { type: "submit", class: "primary" }, "Simulate"))]), errand.node, answer]));
  return {};
};
