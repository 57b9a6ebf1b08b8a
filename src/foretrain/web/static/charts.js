// Draws charts: intervals, stacked bars, a treemap, curves with bands, areas and scatters.
"use strict";

foretrain.charts = (function () {
  var el = foretrain.dom.el, svg = foretrain.dom.svg;

  // Bounds as multiples of the median on one logarithmic scale, so that widths compare from figure to figure.
  var WIDEST = 3;

  function place(ratio) {
    var at = 50 + (50 * Math.log(ratio)) / Math.log(WIDEST);
    return Math.max(0, Math.min(100, at));
  }

  function stretch(name, from, to) {
    return el("span", { class: name, style: { left: from + "%", width: Math.max(0.6, to - from) + "%" } });
  }

  function interval(estimate, format) {
    var middle = estimate.median || 1;
    var low = place(estimate.low / middle), high = place(estimate.high / middle);
    var words = "80% interval " + format(estimate.low) + " to " + format(estimate.high);
    var parts = [];
    if (estimate.low_95 !== undefined && estimate.high_95 !== undefined) {
      parts.push(stretch("wide", place(estimate.low_95 / middle), place(estimate.high_95 / middle)));
    }
    parts.push(stretch("band", low, high), el("span", { class: "middle" }));
    return el("div", { class: "interval" }, [
      el("div", { class: "track", role: "img", "aria-label": words }, parts),
      el("div", { class: "ends" }, [el("span", {}, format(estimate.low)), el("span", {}, format(estimate.high))]),
    ]);
  }

  // Parts beside one another, against a whole that may be more than they are.
  function stacked(parts, settings) {
    var total = parts.reduce(function (sum, part) { return sum + part.value; }, 0);
    var end = Math.max(total, settings.whole || 0) || 1, label = settings.label;
    var bar = el("div", { class: "stack", role: "img", "aria-label": label }, parts.map(function (part) {
      return el("span", {
        class: "segment c-" + part.color, title: part.name + ": " + settings.format(part.value),
        style: { width: (100 * part.value) / end + "%" },
      });
    }));
    (settings.marks || []).forEach(function (mark) {
      bar.appendChild(el("span", {
        class: "mark " + (mark.kind || ""), title: mark.name,
        style: { left: Math.min(100, (100 * mark.value) / end) + "%" },
      }));
    });
    return bar;
  }

  function legend(parts, format, total) {
    return el("ul", { class: "legend" }, parts.map(function (part) {
      var share = total ? " " + foretrain.format.percent(part.value / total) : "";
      return el("li", {}, [
        el("span", { class: "dot c-" + part.color, "aria-hidden": "true" }),
        el("span", { class: "name" }, part.name), el("span", { class: "figure" }, format(part.value)),
        el("span", { class: "share" }, share),
      ]);
    }));
  }

  // Squarified rectangles (Bruls, Huizing and van Wijk): rows as square as they get.
  function squarify(items, x, y, width, height, place) {
    var total = items.reduce(function (sum, item) { return sum + item.value; }, 0);
    if (!items.length || total <= 0 || width <= 0 || height <= 0) return;
    var scale = (width * height) / total, from = 0;
    while (from < items.length) {
      var side = Math.min(width, height), sum = 0, best = Infinity, to = from;
      while (to < items.length) {
        var next = sum + items[to].value * scale;
        var largest = items[from].value * scale, least = items[to].value * scale;
        var worst = Math.max((side * side * largest) / (next * next), (next * next) / (side * side * least));
        if (worst > best) break;
        best = worst;
        sum = next;
        to++;
      }
      var thick = sum / side, along = 0;
      for (var i = from; i < to; i++) {
        var length = (items[i].value * scale) / thick;
        if (width >= height) place(items[i], x, y + along, thick, length);
        else place(items[i], x + along, y, length, thick);
        along += length;
      }
      if (width >= height) { x += thick; width -= thick; } else { y += thick; height -= thick; }
      from = to;
    }
  }

  // Groups with their members inside; what is too small for words has them in its title.
  function treemap(groups, settings) {
    var width = settings.width, height = settings.height, whole = settings.total;
    var box = el("div", { class: "treemap", style: { height: height + "px" } });
    function tile(kind, words, title, x, y, w, h) {
      var wide = w > 34 && h > 15;
      return el("div", {
        class: kind, title: title,
        style: { left: x + "px", top: y + "px", width: Math.max(0, w - 1) + "px", height: Math.max(0, h - 1) + "px" },
      }, wide ? [el("span", {}, words)] : []);
    }
    squarify(groups, 0, 0, width, height, function (group, x, y, w, h) {
      var title = group.name + ": " + settings.format(group.value) + ", " +
        foretrain.format.percent(group.value / whole, 1);
      var outer = tile("group", "", title, x, y, w, h), head = h > 40 && w > 60 ? 18 : 0;
      if (head) outer.appendChild(el("b", { title: title }, group.name));
      box.appendChild(outer);
      squarify(group.members, 1, head + 1, w - 3, h - head - 3, function (member, mx, my, mw, mh) {
        outer.appendChild(tile("tile c-" + member.color, member.name, member.title, mx, my, mw, mh));
      });
    });
    return box;
  }

  // Axes on logarithmic or linear scales.
  function scale(values, logarithmic, from, to, zero) {
    var least = Math.min.apply(null, values), most = Math.max.apply(null, values);
    if (zero) least = 0;
    if (least === most) { least = logarithmic ? least / 2 : least - 1; most = logarithmic ? most * 2 : most + 1; }
    var low = logarithmic ? Math.log(least) : least, high = logarithmic ? Math.log(most) : most;
    return function (value) {
      return from + ((logarithmic ? Math.log(value) : value) - low) / (high - low) * (to - from);
    };
  }

  function ticks(values, many) {
    var sorted = Array.from(new Set(values)).sort(function (a, b) { return a - b; });
    if (sorted.length <= many) return sorted;
    var every = Math.ceil(sorted.length / many);
    return sorted.filter(function (_, i) { return i % every === 0; });
  }

  var LENGTHS = [1, 2, 5, 10, 20, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 28800, 43200, 86400, 172800, 345600,
    604800, 1209600, 2592000, 5184000, 10368000];

  // Round values of an axis: of times from a second on, whole minutes, hours and days.
  function rounded(least, most, times) {
    var lengths = LENGTHS.filter(function (one) { return one >= least && one <= most; });
    if (times && least >= 1 && lengths.length > 1) return lengths;
    var found = [], power = Math.pow(10, Math.floor(Math.log10(least)));
    for (var step = power; step <= most * 1.001; step *= 10) {
      [1, 1.5, 2, 3, 5, 7].forEach(function (digit) {
        if (digit * step >= least * 0.999 && digit * step <= most * 1.001) found.push(digit * step);
      });
    }
    return found;
  }

  // Lines with bands and points: settings.series is [{name, color, points: [{x, y, low, high, title}]}].
  function curves(settings) {
    var width = settings.width, height = settings.height, left = 76, right = 14, top = 12, bottom = 34;
    var xs = [], ys = (settings.lines || []).map(function (line) { return line.y; });
    settings.series.forEach(function (one) {
      one.points.forEach(function (point) {
        var ends = [point.low || (one.whiskers === "x" ? point.x : point.y), point.high || (one.whiskers === "x" ? point.x : point.y)];
        xs.push(point.x);
        ys.push(point.y);
        if (one.whiskers === "x") xs = xs.concat(ends);
        else ys = ys.concat(ends);
      });
    });
    var least = Math.min.apply(null, ys), most = Math.max.apply(null, ys);
    if (settings.pad) ys.push(least / 1.15, most * 1.25);
    var x = scale(xs, settings.logX !== false, left, width - right);
    var y = scale(ys, settings.logY !== false, height - bottom, top, settings.zero);
    var picture = svg("svg", {
      class: "chart", width: width, height: height, viewBox: "0 0 " + width + " " + height, role: "img",
      "aria-label": settings.label,
    });
    var marks = settings.logY !== false ? rounded(least, most, settings.formatY === foretrain.format.seconds) : linear(settings.zero ? 0 : least, most);
    ticks(marks.length > 1 ? marks : [least, most], 5).forEach(function (value) {
      picture.appendChild(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
      picture.appendChild(svg("text", { class: "tick", x: left - 8, y: y(value) + 4, "text-anchor": "end" },
        settings.formatY(value)));
    });
    var placesX = settings.roundX ? rounded(Math.min.apply(null, xs), Math.max.apply(null, xs), true) : settings.ticksX || xs;
    ticks(placesX, Math.max(2, Math.floor(width / 90))).forEach(function (value) {
      var at = x(value), last = at > width - right - 26;
      picture.appendChild(svg("text", { class: "tick", x: last ? width - 2 : at, y: height - 16,
        "text-anchor": last ? "end" : "middle" }, settings.formatX(value)));
    });
    picture.appendChild(svg("text", { class: "axis", x: (left + width - right) / 2, y: height - 2,
      "text-anchor": "middle" }, settings.nameX));
    (settings.lines || []).forEach(function (line) {
      picture.appendChild(svg("line", { class: "limit", x1: left, x2: width - right, y1: y(line.y), y2: y(line.y) }));
      picture.appendChild(svg("text", { class: "tick limit-name", x: width - right, y: y(line.y) - 5,
        "text-anchor": "end" }, line.name));
    });
    settings.series.forEach(function (one) {
      var points = one.points.slice().sort(function (a, b) { return a.x - b.x; });
      if (one.band !== false && points.length > 1 && points[0].low !== undefined) {
        var around = points.map(function (p) { return x(p.x) + "," + y(p.high); }).concat(
          points.slice().reverse().map(function (p) { return x(p.x) + "," + y(p.low); }));
        picture.appendChild(svg("polygon", { class: "band s-" + one.color, points: around.join(" ") }));
      }
      if (one.line !== false && points.length > 1) {
        picture.appendChild(svg("polyline", { class: "line s-" + one.color + (one.dashed ? " dashed" : ""),
          points: points.map(function (p) { return x(p.x) + "," + y(p.y); }).join(" ") }));
      }
      points.forEach(function (p) {
        if (one.whiskers && p.low !== undefined) {
          var across = one.whiskers === "x";
          picture.appendChild(svg("line", { class: "whisker s-" + one.color,
            x1: across ? x(p.low) : x(p.x), x2: across ? x(p.high) : x(p.x),
            y1: across ? y(p.y) : y(p.low), y2: across ? y(p.y) : y(p.high) }));
        }
        if (one.dots === false) return;
        picture.appendChild(svg("circle", { class: "dot s-" + one.color + (p.chosen ? " chosen" : "") +
          (p.hollow ? " hollow" : ""), cx: x(p.x), cy: y(p.y), r: p.chosen ? 6 : 4 },
          [svg("title", {}, p.title || "")]));
        if (p.text) {
          picture.appendChild(svg("text", { class: "tick", x: x(p.x), y: y(p.y) - 9, "text-anchor": "middle" },
            p.text));
        }
      });
    });
    return picture;
  }

  function linear(least, most) {
    var raw = (most - least) / 4 || 1, power = Math.pow(10, Math.floor(Math.log10(raw)));
    var step = [1, 2, 2.5, 5, 10].filter(function (digit) { return digit * power >= raw; })[0] * power, found = [];
    for (var value = Math.ceil(least / step) * step; value <= most * 1.0001; value += step) found.push(value);
    return found;
  }

  // Areas on top of one another over time.
  function areas(settings) {
    var width = settings.width, height = settings.height, left = 62, right = 14, top = 12, bottom = 34;
    var sums = settings.x.map(function () { return 0; });
    settings.layers.forEach(function (layer) {
      layer.values.forEach(function (value, i) { sums[i] += value; });
    });
    var most = Math.max.apply(null, sums) || 1, near = settings.limit && settings.limit < 3 * most;
    var end = near ? Math.max(most, settings.limit) * 1.05 : most * 1.08;
    var x = scale(settings.x, false, left, width - right), y = scale([0, end], false, height - bottom, top);
    var picture = svg("svg", { class: "chart", width: width, height: height, role: "img",
      viewBox: "0 0 " + width + " " + height, "aria-label": settings.label });
    linear(0, end / settings.unit).forEach(function (value) {
      var at = y(value * settings.unit);
      picture.appendChild(svg("line", { class: "grid", x1: left, x2: width - right, y1: at, y2: at }));
      picture.appendChild(svg("text", { class: "tick", x: left - 8, y: at + 4, "text-anchor": "end" },
        settings.formatY(value * settings.unit)));
    });
    var below = settings.x.map(function () { return 0; });
    settings.layers.forEach(function (layer) {
      var upper = layer.values.map(function (value, i) { return below[i] + value; });
      var forth = [], back = [];
      settings.x.forEach(function (time, i) {
        var next = settings.x[Math.min(i + 1, settings.x.length - 1)];
        forth.push(x(time).toFixed(1) + "," + y(upper[i]).toFixed(1), x(next).toFixed(1) + "," + y(upper[i]).toFixed(1));
        back.push(x(time).toFixed(1) + "," + y(below[i]).toFixed(1), x(next).toFixed(1) + "," + y(below[i]).toFixed(1));
      });
      picture.appendChild(svg("polygon", { class: "area f-" + layer.color, points: forth.concat(back.reverse()).join(" ") },
        [svg("title", {}, layer.name)]));
      below = upper;
    });
    if (settings.limit && near) {
      var at = y(settings.limit);
      picture.appendChild(svg("line", { class: "limit", x1: left, x2: width - right, y1: at, y2: at }));
      picture.appendChild(svg("text", { class: "tick limit-name", x: width - right, y: at - 5, "text-anchor": "end" },
        settings.limitName));
    }
    ticks(linear(0, settings.x[settings.x.length - 1]), Math.max(2, Math.floor(width / 110))).forEach(function (value) {
      picture.appendChild(svg("text", { class: "tick", x: x(Math.max(value, settings.x[0])), y: height - 16,
        "text-anchor": "middle" }, foretrain.format.seconds(value)));
    });
    return picture;
  }

  return {
    areas: areas, curves: curves, interval: interval, legend: legend, stacked: stacked, treemap: treemap,
  };
})();
