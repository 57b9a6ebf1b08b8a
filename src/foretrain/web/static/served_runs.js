// One's own runs: upload them, see them, learn from them, and what that changed.
"use strict";

foretrain.runsTab = function (panel) {
  var el = foretrain.dom.el, show = foretrain.dom.show, format = foretrain.format, fields = foretrain.fields, sections = foretrain.sections;
  var file = el("input", { type: "file", id: "runs-file", accept: ".jsonl,.ndjson,application/x-ndjson,text/plain" });
  var pasted = el("textarea", { id: "runs-text", rows: "4", class: "launch", spellcheck: "false",
    placeholder: "{\"job\": {...}, \"measured\": {\"step_time_s\": 0.12}, \"provenance\": {}}" });
  var said = el("p", { role: "status" }), list = el("div", {}), answer = el("div", { class: "content" });
  var name = el("input", { type: "text", id: "learn-name", value: "ours", spellcheck: "false" });
  var method = el("input", { type: "text", id: "learn-method", value: "deletepop", spellcheck: "false" });
  var device = el("input", { type: "text", id: "learn-device", placeholder: "all" });
  var errand = foretrain.api.errand({ label: "Progress of learning", done: changed });

  function say(words, bad) { said.textContent = words; said.className = bad ? "warning" : "good-text"; }

  function upload(event) {
    event.preventDefault();
    var body = file.files.length ? file.files[0] : pasted.value.trim() ? pasted.value : null;
    if (!body) { say("Choose a file, or paste runs.", true); return; }
    say("Uploading");
    foretrain.api.ask("POST", "/v1/runs", { body: body, kind: "application/x-ndjson" }).then(function (found) {
      say(found.new.toLocaleString("en-US") + " new runs are on the server's disk" + (found.known ? ", " +
        found.known.toLocaleString("en-US") + " were there before" : "") + ". Learning from them is the next step.");
      file.value = "";
      refresh();
    }, function (error) { say(error.message, true); });
  }

  function refresh() {
    foretrain.api.get("/v1/runs?limit=20").then(function (found) {
      show(list, [sections.note(found.total.toLocaleString("en-US") + " runs are kept" + (found.total > 20 ? "; the first 20:" : ".")),
        found.runs.length ? sections.table("Runs", ["model", "device", "batch", "time per step", "memory at peak", "source"], found.runs.map(function (one) {
          var job = one.run.job, cluster = (job.cluster.groups || [job.cluster])[0], measured = one.run.measured;
          return { cells: [job.model.title || job.model.name || (job.model.config || {}).model_type || "",
            ((cluster.nodes || 1) * (cluster.devices_per_node || 1)) + " x " + (cluster.device || cluster.node), String(job.training.global_batch),
            measured.step_time_s ? format.seconds(measured.step_time_s) : "", measured.peak_memory_bytes ? format.bytes(measured.peak_memory_bytes) : "",
            (one.run.provenance || {}).source || ""] };
        }), 2) : null]);
    }, function (error) { show(list, el("p", { class: "warning" }, error.message)); });
  }

  function learn(event) {
    event.preventDefault();
    var asked = { name: name.value.trim(), predictor: method.value.trim() };
    if (device.value.trim()) asked.device = device.value.trim();
    show(answer, []);
    errand.begin("/v1/learn", asked);
  }

  function forecast(one) {
    return el("span", {}, [format.seconds(one.predicted), el("small", { class: "dim" }, format.signed(one.error))]);
  }

  function changed(found) {
    var changes = found.changes, before = changes.before, after = changes.after;
    function row(words, value, form) {
      return { cells: [words, value(before) === null ? "" : form(value(before)), value(after) === null ? "" : form(value(after))] };
    }
    function share(value) { return format.percent(value, 1); }
    show(answer, el("section", { id: "changed" }, [el("div", { class: "head" }, el("h2", {}, "What " + found.runs + " runs changed")),
      el("p", {}, found.name + " is " + found.predictor + " that learned from them; ask for it as predictor of a forecast."),
      found.left_out_count ? el("p", { class: "dim" }, found.left_out_count + " runs could not be used: " + found.left_out[0]) : null,
      sections.table("Before and after", ["on " + before.n + " of the runs", "before", "after"], [
        row("median error", function (one) { return one.median_ape; }, share), row("mean error", function (one) { return one.mape; }, share),
        row("bias", function (one) { return one.bias; }, format.signed), row("in the 80% interval", function (one) { return one.coverage; }, share)], 1),
      sections.note("These are the runs that were learned from, so the error after is the least that can be hoped for."),
      sections.table("Run by run", ["run", "measured", "before", "after"], changes.runs.slice(0, 50).map(function (one) {
        return { cells: [one.run, format.seconds(one.measured), forecast(one.before), forecast(one.after)] };
      }), 1)]));
  }

  function box(title, children) { return el("section", {}, [el("div", { class: "head" }, el("h2", {}, title)), children]); }

  show(panel, el("main", {}, [el("h1", {}, "Measured runs"), el("div", { class: "content" }, [
    box("Upload", el("form", { on: { submit: upload } }, [el("div", { class: "grid" }, [
      fields.labelled("A file of runs, one JSON object a line", "runs-file", file),
      fields.labelled("or the lines themselves", "runs-text", pasted)]),
      el("div", { class: "buttons" }, el("button", { type: "submit", class: "primary" }, "Upload")), said])),
    box("Learn from them", [el("form", { on: { submit: learn } }, [el("div", { class: "grid" }, [
      fields.labelled("Name of what learns", "learn-name", name), fields.labelled("Method", "learn-method", method),
      fields.labelled("Runs on device", "learn-device", device)]),
      el("div", { class: "buttons" }, el("button", { type: "submit", class: "primary" }, "Learn"))]), errand.node]),
  ]), answer, el("div", { class: "content" }, box("What is kept", list))]));
  return { shown: refresh };
};
