// Puts the parts of a page together: controls change the view, a source answers, and everything follows.
//
// A source has ``choices`` (of batch, device, count, precision and plan), ``start`` (a view), and
// ``ask(view)``, which gives {record} or {refused, nearest} or {absent, nearest}, or a promise of it; where it can,
// ``batches(view)`` (sizes that the slider goes through) and ``along(view, axis)`` (answers along an axis).
// A record is a forecast as ``foretrain predict --json`` prints it; ``details`` beside it are drawn where they are there.
"use strict";

foretrain.explorer = function (container, source, extra) {
  var el = foretrain.dom.el, show = foretrain.dom.show, format = foretrain.format, sections = foretrain.sections;
  extra = extra || {};
  var view = Object.assign({}, source.start), by = "layer", asked = 0, resting = 0, last = null, bodies = {};
  var AT_ONCE = ["step", "memory"];
  var AXES = { device: "Device", count: "Devices", precision: "Precision", plan: "Plan" };
  var controls = {}, timeline = foretrain.timeline({ changed: remember });

  // The frame

  var title = el("h1", {}, source.label || "foretrain"), subtitle = el("p", { class: "dim subtitle" });
  var notice = el("div", { class: "notice", role: "status" });
  var cards = el("div", { class: "cards", id: "answer" });
  var content = el("div", { class: "content" });
  var slider = el("input", { type: "range", id: "batch-slider", min: "0", step: "1", "aria-label": "Global batch",
    on: { input: function () { change({ batch: stops()[Number(slider.value)] }); } } });
  var number = el("input", { type: "number", id: "batch", min: "1", inputmode: "numeric",
    on: { change: function () { change({ batch: Math.max(1, Math.round(Number(number.value) || 1)) }); } } });

  var carried = el("p", { class: "dim small-text" });

  function choice(name) {
    var list = source.choices[name] || [];
    var node = el("select", { id: "choose-" + name, on: { change: function () {
      var found = list.filter(function (one) { return String(one.value) === node.value; })[0], changed = {};
      changed[name] = found.value;
      change(changed);
    } } }, list.map(function (one) {
      var memory = one.memory_bytes ? " (" + format.bytes(one.memory_bytes) + ")" : "";
      return el("option", { value: one.value }, one.label + memory);
    }));
    controls[name] = node;
    return el("div", { class: "control" }, [el("label", { for: "choose-" + name }, AXES[name]),
      list.length > 1 ? node : el("p", { class: "fixed" }, list.length ? list[0].label : "")]);
  }

  var aside = el("form", { class: "controls", "aria-label": "What to forecast", on: {
    submit: function (event) { event.preventDefault(); } } }, [
    el("div", { class: "control" }, [
      el("div", { class: "pair" }, [el("label", { for: "batch" }, "Global batch"), number]), slider, carried,
    ]),
    choice("device"), choice("count"), choice("precision"), choice("plan"),
    el("div", { class: "buttons" }, [
      el("button", { type: "button", class: "small", id: "reset", on: { click: function () {
        change(source.start);
      } } }, "Back to the job"),
      el("button", { type: "button", class: "small", id: "copy-link", on: { click: function () {
        copy(window.location.href, copyLink);
      } } }, "Copy link"),
    ]),
    el("p", { class: "dim made" }, source.made ? source.made.points.toLocaleString("en-US") +
      " forecasts are in this page" + (source.made.left ? "; there was no time for others" : "") + "." : ""),
  ]);
  var copyLink = aside.querySelector("#copy-link");

  function section(id, heading, beside) {
    var body = el("div", { class: "body" });
    var node = el("section", { id: id, "aria-labelledby": id + "-title" }, [
      el("div", { class: "head" }, [el("h2", { id: id + "-title" }, heading), beside || null]), body]);
    bodies[id] = { node: node, body: body };
    return node;
  }

  function switcher() {
    return el("div", { class: "switch", role: "group", "aria-label": "Group by" },
      ["layer", "operator", "phase"].map(function (name) {
        return el("button", { type: "button", class: "small", "data-by": name, "aria-pressed": String(name === by),
          on: { click: function () {
            by = name;
            bodies.parts.node.querySelectorAll("[data-by]").forEach(function (one) {
              one.setAttribute("aria-pressed", String(one.getAttribute("data-by") === by));
            });
            if (last) draw("parts", last.record);
            remember();
          } } }, name);
      }));
  }

  var text = el("textarea", { class: "launch", readonly: true, rows: "14", spellcheck: "false",
    "aria-label": "Job file and commands of this view" });
  var copyLaunch = el("button", { type: "button", id: "copy-launch", on: { click: function () {
    copy(text.value, copyLaunch, text);
  } } }, "Copy");

  [["step", "What the time of a step goes to"], ["memory", "Memory by category, beside what the device has"],
    ["around", "One change away"], ["parts", "Where the device time of a step goes", switcher()],
    ["timeline", "Timeline of a step"], ["derivation", "How the number comes about"],
    ["evidence", "Nearest measured runs"], ["resources", "Use of resources over a few steps"],
    ["launch", "Launch configuration", copyLaunch], ["assumptions", "Assumptions"],
  ].forEach(function (one) { content.appendChild(section(one[0], one[1], one[2])); });
  bodies.timeline.body.appendChild(timeline.node);
  bodies.launch.body.appendChild(text);
  var planner = null;
  if (extra.plans) {
    content.insertBefore(section("plans", "The best plans"), content.firstChild);
    planner = foretrain.planner(extra.plans, { link: link, same: same, view: function () { return view; } });
  }
  var themes = foretrain.themeButton();
  show(container, [
    el("header", {}, [el("div", {}, [title, subtitle]), themes]),
    el("main", {}, [notice, cards, el("div", { class: "columns" }, [aside, content])]),
    el("footer", { class: "dim" }, "foretrain, forecast by " + (source.predictor || "the server") +
      ". Medians with 80% intervals" + (source.made ? "; all of this page is in its file." : ".")),
  ]);

  // Views

  function same(one, other) {
    return ["batch", "device", "count", "precision", "plan"].every(function (name) {
      return String(one[name]) === String(other[name]);
    });
  }

  function stops() { return source.batches ? source.batches(view) : source.choices.batch; }

  function nearest(list, batch) {
    return list.reduce(function (best, one) {
      return Math.abs(Math.log(one / batch)) < Math.abs(Math.log(best / batch)) ? one : best;
    }, list[0]);
  }

  function change(changes) {
    var moved = "", before = view.batch;
    view = Object.assign({}, view, changes);
    if (changes.batch === undefined && source.batches) {
      var list = source.batches(view);
      if (list.indexOf(view.batch) < 0 && source.has && source.has(view)) {
        view.batch = nearest(list, view.batch);
        if (view.batch !== before) moved = "The batch moved from " + before + " to " + view.batch +
          ", which goes with this choice.";
      }
    }
    ask(moved);
  }

  function ask(moved) {
    var mine = ++asked, began = performance.now(), answer = source.ask(view);
    remember();
    setControls();
    if (answer && typeof answer.then === "function") {
      container.setAttribute("aria-busy", "true");
      answer.then(function (found) { if (mine === asked) apply(found, moved, began); }, function (error) {
        if (mine === asked) apply({ refused: String(error.message || error) }, moved, began);
      });
    } else apply(answer, moved, began);
  }

  function setControls() {
    Object.keys(controls).forEach(function (name) { controls[name].value = String(view[name]); });
    var list = stops();
    slider.max = String(list.length - 1);
    slider.value = String(list.indexOf(nearest(list, view.batch)));
    slider.setAttribute("aria-valuetext", "batch " + view.batch);
    slider.disabled = list.length < 2;
    carried.textContent = source.has && !source.has(view) ? "" : list.length < 2 ? "only this batch is in the page for this choice"
      : list[0].toLocaleString("en-US") + " to " + list[list.length - 1].toLocaleString("en-US") + " samples per step";
    number.value = String(view.batch);
  }

  function remember() {
    var range = timeline.range(), kept = Object.assign({}, view);
    if (by !== "layer") kept.by = by;
    if (range[1] - range[0] < range[2] * 0.999) kept.zoom = range[0].toPrecision(6) + "," + range[1].toPrecision(6);
    if (extra.fragment !== false) foretrain.view.replace(kept);
  }

  function link(words, target) {
    if (!target) return el("span", {}, words);
    return el("button", { type: "button", class: "link", on: { click: function () {
      view = Object.assign({}, target);
      ask("");
      cards.scrollIntoView({ block: "nearest" });
    } } }, words);
  }

  // Answers

  function apply(answer, moved, began) {
    container.removeAttribute("aria-busy");
    var record = answer.record || null;
    var words = [];
    if (moved) words.push(el("p", {}, moved));
    if (answer.interpolated) {
      words.push(el("p", {}, "Interpolated between the forecasts of batch " + answer.interpolated[0] + " and " +
        answer.interpolated[1] + "; timeline and runs are those of the nearer one."));
    }
    if (answer.refused) words.push(el("p", { class: "warning" }, answer.refused));
    if (answer.absent) {
      words.push(el("p", {}, [el("b", {}, "This page does not carry this combination: "), "no time was left for it. foretrain " +
        "predict tells it, and a page that is made with more --html-seconds has it."]));
    }
    if (!record && answer.nearest) words.push(el("p", {}, ["The nearest that is known: ", link(phrase(answer.nearest), answer.nearest)]));
    show(notice, words);
    notice.hidden = !words.length;
    content.hidden = !record && !planner;
    cards.hidden = !record;
    last = record ? answer : null;
    if (!record) subtitle.textContent = phrase(view);
    else {
      title.textContent = source.label || record.job.model.name || "foretrain";
      subtitle.textContent = describe(record);
      show(cards, sections.headline(record, { mode: mode(record) }));
    }
    AT_ONCE.forEach(function (id) { draw(id, record, answer); });
    foretrain.lastUpdateMs = performance.now() - began;
    drawRest(Object.keys(bodies).filter(function (id) { return AT_ONCE.indexOf(id) < 0; }), record, answer);
  }

  // One part after another, so that a slider that is moved on need not wait for them.
  function drawRest(left, record, answer) {
    window.clearTimeout(resting);
    container.setAttribute("data-drawn", left.length ? "partly" : "all");
    if (!left.length) return;
    resting = window.setTimeout(function () {
      draw(left[0], record, answer);
      drawRest(left.slice(1), record, answer);
    }, 0);
  }

  function phrase(one) {
    return "batch " + one.batch + " on " + one.count + " x " + one.device + ", " + one.precision + ", " + label("plan", one.plan);
  }

  function label(axis, value) {
    var found = (source.choices[axis] || []).filter(function (one) { return String(one.value) === String(value); })[0];
    return found ? found.label : String(value);
  }

  function mode(record) { return (record.job.training || {}).mode || source.mode || "train"; }

  function describe(record) {
    var training = record.job.training, shape = training.sequence ? ", sequence " + training.sequence.toLocaleString("en-US")
      : training.image ? ", image " + [].concat(training.image).join("x") : "";
    var work = record.words && record.words.work ? record.words.work.split(",")[0] + "; " : "";
    return work + (mode(record) === "infer" ? "inference" : "training") + ", batch " +
      view.batch.toLocaleString("en-US") + shape + ", " + view.precision + ", on " + view.count + " x " + view.device +
      (view.count > 1 ? ", " + label("plan", view.plan) : "");
  }

  function draw(id, record, answer) {
    var place = bodies[id], width = Math.max(240, place.body.clientWidth || content.clientWidth || 700);
    if (id === "plans") {
      show(place.body, planner(width));
      return;
    }
    if (!record) { place.node.hidden = true; return; }
    var context = { mode: mode(record), width: width, by: by, link: link, fitting: function () { return fitting(record); },
      stages: (record.details || {}).stages ? record.details.stages.length : 1,
      exact: !(answer || last || {}).interpolated };
    record.details = record.details || {};
    var drawn = {
      step: function () { return sections.step(record, context); },
      memory: function () { return record.memory_by_category_bytes && Object.keys(record.memory_by_category_bytes).length
        ? sections.memory(record, context) : null; },
      around: function () { return aroundView(record, context); },
      parts: function () { return sections.deviceTime(record, context); },
      derivation: function () { return sections.derivation(record, context); },
      evidence: function () { return sections.evidence(record); },
      assumptions: function () { return sections.assumptions(record); },
      resources: function () { return extra.resources && same(view, source.start) ? resources(extra.resources, context) : null; },
    }[id];
    if (id === "timeline") {
      place.node.hidden = !record.details.timeline;
      if (record.details.timeline) timeline.set(record.details.timeline);
    } else if (id === "launch") {
      place.node.hidden = false;
      text.value = foretrain.launch.text(record.job, context.exact ? record.launch : null);
    } else {
      var parts = drawn();
      place.node.hidden = !parts;
      if (parts) show(place.body, parts);
    }
  }

  // One change away

  function main(record) { return record.quantities.total_time_s || record.quantities.step_time_s; }

  function compared(record, other) {
    var share = main(other).median / main(record).median - 1;
    return Math.abs(share) < 0.005 ? "same time" : share >= 1 ? format.threeDigits(1 + share) + "x the time"
      : share <= -0.5 ? format.threeDigits(1 / (1 + share)) + "x as fast" : format.signed(share) + " time";
  }

  function fitting(record) {
    if (!source.along) return [];
    var found = [];
    ["plan", "precision", "device", "count", "batch"].forEach(function (axis) {
      var answers = source.along(view, axis);
      if (typeof answers.then === "function") return;
      answers.forEach(function (one) {
        var other = one.answer.record;
        if (!other || same(one.view, view) || other.out_of_memory_chance > 0.1 || !other.needed_memory_bytes) return;
        found.push({ view: one.view, words: axis === "batch" ? "batch " + one.value : axis === "count"
          ? one.value + " devices" : label(axis, one.value), slower: compared(record, other),
          share: other.needed_memory_bytes.median / other.memory_capacity_bytes });
      });
    });
    return found;
  }

  function aroundView(record, context) {
    if (!source.along) return null;
    var half = context.width > 720 ? (context.width - 24) / 2 : context.width, parts = [];
    var devices = source.along(view, "device");
    if (typeof devices.then === "function") return null;
    var rows = [["device", devices], ["plan", source.along(view, "plan")], ["precision", source.along(view, "precision")]];
    rows.forEach(function (pair) {
      var known = pair[1].filter(function (one) { return one.answer.record; });
      if (known.length < 2) return;
      parts.push(sections.table("By " + pair[0], [pair[0], "time", "80% interval", "cost", "memory", "against this"],
        known.map(function (one) {
          var other = one.answer.record, cost = other.cost_usd, price = other.price_usd_per_hour;
          var need = other.needed_memory_bytes, verdict = sections.verdict(other);
          return { chosen: same(one.view, view), cells: [same(one.view, view) ? label(pair[0], one.value)
            : link(label(pair[0], one.value), one.view), format.seconds(main(other).median),
            format.seconds(main(other).low) + " to " + format.seconds(main(other).high),
            cost ? format.dollars(cost.median) : price ? format.dollars(price) + "/h" : "unknown",
            need ? el("span", { class: verdict.kind + "-text" }, format.percent(need.median / other.memory_capacity_bytes) +
              (verdict.kind === "bad" ? ", no" : verdict.kind === "fair" ? ", perhaps" : "")) : "",
            same(one.view, view) ? "" : compared(record, other)] };
        }), 1));
    });
    var charts = [curve("count", half), curve("batch", half)].filter(Boolean);
    if (charts.length) parts.push(el("div", { class: "charts" }, charts));
    return parts.length ? parts : null;
  }

  function curve(axis, width) {
    var known = source.along(view, axis).filter(function (one) { return one.answer.record; });
    if (known.length < 2) return null;
    var many = axis === "count", total = main(known[0].answer.record) === known[0].answer.record.quantities.total_time_s;
    var points = known.map(function (one) {
      var estimate = many || total ? main(one.answer.record) : one.answer.record.quantities.samples_per_s;
      return { x: one.value, y: estimate.median, low: estimate.low, high: estimate.high,
        chosen: String(one.value) === String(view[axis]), hollow: one.answer.record.fits === false,
        title: one.value + ": " + format.seconds(main(one.answer.record).median) };
    });
    var rates = !(many || total);
    return el("figure", {}, [el("figcaption", {}, (rates ? "Samples per second" : total ? "Training time" : "Time per step") +
      " by " + (many ? "devices" : "batch") + (points.some(function (one) { return one.hollow; }) ? "; hollow: does not fit" : "")),
      foretrain.charts.curves({ width: width, height: 220, nameX: many ? "devices" : "global batch",
        formatX: function (value) { return value.toLocaleString("en-US"); }, formatY: rates ? format.rate : format.seconds,
        label: (many ? "Time against the number of devices" : "Time against the batch"),
        series: [{ name: axis, color: "accent", points: points }] })]);
  }

  // Resources, of the job itself

  function resources(found, context) {
    var times = found.times_ms, most = Math.max(200, Math.floor(context.width));
    return [found.panels.map(function (panel) {
      var points = [];
      panel.values.forEach(function (value, i) { // stairs: a level holds until the next sample
        if (i && value !== panel.values[i - 1]) points.push({ x: times[i], y: panel.values[i - 1] });
        if (!i || i === panel.values.length - 1 || value !== panel.values[i - 1]) points.push({ x: times[i], y: value });
      });
      var every = Math.ceil(points.length / (2 * most));
      return el("figure", {}, [el("figcaption", {}, panel.name), foretrain.charts.curves({
        width: context.width, height: 130, logX: false, logY: false, zero: true, nameX: "ms",
        ticksX: [times[0]].concat(found.ends_ms, [times[times.length - 1]]), formatX: format.threeDigits,
        formatY: function (value) { return format.threeDigits(value) + " " + panel.unit; },
        label: panel.name + " over " + (found.ends_ms.length + 1) + " steps",
        series: [{ name: panel.name, color: "accent", dots: false, points: points.filter(function (_, i) {
          return i % every === 0;
        }) }] })]);
    }), found.definitions.map(sections.note)];
  }

  // Copying

  function copy(words, button, area) {
    var before = button.textContent;
    function done(said) {
      button.textContent = said;
      window.setTimeout(function () { button.textContent = before; }, 1600);
    }
    function select() {
      var place = area || el("textarea", { class: "launch", readonly: true, "aria-label": "Text to copy" });
      if (!area) {
        place.value = words;
        show(notice, [el("p", {}, "Copy this:"), place]);
        notice.hidden = false;
      }
      place.focus();
      place.select();
      var worked = false;
      try { worked = document.execCommand("copy"); } catch (error) { worked = false; }
      done(worked ? "Copied" : "Selected: press Ctrl+C");
    }
    if (navigator.clipboard && navigator.clipboard.writeText) {
      navigator.clipboard.writeText(words).then(function () { done("Copied"); }, select);
    } else select();
  }

  // The address

  function fromAddress() {
    var given = foretrain.view.read(window.location.hash);
    view = foretrain.view.chosen(source.start, given, source.choices);
    if (["layer", "operator", "phase"].indexOf(given.by) >= 0) by = given.by;
    container.querySelectorAll("[data-by]").forEach(function (one) {
      one.setAttribute("aria-pressed", String(one.getAttribute("data-by") === by));
    });
    var zoom = (given.zoom || "").split(",").map(Number);
    if (zoom.length === 2 && zoom[1] > zoom[0]) timeline.begin(zoom[0], zoom[1]);
    ask("");
  }

  var waiting = 0, drawnWidth = content.clientWidth;
  new ResizeObserver(function () {
    if (content.clientWidth === drawnWidth) return;
    window.clearTimeout(waiting);
    waiting = window.setTimeout(function () {
      drawnWidth = content.clientWidth;
      redraw();
    }, 60);
  }).observe(content);
  function redraw() {
    if (last) Object.keys(bodies).forEach(function (id) { draw(id, last.record, last); });
  }
  foretrain.themeChanged = redraw;
  if (extra.fragment !== false) {
    window.addEventListener("hashchange", function () {
      var given = foretrain.view.chosen(source.start, foretrain.view.read(window.location.hash), source.choices);
      if (!same(given, view)) fromAddress();
    });
    fromAddress();
  } else ask("");
  return { change: change, redraw: redraw, view: function () { return Object.assign({}, view); } };
};

