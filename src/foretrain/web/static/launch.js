// Writes what starts a view: its job as TOML, the command that forecasts it, and one that launches it.
"use strict";

foretrain.launch = (function () {
  function key(name) { return /^[A-Za-z0-9_-]+$/.test(name) ? name : JSON.stringify(name); }

  function value(one) {
    if (Array.isArray(one)) return "[" + one.map(value).join(", ") + "]";
    if (one !== null && typeof one === "object") {
      var inner = Object.keys(one).map(function (name) { return key(name) + " = " + value(one[name]); }).join(", ");
      return inner ? "{ " + inner + " }" : "{}";
    }
    return JSON.stringify(one);
  }

  function toml(job) {
    return ["model", "training", "cluster", "plan"].filter(function (name) {
      return job[name] && Object.keys(job[name]).length;
    }).map(function (name) {
      var section = job[name];
      return "[" + name + "]\n" + Object.keys(section).filter(function (field) {
        return section[field] !== null;
      }).map(function (field) { return key(field) + " = " + value(section[field]); }).join("\n");
    }).join("\n\n") + "\n";
  }

  function nodes(job) {
    var groups = job.cluster.groups || [job.cluster];
    return groups.reduce(function (sum, group) { return sum + (group.nodes || 1); }, 0);
  }

  var PROGRAMS = { torchtitan: "-m torchtitan.train", megatron: "pretrain_gpt.py" };

  // Frameworks whose processes torchrun starts; of others the folder that ``foretrain plan --out`` writes has it.
  function command(job) {
    var framework = job.training.framework || "pytorch", many = nodes(job), each = job.cluster.devices_per_node;
    if (job.cluster.groups || job.cluster.device === "cpu" || !each) return "";
    if (framework === "deepspeed") {
      return "deepspeed --num_nodes " + many + " --num_gpus " + each + " train.py --deepspeed_config ds_config.json";
    }
    var where = many > 1 ? " --nnodes " + many + " --rdzv-backend c10d --rdzv-endpoint $MASTER_ADDR:29500" : " --standalone";
    return "torchrun" + where + " --nproc-per-node " + each + " " + (PROGRAMS[framework] || "train.py");
  }

  function text(job, files) {
    var lines = ["# job.toml", toml(job), "# its forecast", "foretrain predict job.toml", ""];
    if (files && Object.keys(files).length) {
      Object.keys(files).forEach(function (name) { lines.push("# " + name, files[name]); });
      return lines.join("\n");
    }
    var start = command(job);
    if (start) lines.push(nodes(job) > 1 ? "# on each of the " + nodes(job) + " nodes" : "# on the node", start, "");
    lines.push("# launch files of a framework, for Slurm, Kubernetes, SkyPilot and Ray",
      "foretrain plan job.toml --out launch");
    return lines.join("\n") + "\n";
  }

  return { command: command, text: text, toml: toml };
})();
