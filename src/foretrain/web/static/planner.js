// Draws what a search for plans has found: the ranking, the Pareto front, more devices, and what lies around the best.
"use strict";

foretrain.planner = function (plans, settings) {
  var el = foretrain.dom.el, format = foretrain.format, sections = foretrain.sections, charts = foretrain.charts;

  function ranking() {
    var ranked = plans.options.filter(function (one) { return one.rank; });
    if (!ranked.length) return null;
    var late = plans.goal.deadline_s !== null, over = plans.goal.budget !== null;
    var headings = ["", "cluster and plan", "step", "80% interval"].concat(plans.has_length ? ["training"] : [],
      ["cost", "memory"], late ? ["late"] : [], over ? ["over budget"] : []);
    var view = settings.view();
    return sections.table("The best plans", headings, ranked.map(function (one) {
      return { chosen: one.view && settings.same(one.view, view), cells: [
        String(one.rank), el("div", {}, [settings.link(one.cluster, one.view), el("small", { class: "dim" }, one.plan),
          one.misses.length ? el("small", { class: "bad-text" }, "misses the " + one.misses.join(" and the ")) : null]),
        format.seconds(one.step.median), format.seconds(one.step.low) + " to " + format.seconds(one.step.high),
      ].concat(plans.has_length ? [format.seconds(one.time.median)] : [],
        [one.cost ? format.dollars(one.cost.median) : "unknown", one.memory === null ? "" : format.percent(one.memory)],
        late ? [one.late === null ? "" : format.percent(one.late)] : [],
        over ? [one.over_budget === null ? "" : format.percent(one.over_budget)] : []) };
    }), 2);
  }

  function front(width) {
    var priced = plans.options.every(function (one) { return !one.front || one.cost; });
    function points(on) {
      return plans.options.filter(function (one) {
        return one.front === on && (priced ? one.cost : one.energy);
      }).map(function (one) {
        var other = priced ? one.cost.median : one.energy.median / 3.6e6;
        return { x: one.time.median, y: other, low: one.time.low, high: one.time.high, hollow: !on || Boolean(one.misses.length),
          text: on ? String(one.devices) : "", title: one.cluster + ", " + one.plan,
          chosen: one.view && settings.same(one.view, settings.view()) };
      });
    }
    var on = points(true), off = points(false);
    if (!on.length) return null;
    return charts.curves({ width: width, height: 320, pad: true, nameX: plans.has_length ? "training time" : "time of a step",
      roundX: true, formatX: format.seconds, formatY: priced ? format.dollars : function (value) { return format.count(value * 1e3, "Wh"); },
      label: "Time against " + (priced ? "cost" : "energy") + ": the Pareto front and other plans", series: [
        { name: "front", color: "accent", points: on, dashed: true, band: false, whiskers: "x" },
        { name: "others", color: "grey", points: off, line: false, band: false, whiskers: "x" },
      ] });
  }

  function more(width) {
    if (!plans.curves.length) return null;
    var colors = ["accent", "backward", "optimizer", "recomputed", "network", "amber"];
    return [el("h3", {}, "More devices"), charts.curves({
      width: width, height: 280, nameX: "devices", formatX: String, formatY: format.seconds,
      label: "Time against the number of devices", series: plans.curves.map(function (curve, i) {
        return { name: curve.kind, color: colors[i % colors.length], points: curve.points.map(function (point) {
          return { x: point.devices, y: point.time.median, low: point.time.low, high: point.time.high,
            text: curve.knee === point.devices ? "knee" : "", title: curve.kind + ", " + point.devices };
        }) };
      }) }), el("ul", { class: "legend inline" }, plans.curves.map(function (curve, i) {
      return el("li", {}, [el("span", { class: "dot c-" + colors[i % colors.length], "aria-hidden": "true" }),
        el("span", {}, curve.kind)]);
    }))];
  }

  function around() {
    if (!plans.around.length) return null;
    return [el("h3", {}, "One step from the first plan"), sections.table("One step from the first plan",
      ["axis", "change", "why not", "time", "out of memory"], plans.around.map(function (one) {
        return { cells: [one.axis.replace(/_/g, " "), one.from + " to " + one.to, one.why,
          one.time_change === null ? "" : format.signed(one.time_change),
          one.out_of_memory_chance === null ? "" : format.percent(one.out_of_memory_chance)] };
      }), 3)];
  }

  function list(lines) {
    return lines.length ? el("ul", { class: "plain" }, lines.map(function (line) { return el("li", {}, line); })) : null;
  }

  return function (width) {
    return [
      plans.heading.map(sections.note), ranking(), list(plans.verdicts), el("h3", {}, "Time against cost and energy"),
      front(width), sections.note("Joined: no other plan is faster, cheaper and leaner, with its number of devices. Hollow: misses the goal, or another plan beats it. Bars are 80% intervals."), more(width), around(), el("h3", {}, "Notes"), list(plans.notes),
    ];
  };
};