// Light, dark, or as the system has it.
foretrain.themeButton = function () {
  var names = ["auto", "light", "dark"], now = "auto";
  try { now = window.localStorage.getItem("foretrain-theme") || "auto"; } catch (error) { now = "auto"; }
  var button = foretrain.dom.el("button", { type: "button", class: "small theme", on: { click: function () {
    now = names[(names.indexOf(now) + 1) % names.length];
    try { window.localStorage.setItem("foretrain-theme", now); } catch (error) { /* pages of no origin keep nothing */ }
    set();
    if (foretrain.themeChanged) foretrain.themeChanged();
  } } });
  function set() {
    if (names.indexOf(now) < 0) now = "auto";
    document.documentElement.setAttribute("data-theme", now);
    button.textContent = "Theme: " + now;
  }
  set();
  return button;
};

// The page file: everything is in the element beside this script.
foretrain.start = function (page) {
  var data = JSON.parse(page.getElementById("foretrain-data").textContent), container = page.getElementById("explorer");
  if (data.series) {
    foretrain.page = foretrain.explorer(container, foretrain.tableSource(data),
      { plans: data.plans, resources: data.resources });
    return;
  }
  var body = foretrain.dom.el("section", { class: "alone" }), el = foretrain.dom.el;
  foretrain.dom.show(container, [el("header", {}, [el("h1", {}, data.title), foretrain.themeButton()]),
    el("main", {}, [body])]);
  foretrain.dom.show(body, foretrain.planner(data.plans, { link: function (words) { return el("span", {}, words); },
    same: function () { return false; }, view: function () { return {}; } })(body.clientWidth || 700));
};
