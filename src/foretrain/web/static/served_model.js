// The fields that say what is trained and where: a model of the zoo or a pasted config.json, and what goes with it.
"use strict";

foretrain.fields = (function () {
  var el = foretrain.dom.el, show = foretrain.dom.show, lists = 0;

  var PLANS = [
    { value: "data-parallel", label: "data parallel", options: {} },
    { value: "zero-1", label: "ZeRO-1", options: { shard: "zero1" } },
    { value: "zero-2", label: "ZeRO-2", options: { shard: "zero2" } },
    { value: "zero-3-fsdp", label: "ZeRO-3 (FSDP)", options: { shard: "zero3" } },
    { value: "data-parallel-recompute-full", label: "data parallel, recompute full", options: { recompute: "full" } },
    { value: "zero-3-fsdp-recompute-full", label: "ZeRO-3 (FSDP), recompute full", options: { shard: "zero3", recompute: "full" } },
    { value: "tensor-2", label: "tensor 2", options: { tensor: 2 } },
    { value: "tensor-4", label: "tensor 4", options: { tensor: 4 } },
    { value: "tensor-8", label: "tensor 8", options: { tensor: 8 } },
    { value: "tensor-8-zero-1", label: "tensor 8, ZeRO-1", options: { tensor: 8, shard: "zero1" } },
    { value: "pipeline-4-micro-batch-1", label: "pipeline 4, micro-batch 1", options: { pipeline: 4, micro_batch: 1 } },
    { value: "pipeline-8-micro-batch-1", label: "pipeline 8, micro-batch 1", options: { pipeline: 8, micro_batch: 1 } },
  ];
  var PRECISIONS = ["amp-bf16", "bf16", "fp32", "tf32", "amp-fp16", "fp16", "fp8"];
  var COUNTS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];

  function labelled(words, id, node, more) {
    return el("div", { class: "control" }, [el("label", { for: id }, words), node, more || null]);
  }

  function select(id, choices, value, changed) {
    var node = el("select", { id: id, on: changed ? { change: changed } : {} }, choices.map(function (one) {
      return el("option", { value: one.value }, one.label);
    }));
    node.value = String(value);
    return node;
  }

  function number(id, value, attributes, changed) {
    var node = el("input", Object.assign({ id: id, type: "number", min: "1", inputmode: "numeric",
      on: changed ? { change: changed } : {} }, attributes || {}));
    if (value) node.value = String(value);
    return node;
  }

  // A search field whose suggestions come from the server.
  function model(id, value, changed) {
    var list = el("datalist", { id: "list-" + (++lists) }), waiting = 0, current = null;
    var input = el("input", { id: id, type: "text", list: list.id, autocomplete: "off", spellcheck: "false",
      placeholder: "resnet50, llama-3-8b, vit_b_16", on: {
        input: function () {
          window.clearTimeout(waiting);
          waiting = window.setTimeout(suggest, 120);
        },
        change: function () { if (changed) changed(); },
      } });
    input.value = value || "";

    function suggest() {
      if (current) current.abort();
      current = new AbortController();
      foretrain.api.get("/v1/models?limit=40&like=" + encodeURIComponent(input.value), current.signal).then(function (found) {
        show(list, found.models.map(function (one) { return el("option", { value: one.name }, one.kind); }));
      }).catch(function () { return null; });
    }
    suggest();
    return { node: el("div", {}, [input, list]), input: input };
  }

  // A model by its name or by a configuration, as fields of a request.
  function target(id, value, changed) {
    var name = model(id, value, changed);
    var area = el("textarea", { id: id + "-config", rows: "7", spellcheck: "false", class: "launch",
      placeholder: "{\"model_type\": \"llama\", \"hidden_size\": 4096, ...}", on: { change: function () {
        if (changed) changed();
      } } });
    var wrong = el("p", { class: "warning", role: "status" });
    var box = el("details", { class: "pasted" }, [el("summary", {}, "or paste a Hugging Face config.json"),
      el("label", { for: id + "-config", class: "hidden" }, "config.json"), area, wrong]);
    return {
      input: name.input, area: area,
      nodes: [labelled("Model", id, name.node), box],
      label: function () {
        if (!area.value.trim()) return name.input.value;
        try { return JSON.parse(area.value)._name_or_path || JSON.parse(area.value).model_type || "config.json"; }
        catch (error) { return "config.json"; }
      },
      // {model} or {config}; null where there is none, which it says.
      read: function () {
        wrong.textContent = "";
        if (area.value.trim()) {
          try { return { config: JSON.parse(area.value) }; } catch (error) {
            wrong.textContent = "config.json: not JSON (" + error.message + ")";
            return null;
          }
        }
        return name.input.value.trim() ? { model: name.input.value.trim() } : null;
      },
    };
  }

  // Whether a model reads tokens, by a promise: of names only those of vision libraries have images.
  function readsTokens(asked) {
    if (asked.config) return Promise.resolve(true);
    return foretrain.api.get("/v1/models?limit=1&like=" + encodeURIComponent(asked.model)).then(function (found) {
      var first = found.models[0];
      return !(first && first.name === asked.model && ["torchvision", "timm"].indexOf(first.kind) >= 0);
    }, function () { return true; });
  }

  function plan(value) {
    return PLANS.filter(function (one) { return one.value === value; })[0] || PLANS[0];
  }

  return { COUNTS: COUNTS, PLANS: PLANS, PRECISIONS: PRECISIONS, labelled: labelled, number: number, plan: plan,
    readsTokens: readsTokens, select: select, target: target,
    plain: function (values) { return values.map(function (one) { return { value: one, label: String(one) }; }); } };
})();
