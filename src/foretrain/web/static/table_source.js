// Answers from the table that a page carries: exactly where a combination was forecast, between two batches of one
// otherwise.
"use strict";

// What Python writes (``web/records.py``), or a forecast's JSON, as a record: what is drawn of the step under ``details``.
foretrain.asRecord = function (sections) {
  var result = { details: {} };
  Object.keys(sections).forEach(function (name) {
    if (name.indexOf("details.") === 0) result.details[name.slice(8)] = sections[name];
    else result[name] = sections[name];
  });
  return result;
};

foretrain.tableSource = function (data) {
  var decoded = {};

  function filled(skeleton, figures, cursor) {
    if (typeof skeleton === "number") return figures[cursor.at++];
    if (skeleton === null || typeof skeleton !== "object") return skeleton;
    if (Array.isArray(skeleton)) {
      return skeleton.map(function (one) { return filled(one, figures, cursor); });
    }
    if (typeof skeleton["#"] === "number") {
      cursor.at += skeleton["#"];
      return figures.slice(cursor.at - skeleton["#"], cursor.at);
    }
    var result = {};
    Object.keys(skeleton).forEach(function (key) { result[key] = filled(skeleton[key], figures, cursor); });
    return result;
  }

  function words(numbers) {
    return numbers.map(function (number) { return data.words[number]; });
  }

  function record(number) {
    if (decoded[number]) return decoded[number];
    var packed = data.records[number], sections = {};
    Object.keys(packed).forEach(function (name) {
      sections[name] = filled(data.skeletons[packed[name][0]], packed[name], { at: 1 });
    });
    var result = foretrain.asRecord(sections);
    var parts = result.details.parts, timeline = result.details.timeline;
    if (parts) ["layer", "operator", "phase"].forEach(function (name) { parts[name] = words(parts[name]); });
    if (timeline) {
      timeline.kind = words(timeline.kind);
      timeline.name = words(timeline.name);
      ["start", "length"].forEach(function (name) {
        timeline[name] = timeline[name].map(function (units) { return units * timeline.unit_s; });
      });
    }
    result.job = Object.assign({ model: data.model }, result.job);
    decoded[number] = result;
    return result;
  }

  // Figures are nearly affine in the batch, so a mix by the batch itself is close, and parts still add up to the whole.
  function mixed(one, other, share) {
    if (typeof one === "number" && typeof other === "number") return one + (other - one) * share;
    if (one === null || other === null || typeof one !== typeof other || typeof one !== "object") {
      return share < 0.5 ? one : other;
    }
    if (Array.isArray(one)) {
      if (!Array.isArray(other) || one.length !== other.length) return share < 0.5 ? one : other;
      if (one.some(function (item, i) { return typeof item === "string" && item !== other[i]; })) {
        return share < 0.5 ? one : other;
      }
      return one.map(function (item, i) { return mixed(item, other[i], share); });
    }
    var keys = Object.keys(one);
    if (keys.join() !== Object.keys(other).join()) return share < 0.5 ? one : other;
    var result = {};
    keys.forEach(function (key) { result[key] = mixed(one[key], other[key], share); });
    return result;
  }

  // What goes with the number of steps, which a number of epochs makes one over the batch: mixed as a product with it.
  function byEpochs(one, other, share, batches) {
    var times = [[one, batches[0]], [other, batches[1]]].map(function (pair) {
      return multiplied(pair[0], pair[1]);
    });
    return multiplied(mixed(times[0], times[1], share), 1 / batches[2]);
  }

  function multiplied(value, factor) {
    if (typeof value === "number") return value * factor;
    if (value === null || typeof value !== "object") return value;
    if (Array.isArray(value)) return value.map(function (one) { return multiplied(one, factor); });
    var result = {};
    Object.keys(value).forEach(function (key) { result[key] = multiplied(value[key], factor); });
    return result;
  }

  var WITH_STEPS = ["total_time_parts", "cost_usd", "energy_j"];
  var AS_THEY_ARE = ["job", "evidence", "assumptions", "fits_with", "recomputation", "words", "flops"];

  function between(low, high, batch) {
    var share = (batch - low.batch) / (high.batch - low.batch), batches = [low.batch, high.batch, batch];
    var a = record(low.record), b = record(high.record), nearest = share < 0.5 ? a : b, result = {};
    Object.keys(nearest).forEach(function (name) {
      if (AS_THEY_ARE.indexOf(name) >= 0 || name === "details") result[name] = nearest[name];
      else if (data.by_epochs && WITH_STEPS.indexOf(name) >= 0) {
        result[name] = byEpochs(a[name], b[name], share, batches);
      } else result[name] = mixed(a[name], b[name], share);
    });
    ["epoch_time_s", "total_time_s"].forEach(function (name) {
      if (data.by_epochs && a.quantities[name] && b.quantities[name]) {
        result.quantities[name] = byEpochs(a.quantities[name], b.quantities[name], share, batches);
      }
    });
    var step = result.quantities.step_time_s, tokens = a.quantities.tokens_per_s;
    var length = tokens ? (tokens.median * a.quantities.step_time_s.median) / low.batch : 0;
    if (step) {
      result.quantities.samples_per_s = inverse(step, batch);
      if (tokens) result.quantities.tokens_per_s = inverse(step, batch * length);
    }
    result.details = Object.assign({}, nearest.details, {
      parts: mixed(a.details.parts || null, b.details.parts || null, share) || undefined,
      derivation: mixed(a.details.derivation || null, b.details.derivation || null, share) || undefined,
    });
    result.job = Object.assign({}, nearest.job, {
      training: Object.assign({}, nearest.job.training, { global_batch: batch }),
    });
    result.flops = perStep(nearest.flops, batch / (share < 0.5 ? low.batch : high.batch), nearest, result);
    if (result.needed_memory_bytes && result.usable_memory_bytes) {
      result.out_of_memory_chance = chanceAbove(result.needed_memory_bytes, result.usable_memory_bytes);
      result.fits = result.out_of_memory_chance <= 0.5;
    }
    return result;
  }

  function inverse(step, of) {
    return {
      median: of / step.median, low: of / step.high, high: of / step.low,
      low_95: of / (step.high_95 || step.high), high_95: of / (step.low_95 || step.low),
    };
  }

  // The probability of more than a limit, with the logarithm spread normally on either side of the median.
  function chanceAbove(estimate, limit) {
    var above = limit >= estimate.median, bound = above ? estimate.high : estimate.low;
    var deviation = Math.abs(Math.log(bound / estimate.median)) / 1.2815515655446004;
    if (!deviation) return estimate.median > limit ? 1 : 0;
    return 0.5 * erfc(Math.log(limit / estimate.median) / deviation / Math.SQRT2);
  }

  function erfc(x) { // Abramowitz and Stegun 7.1.26
    var t = 1 / (1 + 0.3275911 * Math.abs(x));
    var tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))) *
      Math.exp(-x * x);
    return x >= 0 ? tail : 2 - tail;
  }

  // Arithmetic grows with the batch; its rate and share of the peak follow from the time.
  function perStep(flops, factor, nearest, result) {
    if (!flops || !nearest.quantities.step_time_s) return flops;
    var faster = (factor * nearest.quantities.step_time_s.median) / result.quantities.step_time_s.median;
    var copy = {};
    Object.keys(flops).forEach(function (name) {
      copy[name] = multiplied(flops[name], /mfu|hfu/.test(name) ? faster : name === "flops_per_step" ? factor : 1);
    });
    return copy;
  }

  function seriesOf(view) {
    return data.series[[view.device, view.count, view.precision, view.plan].join("|")];
  }

  function points(series) {
    if (!series) return [];
    return Object.keys(series.at).map(function (batch) {
      return { batch: Number(batch), record: series.at[batch] };
    }).sort(function (a, b) { return a.batch - b.batch; });
  }

  function ask(view) {
    var series = seriesOf(view), known = points(series);
    if (!known.length) return nothing(view, series);
    var exact = known.filter(function (point) { return point.batch === view.batch; })[0];
    if (exact) return { record: record(exact.record) };
    if (view.batch % series.multiple) {
      return refused("training.global_batch: " + view.batch + " does not divide into whole samples for every rank; " +
        "a multiple of " + series.multiple + " does", view, known);
    }
    var low = known.filter(function (point) { return point.batch < view.batch; }).pop();
    var high = known.filter(function (point) { return point.batch > view.batch; })[0];
    if (!low || !high) {
      var number = series.refused[String(view.batch)];
      var reason = number !== undefined ? data.reasons[number] : "the page carries batches from " + known[0].batch +
        " to " + known[known.length - 1].batch + " of this combination";
      return refused(reason, view, known);
    }
    return { record: between(low, high, view.batch), interpolated: [low.batch, high.batch] };
  }

  function refused(reason, view, known) {
    var nearest = known.slice().sort(function (a, b) {
      return Math.abs(Math.log(a.batch / view.batch)) - Math.abs(Math.log(b.batch / view.batch));
    })[0];
    return { refused: reason, nearest: nearest && Object.assign({}, view, { batch: nearest.batch }) };
  }

  function nothing(view, series) {
    if (series) {
      var own = series.refused[String(view.batch)];
      var numbers = own !== undefined ? [own] : Object.keys(series.refused).map(function (batch) {
        return series.refused[batch];
      });
      return { refused: data.reasons[numbers[0]], nearest: nearestView(view) };
    }
    return { absent: true, nearest: nearestView(view) };
  }

  // The carried combination with fewest changes, and the nearest batch of it.
  function nearestView(view) {
    var best = null, names = ["device", "count", "precision", "plan"];
    Object.keys(data.series).forEach(function (key) {
      var known = points(data.series[key]), parts = key.split("|");
      if (!known.length) return;
      var changes = names.filter(function (name, i) { return String(view[name]) !== parts[i]; }).length;
      var count = Number(parts[1]), far = changes + 0.01 * Math.abs(Math.log(count / view.count));
      known.forEach(function (point) {
        var distance = far + 0.1 * Math.abs(Math.log(point.batch / view.batch));
        if (best && best.distance <= distance) return;
        best = { distance: distance, view: {
          batch: point.batch, device: parts[0], count: count, precision: parts[2], plan: parts[3],
        } };
      });
    });
    return best && best.view;
  }

  // Batches that can be chosen: those that were forecast, and whole multiples between them.
  function batches(view) {
    var series = seriesOf(view), known = points(series).map(function (point) { return point.batch; });
    if (known.length < 2) return known.length ? known : [view.batch];
    var found = {}, first = known[0], last = known[known.length - 1], unit = series.multiple, stops = 72;
    known.forEach(function (batch) { found[batch] = true; });
    for (var i = 0; i <= stops; i++) {
      var size = Math.round((first * Math.pow(last / first, i / stops)) / unit) * unit;
      if (size > first && size < last) found[size] = true;
    }
    return Object.keys(found).map(Number).sort(function (a, b) { return a - b; });
  }

  // The answers along one axis, the others as they are.
  function along(view, axis) {
    var values = axis === "batch" ? points(seriesOf(view)).map(function (point) { return point.batch; })
      : data.choices[axis].map(function (one) { return one.value; });
    return values.map(function (value) {
      var change = {};
      change[axis] = value;
      var changed = Object.assign({}, view, change), answer = ask(changed);
      return { value: value, view: changed, answer: answer };
    });
  }

  return {
    choices: data.choices, start: data.start, made: data.made, label: data.model_label, mode: data.mode,
    predictor: data.predictor, ask: ask, along: along, batches: batches,
    has: function (view) { var series = seriesOf(view); return Boolean(series && Object.keys(series.at).length); },
  };
};
