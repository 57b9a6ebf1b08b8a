// Draws the timeline of a step on a canvas: wheel, buttons and keys zoom and move it.
"use strict";

foretrain.timeline = function (settings) {
  var el = foretrain.dom.el, format = foretrain.format;
  var LANE = 34, TOP = 22, LABEL = 96, LEAST = 1e-7;
  var data = null, from = 0, to = 1, end = 1, hovered = null, byLane = [], wanted = null;

  var canvas = el("canvas", { "aria-hidden": "true" });
  var status = el("p", { class: "dim status", "aria-live": "polite" });
  var frame = el("div", {
    class: "timeline", tabindex: "0", role: "group",
    "aria-label": "Timeline of a step: plus and minus or the wheel zoom, arrow keys move, Home shows all of it",
    on: { keydown: onKey, wheel: onWheel, mousemove: onMove, mouseleave: function () { hover(null); },
      mousedown: onDown, dblclick: function () { show(0, end); } },
  }, [canvas]);
  var buttons = el("div", { class: "buttons", role: "group", "aria-label": "Zoom of the timeline" }, [
    button("+", "Zoom in", function () { zoom(0.5); }), button("−", "Zoom out", function () { zoom(2); }),
    button("←", "Earlier", function () { move(-0.3); }), button("→", "Later", function () { move(0.3); }),
    button("All", "Show the whole step", function () { show(0, end); }),
  ]);
  var legend = el("div", {});
  var node = el("div", {}, [buttons, frame, status, legend]);

  function button(text, label, act) {
    return el("button", { type: "button", class: "small", "aria-label": label, title: label, on: { click: act } }, text);
  }

  function set(timeline) {
    var whole = !wanted && from <= 0 && to >= end;
    data = timeline;
    end = timeline.end_s || 1;
    if (wanted) {
      from = Math.max(0, wanted[0]);
      to = wanted[1];
      wanted = null;
    }
    byLane = timeline.lanes.map(function () { return []; });
    timeline.lane.forEach(function (lane, i) { byLane[lane].push(i); });
    if (whole || to > end) { from = 0; to = end; }
    hovered = null;
    var kinds = Array.from(new Set(timeline.kind));
    foretrain.dom.show(legend, el("ul", { class: "legend inline" }, kinds.map(function (kind) {
      return el("li", {}, [el("span", { class: "dot c-" + kind, "aria-hidden": "true" }), el("span", {}, kind)]);
    })));
    say();
    draw();
  }

  function say() {
    var shown = format.seconds(Math.max(0, from)) + " to " + format.seconds(to) + " of " + format.seconds(end) + ". ";
    status.textContent = hovered === null ? shown + data.note
      : data.lanes[data.lane[hovered]] + ": " + data.name[hovered] + ", " + format.seconds(data.length[hovered]) +
        " from " + format.seconds(Math.max(0, data.start[hovered]));
  }

  function colors() {
    var style = window.getComputedStyle(node), found = {};
    ["forward", "backward", "optimizer", "recomputed", "network", "weights"].forEach(function (kind) {
      found[kind] = style.getPropertyValue("--strong-" + kind).trim() || "#888";
    });
    found.text = style.getPropertyValue("--text").trim();
    found.dim = style.getPropertyValue("--dim").trim();
    found.line = style.getPropertyValue("--line").trim();
    return found;
  }

  function draw() {
    if (!data) return;
    var width = frame.clientWidth, height = TOP + LANE * data.lanes.length + 4, ratio = window.devicePixelRatio || 1;
    if (!width) return;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.width = width + "px";
      canvas.style.height = height + "px";
    }
    var pen = canvas.getContext("2d"), paint = colors(), scale = (width - LABEL) / (to - from);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    axis(pen, paint, width, height, scale);
    data.lanes.forEach(function (lane, number) {
      var y = TOP + number * LANE;
      pen.fillStyle = paint.dim;
      pen.fillText(lane, 0, y + LANE / 2 - 2, LABEL - 8);
      pen.save();
      pen.beginPath();
      pen.rect(LABEL, y, width - LABEL, LANE);
      pen.clip();
      byLane[number].forEach(function (i) {
        var x = LABEL + (data.start[i] - from) * scale, length = data.length[i] * scale;
        if (x + length < LABEL || x > width) return;
        pen.fillStyle = paint[data.kind[i]] || paint.dim;
        pen.globalAlpha = hovered === i ? 1 : 0.86;
        pen.fillRect(x, y + 3, Math.max(0.6, length - (length > 3 ? 0.6 : 0)), LANE - 10);
        if (length > 44) {
          pen.fillStyle = "#ffffff";
          pen.globalAlpha = 1;
          pen.save();
          pen.beginPath();
          pen.rect(x, y, length - 4, LANE);
          pen.clip();
          pen.fillText(data.name[i], Math.max(x, LABEL) + 4, y + LANE / 2 - 2);
          pen.restore();
        }
      });
      pen.restore();
      pen.globalAlpha = 1;
    });
  }

  function axis(pen, paint, width, height, scale) {
    var raw = (to - from) / Math.max(2, (width - LABEL) / 110), power = Math.pow(10, Math.floor(Math.log10(raw)));
    var step = [1, 2, 5, 10].filter(function (digit) { return digit * power >= raw; })[0] * power;
    pen.strokeStyle = paint.line;
    pen.fillStyle = paint.dim;
    for (var time = Math.ceil(from / step) * step; time <= to; time += step) {
      var x = LABEL + (time - from) * scale;
      pen.beginPath();
      pen.moveTo(x, TOP - 6);
      pen.lineTo(x, height);
      pen.stroke();
      pen.fillText(format.seconds(Math.max(0, Number(time.toPrecision(12)))), x + 3, 8);
    }
  }

  function show(start, stop) {
    var length = Math.min(end, Math.max(LEAST, stop - start));
    from = Math.max(0, Math.min(end - length, start));
    to = from + length;
    say();
    draw();
    if (settings && settings.changed) settings.changed(from, to, end);
  }

  function zoom(factor, at) {
    var middle = at === undefined ? (from + to) / 2 : at;
    show(middle - (middle - from) * factor, middle + (to - middle) * factor);
  }

  function move(share) { show(from + (to - from) * share, to + (to - from) * share); }

  function timeAt(event) {
    var box = frame.getBoundingClientRect();
    return from + ((event.clientX - box.left - LABEL) / (box.width - LABEL)) * (to - from);
  }

  function onWheel(event) {
    if (!data || (!event.ctrlKey && document.activeElement !== frame)) return; // else the page scrolls
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) move(event.deltaX / 600);
    else zoom(Math.pow(1.2, Math.sign(event.deltaY)), timeAt(event));
  }

  function onKey(event) {
    var acts = {
      "+": function () { zoom(0.5); }, "=": function () { zoom(0.5); }, "-": function () { zoom(2); },
      ArrowLeft: function () { move(-0.2); }, ArrowRight: function () { move(0.2); },
      Home: function () { show(0, end); },
    };
    if (!acts[event.key]) return;
    event.preventDefault();
    acts[event.key]();
  }

  function onMove(event) {
    var box = frame.getBoundingClientRect(), lane = Math.floor((event.clientY - box.top - TOP) / LANE);
    var time = timeAt(event), found = null;
    (byLane[lane] || []).forEach(function (i) {
      if (data.start[i] <= time && time <= data.start[i] + data.length[i]) found = i;
    });
    hover(found);
  }

  function hover(found) {
    if (found === hovered || !data) return;
    hovered = found;
    say();
    draw();
  }

  function onDown(event) {
    var last = event.clientX, width = frame.clientWidth - LABEL;
    function drag(moved) {
      move((-(moved.clientX - last) / width));
      last = moved.clientX;
    }
    function drop() {
      window.removeEventListener("mousemove", drag);
      window.removeEventListener("mouseup", drop);
    }
    window.addEventListener("mousemove", drag);
    window.addEventListener("mouseup", drop);
  }

  return {
    node: node, set: set, draw: draw, show: show,
    begin: function (start, stop) { wanted = [start, stop]; }, // what is shown of the timeline that is set next
    range: function () { return wanted ? [wanted[0], wanted[1], Infinity] : [from, to, end]; },
  };
};
