// Writes figures for people, as the command line does.
"use strict";
var foretrain = {};

foretrain.format = (function () {
  function threeDigits(value) {
    if (!value) return "0";
    if (Math.abs(value) >= 100) return Math.round(value).toLocaleString("en-US");
    return String(Number(value.toPrecision(3)));
  }

  function seconds(time) {
    if (time === null || time === undefined || !isFinite(time)) return "unknown";
    var pairs = [["d", 86400, 24, "h"], ["h", 3600, 60, "min"], ["min", 60, 60, "s"]];
    for (var i = 0; i < pairs.length; i++) {
      if (time >= pairs[i][1]) {
        var all = Math.round((time / pairs[i][1]) * pairs[i][2]);
        var whole = Math.floor(all / pairs[i][2]), rest = all % pairs[i][2];
        return whole.toLocaleString("en-US") + " " + pairs[i][0] + (rest ? " " + rest + " " + pairs[i][3] : "");
      }
    }
    var units = [["s", 1], ["ms", 1e-3], ["us", 1e-6]];
    for (var j = 0; j < units.length; j++) {
      if (time >= units[j][1]) return threeDigits(time / units[j][1]) + " " + units[j][0];
    }
    return time ? Math.round(time * 1e9) + " ns" : "0 s";
  }

  function scaled(value, scales, unit) {
    for (var i = 0; i < scales.length; i++) {
      if (Math.abs(value) >= scales[i][1]) return threeDigits(value / scales[i][1]) + " " + scales[i][0] + unit;
    }
    return (threeDigits(value) + " " + unit).trim();
  }

  function bytes(size) {
    if (size === null || size === undefined) return "unknown";
    return scaled(size, [["Ti", 1099511627776], ["Gi", 1073741824], ["Mi", 1048576], ["Ki", 1024]], "B");
  }

  function count(value, unit) {
    return scaled(value, [["P", 1e15], ["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]], unit || "").trim();
  }

  function dollars(amount) {
    if (amount === null || amount === undefined) return "unknown";
    if (amount > 0 && amount < 1e-4) return "<$0.0001";
    var digits = amount > 0 && amount < 0.01 ? 4 : amount < 1000 ? 2 : 0;
    return "$" + amount.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  }

  function percent(share, digits) {
    if (digits === undefined && share > 0 && share < 0.005) return "<1%";
    return (share * 100).toFixed(digits === undefined ? 0 : digits) + "%";
  }

  // Whole percents, never 0 or 100: nothing is certain.
  function chance(share) {
    return share < 0.01 ? "under 1%" : share > 0.99 ? "over 99%" : percent(share);
  }

  function rate(value) {
    return value >= 100 ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(3)));
  }

  function signed(share) {
    return (share >= 0 ? "+" : "-") + Math.abs(share * 100).toFixed(Math.abs(share) < 0.1 ? 1 : 0) + "%";
  }

  return {
    bytes: bytes, chance: chance, count: count, dollars: dollars, percent: percent, rate: rate, seconds: seconds,
    signed: signed, threeDigits: threeDigits,
  };
})();
