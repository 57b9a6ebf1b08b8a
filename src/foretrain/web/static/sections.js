// Draws the parts of a page, each from the record of a view.
"use strict";

foretrain.sections = (function () {
  var el = foretrain.dom.el, format = foretrain.format, charts = foretrain.charts;

  var CATEGORIES = {
    weights: "weights", gradients: "backward", optimizer_state: "optimizer", activations: "forward",
    temporaries: "recomputed", workspaces: "amber", inputs: "grey", buffers: "grey", rounding: "grey2",
  };
  var CAUSES = {
    computation: "forward", "exposed communication": "network", "gaps between kernels": "grey",
    "update on the host": "optimizer", "pipeline bubble": "amber", "waiting for the host": "backward",
    "waiting for the slowest rank": "recomputed",
  };
  var PHASES = ["forward", "backward", "recomputed", "optimizer"];

  function words(name) { return name.replace(/_/g, " "); }
  function note(text) { return el("p", { class: "dim" }, text); }

  function rows(pairs) {
    return el("dl", { class: "figures" }, pairs.filter(Boolean).map(function (pair) {
      return el("div", {}, [el("dt", {}, pair[0]), el("dd", {}, [el("b", {}, pair[1]),
        pair[2] ? el("span", { class: "dim" }, " " + pair[2]) : null])]);
    }));
  }

  function bounds(estimate, form) { return form(estimate.low) + " to " + form(estimate.high); }

  function table(caption, headings, body, numbersFrom) {
    function cell(tag, text, i) {
      return el(tag, { class: i >= numbersFrom ? "number" : null, scope: tag === "th" ? "col" : null },
        typeof text === "object" ? [text] : text);
    }
    return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table: " + caption }, [
      el("table", {}, [
        el("caption", { class: "hidden" }, caption),
        el("thead", {}, [el("tr", {}, headings.map(function (one, i) { return cell("th", one, i); }))]),
        el("tbody", {}, body.map(function (row) {
          return el("tr", { class: row.chosen ? "chosen" : null }, row.cells.map(function (one, i) {
            return cell("td", one, i);
          }));
        })),
      ]),
    ]);
  }

  // The answer: how long, how much, does it fit, how sure.

  function verdict(record) {
    var chance = record.out_of_memory_chance;
    if (chance === null || chance === undefined) return { word: "unknown", kind: "", chance: null };
    if (chance <= 0.1) return { word: "Fits", kind: "good", chance: chance };
    return chance <= 0.5 ? { word: "May not fit", kind: "fair", chance: chance }
      : { word: "Does not fit", kind: "bad", chance: chance };
  }

  function card(title, value, detail, below, kind) {
    return el("div", { class: "card " + (kind || "") }, [
      el("h2", {}, title), el("p", { class: "value" }, value), below || null, el("p", { class: "detail" }, detail),
    ]);
  }

  function headline(record, context) {
    var quantities = record.quantities, total = quantities.total_time_s, step = quantities.step_time_s;
    var main = total || step, of = context.mode === "infer" ? "batch" : "step";
    var time = main ? card(total ? "Training time" : "Time per " + of, format.seconds(main.median),
      total ? format.seconds(step.median) + " per " + of : throughput(quantities), charts.interval(main, format.seconds))
      : card("Time", "unknown", "this predictor does not tell");
    var need = record.needed_memory_bytes, capacity = record.memory_capacity_bytes, fits = verdict(record);
    var memory = need ? card("Memory", format.bytes(need.median) + ", " + format.percent(need.median / capacity),
      fits.chance === null ? "" : fits.kind === "bad" ? fits.word + ": " + format.chance(fits.chance) + " sure"
        : fits.word + ": " + format.chance(fits.chance) + " chance of running out",
      gauge(need, capacity), fits.kind) : card("Memory", "unknown", "this predictor does not tell");
    var cost = record.cost_usd, price = record.price_usd_per_hour;
    var many = quantities.tokens_per_s || quantities.samples_per_s;
    var perHour = price === null || price === undefined ? "" : format.dollars(price) + " per hour";
    var money = cost ? card("Cost", format.dollars(cost.median), perHour, charts.interval(cost, format.dollars))
      : price && context.mode === "infer" && many ? card("Cost of 1 M " + (quantities.tokens_per_s ? "tokens" : "samples"),
        format.dollars(millions(price, many).median), perHour, charts.interval(millions(price, many), format.dollars))
      : price ? card("Cost", format.dollars(price), "per hour; give epochs or steps for the whole training")
        : card("Cost", "unknown", "no price is known of these devices");
    return [time, money, memory, sureness(record, main)];
  }

  // What a million cost where every batch follows the one before.
  function millions(price, rate) {
    return { median: (price * 1e6) / 3600 / rate.median, low: (price * 1e6) / 3600 / rate.high,
      high: (price * 1e6) / 3600 / rate.low };
  }

  function throughput(quantities) {
    var tokens = quantities.tokens_per_s, samples = quantities.samples_per_s;
    if (tokens) return format.rate(tokens.median) + " tokens/s";
    return samples ? format.rate(samples.median) + " samples/s" : "";
  }

  function gauge(need, capacity) {
    var end = Math.max(capacity, need.high) * 1.04;
    function at(value) { return Math.min(100, (100 * value) / end); }
    return el("div", { class: "interval" }, [
      el("div", { class: "track gauge", role: "img", "aria-label": "80% interval " + bounds(need, format.bytes) }, [
        el("span", { class: "held", style: { left: "0", width: at(need.median) + "%" } }),
        el("span", { class: "band", style: { left: at(need.low) + "%", width: Math.max(0.6, at(need.high) - at(need.low)) + "%" } }),
        el("span", { class: "mark", style: { left: at(capacity) + "%" }, title: "capacity" }),
      ]),
      el("div", { class: "ends" }, [el("span", {}, bounds(need, format.bytes).replace(/ ([KMGT]iB) to (.*) \1$/, " to $2 $1")),
        el("span", { class: "capacity" }, "of " + format.bytes(capacity))]),
    ]);
  }

  function sureness(record, main) {
    var evidence = record.evidence;
    if (!main) return card("How sure", "unknown", "");
    var span = "−" + format.percent(1 - main.low / main.median) + " / +" + format.percent(main.high / main.median - 1);
    var said = evidence ? (evidence.far ? "no measured run is near this job"
      : evidence.runs + (evidence.runs === 1 ? " measured run is" : " measured runs are") + " near, median error " + format.percent(evidence.median_error)) : "";
    return card("How sure", span, said, el("p", { class: "dim small-text" }, "80% of measured runs lie within"),
      evidence && evidence.far ? "fair" : "");
  }

  // A step

  function causes(record) {
    var parts = record.step_breakdown_s || {};
    return Object.keys(parts).filter(function (name) { return parts[name] > 0; }).map(function (name) {
      return { name: name, value: parts[name], color: CAUSES[name] || "grey" };
    });
  }

  function step(record, context) {
    var quantities = record.quantities, time = quantities.step_time_s, parts = causes(record), flops = record.flops || {};
    var of = context.mode === "infer" ? "latency of a batch" : "time per step";
    var total = parts.reduce(function (sum, part) { return sum + part.value; }, 0);
    var figures = [
      time && [of, format.seconds(time.median), bounds(time, format.seconds)],
      quantities.samples_per_s && ["throughput", format.rate(quantities.samples_per_s.median) + " samples/s"],
      quantities.tokens_per_s && ["tokens", format.rate(quantities.tokens_per_s.median) + " tokens/s"],
      flops.mfu && ["MFU", format.percent(flops.mfu.median === undefined ? flops.mfu : flops.mfu.median, 1)],
      quantities.device_utilization && ["device busy", format.percent(quantities.device_utilization.median)],
      quantities.network_tx_bytes_per_s && ["network per rank",
        format.count(quantities.network_tx_bytes_per_s.median, "B/s"), "each way"],
    ].concat(PHASES.map(function (phase) {
      var one = quantities[phase + "_time_s"];
      return one && context.mode !== "infer" && [phase, format.seconds(one.median)];
    }));
    return [
      record.bound ? el("p", { class: "lead" }, ["Bound by ", el("b", {}, record.bound)]) : null,
      parts.length ? charts.stacked(parts, { format: format.seconds, label: "What the time of a step goes to" }) : null,
      parts.length ? charts.legend(parts, format.seconds, total) : null,
      rows(figures),
    ];
  }

  // Memory

  function categories(sizes) {
    return Object.keys(sizes || {}).filter(function (name) { return sizes[name] > 0; }).map(function (name) {
      return { name: words(name), value: sizes[name], color: CATEGORIES[name] || "grey" };
    });
  }

  function memory(record, context) {
    var parts = categories(record.memory_by_category_bytes), capacity = record.memory_capacity_bytes;
    var need = record.needed_memory_bytes, fits = verdict(record), moment = record.peak_moment, details = record.details;
    var said = record.words || {};
    var total = parts.reduce(function (sum, part) { return sum + part.value; }, 0);
    if (need && need.median > total) {
      parts.push({ name: "held by the allocator", value: need.median - total, color: "hatched" });
    }
    var end = Math.max(capacity, need ? need.high : total);
    var stages = details.stages || [];
    return [
      el("p", { class: "lead" }, [el("span", { class: "badge " + fits.kind }, fits.word), " ",
        need ? format.bytes(need.median) + " [" + bounds(need, format.bytes) + "] of " + format.bytes(capacity) : "",
        fits.chance !== null ? "; chance of running out " + format.chance(fits.chance) : ""]),
      said.fits && context.exact ? note(said.fits.charAt(0).toUpperCase() + said.fits.slice(1) + ".") : null,
      charts.stacked(parts, { format: format.bytes, whole: end, label: "Memory by category against the device's",
        marks: [{ value: capacity, name: "capacity " + format.bytes(capacity), kind: "limit" }] }),
      charts.legend(parts, format.bytes, capacity),
      said.peak ? note("The peak is reached " + said.peak + ".") : moment && moment.phase
        ? note("The peak is reached in the phase " + moment.phase + ".") : null,
      remedies(record, context),
      stages.length > 1 ? el("h3", {}, "Memory of a rank of each stage") : null,
      stages.length > 1 ? el("div", { class: "bars" }, stages.map(function (stage) {
        var own = categories(stage.by_category);
        var size = own.reduce(function (sum, part) { return sum + part.value; }, 0);
        return el("div", { class: "bar" }, [el("span", {}, "stage " + stage.stage),
          charts.stacked(own, { format: format.bytes, whole: end, label: "stage " + stage.stage,
            marks: [{ value: capacity, name: "capacity", kind: "limit" }] }),
          el("span", { class: "number" }, format.bytes(size))]);
      })) : null,
      overStep(details.memory_over_step, capacity, context),
    ];
  }

  function overStep(memory, capacity, context) {
    if (!memory || !memory.times.length) return null;
    var layers = Object.keys(memory.bytes).map(function (name) {
      return { name: words(name), values: memory.bytes[name], color: CATEGORIES[name] || "grey" };
    });
    return [
      el("h3", {}, "Memory over a step"),
      charts.areas({ x: memory.times, layers: layers, width: context.width, height: 240, limit: capacity,
        limitName: "capacity " + format.bytes(capacity), unit: 1073741824, formatY: format.bytes,
        label: "Bytes alive by category over a step" }),
      note("By when the host issues each call: buffers of the traced step, without library workspaces and what the allocator rounds up."),
    ];
  }

  // What would make it fit: by the forecast itself, else by what the page knows one change away.
  function remedies(record, context) {
    if (record.fits !== false && record.out_of_memory_chance <= 0.1) return null;
    var own = (record.fits_with || []).map(function (one) {
      return el("li", {}, [el("b", {}, one.change), " ", el("span", { class: "dim" },
        format.bytes(one.memory_bytes ? one.memory_bytes.median || one.memory_bytes : null))]);
    });
    var found = own.length ? own : context.fitting().slice(0, 6).map(function (one) {
      return el("li", {}, [context.link(one.words, one.view), " ", el("span", { class: "dim" },
        format.percent(one.share) + " of its memory, " + one.slower)]);
    });
    return found.length ? [el("h3", {}, "Would fit with"), el("ul", {}, found)] : null;
  }

  // Where the device's time goes

  function grouped(parts, by) {
    var groups = {};
    parts.seconds.forEach(function (seconds, i) {
      var phase = parts.phase[i], color = PHASES.indexOf(phase) >= 0 ? phase : "network";
      var layer = parts.layer[i], operator = parts.operator[i], cut = layer.lastIndexOf(".");
      var outer = by === "operator" ? operator : by === "phase" ? phase : cut > 0 ? layer.slice(0, cut) : layer;
      var inner = by === "operator" ? layer : by === "phase" ? layer + " " + operator
        : (cut > 0 ? layer.slice(cut + 1) + " " : "") + operator;
      var group = groups[outer] = groups[outer] || { name: outer, value: 0, members: {} };
      var id = inner + phase, member = group.members[id] = group.members[id] || { name: inner, value: 0, color: color, phase: phase };
      group.value += seconds;
      member.value += seconds;
    });
    return Object.keys(groups).map(function (name) {
      var group = groups[name];
      group.members = Object.keys(group.members).map(function (one) {
        var member = group.members[one];
        member.title = name + " / " + member.name + " (" + member.phase + "): " + format.seconds(member.value);
        return member;
      }).sort(larger);
      return group;
    }).sort(larger);
  }

  function larger(a, b) { return b.value - a.value; }

  function deviceTime(record, context) {
    var parts = record.details.parts || fromBreakdown(record.breakdown_s);
    if (!parts || !parts.seconds.length) return null;
    var total = parts.seconds.reduce(function (sum, one) { return sum + one; }, 0);
    var groups = grouped(parts, context.by);
    return [
      note(format.seconds(total) + " of device time in a step" + (context.stages > 1 ? " on a rank of each stage together"
        : "") + ". Sizes are times, colours phases."),
      charts.treemap(groups, { width: context.width, height: Math.max(260, Math.min(460, context.width * 0.5)),
        total: total, format: format.seconds }),
      el("ul", { class: "legend inline" }, Array.from(new Set(parts.phase)).map(function (phase) {
        return el("li", {}, [el("span", { class: "dot c-" + (PHASES.indexOf(phase) >= 0 ? phase : "network"),
          "aria-hidden": "true" }), el("span", {}, phase)]);
      })),
      table("Largest parts by " + context.by, [context.by, "time", "share", "together"],
        cumulated(groups.slice(0, 10), total), 1),
    ];
  }

  function cumulated(groups, total) {
    var sum = 0;
    return groups.map(function (group) {
      sum += group.value;
      return { cells: [group.name, format.seconds(group.value), format.percent(group.value / total, 1),
        format.percent(sum / total, 1)] };
    });
  }

  // A forecast's JSON alone has operators, not where they are.
  function fromBreakdown(breakdown) {
    if (!breakdown || !breakdown.operator) return null;
    var names = Object.keys(breakdown.operator);
    return {
      layer: names.map(function () { return "(all layers)"; }), operator: names,
      phase: names.map(function () { return "forward"; }),
      seconds: names.map(function (name) { return breakdown.operator[name]; }),
    };
  }

  // Where the number comes from

  function derivation(record, context) {
    var quantities = record.quantities, time = quantities.step_time_s, found = record.details.derivation || {};
    var parts = record.step_breakdown_s || {}, job = record.job, steps = [], sum = 0;
    if (!time) return null;
    function add(title, seconds, text) {
      sum += seconds;
      steps.push({ title: title, seconds: seconds, sum: sum, text: text });
    }
    var computing = parts.computation || 0, ideal = found.roofline_s;
    if (ideal !== undefined && computing) {
      add("Operators at the device's peak", ideal, format.rate(found.kernels) + " kernels of the busiest rank, each at its " +
        "roofline: its arithmetic at the peak rate or its bytes at the memory's rate, whichever takes longer" +
        (found.micro_batches > 1 ? "; " + found.micro_batches + " micro-batches" : "") + ".");
      add("Learned factor", computing - ideal, "Real kernels take " + format.threeDigits(computing / ideal) +
        " times as long: " + (found.measured_share ? format.percent(found.measured_share) +
        " of this time is looked up among measurements on this very device, the rest by models of measured operators."
          : "by models of operators that were measured on other devices."));
    } else if (computing) add("Computation", computing, "The operators of the busiest rank.");
    var host = (parts["waiting for the host"] || 0) + (parts["gaps between kernels"] || 0);
    if (computing) {
      add("Host", host, "The host issues all of it in " + format.seconds(found.host_issue_s || 0) +
        "; what the device waits for kernels, and gaps between them.");
      add("Exchange", parts["exposed communication"] || 0, found.sent_bytes ? "Each rank sends " +
        format.bytes(found.sent_bytes) + " in a step; this is what computation does not hide." : "One device exchanges nothing.");
      if (found.stages > 1 || parts["pipeline bubble"]) {
        add("Pipeline", parts["pipeline bubble"] || 0, found.stages + " stages wait for one another as the pipeline fills and drains.");
      }
      if (parts["update on the host"]) add("Update on the host", parts["update on the host"], "The optimizer runs on the CPU.");
      if (parts["waiting for the slowest rank"]) {
        add("Slowest rank", parts["waiting for the slowest rank"], "Ranks differ a little, and all wait for the last.");
      }
    }
    var rest = time.median - sum;
    add("Calibration", Math.abs(rest) > 1e-6 * time.median ? rest : 0, found.calibration && found.calibration !== 1
      ? "Measured runs near this job make it " + format.threeDigits(found.calibration) + " times as long (in the parts above)."
      : "No calibration to runs of your own is loaded: factor 1. foretrain fit makes one.");
    var widest = Math.max(time.median, steps.reduce(function (most, one) { return Math.max(most, one.sum); }, 0));
    var list = el("ol", { class: "derivation" }, steps.map(function (one) {
      var left = Math.min(99.7, Math.max(0, (100 * (one.sum - Math.max(0, one.seconds))) / widest));
      return el("li", {}, [
        el("div", { class: "row" }, [el("b", {}, one.title), el("span", { class: "number" },
          (one.seconds < 0 ? "−" : one.seconds > 0 ? "+" : "") + format.seconds(Math.abs(one.seconds)))]),
        el("div", { class: "fall", "aria-hidden": "true" }, [el("span", { style: {
          left: left + "%", width: (one.seconds ? Math.max(0.3, (100 * Math.abs(one.seconds)) / widest) : 0) + "%" } })]),
        note(one.text),
      ]);
    }).concat(whole(record, time, job, context)));
    return [list];
  }

  function whole(record, time, job, context) {
    var items = [], quantities = record.quantities, parts = record.total_time_parts, price = record.price_usd_per_hour;
    function item(title, value, text) {
      items.push(el("li", { class: "sum" }, [el("div", { class: "row" }, [el("b", {}, title),
        el("span", { class: "number" }, value)]), note(text)]));
    }
    item("= " + (context.mode === "infer" ? "Batch" : "Step"), format.seconds(time.median),
      "80% interval " + bounds(time, format.seconds) + ", from how far held-out runs of such jobs lay from their forecasts.");
    if (quantities.epoch_time_s) {
      item("Epoch", format.seconds(quantities.epoch_time_s.median), (job.training.samples || 0).toLocaleString("en-US") +
        " samples in batches of " + job.training.global_batch.toLocaleString("en-US") + ".");
    }
    if (parts && quantities.total_time_s) {
      item("Training", format.seconds(quantities.total_time_s.median), Object.keys(parts).map(function (name) {
        return name + " " + format.seconds(parts[name].median) + (context.exact ? " (" + parts[name].source + ")" : "");
      }).join(" + ") + ".");
    }
    if (record.cost_usd && price) {
      item("Cost", format.dollars(record.cost_usd.median), format.seconds(quantities.total_time_s.median) + " x " +
        format.dollars(price) + " per hour" + (record.price_source ? " (" + record.price_source + ")" : "") +
        "; 80% interval " + bounds(record.cost_usd, format.dollars) + ".");
    }
    return items;
  }

  // Measured runs

  function evidence(record) {
    var found = record.evidence;
    if (!found) return [note("No measured runs with forecasts of this predictor are kept.")];
    var times = /_s$/.test(found.quantity), form = times ? format.seconds : function (value) { return format.threeDigits(value); };
    var list = found.nearest || [], single = list.some(function (one) { return typeof one.measured === "number"; });
    return [
      el("p", {}, found.far ? "No measured run is near this job; these are the nearest."
        : "On " + found.runs + " measured runs near this job the median error was " + format.percent(found.median_error) +
          ", and " + format.percent(found.coverage) + " lay in their 80% intervals."),
      list.length ? table("Nearest measured runs", ["run"].concat(single ? ["measured", "forecast"] : [], ["off", "distance"]),
        list.map(function (one) {
          var differs = one.differs && one.differs.length ? one.differs.join("; ") : "the same settings";
          var known = one.measured !== null && one.measured !== undefined;
          return { cells: [el("div", {}, [el("span", {}, one.run + (one.runs > 1 ? " (median of " + one.runs + " runs)" : "")),
            el("small", { class: "dim" }, differs + " (" + one.source + ")")])].concat(
            single ? [known ? form(one.measured) : "", known ? form(one.predicted) : ""] : [],
            [known ? format.signed(one.error) : format.percent(Math.abs(one.error), 1), format.threeDigits(one.distance)]) };
        }), 1) : null,
      found.learned_from ? note("The predictor learned from these very runs, so new ones will be farther off.") : null,
    ];
  }

  function assumptions(record) {
    return [note("Forecast by " + record.predictor + "; bars and brackets are 80% intervals, thin ends 95%."),
      el("ul", { class: "plain" }, (record.assumptions || []).map(function (one) { return el("li", {}, one); }))];
  }

  return {
    assumptions: assumptions, derivation: derivation, deviceTime: deviceTime, evidence: evidence, headline: headline,
    memory: memory, note: note, rows: rows, step: step, table: table, verdict: verdict,
  };
})();
