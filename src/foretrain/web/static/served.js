// The served page: tabs over one server.
"use strict";

(function () {
  var el = foretrain.dom.el, show = foretrain.dom.show, fields = foretrain.fields;
  var TABS = [["explore", "Explore"], ["compare", "Compare"], ["plan", "Plan"], ["schedule", "Schedule"],
    ["leaderboard", "Leaderboard"], ["runs", "Runs"]];
  var place = document.getElementById("served"), buttons = {}, panels = {}, tabs = {}, chosen = "explore";
  var given = foretrain.view.read(window.location.hash), context = { choices: {} }, kept = {};
  foretrain.openTab = open;

  function remember() {
    foretrain.view.replace(Object.assign({ tab: chosen === "explore" ? "" : chosen }, chosen === "explore" ? kept : {}));
  }

  function open(name, focus) {
    chosen = name;
    TABS.forEach(function (one) {
      var on = one[0] === name;
      buttons[one[0]].setAttribute("aria-selected", String(on));
      buttons[one[0]].tabIndex = on ? 0 : -1;
      panels[one[0]].hidden = !on;
    });
    buttons[name].scrollIntoView({ block: "nearest", inline: "center" });
    if (focus) buttons[name].focus();
    if (!tabs[name]) tabs[name] = make(name);
    if (tabs[name].shown) tabs[name].shown();
    if (tabs[name].redraw) tabs[name].redraw();
    remember();
  }

  function make(name) {
    var makers = { explore: explore, compare: foretrain.compareTab, plan: foretrain.planTab, schedule: foretrain.scheduleTab,
      leaderboard: foretrain.leaderboardTab, runs: foretrain.runsTab };
    return makers[name](panels[name], context) || {};
  }

  function keys(event) {
    var names = TABS.map(function (one) { return one[0]; }), at = names.indexOf(chosen);
    var to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: names.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    open(names[(to + names.length) % names.length], true);
  }

  // Explore

  function explore(panel) {
    var target = fields.target("model", given.model || "resnet50", changed), container = el("div", { id: "explorer" }), page = null;
    var length = fields.number("steps", given.steps || "", { placeholder: "none" }, changed);
    var size = fields.number("size", given.size || "", { placeholder: "the model's own" }, changed);
    var optimizer = fields.select("optimizer", [{ value: "", label: "the model's own" }].concat(
      fields.plain(["sgd", "adamw", "adam", "adafactor", "lamb"])), given.optimizer || "", changed);
    var usual = { batch: 256, device: "h100-sxm-80gb", count: 8, precision: "amp-bf16", plan: "data-parallel" };
    if (given.config) target.area.value = given.config;

    function options() {
      var found = {};
      if (length.value) found.steps = Number(length.value);
      if (size.value) found[context.text ? "sequence" : "image"] = Number(size.value);
      if (optimizer.value) found.optimizer = optimizer.value;
      return found;
    }

    function changed() {
      var read = target.read();
      if (!read) return;
      fields.readsTokens(read).then(function (found) {
        context.text = found;
        start(read, target.label());
      });
    }

    function start(read, name) {
      var now = page ? page.view() : foretrain.view.chosen(Object.assign({}, usual, context.text && !given.batch ? { batch: 64, plan: "zero-3-fsdp" } : {}), given, context.choices);
      var source = foretrain.servedSource({ target: read, label: name, start: now, choices: context.choices, options: options,
        changed: function (view) {
          kept = Object.assign({ model: read.model || "", steps: length.value, size: size.value, optimizer: optimizer.value }, view);
          if (chosen === "explore") remember();
        }, redraw: function () { if (page) page.redraw(); } });
      page = foretrain.explorer(container, source, { fragment: false });
      foretrain.page = page;
    }

    show(panel, [el("form", { class: "box model", "aria-label": "What is trained", on: { submit: function (event) {
      event.preventDefault();
      changed();
    } } }, [target.nodes[0], el("div", { class: "grid small-grid" }, [fields.labelled("Sequence or image size", "size", size),
      fields.labelled("Optimizer", "optimizer", optimizer), fields.labelled("Steps of the training", "steps", length)]), target.nodes[1]]), container]);
    changed();
    return { redraw: function () { if (page) page.redraw(); } };
  }

  // The frame

  function frame() {
    var token = el("input", { type: "password", id: "token", autocomplete: "off", value: foretrain.api.token(),
      on: { change: function () { foretrain.api.setToken(token.value.trim()); } } });
    var bar = el("div", { class: "tabs", role: "tablist", "aria-label": "What to ask", on: { keydown: keys } }, TABS.map(function (one) {
      buttons[one[0]] = el("button", { type: "button", role: "tab", id: "tab-" + one[0], "aria-controls": "panel-" + one[0],
        on: { click: function () { open(one[0]); } } }, one[1]);
      return buttons[one[0]];
    }));
    show(place, [el("div", { class: "top", role: "banner" }, [el("b", { class: "brand" }, "foretrain"), bar,
      el("details", { class: "token" }, [el("summary", {}, "Token"), el("form", { on: { submit: function (event) {
        event.preventDefault();
        foretrain.api.setToken(token.value.trim());
      } } }, [el("label", { for: "token" }, "Token of the server, for what writes or takes long"), token,
        el("p", { class: "dim small-text" }, "Kept in this tab alone, until it is closed.")])]), foretrain.themeButton()]),
    TABS.map(function (one) {
      panels[one[0]] = el("div", { role: "tabpanel", id: "panel-" + one[0], "aria-labelledby": "tab-" + one[0], class: "panel" });
      return panels[one[0]];
    })]);
  }

  function begin(devices) {
    context.choices = {
      device: Object.keys(devices).map(function (name) {
        return { value: name, label: name, memory_bytes: devices[name].memory_bytes || devices[name].memory };
      }),
      count: fields.plain(fields.COUNTS), precision: fields.plain(fields.PRECISIONS), plan: fields.PLANS, batch: [],
    };
    frame();
    open(TABS.some(function (one) { return one[0] === given.tab; }) ? given.tab : "explore");
  }

  foretrain.api.get("/v1/catalog/devices").then(begin, function (error) {
    show(place, el("p", { class: "warning" }, error.message));
  });
})();
