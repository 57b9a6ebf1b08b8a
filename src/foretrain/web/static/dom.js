// Makes elements: no text is ever read as HTML, and no handler stands in an attribute.
"use strict";

foretrain.dom = (function () {
  var SVG = "http://www.w3.org/2000/svg";

  function fill(node, children) {
    (Array.isArray(children) ? children : [children]).forEach(function (child) {
      if (child === null || child === undefined || child === false) return;
      if (Array.isArray(child)) fill(node, child);
      else node.appendChild(typeof child === "object" ? child : document.createTextNode(String(child)));
    });
    return node;
  }

  function make(node, settings, children) {
    Object.keys(settings || {}).forEach(function (name) {
      var value = settings[name];
      if (value === undefined || value === null || value === false) return;
      if (name === "on") {
        Object.keys(value).forEach(function (event) { node.addEventListener(event, value[event]); });
      } else if (name === "style") {
        Object.keys(value).forEach(function (property) { node.style.setProperty(property, value[property]); });
      } else node.setAttribute(name, value === true ? "" : value);
    });
    return children === undefined ? node : fill(node, children);
  }

  return {
    el: function (tag, settings, children) { return make(document.createElement(tag), settings, children); },
    svg: function (tag, settings, children) { return make(document.createElementNS(SVG, tag), settings, children); },
    show: function (node, children) {
      node.textContent = "";
      return fill(node, children);
    },
  };
})();
