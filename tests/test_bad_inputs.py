"""Bad inputs, each answered by one line that names the field or the file, the value and what is allowed.

Rows are text: what is wrong, an arrow, and a part of the answer.
"""

from __future__ import annotations

import copy
import gzip
import json
import runpy
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

import foretrain.callbacks
import foretrain.catalog
import foretrain.evaluate
import foretrain.graph
import foretrain.units
from commands import run
from foretrain import predictors
from foretrain.errors import ForetrainError
from foretrain.graph.storage import to_json
from foretrain.job import Job
from made_up import one_product

JOB_ROWS = r"""
model.source = "tim" -> model.source: 'tim' is not one of diffusion, graph, onnx, python, timm, torchvision
model.source = "" -> model.source: '' is not one of diffusion, graph, onnx, python, timm, torchvision, transformers
model.source = 3 -> model.source: 3 is not one of diffusion, graph, onnx, python, timm, torchvision, transformers
model.source = null -> model.source: None is not one of diffusion, graph, onnx, python, timm, torchvision
model.source = ["timm"] -> model.source: ['timm'] is not one of diffusion, graph, onnx, python, timm, torchvision
model.source = true -> model.source: True is not one of diffusion, graph, onnx, python, timm, torchvision
model.name = - -> model.name: missing; a graph model is given by name
model.name = "" -> model.name: missing; a graph model is given by name
model.name = 3 -> model.name: 3 is not a text
model.name = "a\u0000b.json.zst" -> model.name: 'a\x00b.json.zst' is not a text without NUL
model.name = null -> model.name: missing; a graph model is given by name
model.name = ["a"] -> model.name: ['a'] is not a text
model.args = 3 -> model.args: 3 is not a table of keys and values
model.args = "x" -> model.args: 'x' is not a table of keys and values
model.args = ["a"] -> model.args: ['a'] is not a table of keys and values
model.nmae = "x" -> model.nmae: 'nmae' is not a known key; allowed are args, config, libraries, name, source, task
model.task = "causal-lm" -> model.task: only a transformers model has it, not source = 'graph'
model.config = {"a": 1} -> model.config: only a transformers model has it, not source = 'graph'
model = 3 -> model: 3 is not a table of keys and values
model = - -> model: missing; a job has the sections model, training and cluster (and plan)
model = [] -> model: [] is not a table of keys and values
model = null -> model: None is not a table of keys and values
model.source = "transformers" ; model.name = - -> model.config: missing; a transformers model needs its configuration, with model_type in it
model.source = "transformers" ; model.name = - ; model.config = {} -> model.config.model_type: missing; for example "llama" or "bert"
model.source = "transformers" ; model.name = - ; model.config = 3 -> model.config: 3 is not a table of keys and values
model.source = "transformers" ; model.name = "x" ; model.config = {"model_type": "bert"} -> model.name: 'x' is not used; model.config.model_type names a transformers model
model.source = "transformers" ; model.name = - ; model.config = {"model_type": "bert"} ; model.args = {"a": 1} -> model.args: a transformers model has its settings in model.config
model.source = "timm" ; model.name = "resnet18" ; training.sequence = 128 -> training.sequence: 128 is not used by a timm model
training = - -> training: missing; a job has the sections model, training and cluster (and plan)
training = 3 -> training: 3 is not a table of keys and values
training.global_batch = - -> training.global_batch: missing; it is required
training.global_batch = 0 -> training.global_batch: 0 is not a number greater than zero
training.global_batch = -1 -> training.global_batch: -1 is not a number greater than zero
training.global_batch = 1.5 -> training.global_batch: 1.5 is not a whole number
training.global_batch = "32" -> training.global_batch: '32' is not a whole number
training.global_batch = true -> training.global_batch: True is not a whole number
training.global_batch = null -> training.global_batch: None is not a whole number
training.global_batch = Infinity -> training.global_batch: inf is not a whole number
training.global_batch = NaN -> training.global_batch: nan is not a whole number
training.global_batch = [32] -> training.global_batch: [32] is not a whole number
training.global_batch = 1000000000000000000000000000000 -> training.global_batch: 1000000000000000000000000000000 is not a number of at most 2^63
training.global_batch = 99999999999999 -> training.global_batch: 99999999999999 is not at most 1,000,000,000
training.global_batch = 1000000000 ; training.image = 1000 -> training.image: 1000 in micro-batches of 1,000,000,000 are 3e+15 numbers at once; 1.1e+15 is the most
training.mode = "trian" -> training.mode: 'trian' is not one of infer, train
training.mode = "" -> training.mode: '' is not one of infer, train
training.mode = 1 -> training.mode: 1 is not one of infer, train
training.mode = null -> training.mode: None is not one of infer, train
training.mode = true -> training.mode: True is not one of infer, train
training.sequence = 0 -> training.sequence: 0 is not a number greater than zero
training.sequence = -5 -> training.sequence: -5 is not a number greater than zero
training.sequence = 1.5 -> training.sequence: 1.5 is not a whole number
training.sequence = "x" -> training.sequence: 'x' is not a whole number
training.sequence = [128] -> training.sequence: [128] is not a whole number
training.sequence = true -> training.sequence: True is not a whole number
training.sequence = 200000000 -> training.sequence: 200000000 is not at most 100,000,000
training.image = 0 -> training.image: 0 is not greater than zero
training.image = -1 -> training.image: -1 is not greater than zero
training.image = 99999999999999 -> training.image: 99999999999999 is not at most 1,000,000 in each direction
training.image = [3, 224, 2000000] -> training.image: [3, 224, 2000000] is not at most 1,000,000 in each direction
training.image = "224" -> training.image: '224' is not a whole number or a list
training.image = [224, 224] -> training.image: [224, 224] is not a side length or [channels, height, width]
training.image = [3, 224] -> training.image: [3, 224] is not a side length or [channels, height, width]
training.image = [3, 0, 224] -> training.image: [3, 0, 224] is not a side length or [channels, height, width]
training.image = [3, 224, 224, 1] -> training.image: [3, 224, 224, 1] is not a side length or [channels, height, width]
training.image = [] -> training.image: [] is not a side length or [channels, height, width]
training.image = [3, 224, "x"] -> training.image: [3, 224, 'x'] is not a whole number or a list
training.image = 1.5 -> training.image: 1.5 is not a whole number or a list
training.image = true -> training.image: True is not a whole number or a list
training.image = {"h": 1} -> training.image: {'h': 1} is not a whole number or a list
training.image = [3, 1000.0, 4] -> training.image: [3, 1000.0, 4] is not a whole number or a list
training.classes = 0 -> training.classes: 0 is not a number greater than zero
training.classes = -1 -> training.classes: -1 is not a number greater than zero
training.classes = 999999999999 -> training.classes: 999999999999 is not at most 1,000,000,000
training.classes = "x" -> training.classes: 'x' is not a whole number
training.classes = 1.5 -> training.classes: 1.5 is not a whole number
training.precision = "fp31" -> training.precision: 'fp31' is not one of amp-bf16, amp-fp16, bf16, fp16, fp32, fp8, tf32
training.precision = null -> training.precision: None is not one of amp-bf16, amp-fp16, bf16, fp16, fp32, fp8, tf32
training.precision = "" -> training.precision: '' is not one of amp-bf16, amp-fp16, bf16, fp16, fp32, fp8, tf32
training.precision = "mxfp8" -> training.precision: 'mxfp8' is a way of scaling fp8; give precision fp8 and fp8 = 'mxfp8'
training.fp8 = "colwise" -> training.fp8: 'colwise' is not one of blockwise, current, delayed, mxfp8, nvfp4, rowwise
training.fp8 = "rowwise" -> training.fp8: 'rowwise' needs precision fp8, not fp32
training.master_weights = 1 -> training.master_weights: 1 is not true or false
training.master_weights = "yes" -> training.master_weights: 'yes' is not true or false
training.master_weights = null -> training.master_weights: None is not true or false
training.master_weights = true -> training.master_weights: true needs precision bf16, fp16 or fp8; fp32 already keeps fp32
training.optimizer = "adamv" -> training.optimizer: 'adamv' is not one of adadelta, adafactor, adagrad, adam, adam-fused
training.optimizer = "" -> training.optimizer: '' is not one of adadelta, adafactor, adagrad, adam, adam-fused, adamax
training.optimizer = 1 -> training.optimizer: 1 is not one of adadelta, adafactor, adagrad, adam, adam-fused, adamax
training.optimizer = ["sgd"] -> training.optimizer: ['sgd'] is not one of adadelta, adafactor, adagrad, adam, adam-fused
training.optimizer = {"name": "adam"} -> training.optimizer: {'name': 'adam'} is not one of adadelta, adafactor, adagrad, adam
training.channels_last = 1 -> training.channels_last: 1 is not true or false
training.compile = 1 -> training.compile: 1 is not true, false or one of default, reduce-overhead
training.adapter = 16 -> training.adapter: 16 is not a table such as { kind = "lora", rank = 16 }, or a text such as lora:16
training.adapter = "dora:8" -> training.adapter.kind: 'dora' is not modelled; give lora or qlora
training.adapter = "lora:0" -> training.adapter.rank: 0 is not 1 or more
training.adapter = "lora:x" -> training.adapter.rank: 'x' is not a number
training.adapter = {"rank": 8} -> training.adapter.kind: missing; it is required
training.adapter = {"kind": "lora", "rnk": 8} -> training.adapter.rnk: 'rnk' is not a known key; allowed are
training.adapter = {"kind": "lora", "targets": []} -> training.adapter.targets: () is not all-linear or names of layers
training.adapter = {"kind": "lora", "dropout": 1} -> training.adapter.dropout: 1.0 is not from 0 to below 1
training.adapter = {"kind": "lora", "base": "bf16"} -> training.adapter.base: 'bf16' is for autocast; precision = 'fp32' says what
training.adapter = {"kind": "qlora", "bits": 8} -> training.adapter.bits: 8 with kind = 'qlora' is not modelled; qlora has 4
training.adapter = {"kind": "lora", "bias": "all"} -> training.adapter.bias: 'all' is not modelled; biases stay frozen
training.adapter = "lora" -> training.adapter: the graph graph.json.zst was captured without; capture it with adapters
training.channels_last = "yes" -> training.channels_last: 'yes' is not true or false
training.compile = "yes" -> training.compile: 'yes' is not true, false or one of default, reduce-overhead
training.framework = "pytroch" -> training.framework: 'pytroch' is not one of adaptdl, automodel, deepspeed, fms-fsdp
training.framework = "" -> training.framework: '' is not one of adaptdl, automodel, deepspeed, fms-fsdp, internevo
training.framework = 2 -> training.framework: 2 is not one of adaptdl, automodel, deepspeed, fms-fsdp, internevo
training.samples = 0 -> training.samples: 0 is not a number greater than zero
training.samples = -1 -> training.samples: -1 is not a number greater than zero
training.samples = 1.5 -> training.samples: 1.5 is not a whole number
training.samples = "many" -> training.samples: 'many' is not a whole number
training.epochs = 0 ; training.samples = 100 -> training.epochs: 0.0 is not a number greater than zero
training.epochs = -1 ; training.samples = 100 -> training.epochs: -1.0 is not a number greater than zero
training.epochs = "x" ; training.samples = 100 -> training.epochs: 'x' is not a number
training.epochs = NaN ; training.samples = 100 -> training.epochs: nan is not a number greater than zero
training.epochs = Infinity ; training.samples = 100 -> training.epochs: inf is not a number greater than zero
training.epochs = 3 -> training.samples: missing; training.epochs needs the number of samples in an epoch
training.epochs = 3 ; training.steps = 5 ; training.samples = 100 -> training.steps: 5 and training.epochs: 3.0 are both given; give one
training.steps = 0 -> training.steps: 0 is not a number greater than zero
training.steps = 9999999999999 -> training.steps: 9999999999999 is not at most 1,000,000,000,000
training.steps = -1 -> training.steps: -1 is not a number greater than zero
training.steps = 1.5 -> training.steps: 1.5 is not a whole number
training.steps = "x" -> training.steps: 'x' is not a whole number
training.loader_rate = 0 -> training.loader_rate: 0.0 is not a number greater than zero
training.loader_rate = -1 -> training.loader_rate: -1.0 is not a number greater than zero
training.loader_rate = "x" -> training.loader_rate: 'x' is not a number
training.loader_rate = NaN -> training.loader_rate: nan is not a number greater than zero
training.loader_rate = Infinity -> training.loader_rate: inf is not a number greater than zero
training.loader_workers = 3 -> training.loader_rate: missing; training.loader_workers needs what one delivers
training.loader_workers = 0 ; training.loader_rate = 100 -> training.loader_workers: 0 is not a number greater than zero
training.loader_workers = -1 ; training.loader_rate = 100 -> training.loader_workers: -1 is not a number greater than zero
training.loader_workers = 1.5 ; training.loader_rate = 100 -> training.loader_workers: 1.5 is not a whole number
training.loader_workers = "x" ; training.loader_rate = 100 -> training.loader_workers: 'x' is not a whole number
training.evaluate_every = "epoch" -> training.evaluate_samples: missing; training.evaluate_every needs it
training.evaluate_samples = 3 -> training.evaluate_every: missing; training.evaluate_samples needs it
training.evaluate_every = "epoch" ; training.evaluate_samples = 3 -> training.samples: missing; training.evaluate_every = "epoch" needs it
training.evaluate_every = 0 ; training.evaluate_samples = 3 ; training.samples = 100 -> training.evaluate_every: 0 is not steps above zero, "epoch", or a time such as "1h"
training.evaluate_every = -1 ; training.evaluate_samples = 3 ; training.samples = 100 -> training.evaluate_every: -1 is not steps above zero, "epoch", or a time such as "1h"
training.evaluate_every = "soon" ; training.evaluate_samples = 3 ; training.samples = 100 -> training.evaluate_every: 'soon' is not a time such as "3h", "1d 12h" or "90 min"
training.evaluate_every = "-1h" ; training.evaluate_samples = 3 ; training.samples = 100 -> training.evaluate_every: '-1h' is not a time such as "3h", "1d 12h" or "90 min"
training.evaluate_every = "" ; training.evaluate_samples = 3 ; training.samples = 100 -> training.evaluate_every: '' is not a time such as "3h", "1d 12h" or "90 min"
training.evaluate_every = [1] ; training.evaluate_samples = 3 ; training.samples = 100 -> training.evaluate_every: [1] is not a whole number or a text
training.evaluate_every = 1.5 ; training.evaluate_samples = 3 ; training.samples = 100 -> training.evaluate_every: 1.5 is not a whole number or a text
training.evaluate_every = true ; training.evaluate_samples = 3 ; training.samples = 100 -> training.evaluate_every: True is not a whole number or a text
training.evaluate_every = "0s" ; training.evaluate_samples = 3 ; training.samples = 100 -> training.evaluate_every: '0s' is not steps above zero, "epoch", or a time such as "1h"
training.checkpoint_every = 0 -> training.checkpoint_every: 0 is not steps above zero, "epoch", or a time such as "1h"
training.checkpoint_every = -1 -> training.checkpoint_every: -1 is not steps above zero, "epoch", or a time such as "1h"
training.checkpoint_every = "soon" -> training.checkpoint_every: 'soon' is not a time such as "3h", "1d 12h" or "90 min"
training.checkpoint_every = 1.5 -> training.checkpoint_every: 1.5 is not a whole number or a text
training.checkpoint_every = 10 ; training.mode = "infer" -> training.checkpoint_every: 10 needs mode = "train"
training.batch = 3 -> training.batch: 'batch' is not a known key; allowed are adapter, allocator, attention, channels_last
training.lr = 0.1 -> training.lr: 'lr' is not a known key; allowed are adapter, allocator, attention, channels_last
trainig = {} -> trainig: 'trainig' is not a known section; allowed are cluster, model, plan, training
extra = {} -> extra: 'extra' is not a known section; allowed are cluster, model, plan, training
training.precison = "fp32" -> training.precison: 'precison' is not a known key; allowed are adapter, allocator, attention, channels_last
cluster = - -> cluster: missing; a job has the sections model, training and cluster (and plan)
cluster = 3 -> cluster: 3 is not a table of keys and values
cluster = {} -> cluster: missing; a job has the sections model, training and cluster (and plan)
cluster.device = - -> cluster: missing; a job has the sections model, training and cluster (and plan)
cluster.device = "h1000" -> cluster.device: 'h1000' is not one of foretrain catalog devices
cluster.device = "" -> cluster.device: '' is not one of foretrain catalog devices
cluster.device = 3 -> cluster.device: 3 is not a text
cluster.device = null -> cluster.device: missing; name a device or a node of the catalogue
cluster.devices_per_node = 0 -> cluster.devices_per_node: 0 is not a whole number of at least 1
cluster.devices_per_node = -1 -> cluster.devices_per_node: -1 is not a whole number of at least 1
cluster.devices_per_node = 1.5 -> cluster.devices_per_node: 1.5 is not a whole number
cluster.devices_per_node = "8" -> cluster.devices_per_node: '8' is not a whole number
cluster.devices_per_node = NaN -> cluster.devices_per_node: nan is not a whole number
cluster.devices_per_node = 1000000000 -> cluster.devices_per_node: 1000000000 is not at most 8, what NVSwitch joins in a node; give
cluster.nodes = 0 -> cluster.nodes: 0 is not a whole number of at least 1
cluster.nodes = 99999999 -> cluster.nodes: 99999999 is not at most 10,000,000 devices in all
cluster.nodes = -1 -> cluster.nodes: -1 is not a whole number of at least 1
cluster.nodes = 1.5 -> cluster.nodes: 1.5 is not a whole number
cluster.nodes = "8" -> cluster.nodes: '8' is not a whole number
cluster.nodes = Infinity -> cluster.nodes: inf is not a whole number
cluster.node = "dgx-h1000" -> cluster.node: 'dgx-h1000' is not one of foretrain catalog nodes
cluster.node = "" -> cluster.node: '' is not one of foretrain catalog nodes
cluster.node = 3 -> cluster.node: 3 is not a text
cluster.device = - ; cluster.node = "dgx-h100" ; cluster.devices_per_node = 16 -> cluster.devices_per_node: 16 is not at most 8, what node 'dgx-h100' has
cluster.price = "free" -> cluster.price: 'free' is not a price per hour such as "$4.10/h"
cluster.price = "-$1/h" -> cluster.price: '-$1/h' is not a price per hour such as "$4.10/h"
cluster.price = -1 -> cluster.price: -1.0 is not a number of at least 0
cluster.price = NaN -> cluster.price: nan is not a number of at least 0
cluster.price = Infinity -> cluster.price: inf is not a number of at least 0
cluster.price = [1] -> cluster.price: [1] is not a price per hour such as "$4.10/h"
cluster.price = true -> cluster.price: True is not a price per hour such as "$4.10/h"
cluster.price = "\u20ac3" -> cluster.price: '€3' is not a price per hour such as "$4.10/h"
cluster.storage_bandwidth = "fast" -> cluster.storage_bandwidth: 'fast' is not a rate such as "900 GB/s" or "400 Gb/s"
cluster.storage_bandwidth = 400 -> cluster.storage_bandwidth: 400 is not a rate with its unit, such as "400 Gb/s", or bytes per
cluster.storage_bandwidth = -1 -> cluster.storage_bandwidth: -1.0 is not a number above 0
cluster.storage_bandwidth = 0 -> cluster.storage_bandwidth: 0.0 is not a number above 0
cluster.storage_bandwidth = NaN -> cluster.storage_bandwidth: nan is not a number above 0
cluster.storage_bandwidth = Infinity -> cluster.storage_bandwidth: inf is not a number above 0
cluster.storage_bandwidth = "0 GB/s" -> cluster.storage_bandwidth: 0.0 is not a number above 0
cluster.storage_bandwidth = true -> cluster.storage_bandwidth: True is not a rate such as "900 GB/s" or "400 Gb/s"
cluster.storage_bandwidth = "10" -> cluster.storage_bandwidth: '10' is not a rate such as "900 GB/s" or "400 Gb/s"
cluster.node_mtbf = "often" -> cluster.node_mtbf: 'often' is not a time such as "3h", "1d 12h" or "90 min"
cluster.node_mtbf = -1 -> cluster.node_mtbf: -1.0 is not a number above 0
cluster.node_mtbf = 0 -> cluster.node_mtbf: 0.0 is not a number above 0
cluster.node_mtbf = NaN -> cluster.node_mtbf: nan is not a number above 0
cluster.node_mtbf = "0s" -> cluster.node_mtbf: 0.0 is not a number above 0
cluster.node_mtbf = true -> cluster.node_mtbf: True is not a time such as "3h", "1d 12h" or "90 min"
cluster.restart_time = "often" -> cluster.restart_time: 'often' is not a time such as "3h", "1d 12h" or "90 min"
cluster.restart_time = -1 -> cluster.restart_time: -1.0 is not a number of at least 0
cluster.restart_time = NaN -> cluster.restart_time: nan is not a number of at least 0
cluster.restart_time = Infinity -> cluster.restart_time: inf is not a number of at least 0
cluster.restart_time = true -> cluster.restart_time: True is not a time such as "3h", "1d 12h" or "90 min"
cluster.inter_node = 3 ; cluster.nodes = 2 -> cluster.inter_node: 3 is not a rate with its unit, such as "400 Gb/s", or bytes per second of
cluster.inter_node = "ib" ; cluster.nodes = 2 -> cluster.inter_node: 'ib' is not a rate such as "900 GB/s" or "400 Gb/s"
cluster.inter_node = {"kind": "wifi"} ; cluster.nodes = 2 -> cluster.inter_node.kind: 'wifi' is not one of efa, ethernet, infiniband, infinity-fabric
cluster.inter_node = {"kind": "roce", "bandwidth": "x"} ; cluster.nodes = 2 -> cluster.inter_node.bandwidth: 'x' is not a rate such as "900 GB/s" or "400 Gb/s"
cluster.inter_node = {"bandwidth": -1} ; cluster.nodes = 2 -> cluster.inter_node.bandwidth: -1.0 is not a number above 0
cluster.inter_node = {"kind": "roce", "bandwidth": "400 Gb/s", "nics": 0} ; cluster.nodes = 2 -> cluster.inter_node.nics: 0 is not a number above 0
cluster.inter_node = {"bandwith": 1} ; cluster.nodes = 2 -> cluster.inter_node.bandwith: 'bandwith' is not a known key; allowed are bandwidth, kind
cluster.inter_node = {"kind": "nvswitch"} ; cluster.nodes = 2 -> cluster.inter_node.kind: 'nvswitch' is not a network between nodes
cluster.inter_node = {"kind": "roce", "bandwidth": 400} ; cluster.nodes = 2 -> cluster.inter_node.bandwidth: 400 is not a rate with its unit, such as "400 Gb/s", or bytes
cluster.inter_node = {"kind": 3} ; cluster.nodes = 2 -> cluster.inter_node.kind: 3 is not a text
cluster.inter_node = {"kind": "roce", "bandwidth": NaN} ; cluster.nodes = 2 -> cluster.inter_node.bandwidth: nan is not a number above 0
cluster.intra_node = 3 ; cluster.devices_per_node = 2 -> cluster.intra_node: 3 is not a rate with its unit, such as "400 Gb/s", or bytes per second of
cluster.intra_node = {"kind": "wifi"} ; cluster.devices_per_node = 2 -> cluster.intra_node.kind: 'wifi' is not one of efa, ethernet, infiniband, infinity-fabric
cluster.intra_node = {"kind": "roce"} ; cluster.devices_per_node = 2 -> cluster.intra_node.kind: 'roce' is not a link inside a node
cluster.intra_node = {"kind": "pcie", "bandwidth": "0 GB/s"} ; cluster.devices_per_node = 2 -> cluster.intra_node.bandwidth: 0.0 is not a number above 0
cluster.intra_node = {"latency": -1} ; cluster.devices_per_node = 2 -> cluster.intra_node.latency: -1.0 is not a number of at least 0
cluster.intra_node = {"kind": "pcie", "bandwidth": Infinity} ; cluster.devices_per_node = 2 -> cluster.intra_node.bandwidth: inf is not a number above 0
cluster.cores_per_device = 4 -> cluster.cores_per_device: 4 is not allowed, because 'h100-sxm-80gb' is not a CPU device
cluster.device = "cpu" ; cluster.cores_per_device = 0 -> cluster.cores_per_device: 0 is not a whole number of at least 1
cluster.device = "cpu" ; cluster.cores_per_device = -1 -> cluster.cores_per_device: -1 is not a whole number of at least 1
cluster.device = "cpu" ; cluster.cores_per_device = 1.5 -> cluster.cores_per_device: 1.5 is not a whole number
cluster.device = "cpu" ; cluster.cores_per_device = "x" -> cluster.cores_per_device: 'x' is not a whole number
cluster.device = "cpu" -> cluster.cores_per_device: missing; device 'cpu' needs a whole number of at least 1
cluster.servers = 3 -> cluster.servers: 3 is not a table of keys and values
cluster.servers = {} -> cluster.servers.nodes: missing; it is required
cluster.servers = {"nodes": 0} -> cluster.servers.nodes: 0 is not a number above 0
cluster.servers = {"nodes": 2} -> cluster.servers: 2 nodes need parameter servers; give plan.servers
cluster.servers = {"nodes": 1, "cores": 0} -> cluster.servers.cores: 0 is not a number above 0
cluster.servers = {"nodes": 1, "memory": "x"} -> cluster.servers.memory: 'x' is not a size such as "80 GiB" or "25 MB"
cluster.servers = {"nodes": 1, "cores": 2, "price": "x"} -> cluster.servers.price: 'x' is not a price per hour such as "$4.10/h"
cluster.servers = {"node": 1} -> cluster.servers.node: 'node' is not a known key; allowed are cores, memory, nodes, price
cluster.servers = {"nodes": 2, "cores": 4, "memory": "8 GiB"} ; plan.servers = 1 -> cluster.servers.nodes: 2 is not at most plan.servers = 1
cluster.device = - ; cluster.groups = 3 -> cluster.groups: 3 is not a list
cluster.device = - ; cluster.groups = [] -> cluster.device: missing; name a device or a node of the catalogue
cluster.device = - ; cluster.groups = [3] -> cluster.groups[0]: 3 is not a table of keys and values
cluster.device = - ; cluster.groups = [{}] -> cluster.groups[0].device: missing; name a device or a node of the catalogue
cluster.device = - ; cluster.groups = [{"device": "h100", "nodes": 0}] -> cluster.groups[0].nodes: 0 is not a whole number of at least 1
cluster.device = - ; cluster.groups = [{"device": "zzz"}] -> cluster.groups[0].device: 'zzz' is not one of foretrain catalog devices
cluster.device = - ; cluster.groups = [{"device": "h100", "node_count": 1}] -> cluster.groups[0].node_count: 'node_count' is not a known key; allowed are cores_per_device
cluster.device = - ; cluster.groups = "a" -> cluster.groups: 'a' is not a list
cluster.groups = [{"device": "a100"}] -> cluster.device: not allowed beside groups; give it in each group
cluster.machines = 0 -> cluster.machines: 0 is not from 1 to the nodes, 1
cluster.machines = 5 -> cluster.machines: 5 is not from 1 to the nodes, 1
cluster.machines = "x" -> cluster.machines: 'x' is not a whole number
cluster.host = 3 -> cluster.host: 3 is not a name, a file of foretrain measure host, or a table of speeds
cluster.gpus = 8 -> cluster.gpus: 'gpus' is not a known key; allowed are cores_per_device, device
plan.data = 0 -> plan.data: 0 is not 1 or more
plan.data = -1 -> plan.data: -1 is not 1 or more
plan.data = 1.5 -> plan.data: 1.5 is not a whole number
plan.data = "2" -> plan.data: '2' is not a whole number
plan.tensor = 0 -> plan.tensor: 0 is not 1 or more
plan.tensor = -1 -> plan.tensor: -1 is not 1 or more
plan.tensor = 1.5 -> plan.tensor: 1.5 is not a whole number
plan.tensor = "2" -> plan.tensor: '2' is not a whole number
plan.pipeline = 0 -> plan.pipeline: 0 is not 1 or more
plan.pipeline = -1 -> plan.pipeline: -1 is not 1 or more
plan.pipeline = 1.5 -> plan.pipeline: 1.5 is not a whole number
plan.pipeline = "2" -> plan.pipeline: '2' is not a whole number
plan.context = 0 -> plan.context: 0 is not 1 or more
plan.context = -1 -> plan.context: -1 is not 1 or more
plan.context = 1.5 -> plan.context: 1.5 is not a whole number
plan.context = "2" -> plan.context: '2' is not a whole number
plan.expert = 0 -> plan.expert: 0 is not 1 or more
plan.expert = -1 -> plan.expert: -1 is not 1 or more
plan.expert = 1.5 -> plan.expert: 1.5 is not a whole number
plan.expert = "2" -> plan.expert: '2' is not a whole number
plan.micro_batch = 0 -> plan.micro_batch: 0 is not 1 or more
plan.micro_batch = -1 -> plan.micro_batch: -1 is not 1 or more
plan.micro_batch = 1.5 -> plan.micro_batch: 1.5 is not a whole number
plan.micro_batch = "2" -> plan.micro_batch: '2' is not a whole number
plan.data = 2 -> plan: data 2 x tensor 1 x pipeline 1 x context 1 = 2, but the cluster has 1 devices
plan.tensor = 3 -> plan: tensor 3 x pipeline 1 x context 1 = 3 does not divide the 1 devices
plan.tensor = 2 ; cluster.devices_per_node = 3 -> plan: tensor 2 x pipeline 1 x context 1 = 2 does not divide the 3 devices
plan.pipeline = 4 ; cluster.devices_per_node = 2 -> plan: tensor 1 x pipeline 4 x context 1 = 4 does not divide the 2 devices
plan.micro_batch = 5 -> plan.micro_batch: 5 x data 1 = 5 does not divide the global batch 4
plan.micro_batch = 8 -> plan.micro_batch: 8 x data 1 = 8 does not divide the global batch 4
plan.data = 2 ; plan.tensor = 2 ; cluster.devices_per_node = 2 -> plan: data 2 x tensor 2 x pipeline 1 x context 1 = 4, but the cluster has 2 devices
cluster.devices_per_node = 3 -> training.global_batch: 4 does not divide over plan.data = 3
cluster.devices_per_node = 8 ; cluster.nodes = 8 -> training.global_batch: 4 does not divide over plan.data = 64
plan.shard = "zero4" -> plan.shard: 'zero4' is not one of none, zero1, zero2, zero3
plan.shard = null -> plan.shard: None is not one of none, zero1, zero2, zero3
plan.schedule = "2f2b" -> plan.schedule: '2f2b' is not one of 1f1b, dualpipe, gpipe, interleaved
plan.schedule = 1 -> plan.schedule: 1 is not one of 1f1b, dualpipe, gpipe, interleaved
plan.recompute = "some" -> plan.recompute: 'some' is not one of full, none, operators, selective
plan.recompute_every = 2 -> plan.recompute_every: 2 needs what is recomputed; give plan.recompute
plan.recompute = "full" ; plan.recompute_every = 0 -> plan.recompute_every: 0 is not 1 or more
plan.sequence_parallel = "yes" -> plan.sequence_parallel: 'yes' is not true or false
plan.sequence_parallel = 1 -> plan.sequence_parallel: 1 is not true or false
plan.tensor_plan = 3 -> plan.tensor_plan: 3 is not a table of keys and values
plan.tensor_plan = {"a": "sideways"} -> plan.tensor_plan.a: 'sideways' is not one of column, replicate, row, vocab
plan.tensor_plan = {"a": 3} -> plan.tensor_plan.a: 3 is not a text
plan.tensor_plan = ["a"] -> plan.tensor_plan: ['a'] is not a table of keys and values
plan.virtual_stages = 2 -> plan.virtual_stages: 2 needs schedule = 'interleaved' or 'zero-bubble', not '1f1b'
plan.virtual_stages = 0 ; plan.schedule = "interleaved" -> plan.virtual_stages: 0 is not 1 or more
plan.balance = "unfair" -> plan.balance: 'unfair' is not one of even, speed
plan.offload = "yes" -> plan.offload: 'yes' is not true or false
plan.servers = -1 -> plan.servers: -1 is not 0 (all-reduce) or more
plan.servers = "x" -> plan.servers: 'x' is not a whole number
plan.asynchronous = true -> plan.asynchronous: true needs parameter servers; give plan.servers
plan.servers = 1 ; plan.shard = "zero1" -> plan.servers: 1 hold the optimizer state already; leave out plan.shard = 'zero1'
plan.servers = 1 ; plan.offload = true -> plan.servers: 1 hold the optimizer state already; leave out plan.offload
plan.servers = 1 ; training.mode = "infer" -> plan.servers: 1, but inference has no gradients to send them
plan.servers = 1 ; plan.tensor = 2 ; cluster.devices_per_node = 2 -> plan.servers: 1 serve workers that hold the whole model; leave out plan.tensor = 2
plan.offload = true ; cluster.device = "cpu" ; cluster.cores_per_device = 1 -> plan.offload: true, but a CPU is the host already; leave it out
plan.zero = 3 -> plan.zero: 'zero' is not a known key; allowed are asynchronous, balance, context, context_exchange, data
plan = 3 -> plan: 3 is not a table of keys and values
plan = [1] -> plan: [1] is not a table of keys and values
training.precision = "fp8" ; cluster.device = "v100-sxm-32gb" -> training.precision: 'fp8' cannot run on v100-sxm-32gb, which has no fp8 rate in the catalogue
training.precision = "bf16" -> training.precision: the graph graph.json.zst was captured with 'fp32', the job asks for 'bf16'
training.optimizer = "adamw" -> training.optimizer: the graph graph.json.zst was captured with 'sgd', the job asks for 'adamw'
training.mode = "infer" -> training.mode: the graph graph.json.zst was captured with 'train', the job asks for 'infer'
training.global_batch = 64 -> training.global_batch: the graph graph.json.zst holds 4 samples per micro-batch, the job asks
training.sequence = 12 -> training.sequence: 12, but the graph graph.json.zst holds no sequences
training.image = 32 -> training.image: [3, 32, 32], but the graph graph.json.zst holds no such images
training.classes = 17 -> training.classes: 17, but no tensor of the graph graph.json.zst is as wide
plan.tensor = 2 ; cluster.devices_per_node = 2 -> plan: a graph that is given as a file cannot be cut; plan.tensor, plan.context and plan.expert
plan.expert = 2 ; cluster.devices_per_node = 2 -> plan: a graph that is given as a file cannot be cut; plan.tensor, plan.context and plan.expert
plan.context = 2 ; cluster.devices_per_node = 2 -> plan: a graph that is given as a file cannot be cut; plan.tensor, plan.context and plan.expert
"""
COMMAND_ROWS = r"""
predict -> give a job file, a model, --from or --jobs (and only one of them)
predict job.json job.toml -> Got unexpected extra argument(s) (job.toml)
predict missing.toml -> missing.toml: cannot be read (No such file or directory)
predict missing.json -> missing.json: cannot be read (No such file or directory)
predict folder.toml -> folder.toml: cannot be read (Is a directory)
predict folder.json -> folder.json: cannot be read (Is a directory)
predict empty.json -> empty.json: not JSON
predict empty.toml -> empty.toml: model: missing; a job has the sections model, training and cluster (and plan)
predict broken.json -> broken.json: not JSON
predict broken.toml -> broken.toml: not TOML
predict binary.json -> binary.json: cannot be read
predict binary.toml -> binary.toml: cannot be read
predict list.json -> list.json: job: [1, 2] is not a table with model, training and cluster
predict text.json -> text.json: job: 'job' is not a table with model, training and cluster
predict null.json -> null.json: job: None is not a table with model, training and cluster
predict deep.json -> deep.json: not JSON (it is nested too deeply)
predict deep.toml -> deep.toml: not TOML (it is nested too deeply)
predict job.json --catalog deep.toml -> deep.toml: not TOML (it is nested too deeply)
predict --from deep.toml -> deep.toml: not TOML (it is nested too deeply)
schedule trace.csv --cluster deep.toml -> deep.toml: not TOML (it is nested too deeply)
schedule trace.csv --cluster 2x4xv100 --residuals deep.json -> deep.json: not a result of foretrain evaluate --json (ValueError: it is nested
predict graph.json.zst --set plan.tensor=[ -> plan.tensor: '[' is not a whole number
predict graph.json.zst --set plan.data=many -> plan.data: 'many' is not a whole number
plan many.jsonl -> many.jsonl: a file of many jobs is for foretrain predict --jobs
predict job.json --breakdown -> Option '--breakdown' requires an argument (see foretrain predict --help)
measure steps job.json --out -> Option '--out' requires an argument (see foretrain measure --help)
catalog h100 h100 -> catalog: 'h100' is not one of devices, hosts, models, nodes, prices
predict utf16.json -> utf16.json: cannot be read
predict twice.toml -> twice.toml: not TOML
predict runs.jsonl -> runs.jsonl: a file of many jobs is for foretrain predict --jobs
predict job.json --batch x -> --batch: 'x' is not a valid integer
predict job.json --batch 0 -> job.json: training.global_batch: 0 is not a number greater than zero
predict job.json --batch -3 -> job.json: training.global_batch: -3 is not a number greater than zero
predict job.json --batch 1.5 -> --batch: '1.5' is not a valid integer
predict job.json --devices 0 -> job.json: devices: 0 is not a whole number of at least 1
predict job.json --devices -1 -> job.json: devices: -1 is not a whole number of at least 1
predict job.json --devices 3 -> job.json: training.global_batch: 4 does not divide over plan.data = 3
predict job.json --nodes 0 -> job.json: cluster.nodes: 0 is not a whole number of at least 1
predict job.json --device nope -> job.json: cluster.device: 'nope' is not one of foretrain catalog devices
predict job.json --node nope -> job.json: cluster.node: 'nope' is not one of foretrain catalog nodes
predict job.json --precision fp31 -> training.precision: 'fp31' is not one of amp-bf16, amp-fp16, bf16, fp16, fp32, fp8, tf32
predict job.json --optimizer nope -> training.optimizer: 'nope' is not one of adadelta, adafactor, adagrad, adam, adam-fused
predict job.json --mode nope -> training.mode: 'nope' is not one of infer, train
predict job.json --image x -> training.image: 'x' is not a side length or channels,height,width
predict job.json --image 3,x,3 -> training.image: '3,x,3' is not a side length or channels,height,width
predict job.json --image 3,4 -> training.image: '3,4' is not a side length or channels,height,width
predict job.json --image -1 -> training.image: '-1' is not a side length or channels,height,width
predict job.json --image "" -> training.image: '' is not a side length or channels,height,width
predict job.json --sequence 0 -> job.json: training.sequence: 0 is not a number greater than zero
predict job.json --classes 0 -> job.json: training.classes: 0 is not a number greater than zero
predict job.json --samples 0 -> job.json: training.samples: 0 is not a number greater than zero
predict job.json --epochs nan -> job.json: training.epochs: nan is not a number greater than zero
predict job.json --epochs inf --samples 10 -> job.json: training.epochs: inf is not a number greater than zero
predict job.json --epochs -1 --samples 10 -> job.json: training.epochs: -1.0 is not a number greater than zero
predict job.json --epochs x -> --epochs: 'x' is not a valid number
predict job.json --steps 0 -> job.json: training.steps: 0 is not a number greater than zero
predict job.json --micro-batch 0 -> job.json: plan.micro_batch: 0 is not 1 or more
predict job.json --tensor 0 -> job.json: plan.tensor: 0 is not 1 or more
predict job.json --pipeline 0 -> job.json: plan.pipeline: 0 is not 1 or more
predict job.json --context 0 -> job.json: plan.context: 0 is not 1 or more
predict job.json --expert 0 -> job.json: plan.expert: 0 is not 1 or more
predict job.json --shard nope -> job.json: plan.shard: 'nope' is not one of none, zero1, zero2, zero3
predict job.json --recompute nope -> job.json: plan.recompute: 'nope' is not one of full, none, operators, selective
predict job.json --schedule nope -> job.json: plan.schedule: 'nope' is not one of 1f1b, dualpipe, gpipe, interleaved
predict job.json --framework nope -> job.json: training.framework: 'nope' is not one of adaptdl, automodel, deepspeed, fms-fsdp
predict job.json --set plan.nope=1 -> plan.nope: 'nope' is not a known key; allowed are asynchronous
predict job.json --set training.graphs=some -> job.json: training.graphs: 'some' is not one of layers, none, step
predict job.json --set plan -> --set: 'plan' is not of the form section.field=value, such as plan.reshard=false
predict --from nothing.sh -> nothing.sh: there is no such file
predict --from folder.jsonl -> folder.jsonl: is a folder, not a file
predict --from job.json -> job.json: a job file already; give it without --from
predict --from job.json --jobs jobs.jsonl -> --from is for one job, not for --jobs
predict --jobs jobs.jsonl --write-job job.toml -> --write-job is for one job, not for --jobs
predict job.json --cores-per-device 4 -> job.json: cluster.cores_per_device: 4 is not allowed, because 'h100-sxm-80gb' is not a CPU
predict job.json --source nope -> job.json: model.source: 'nope' is not one of diffusion, graph, onnx, python, timm
predict job.json --catalog missing.toml -> missing.toml: the catalogue cannot be read (No such file or directory)
predict job.json --catalog folder.toml -> folder.toml: the catalogue cannot be read (Is a directory)
predict job.json --catalog cat_broken.toml -> cat_broken.toml: not TOML
predict job.json --catalog cat_unknown.toml -> cat_unknown.toml: gpus: 'gpus' is not a known table; allowed are devices, hosts, links, nodes, prices
predict job.json --catalog cat_missing.toml -> cat_missing.toml: devices.mine.memory_bytes: missing; it is required
predict job.json --catalog cat_text.toml -> cat_text.toml: devices.mine.fp32: 'fast' is not a number
predict job.json --catalog cat_negative.toml -> cat_negative.toml: devices.mine.fp32: -1.0 is not a number above 0
predict job.json --catalog cat_key.toml -> cat_key.toml: devices.mine.tensor_cores: 'tensor_cores' is not a known key; allowed are 37
predict job.json --catalog cat_node.toml -> cat_node.toml: nodes.n.device: 'nope' is not one of foretrain catalog devices
predict job.json --catalog cat_empty_node.toml -> cat_empty_node.toml: nodes.n.devices: 0 is not a number above 0
predict job.json --catalog cat_price.toml -> cat_price.toml: prices.h100-sxm-80gb.per_hour: 'cheap' is not a price per hour such as
predict job.json --catalog cat_negative_price.toml -> cat_negative_price.toml: prices.h100-sxm-80gb.per_hour: -3.0 is not a number of at least 0
predict job.json --catalog cat_price_of_nothing.toml -> cat_price_of_nothing.toml: prices.nothing: 'nothing' is not one of foretrain catalog devices
predict job.json --catalog cat_table.toml -> cat_table.toml: devices: 3 is not a table of keys and values
predict job.json --catalog cat_entry.toml -> cat_entry.toml: devices.mine: 3 is not a table of keys and values
predict job.json --catalog cat_memory.toml -> cat_memory.toml: devices.mine.memory_bytes: 'lots' is not a size such as "80 GiB" or "25 MB"
predict job.json --catalog cat_alias.toml -> cat_alias.toml: devices.mine.aliases: 3 is not a list
predict job.json --catalog cat_infinite.toml -> cat_infinite.toml: devices.mine.fp32: inf is not a number above 0
predict job.json --catalog binary.toml -> binary.toml: the catalogue cannot be read
predict job.json --breakdown colour -> --breakdown: 'colour' is not one of 'layer', 'operator', 'phase'
predict job.json --depth 0 -> --depth: '0' is not greater than or equal to 1
predict job.json --depth 3 -> --depth: changes nothing without --breakdown layer
predict job.json --depth 3 --breakdown phase -> --depth: changes nothing without --breakdown layer
predict job.json --html-seconds 5 -> --html-seconds: changes nothing without --html
plan job.json --html-seconds 5 -> --html-seconds: changes nothing without --html
predict job.json --schedule 1f1b -> --schedule: changes nothing here: orders the stages of a pipeline; give --pipeline
predict job.json --sequence-parallel -> --sequence-parallel: changes nothing here: splits norms beside --tensor; give it
predict job.json --mode infer --optimizer adamw -> --optimizer: changes nothing here: inference has no optimizer
predict job.json --checkpoint-every 1h -> --checkpoint-every: changes nothing here: of a whole training; give --steps
predict job.json --node-mtbf 10d -> --node-mtbf: changes nothing here: of a whole training; give --steps
predict job.json --steps 100 --storage-bandwidth 2GB/s -> --storage-bandwidth: changes nothing here: checkpoints are written
predict job.json --steps 100 --restart-time 5m -> --restart-time: changes nothing here: failures cost it; give --node-mtbf
predict job.json --out x -> --out is for --jobs; --json prints one forecast, --trace and --html write files
predict job.json --processes 2 -> --processes and --ray are for --jobs
predict job.json --processes 0 -> --processes: '0' is not greater than or equal to 1
predict job.json --jobs jobs.jsonl -> give a job file, a model, --from or --jobs (and only one of them)
predict job.json --compare --html x.html -> --compare asks every predictor: only --json and the job's own options go with it
predict job.json --compare --predictor ernest -> --compare asks every predictor: only --json and the job's own options go with it
predict job.json --colour -> No such option: --colour (Possible options: --out, --source)
predict job.json --html folder.html -> folder.html: cannot be written (Is a directory)
predict job.json --html empty.json/x.html -> empty.json/x.html: cannot be written (empty.json is not a directory)
predict --jobs missing.jsonl -> missing.jsonl: cannot be read (No such file or directory)
predict --jobs folder.jsonl -> folder.jsonl: cannot be read (Is a directory)
predict --jobs empty.jsonl -> empty.jsonl: empty; a file of jobs has one job per line
predict --jobs binary.jsonl -> binary.jsonl: cannot be read
predict --jobs jobs.jsonl --out folder.jsonl -> folder.jsonl: cannot be written (Is a directory)
predict --jobs jobs.jsonl --out empty.json/x -> empty.json/x: cannot be written (empty.json is not a directory)
predict --jobs jobs.jsonl --html x.html -> --trace, --html, --breakdown, --resources, --suggest, --compare and --evidence are for one job, not for
predict --jobs jobs.jsonl --processes 0 -> --processes: '0' is not greater than or equal to 1
predict --jobs jobs.jsonl --processes x -> --processes: 'x' is not a valid integer
predict --jobs jobs.jsonl --predictor nope -> predictor: 'nope' is not one of cherrypick, deletepop, driple, ernest, flops, joined, predictddl
predict --jobs broken.jsonl.zst -> broken.jsonl.zst: not a zstd file
predict --jobs cut.jsonl.zst -> cut.jsonl.zst: not a whole zstd file (it ends within a frame)
predict job.json --predictor nope -> predictor: 'nope' is not one of cherrypick, deletepop, driple, ernest, flops, joined, predictddl
predict job.json --predictor "" -> predictor: the folder . has no predictor.json; foretrain fit makes one
predict job.json --predictor deletpop -> predictor: 'deletpop' is not one of cherrypick, deletepop, driple, ernest, flops, joined, predictddl
predict job.json --predictor s_broken -> s_broken/predictor.json: not JSON
predict job.json --predictor s_list -> s_list/predictor.json: format None is not 'foretrain-predictor/1'; fit the predictor again
predict job.json --predictor s_version -> s_version/predictor.json: format 'foretrain-predictor/9' is not 'foretrain-predictor/1'; fit
predict job.json --predictor s_nameless -> s_nameless/predictor.json: predictor: None is not a name; fit the predictor again
predict job.json --predictor s_unknown -> s_unknown/predictor.json: a saved 'nope', which neither comes with foretrain nor is installed
predict job.json --predictor s_number -> s_number/predictor.json: predictor: 3 is not a name; fit the predictor again
predict job.json --predictor s_binary -> s_binary/predictor.json: cannot be read
predict job.json --predictor s_empty -> s_empty/predictor.json: not JSON
predict job.json --predictor s_nothing -> predictor: the folder s_nothing has no predictor.json; foretrain fit makes one
predict job.json --predictor s_folder -> s_folder/predictor.json: cannot be read (Is a directory)
predict job.json --predictor s_cherrypick -> s_cherrypick: not a cherrypick of this version (it has no 'columns'); fit it again
predict job.json --predictor s_deletepop -> s_deletepop/operators.safetensors: cannot be read as fitted operator models (No such file or
predict job.json --predictor s_ernest -> s_ernest: does not say how far its runs reach; fit it again
predict job.json --predictor s_flops -> s_flops: not a flops of this version (it has no 'columns'); fit it again
predict job.json --predictor s_ray_models -> s_ray_models: not a ray_models of this version (it has no 'workloads'); fit it again
predict job.json --predictor s_roofline -> s_roofline/predictor.json: roofline: has nothing to learn, so nothing was saved
predict job.json --predictor cut_deletepop -> cut_deletepop/operators.safetensors: cannot be read as fitted operator models
predict job.json --predictor cut_predictddl -> cut_predictddl/arrays.safetensors: cannot be read
predict job.json --predictor missing.py:P -> predictor missing.py:P: there is no file missing.py
predict job.json --predictor folder.py:P -> predictor folder.py:P: there is no file folder.py
predict job.json --predictor p_syntax.py:P -> predictor p_syntax.py:P: cannot be loaded (SyntaxError: invalid syntax (p_syntax.py, line 1))
predict job.json --predictor p_empty.py:P -> predictor p_empty.py:P: p_empty.py has no P
predict job.json --predictor p_function.py:P -> predictor p_function.py:P: is not a class derived from foretrain.predictors.base.Predictor
predict job.json --predictor p_class.py:P -> predictor p_class.py:P: is not a class derived from foretrain.predictors.base.Predictor
predict job.json --predictor p_raises.py:P -> predictor p_raises.py:P: cannot be loaded (RuntimeError: no)
predict job.json --predictor p_exits.py:P -> predictor p_exits.py:P: cannot be loaded (SystemExit: 3)
predict job.json --predictor p_abstract.py:P -> predictor p_abstract.py:P: lacks fit, predict
predict job.json --predictor p_imports.py:P -> predictor p_imports.py:P: cannot be loaded (ModuleNotFoundError: No module named 'not_there')
predict job.json --predictor p_empty.py -> predictor: 'p_empty.py' is not one of cherrypick, deletepop, driple, ernest, flops
predict job.json --predictor cherrypick -> cherrypick: has learned from no runs yet; fit it first
predict job.json --predictor ernest@s_ray_models -> s_ray_models/predictor.json: a saved ray_models, not ernest
predict g_cut.json.zst -> g_cut.json.zst: not a foretrain graph file
predict g_other.json.zst -> g_other.json.zst: not a foretrain graph file (it has no format)
predict g_list.json.zst -> g_list.json.zst: not a foretrain graph file
predict empty.json.zst -> empty.json.zst: not a foretrain graph file
predict g_old.json.zst -> g_old.json.zst: format 'foretrain-graph/0' is not 'foretrain-graph/1'; capture the model again
predict g_text_samples.json.zst -> g_text_samples.json.zst: not a foretrain graph file (samples: 'many' is not a whole number of
predict g_no_samples.json.zst -> g_no_samples.json.zst: not a foretrain graph file (samples: 0 is not a whole number of at
predict g_no_ops.json.zst -> g_no_ops.json.zst: not a foretrain graph file (it has no operators)
predict g_odd_ops.json.zst -> g_odd_ops.json.zst: not a foretrain graph file
predict g_no_buffers.json.zst -> g_no_buffers.json.zst: not a foretrain graph file (an operator uses a buffer that is not one
predict missing.json.zst -> model.name: 'missing.json.zst' cannot be read: there is no such file
predict graph.json.zst --batch 5 -> training.global_batch: the graph graph.json.zst holds 4 samples per micro-batch, the job asks
predict graph.json.zst --precision bf16 -> training.precision: the graph graph.json.zst was captured with 'fp32', not 'bf16'
predict graph.json.zst --optimizer adamw -> training.optimizer: the graph graph.json.zst was captured with 'sgd', not 'adamw'
predict graph.json.zst --mode infer -> training.mode: the graph graph.json.zst was captured with 'train', not 'infer'
predict graph.json.zst --tensor 2 --devices 2 -> plan: a graph that is given as a file cannot be cut; plan.tensor, plan.context and plan.expert
predict graph.json.zst --image 32 -> training.image: [3, 32, 32], but the graph graph.json.zst holds no such images
predict graph.json.zst --sequence 32 -> training.sequence: 32, but the graph graph.json.zst holds no sequences
capture job.json -> Missing option '--out' / '-o'
capture job.json -o folder.zst -> folder.zst: cannot be written (Is a directory)
capture job.json -o empty.json/g.json.zst -> empty.json/g.json.zst: cannot be written (empty.json is not a directory)
capture missing.toml -o g.json.zst -> missing.toml: cannot be read (No such file or directory)
capture broken.json -o g.json.zst -> broken.json: not JSON
capture -o g.json.zst -> Missing argument 'JOB.toml|JOB.json|MODEL'
explain job.json -> Missing argument 'B'
explain job.json missing.toml -> missing.toml: cannot be read (No such file or directory)
explain job.json jobs.jsonl -> jobs.jsonl: a file of many jobs is for foretrain predict --jobs
explain job.json folder.toml -> folder.toml: cannot be read (Is a directory)
explain job.json broken.toml -> broken.toml: not TOML
explain resnetfifty resnet18 -> model: 'resnetfifty' is no preset
explain job.json job.toml --predictor nope -> predictor: 'nope' is not one of cherrypick, deletepop, driple, ernest, flops, joined, predictddl
explain job.json job.toml --predictor roofline --catalog missing.toml -> missing.toml: the catalogue cannot be read (No such file or directory)
explain job.json job.toml --predictor ernest -> job.json: ernest: has learned from no runs yet; fit it first
catalog gpus -> catalog: 'gpus' is not one of devices, nodes, hosts, models, prices or of
catalog devices nope -> devices: 'nope' is not one of foretrain catalog devices
catalog nodes nope -> nodes: 'nope' is not one of foretrain catalog nodes
catalog models nope -> models: 'nope' is not a preset (names of timm and torchvision go to predict as they are)
catalog prices nope -> prices: 'nope' is not one of 106 known names
catalog devices h100 extra -> Got unexpected extra argument(s) (extra)
catalog --catalog cat_broken.toml -> cat_broken.toml: not TOML
evaluate -> Missing argument 'RUNS.jsonl'
evaluate missing.jsonl -> missing.jsonl: cannot be read (No such file or directory)
evaluate folder.jsonl -> folder.jsonl: cannot be read (Is a directory)
evaluate empty.jsonl -> empty.jsonl: empty; a runs file has one run per line
evaluate blank.jsonl -> blank.jsonl: empty; a runs file has one run per line
evaluate binary.jsonl -> binary.jsonl: cannot be read
evaluate broken.jsonl -> broken.jsonl:1: not JSON
evaluate deep.jsonl -> deep.jsonl:1: not JSON (it is nested too deeply)
evaluate broken.jsonl.zst -> broken.jsonl.zst: not a zstd file
evaluate cut.jsonl.zst -> cut.jsonl.zst: not a whole zstd file (it ends within a frame)
evaluate jobs.jsonl -> jobs.jsonl:1: run: a run is a table with job and measured (and provenance)
evaluate ops.jsonl -> ops.jsonl:1: run: a run is a table with job and measured (and provenance)
evaluate job.json -> job.json:1: run: a run is a table with job and measured (and provenance)
evaluate run_nan.jsonl -> run_nan.jsonl:1: measured.step_time_s: nan is not a finite number above zero
evaluate run_inf.jsonl -> run_inf.jsonl:1: measured.step_time_s: inf is not a finite number above zero
evaluate run_ninf.jsonl -> run_ninf.jsonl:1: measured.step_time_s: -inf is not a finite number above zero
evaluate run_neg.jsonl -> run_neg.jsonl:1: measured.step_time_s: -1.0 is not a finite number above zero
evaluate run_zero.jsonl -> run_zero.jsonl:1: measured.step_time_s: 0.0 is not a finite number above zero
evaluate run_text.jsonl -> run_text.jsonl:1: measured.step_time_s: 'fast' is not a number
evaluate run_null.jsonl -> run_null.jsonl:1: measured.step_time_s: None is not a number
evaluate run_list.jsonl -> run_list.jsonl:1: measured.step_time_s: [1] is not a number
evaluate run_bool.jsonl -> run_bool.jsonl:1: measured.step_time_s: True is not a number
evaluate run_huge.jsonl -> run_huge.jsonl:1: measured.step_time_s: inf is not a finite number above zero
evaluate run_unknown.jsonl -> run_unknown.jsonl:1: measured.steptime: 'steptime' is not a known quantity; allowed are 33
evaluate run_jobless.jsonl -> run_jobless.jsonl:1: run: a run is a table with job and measured (and provenance)
evaluate run_extra.jsonl -> run_extra.jsonl:1: notes: 'notes' is not a known key; allowed are job, measured, provenance
evaluate run_bad_job.jsonl -> run_bad_job.jsonl:1: training: missing; a job has the sections model, training and cluster
evaluate run_provenance.jsonl -> run_provenance.jsonl:1: provenance: 3 is not a table of keys and values
evaluate run_measured_list.jsonl -> run_measured_list.jsonl:1: measured: [1] is not a table of keys and values
evaluate runs.jsonl --predictor nope -> predictor: 'nope' is not one of cherrypick, deletepop, driple, ernest, flops, joined, predictddl
evaluate runs.jsonl --predictor s_broken -> s_broken/predictor.json: not JSON
evaluate runs.jsonl --split nope -> split: 'nope' is not one of extrapolate, extrapolate:batch, extrapolate:cores
evaluate runs.jsonl --split interpolate:colour -> split: 'interpolate:colour' is not one of interpolate:batch, interpolate:cores
evaluate runs.jsonl --split random -> split: random needs runs of at least two distinct jobs; all 1 are of one
evaluate runs.jsonl --split leave-model-out -> split: leave-model-out needs runs of at least two architecture families; all 1 are of one
evaluate runs.jsonl --train-runs 0 -> --train-runs: '0' is not greater than or equal to 1
evaluate runs.jsonl --train-runs 3 -> --train-runs is for --split, which says what is learned from
evaluate runs.jsonl --processes 0 -> --processes: '0' is not greater than or equal to 1
evaluate runs.jsonl --json folder.json -> folder.json: cannot be written (Is a directory)
evaluate runs.jsonl --json empty.json/x -> empty.json/x: cannot be written (empty.json is not a directory)
evaluate runs.jsonl --catalog missing.toml -> missing.toml: the catalogue cannot be read (No such file or directory)
fit -> Missing argument 'NAME'
fit nope runs.jsonl -o out -> predictor: 'nope' is not one of cherrypick, deletepop, driple, ernest, flops, joined, predictddl
fit deletepop -o out -> Missing argument 'FILE'
fit deletepop missing.jsonl -o out -> missing.jsonl: no such file
fit deletepop folder.jsonl -o out -> folder.jsonl: is a folder, not a file
fit deletepop empty.jsonl -o out -> empty.jsonl: empty; a runs file has one run per line
fit ernest runs.jsonl empty.jsonl -o out -> empty.jsonl: empty; a runs file has one run per line
learn empty.jsonl --name x -> empty.jsonl: empty; a runs file has one run per line
advise empty.jsonl --deadline 1h -> empty.jsonl: empty; a runs file has one run per line
plan job.json --runs empty.jsonl -> empty.jsonl: empty; a runs file has one run per line
runs import empty.jsonl --store runs.db -> empty.jsonl: empty; a runs file has one run per line
fit deletepop binary.jsonl -o out -> binary.jsonl: cannot be read
fit deletepop broken.jsonl -o out -> broken.jsonl:1: not JSON
fit deletepop deep.jsonl -o out -> deep.jsonl:1: not JSON (it is nested too deeply)
fit deletepop jobs.jsonl -o out -> jobs.jsonl:1: run: a run is a table with job and measured (and provenance)
fit deletepop job.json -o out -> job.json: neither runs (.jsonl, .jsonl.zst) nor an operator dataset (.parquet)
fit deletepop run_nan.jsonl -o out -> run_nan.jsonl:1: measured.step_time_s: nan is not a finite number above zero
fit deletepop run_inf.jsonl -o out -> run_inf.jsonl:1: measured.step_time_s: inf is not a finite number above zero
fit deletepop run_neg.jsonl -o out -> run_neg.jsonl:1: measured.step_time_s: -1.0 is not a finite number above zero
fit deletepop run_huge.jsonl -o out -> run_huge.jsonl:1: measured.step_time_s: inf is not a finite number above zero
fit deletepop run_unmeasured.jsonl -o out -> runs: none has a step, phase or busy time that can be learned from; calibration needs at least one (graph.json.zst
fit deletepop runs.jsonl -> Missing option '--out' / '-o'
fit deletepop runs.jsonl -o empty.json -> empty.json: cannot be written (empty.json is not a directory)
fit deletepop runs.jsonl -o empty.json/out -> empty.json/out: cannot be written (empty.json is not a directory)
fit deletepop runs.jsonl -o out --device h100 -> --device: is for operator datasets (.parquet), and none is given
fit deletepop runs.jsonl -o out --published folder -> --published: is for operator datasets (.parquet), and none is given
fit deletepop runs.jsonl -o out --from missing -> missing/predictor.json: cannot be read (No such file or directory)
fit deletepop runs.jsonl -o out --from s_broken -> s_broken/predictor.json: not JSON
fit deletepop runs.jsonl -o out --from s_ernest -> s_ernest/predictor.json: a saved ernest, not deletepop
fit deletepop runs.jsonl -o out --techniques ridge -> No such option: --techniques
fit deletepop not.parquet -o out -> not.parquet: cannot be read as Parquet
fit deletepop empty.parquet -o out -> empty.parquet: cannot be read as Parquet
fit deletepop other.parquet -o out -> other.parquet: not an operator dataset; it has no column key, name, precision, flops, bytes
fit deletepop folder.parquet -o out -> folder.parquet: is a folder, not a file
fit deletepop other.parquet -o out --device nope -> --device: 'nope' is not one of foretrain catalog devices
fit deletepop other.parquet -o out --device h100 -> other.parquet: not an operator dataset; it has no column key, name, precision, flops, bytes
fit deletepop other.parquet -o out --device h100 --published folder -> other.parquet: not an operator dataset; it has no column key, name, precision, flops, bytes
fit ernest other.parquet -o out -> other.parquet: ernest learns from runs (.jsonl), not from operator datasets
fit roofline runs.jsonl -o out -> roofline: has nothing to learn
fit ernest run_unmeasured.jsonl -o out -> runs: none has a step time under data parallelism; ernest needs some of every workload
fit cherrypick run_unmeasured.jsonl -o out -> runs: none has a step time under data parallelism; cherrypick needs some of every workload
fit flops run_unmeasured.jsonl -o out -> runs: none has a step time under data parallelism; flops needs at least one
fit predictddl run_unmeasured.jsonl -o out -> runs: none has a step time under data parallelism; predictddl needs at least one
fit driple runs.jsonl -o out -> runs: none has resource figures or utilisation; driple needs at least one
fit driple run_unmeasured.jsonl -o out -> runs: none has resource figures or utilisation; driple needs at least one
fit ray_models run_unmeasured.jsonl -o out -> runs: no model has 3 runs with a time; ray_models learns each model from runs of its own
fit ray_models runs.jsonl -o out -> runs: no model has 3 runs with a time; ray_models learns each model from runs of its own
fit ray_models cpu_runs.jsonl -o out --techniques nope -> No such option: --techniques
fit ray_models cpu_runs.jsonl -o out --trials x -> --trials: 'x' is not a valid integer
fit p_syntax.py:P runs.jsonl -o out -> predictor p_syntax.py:P: cannot be loaded (SyntaxError: invalid syntax (p_syntax.py, line 1))
fit p_exits.py:P runs.jsonl -o out -> predictor p_exits.py:P: cannot be loaded (SystemExit: 3)
advise cpu_runs.jsonl -> Missing option '--deadline'
advise cpu_runs.jsonl --deadline 1h --search --next next.toml -> --next: 'next.toml' is not a .jsonl file, which foretrain measure campaign takes
check graph.json.zst --max-memory 70 -> max-memory: '70' is not a size with its unit, such as "70 GiB"
runs export --out runs.txt -> --out: 'runs.txt' is not a .jsonl or .jsonl.zst file
schedule --generate jobs=99999999999999 --cluster 8xv100 -> generate.jobs: 99999999999999 is not at most 10,000,000
leaderboard job.json -> job.json:1: run: a run is a table with job and measured (and provenance)
advise cpu_runs.jsonl --deadline soon -> deadline: 'soon' is not a time such as "3h", "1d 12h" or "90 min"
advise cpu_runs.jsonl --deadline -1h -> deadline: '-1h' is not a time such as "3h", "1d 12h" or "90 min"
advise cpu_runs.jsonl --deadline 0s --epochs 1 -> deadline: 0 s is not more than zero
advise cpu_runs.jsonl --deadline inf --epochs 1 -> deadline: 'inf' is not a time such as "3h", "1d 12h" or "90 min"
advise cpu_runs.jsonl --deadline 1h --risk 2 --epochs 1 -> risk: 2 is not between 0 and 1
advise cpu_runs.jsonl --deadline 1h --risk -1 --epochs 1 -> risk: -1 is not between 0 and 1
advise cpu_runs.jsonl --deadline 1h --risk nan --epochs 1 -> risk: nan is not between 0 and 1
advise cpu_runs.jsonl --deadline 1h --risk x -> --risk: 'x' is not a valid number
advise cpu_runs.jsonl --deadline 1h --epochs 0 -> epochs: 0.0 is not a number greater than zero
advise cpu_runs.jsonl --deadline 1h --epochs nan -> epochs: nan is not a number greater than zero
advise cpu_runs.jsonl --deadline 1h --epochs -1 -> epochs: -1.0 is not a number greater than zero
advise cpu_runs.jsonl --deadline 1h --epochs inf -> epochs: inf is not a number greater than zero
advise cpu_runs.jsonl --deadline 1h --model nope --epochs 1 -> model: 'nope' is not one of graph.json.zst
advise cpu_runs.jsonl --deadline 1h --search --samples 1000,100000 -> samples: '1000,100000' is not one size of the data, as a search is of
advise cpu_runs.jsonl --deadline 1h --search --job job.json --model nope -> --model: 'nope' is not the model of --job, graph.json.zst
advise cpu_runs.jsonl --deadline 1h --samples x --epochs 1 -> samples: 'x' is not whole numbers with commas between them
advise cpu_runs.jsonl --deadline 1h --samples 0 --epochs 1 -> samples: '0' has a number below 1
advise cpu_runs.jsonl --deadline 1h --samples 1.5,x --epochs 1 -> samples: '1.5,x' is not whole numbers with commas between them
advise cpu_runs.jsonl --deadline 1h --samples inf --epochs 1 -> samples: 'inf' is not whole numbers with commas between them
advise cpu_runs.jsonl --deadline 1h --samples nan --epochs 1 -> samples: 'nan' is not whole numbers with commas between them
advise cpu_runs.jsonl --deadline 1h --workers 0 --epochs 1 -> workers: '0' has a number below 1
advise cpu_runs.jsonl --deadline 1h --workers x --epochs 1 -> workers: 'x' is not whole numbers with commas between them
advise cpu_runs.jsonl --deadline 1h --cores 0 --epochs 1 -> cores: '0' has a number below 1
advise runs.jsonl --deadline 1h --cores 2 --epochs 1 --samples 10 -> runs: no model has 3 runs with a time; ray_models learns each model from runs of its own
advise cpu_runs.jsonl --deadline 1h --instances nope --epochs 1 -> instances: 'nope' is not one of foretrain catalog nodes
advise cpu_runs.jsonl --deadline 1h --batch 0 --epochs 1 -> --batch: '0' is not greater than or equal to 1
advise cpu_runs.jsonl --deadline 1h --top 0 --epochs 1 -> --top: '0' is not greater than or equal to 1
advise cpu_runs.jsonl --deadline 1h --predictor nope --epochs 1 -> predictor: 'nope' is not one of cherrypick, deletepop, driple, ernest, flops, joined, predictddl
advise cpu_runs.jsonl --deadline 1h --predictor s_broken --epochs 1 -> s_broken/predictor.json: not JSON
design -> give a file of candidates or --cluster
design --cluster 1,2 -> give --budget or --count (and only one of them)
design --cluster 1,2 --count 1 --budget 1h -> give --budget or --count (and only one of them)
design --cluster x --count 1 -> --cluster: 'x' is not a list of numbers such as 1,2,4
design --cluster 0 --count 1 -> --cluster: '0' is not a list of whole numbers of machines
design --cluster "" --count 1 -> --cluster: '' is not a list of numbers such as 1,2,4
design --cluster 1.5 --count 1 -> --cluster: '1.5' is not a list of whole numbers of machines
design --cluster inf --count 1 -> --cluster: 'inf' is not a list of numbers such as 1,2,4
design --cluster 1,2 --count 0 -> count: 0 is not between 1 and the 8 candidates
design --cluster 1,2 --count -1 -> count: -1 is not between 1 and the 8 candidates
design --cluster 1,2 --count 1000 -> count: 1000 is not between 1 and the 8 candidates
design --cluster 1,2 --count x -> --count: 'x' is not a valid integer
design --cluster 1,2 --budget soon -> budget: 'soon' is not a time such as "3h", "1d 12h" or "90 min"
design --cluster 1,2 --budget 0s -> budget: 0 s is below the cheapest candidate, which takes 3 min 45 s
design --cluster 1,2 --budget -1s -> budget: '-1s' is not a time such as "3h", "1d 12h" or "90 min"
design --cluster 1,2 --count 1 --scale 0 -> cluster: 1 machines on 0 of the data; machines are at least 1, scales above 0 and at most 1
design --cluster 1,2 --count 1 --scale 2 -> cluster: 1 machines on 2 of the data; machines are at least 1, scales above 0 and at most 1
design --cluster 1,2 --count 1 --scale x -> --scale: 'x' is not a list of numbers such as 1,2,4
design --cluster 1,2 --count 1 --scale nan -> --scale: 'nan' is not a list of numbers such as 1,2,4
design --cluster 1,2 --count 1 --whole-time x -> whole-time: 'x' is not a time such as "3h", "1d 12h" or "90 min"
design --cluster 1,2 --count 1 --whole-time 0s -> candidates: cost_s of row 1 is 0, not a positive number
design --cluster 1,2 --count 1 --method magic -> --method: 'magic' is not one of 'd-optimal', 'half-d-optimal', 'a-optimal', 'random'
design --cluster 1,2 --count 1 --predictor ernest -> --predictor: needs the job to scale: design JOB.toml --cluster 1,2
design --cluster 1,2 --count 1 --measured runs.jsonl -> --measured: needs the job to scale: design JOB.toml --cluster 1,2
design --cluster 1,2 --count 1 -o x.jsonl -> --out: needs the job to scale: design JOB.toml --cluster 1,2
design --cluster 1,2 --count 1 --seed x -> --seed: 'x' is not a valid integer
design missing.csv --count 1 -> missing.csv: cannot be read (No such file or directory)
design folder.csv --count 1 -> folder.csv: cannot be read (Is a directory)
design empty.csv --count 1 -> empty.csv: holds no candidates
design binary.csv --count 1 -> binary.csv: cannot be read
design t_head.csv --count 1 -> t_head.csv: holds no candidates
design t_text.csv --count 1 -> t_text.csv: no column of numbers to model (columns: a, b)
design t_ragged.csv --count 1 -> t_ragged.csv: row 1 does not have as many cells as the heading
design t_negative.csv --count 2 --log -> t_negative.csv: a of row 1 is -1: --log is for positive features
design t_cost.csv --budget 10s -> candidates: cost_s of row 1 is -1, not a positive number
design t_nan.csv --count 1 -> t_nan.csv: a of row 1 is 'nan', not a number
design t_text.csv --count 1 --features a -> t_text.csv: a of row 1 is 'x', not a number
design t.csv --count 1 --features nope -> --features: 'nope' is not one of a, b
design t.csv --count 1 --features "" -> --features: '' is not one of a, b
design t.csv --budget 10s --cost-column nope -> t.csv: no column 'nope' with the seconds that each measurement takes; name it with
design t.csv --count 9 -> count: 9 is not between 1 and the 4 candidates
design t.csv --budget 1us -> budget: 1 us is below the cheapest candidate, which takes 3 s
design t.csv --count 1 --predictor ernest -> --predictor: is for jobs, campaigns and --operators, not for the table t.csv
design t.csv --count 1 --measured runs.jsonl -> --measured: is for jobs, campaigns and --operators, not for the table t.csv
design t.csv --count 1 --operators -> t.csv: row 1 is not an operator with name, inputs, flops and bytes ('inputs')
design t.csv --count 1 -o folder.csv -> folder.csv: cannot be written (Is a directory)
design t.csv --count 1 -o empty.json/x -> empty.json/x: cannot be written (empty.json is not a directory)
design t_list.jsonl --count 1 -> t_list.jsonl:1: not a JSON object
design t_lacks.jsonl --count 1 -> t_lacks.jsonl: a of row 2 is None, not a number
design broken.jsonl --count 1 -> broken.jsonl:1: not JSON
design empty.jsonl --count 1 -> empty.jsonl: holds no candidates
design missing.jsonl --count 1 -> missing.jsonl: cannot be read (No such file or directory)
design not.parquet --count 1 -> not.parquet: cannot be read
design folder.parquet --count 1 -> folder.parquet: holds no candidates
design job.txt --count 1 -> candidates: '.txt' is not a file of .csv, .jsonl, .parquet
design jobs.jsonl --count 1 --features a -> --features, --log and --operators are for tables, not for jobs
design jobs.jsonl --count 1 --predictor roofline -> --predictor: roofline has nothing to learn
design jobs.jsonl --count 1 --predictor nope -> predictor: 'nope' is not one of cherrypick, deletepop, driple, ernest, flops, joined, predictddl
design jobs.jsonl --count 1 --measured t.csv -> t.csv: does not begin with a line of JSON; design --measured, for jobs, takes runs
design jobs.jsonl --count 1 --measured missing.jsonl -> missing.jsonl: cannot be read (No such file or directory)
design jobs.jsonl --count 1 --measured jobs.jsonl -> jobs.jsonl: holds jobs (foretrain measure steps, measure campaign, design and predict --jobs
design jobs.jsonl --count 1 --measured run_inf.jsonl -> run_inf.jsonl:1: measured.step_time_s: inf is not a finite number above zero
design run_bad_job.jsonl --count 1 -> run_bad_job.jsonl:1: training: missing; a job has the sections model, training and cluster
design c_broken.toml --count 1 -> c_broken.toml: not TOML (Invalid value
design c_key.toml --count 1 -> c_key.toml: colour: 'colour' is not a known key; allowed are batch, batch_per_worker, classes
design job.toml --count 1 -> job.toml: model: 'model' is not a known key; allowed are batch, batch_per_worker, classes
design job.toml --count 1 --cluster 1,2 --scale 2 -> --scale: '2' is not above 0 and at most 1
design t.csv --count 1 --cluster 1,2 -> t.csv: with --cluster the file is the job to scale (.toml, or a model's name)
design ops.jsonl --count 1 --operators --predictor ernest -> --predictor: ernest learns from runs, not from operators
design ops.jsonl --count 1 --operators --measured measured.jsonl -> ops.jsonl: all of its operators were measured before
design ops.jsonl --count 1 --operators --measured runs.jsonl -> runs.jsonl: holds runs (foretrain fit and evaluate take them, and measure steps or campaign
design o_inputs.jsonl --count 1 --operators -> o_inputs.jsonl: row 1 is not an operator with name, inputs, flops and bytes ('int' object is
design o_shape.jsonl --count 1 --operators -> o_shape.jsonl: row 1 is not an operator with name, inputs, flops and bytes
measure ops -> Missing argument 'TARGET'
measure ops ops.jsonl -> Missing option '--out' / '-o'
measure ops missing.jsonl -o o.jsonl --device cpu -> missing.jsonl: cannot be read (No such file or directory)
measure ops folder.jsonl -o o.jsonl --device cpu -> folder.jsonl: cannot be read (Is a directory)
measure ops empty.jsonl -o o.jsonl --device cpu -> empty.jsonl: does not begin with a line of JSON; measure ops takes operators or jobs or runs
measure ops binary.jsonl -o o.jsonl --device cpu -> binary.jsonl: cannot be read
measure ops broken.jsonl -o o.jsonl --device cpu -> broken.jsonl: does not begin with a line of JSON; measure ops takes operators or jobs or runs
measure ops deep.jsonl -o o.jsonl --device cpu -> deep.jsonl: does not begin with a line of JSON; measure ops takes operators or jobs or runs
measure ops t.csv -o o.jsonl --device cpu -> t.csv: does not begin with a line of JSON; measure ops takes operators or jobs or runs
measure ops other.parquet -o o.jsonl --device cpu -> other.parquet: does not begin with a line of JSON; measure ops takes operators or jobs or runs
measure ops t.jsonl -o o.jsonl --device cpu -> t.jsonl: holds other lines (neither operators nor jobs nor runs); measure ops takes operators
measure ops o_shape.jsonl -o o.jsonl --device cpu -> o_shape.jsonl:1: not an operator that can be replayed: inputs: ['x', 'float32', None] is not
measure ops o_negative.jsonl -o o.jsonl --device cpu -> o_negative.jsonl:1: not an operator that can be replayed: inputs: [[-4, 4], 'float32', None]
measure ops o_dtype.jsonl -o o.jsonl --device cpu -> o_dtype.jsonl:1: not an operator that can be replayed: inputs: [[4], 'float99', None] is not
measure ops o_inputs.jsonl -o o.jsonl --device cpu -> o_inputs.jsonl:1: not an operator that can be replayed: inputs: 3 is not a list
measure ops o_name.jsonl -o o.jsonl --device cpu -> o_name.jsonl:1: not an operator that can be replayed: name: 3 is not a text
measure ops o_args.jsonl -o o.jsonl --device cpu -> o_args.jsonl:1: not an operator that can be replayed: args: 3 is not a table of keys and values
measure ops o_phase.jsonl -o o.jsonl --device cpu -> o_phase.jsonl:1: not an operator that can be replayed: phase: 'sideways' is not one of
measure ops o_strides.jsonl -o o.jsonl --device cpu -> o_strides.jsonl:1: not an operator that can be replayed: inputs: strides 'x' are not 1 whole
measure ops o_uses.jsonl -o o.jsonl --device cpu -> o_uses.jsonl:1: not an operator that can be replayed: uses: 'x' is not a number of at least 0
measure ops o_two.jsonl -o o.jsonl --device cpu -> o_two.jsonl:1: not an operator that can be replayed: inputs: [[4], 'float32'] is not [shape
measure ops ops.jsonl -o folder.jsonl --device cpu -> folder.jsonl: cannot be written (Is a directory)
measure ops ops.jsonl -o empty.json/o.jsonl --device cpu -> empty.json/o.jsonl: cannot be written (File exists)
measure ops ops.jsonl -o runs.jsonl --device cpu -> runs.jsonl:1: operator: not the line of a measured operator, which has a key
measure ops ops.jsonl -o broken.jsonl --device cpu -> broken.jsonl:1: not JSON
measure ops ops.jsonl -o binary.jsonl --device cpu -> binary.jsonl: cannot be read
measure ops ops.jsonl -o o.jsonl --device tpu -> --device: 'tpu' is not one of 'cuda', 'cpu'
measure ops ops.jsonl -o o.jsonl -> device: 'cuda' is not available: torch finds no GPU; use --device cpu
measure ops ops.jsonl -o o.jsonl --device cpu --budget soon -> budget: 'soon' is not a time such as "3h", "1d 12h" or "90 min"
measure ops ops.jsonl -o o.jsonl --device cpu --budget -1s -> budget: '-1s' is not a time such as "3h", "1d 12h" or "90 min"
measure ops ops.jsonl -o o.jsonl --device cpu --budget nan -> budget: 'nan' is not a time such as "3h", "1d 12h" or "90 min"
measure ops job.toml missing.toml -o o.jsonl --collect-only -> missing.toml: cannot be read (No such file or directory)
measure ops runs.jsonl -o folder.jsonl --collect-only -> folder.jsonl: cannot be written (Is a directory)
measure ops run_bad_job.jsonl -o o.jsonl --collect-only -> run_bad_job.jsonl:1: training: missing; a job has the sections model, training and cluster
measure pack -> Missing argument 'FILE'
measure pack measured.jsonl -> Missing option '--out' / '-o'
measure pack missing.jsonl -o p.parquet -> missing.jsonl: no such file
measure pack folder.jsonl -o p.parquet -> folder.jsonl: is a folder, not a file
measure pack empty.jsonl -o p.parquet --device cpu -> operators: the files hold no measured operator
measure pack binary.jsonl -o p.parquet --device cpu -> binary.jsonl: cannot be read as measured operators
measure pack broken.jsonl -o p.parquet --device cpu -> broken.jsonl: cannot be read as measured operators
measure pack deep.jsonl -o p.parquet --device cpu -> deep.jsonl: cannot be read as measured operators (it is nested too deeply)
measure pack runs.jsonl -o p.parquet --device cpu -> runs.jsonl:1: not a measured operator but one of runs
measure pack jobs.jsonl -o p.parquet --device cpu -> jobs.jsonl:1: not a measured operator but one of jobs
measure pack ops.jsonl -o p.parquet --device cpu -> ops.jsonl:1: not a measured operator but one of operators
measure pack t.csv -o p.parquet --device cpu -> t.csv: cannot be read as measured operators
measure pack other.parquet -o p.parquet --device cpu -> other.parquet: cannot be read as measured operators
measure pack m_nan.jsonl -o p.parquet --device cpu -> m_nan.jsonl:1: cold_s: nan is not a finite number of at least 0
measure pack m_inf.jsonl -o p.parquet --device cpu -> m_inf.jsonl:1: warm_s: inf is not a finite number of at least 0
measure pack m_negative.jsonl -o p.parquet --device cpu -> m_negative.jsonl:1: host_s: -1 is not a finite number of at least 0
measure pack m_text.jsonl -o p.parquet --device cpu -> m_text.jsonl:1: cold_s: 'x' is not a finite number of at least 0
measure pack m_null.jsonl -o p.parquet --device cpu -> m_null.jsonl:1: cold_s: None is not a finite number of at least 0
measure pack m_name.jsonl -o p.parquet --device cpu -> m_name.jsonl:1: name: 3 is not a text
measure pack m_inputs.jsonl -o p.parquet --device cpu -> m_inputs.jsonl:1: inputs: 3 is not a list of [shape, dtype, strides]
measure pack m_kernel_names.jsonl -o p.parquet --device cpu -> m_kernel_names.jsonl:1: kernel_names: 3 is not a list of texts
measure pack m_kernel_name.jsonl -o p.parquet --device cpu -> m_kernel_name.jsonl:1: kernel_names: [3] is not a list of texts
measure pack m_args.jsonl -o p.parquet --device cpu -> m_args.jsonl:1: args: [] is not a table of keys and values
measure pack m_flops.jsonl -o p.parquet --device cpu -> m_flops.jsonl:1: flops: 'x' is not a finite number of at least 0
measure pack m_key.jsonl -o p.parquet --device cpu -> m_key.jsonl:1: key: 3 is not a text
measure pack m_key.jsonl measured.jsonl -o p.parquet --device cpu -> m_key.jsonl:1: key: 3 is not a text
measure pack m_device.jsonl -o p.parquet --device cpu -> m_device.jsonl:1: device: 3 is not a text
measure pack m_devices.jsonl -o p.parquet --device cpu -> m_devices.jsonl:1: device: ['x'] is not a text
measure pack m_lacks.jsonl -o p.parquet --device cpu -> m_lacks.jsonl:1: not a measured operator but without host_s
measure pack m.jsonl.gz -o p.parquet --device cpu -> m.jsonl.gz: cannot be read as measured operators
measure pack m_cut.jsonl.gz -o p.parquet --device cpu -> m_cut.jsonl.gz: cannot be read as measured operators
measure pack m_list.jsonl -o p.parquet --device cpu -> m_list.jsonl:1: not a measured operator but one of other lines
measure pack m_failed.jsonl -o p.parquet --device cpu -> operators: the files hold no measured operator
measure pack measured.jsonl -o folder.parquet --device cpu -> folder.parquet: cannot be written (Is a directory)
measure pack measured.jsonl -o empty.json/p.parquet --device cpu -> empty.json/p.parquet: cannot be written (empty.json is not a directory)
measure pack measured.jsonl -o p.parquet -> --device: missing; the files do not say what they were measured on
measure pack measured.jsonl -o p.parquet --device nope -> --device: 'nope' is not one of foretrain catalog devices
measure steps -> Missing argument 'TARGET'
measure steps missing.jsonl -o s.jsonl --device cpu -> missing.jsonl: cannot be read (No such file or directory)
measure steps empty.jsonl -o s.jsonl --device cpu -> empty.jsonl: does not begin with a line of JSON; measure steps takes jobs or runs
measure steps folder.jsonl -o s.jsonl --device cpu -> folder.jsonl: cannot be read (Is a directory)
measure steps ops.jsonl -o s.jsonl --device cpu -> ops.jsonl: holds operators (foretrain measure ops and design --operators take them); measure
measure steps t.csv -o s.jsonl --device cpu -> t.csv: does not begin with a line of JSON; measure steps takes jobs or runs
measure steps jobs.jsonl -o s.jsonl -> device: 'cuda' is not available: torch finds no GPU; use --device cpu
measure steps missing.toml -o s.jsonl --device cpu -> missing.toml: cannot be read (No such file or directory)
measure steps jobs.jsonl -o folder.jsonl --device cpu -> folder.jsonl: cannot be written (Is a directory)
measure steps jobs.jsonl -o ops.jsonl --device cpu -> ops.jsonl:1: run: a run is a table with job and measured (and provenance)
measure steps jobs.jsonl -o s.jsonl --device tpu -> --device: 'tpu' is not one of 'cuda', 'cpu'
measure steps jobs.jsonl -o s.jsonl --device cpu --seconds x -> --seconds: 'x' is not a valid number
measure steps jobs.jsonl -o s.jsonl --device cpu --seconds nan -> --seconds: nan is not a time above 0
measure steps jobs.jsonl -o s.jsonl --device cpu --seconds -1 -> --seconds: -1.0 is not a time above 0
measure steps jobs.jsonl -o s.jsonl --device cpu --budget soon -> budget: 'soon' is not a time such as "3h", "1d 12h" or "90 min"
measure campaign -> Missing option '--out' / '-o'
measure campaign -o c.jsonl -> models: missing; it is required
measure campaign missing.toml -o c.jsonl -> missing.toml: cannot be read (No such file or directory)
measure campaign folder.toml -o c.jsonl -> folder.toml: cannot be read (Is a directory)
measure campaign c_broken.toml -o c.jsonl -> c_broken.toml: not TOML (Invalid value
measure campaign c_key.toml -o c.jsonl -> c_key.toml: colour: 'colour' is not a known key; allowed are batch, batch_per_worker, classes
measure campaign c_models.toml -o c.jsonl -> c_models.toml: models: missing; it is required
measure campaign c_batch.toml -o c.jsonl -> c_batch.toml: batch: give batch (samples per step over all workers) or batch_per_worker, one
measure campaign c_zero.toml -o c.jsonl -> c_zero.toml: batch: 0 is not 1 or more
measure campaign c_text.toml -o c.jsonl -> c_text.toml: batch[0]: 'x' is not a whole number
measure campaign c_grid.toml -o c.jsonl -> c_grid.toml: grid: 3 is not tables [[grid]]
measure campaign c_sync.toml -o c.jsonl -> c_sync.toml: sync[0]: 'magic' is not one of allreduce, ps
measure campaign c_links.toml -o c.jsonl -> c_links.toml: links: 'fast' is not a rate such as "1Gbit" or "100 MB/s"
measure campaign c_model.toml -o c.jsonl -> c_model.toml: models[0]: 3 is not a text or a table
measure campaign missing.jsonl -o c.jsonl -> missing.jsonl: cannot be read (No such file or directory)
measure campaign ops.jsonl -o c.jsonl -> ops.jsonl: holds operators (foretrain measure ops and design --operators take them); measure
measure campaign empty.jsonl -o c.jsonl -> empty.jsonl: does not begin with a line of JSON; measure campaign takes jobs or runs
measure campaign jobs.jsonl -o c.jsonl --workers 2 -> --workers: is for a grid; jobs.jsonl has jobs
measure campaign c_ok.toml -o c.jsonl --on mars -> on: 'mars' is not one of local, ray, torchrun
measure campaign c_ok.toml -o c.jsonl --workers x -> workers: 'x' is not whole numbers with commas between them
measure campaign c_ok.toml -o c.jsonl --workers 0 -> c_ok.toml: workers: 0 is not 1 or more
measure campaign c_ok.toml -o c.jsonl --workers "" -> workers: '' is not names or numbers with commas between them
measure campaign c_ok.toml -o c.jsonl --batch -1 -> c_ok.toml: batch: -1 is not 1 or more
measure campaign c_ok.toml -o c.jsonl --batch-per-worker 2 -> c_ok.toml: batch: give batch (samples per step over all workers) or batch_per_worker, one of
measure campaign c_ok.toml -o c.jsonl --image x -> image: 'x' is not a side length or channels,height,width
measure campaign c_ok.toml -o c.jsonl --image "" -> image: '' is not a side length or channels,height,width
measure campaign c_ok.toml -o c.jsonl --precision fp31 -> training.precision: 'fp31' is not one of amp-bf16, amp-fp16, bf16, fp16, fp32, fp8, tf32
measure campaign c_ok.toml -o c.jsonl --optimizer nope -> training.optimizer: 'nope' is not one of adadelta, adafactor, adagrad, adam, adam-fused
measure campaign c_ok.toml -o c.jsonl --device nope -> device: 'nope' is not one of foretrain catalog devices
measure campaign c_ok.toml -o c.jsonl --device h100 -> device: 'h100-sxm-80gb' needs an NVIDIA GPU, and there is none here
measure campaign c_ok.toml -o c.jsonl --address x:1 -> address: 'x:1' is for --on ray, not for --on local
measure campaign c_ok.toml -o c.jsonl --on torchrun --ray -> --ray stands for --on ray and its --address; give one or the other
measure campaign c_ok.toml -o c.jsonl --seconds x -> --seconds: 'x' is not a valid number
measure campaign c_ok.toml -o c.jsonl --seconds nan -> seconds: nan is not a time of 0 or more
measure campaign c_ok.toml -o c.jsonl --seconds -1 -> seconds: -1.0 is not a time of 0 or more
measure campaign c_ok.toml -o c.jsonl --period 0s -> period: 0.0 is not a time greater than zero
measure campaign c_ok.toml -o c.jsonl --period x -> period: 'x' is not a time such as "3h", "1d 12h" or "90 min"
measure campaign c_ok.toml -o c.jsonl --threshold 2 -> threshold: 2.0 is not a share of the maximum, from 0 to less than 1
measure campaign c_ok.toml -o c.jsonl --threshold nan -> threshold: nan is not a share of the maximum, from 0 to less than 1
measure campaign c_ok.toml -o c.jsonl --timeout x -> timeout: 'x' is not a time such as "3h", "1d 12h" or "90 min"
measure campaign c_ok.toml -o c.jsonl --timeout 0s -> timeout: '0s' is not a time above 0
measure campaign c_ok.toml -o c.jsonl --epoch-limit x -> epoch-limit: 'x' is not a time such as "3h", "1d 12h" or "90 min"
measure campaign c_ok.toml -o c.jsonl --budget x -> budget: 'x' is not a time such as "3h", "1d 12h" or "90 min"
measure campaign c_ok.toml -o folder.jsonl -> folder.jsonl: cannot be written (Is a directory)
measure campaign c_ok.toml -o empty.json/c.jsonl -> empty.json/c.jsonl: cannot be written (File exists)
measure campaign c_ok.toml -o ops.jsonl -> ops.jsonl:1: one of operators, not a run; give another --out
measure fly -> No such command 'fly'
runs list --store missing.jsonl -> missing.jsonl: cannot be read (No such file or directory)
runs list --store folder.jsonl -> folder.jsonl: cannot be read (Is a directory)
runs list --store binary.jsonl -> binary.jsonl:1: not JSON
runs list --store broken.jsonl -> broken.jsonl:1: not JSON
runs list --store run_nan.jsonl -> run_nan.jsonl:1: measured.step_time_s: nan is not a finite number above zero
runs list --store jobs.jsonl -> jobs.jsonl:1: run: a run is a table with job and measured (and provenance)
runs list --store folder.db -> folder.db: unable to open database file
runs list --store job.toml -> job.toml:1: not JSON
runs list --store nope://x -> store: 'nope://x' is not a URL such as sqlite:///runs.db or postgresql+psycopg://user@host/name
runs list --store mysql://x/y -> store: 'mysql://x/y' is not a URL such as sqlite:///runs.db or
runs list --store "sqlite:///folder/" -> sqlite:///folder/: there is no such file; `foretrain runs import` makes it
runs list --store runs.jsonl --limit 0 -> --limit: '0' is not greater than or equal to 1
runs list --store runs.jsonl --limit x -> --limit: 'x' is not a valid integer
runs list --store runs.jsonl --quantity nope -> --quantity: 'nope' is not one of 33 known names
runs show -> Missing argument 'ID'
runs show zzz --store runs.jsonl -> id: 'zzz' is not the start of an id (digits and the letters a to f), as `foretrain runs list`
runs show "" --store runs.jsonl -> id: '' is not the start of an id (digits and the letters a to f), as `foretrain runs list`
runs show abc --store runs.jsonl -> id: no run in runs.jsonl has an id that starts with 'abc'
runs show abc --store missing.jsonl -> missing.jsonl: cannot be read (No such file or directory)
runs import -> Missing argument 'RUNS.jsonl'
runs import missing.jsonl --store a.db -> missing.jsonl: cannot be read (No such file or directory)
runs import runs.jsonl --store a.jsonl -> --store: 'a.jsonl' is not a database; name a URL such as sqlite:///runs.db, or a .db file
runs import runs.jsonl --store folder.db -> folder.db: unable to open database file
runs import runs.jsonl --store job.toml -> --store: 'job.toml' is not a database; name a URL such as sqlite:///runs.db, or a .db file
runs import folder.jsonl --store a.db -> folder.jsonl: cannot be read (Is a directory)
runs import a.db --store b.db -> a.db: it is a database; `foretrain runs export --store a.db -o runs.jsonl` makes it a file of
runs import binary.jsonl --store a.db --strict -> binary.jsonl:1: not JSON
runs import run_nan.jsonl --store a.db --strict -> run_nan.jsonl:1: measured.step_time_s: nan is not a finite number above zero
runs import broken.jsonl --store empty.jsonl -> --store: 'empty.jsonl' is not a database; name a URL such as sqlite:///runs.db, or a .db file
runs export --store runs.jsonl -> Missing option '--out' / '-o'
runs export --store runs.jsonl -o folder.jsonl -> folder.jsonl: cannot be written (Is a directory)
runs export --store runs.jsonl -o empty.json/x.jsonl -> empty.json/x.jsonl: cannot be written (File exists)
runs export --store missing.jsonl -o x.jsonl -> missing.jsonl: cannot be read (No such file or directory)
runs export --store runs.jsonl -o x.jsonl --quantity nope -> --quantity: 'nope' is not one of 33 known names
runs fly -> No such command 'fly'
schedule -> Missing option '--cluster'
schedule trace.csv -> Missing option '--cluster'
schedule trace.csv --generate jobs=3 --cluster 2x4xv100 -> give a TRACE or --generate (and only one of them)
schedule missing.csv --cluster 2x4xv100 -> missing.csv: cannot be read (No such file or directory)
schedule folder.csv --cluster 2x4xv100 -> folder.csv: cannot be read (Is a directory)
schedule empty.csv --cluster 2x4xv100 -> empty.csv: empty
schedule binary.csv --cluster 2x4xv100 -> binary.csv: cannot be read
schedule trace_unknown.csv --cluster 2x4xv100 -> trace_unknown.csv: not a trace of a known format (own, philly, helios, alibaba-2023
schedule trace_head.csv --cluster 2x4xv100 -> trace_head.csv: holds no jobs in the format own
schedule trace_text.csv --cluster 2x4xv100 -> trace_text.csv: holds no jobs in the format own (1 line left out: arrival_s is not a number (first in
schedule trace_negative.csv --cluster 2x4xv100 -> trace_negative.csv: holds no jobs in the format own (1 line left out: gpus is not a whole number of at
schedule trace_infinite.csv --cluster 2x4xv100 -> trace_infinite.csv: holds no jobs in the format own (1 line left out: duration_s is not a number (first
schedule trace.csv --cluster 2x4xv100 --format nope -> format: 'nope' is not one of alibaba-2020, alibaba-2023, alibaba-2025, gavel, helios, kubernetes, own
schedule trace.csv --cluster 2x4xv100 --format philly -> trace.csv: holds no jobs in the format philly (2 lines left out: timestamp is not a time (first in line
schedule trace.csv --cluster 2x4xv100 --format gavel -> trace.csv: holds no jobs in the format gavel (3 lines left out: neither seven nor ten fields (first in
schedule trace.csv --cluster 2x4xv100 --format swf -> trace.csv: holds no jobs in the format swf (3 lines left out: a field is not a number (first in line 1))
schedule trace.csv --cluster 2x4 -> cluster: '2x4' is not a TOML file with [cluster], a CSV file of nodes (gpu, model)
schedule trace.csv --cluster 0x4xv100 -> cluster: '0x4xv100' is not at least one node with at least one GPU
schedule trace.csv --cluster 2x4xnope -> cluster: 'nope' is not one of foretrain catalog devices
schedule trace.csv --cluster "" -> cluster: '' is not a TOML file with [cluster], a CSV file of nodes (gpu, model), "64x8xv100"
schedule trace.csv --cluster missing.toml -> missing.toml: cannot be read (No such file or directory)
schedule trace.csv --cluster folder.toml -> folder.toml: cannot be read (Is a directory)
schedule trace.csv --cluster broken.toml -> broken.toml: not TOML (Expected ']' at the end of a table declaration
schedule trace.csv --cluster binary.toml -> binary.toml: cannot be read
schedule trace.csv --cluster cluster_device.toml -> cluster_device.toml: cluster.device: 'nope' is not one of foretrain catalog devices, which has
schedule trace.csv --cluster cluster_nodes.toml -> cluster_nodes.toml: cluster.nodes: 0 is not a whole number of at least 1
schedule trace.csv --cluster empty.toml -> empty.toml: cluster.device: missing; name a device or a node of the catalogue
schedule trace.csv --cluster nodes_text.csv -> nodes_text.csv: line 2: not a node; needed are gpu (a number) and model
schedule trace.csv --cluster nodes_none.csv -> nodes_none.csv: lists no nodes with GPUs
schedule trace.csv --cluster nodes_columns.csv -> nodes_columns.csv: line 2: not a node; needed are gpu (a number) and model
schedule trace.csv --cluster empty.csv -> empty.csv: lists no nodes with GPUs
schedule trace.csv --cluster binary.csv -> binary.csv: cannot be read
schedule trace.csv --cluster missing.csv -> missing.csv: cannot be read (No such file or directory)
schedule trace.csv --cluster 2x4xv100 --policy nope -> policy: 'nope' is not a class as file.py:Class or one of afs, allox_perf, backfill, conservative, edf, fifo
schedule trace.csv --cluster 2x4xv100 --policy "" -> policy: '' is not a class as file.py:Class or one of afs, allox_perf, backfill, conservative, edf, fifo
schedule trace.csv --cluster 2x4xv100 --policy missing.py:P -> policy missing.py:P: there is no file missing.py
schedule trace.csv --cluster 2x4xv100 --policy policy.py:P -> policy policy.py:P: P is not a foretrain.scheduling.policies.Policy
schedule trace.csv --cluster 2x4xv100 --policy policy.py:Q -> policy policy.py:Q: cannot be loaded (AttributeError: module 'foretrain_policy_policy' has no
schedule trace.csv --cluster 2x4xv100 --policy policy_syntax.py:P -> policy policy_syntax.py:P: cannot be loaded (SyntaxError: '(' was never closed
schedule trace.csv --cluster 2x4xv100 --policy policy_exit.py:P -> policy policy_exit.py:P: cannot be loaded (SystemExit: SystemExit)
schedule trace.csv --cluster 2x4xv100 --first 0 -> first: 0 is not a whole number of at least 1
schedule trace.csv --cluster 2x4xv100 --placement nope -> placement: 'nope' is not one of packed, random, spread, topology
schedule trace.csv --cluster 2x4xv100 --rack 0 -> rack: 0 is not a whole number of at least 1
schedule trace.csv --cluster 2x4xv100 --throughputs missing.json -> missing.json: cannot be read (No such file or directory)
schedule trace.csv --cluster 2x4xv100 --throughputs speeds_list.json -> speeds_list.json: not a table of throughputs by device, (job type, GPUs) and partner ('list'
schedule trace.csv --cluster 2x4xv100 --throughputs speeds_text.json -> speeds_text.json: not a table of throughputs by device, (job type, GPUs) and partner
schedule trace.csv --cluster 2x4xv100 --throughputs broken.json -> broken.json: not a table of throughputs by device, (job type, GPUs) and partner
schedule trace.csv --cluster 2x4xv100 --predictor deletepop -> predictor: needs templates, a folder with a job file for each job type (and templates need a
schedule trace.csv --cluster 2x4xv100 --slowdown-per-node -1 -> slowdown_per_node: -1.0 is not a number of at least 0
schedule trace.csv --cluster 2x4xv100 --slowdown-per-node nan -> slowdown_per_node: nan is not a number of at least 0
schedule trace.csv --cluster 2x4xv100 --slowdown-per-node x -> --slowdown-per-node: 'x' is not a valid number
schedule trace.csv --cluster 2x4xv100 --rounds x -> --rounds: 'x' is not a time such as "3h", "1d 12h" or "90 min"
schedule trace.csv --cluster 2x4xv100 --rounds -1s -> --rounds: '-1s' is not a time such as "3h", "1d 12h" or "90 min"
schedule trace.csv --cluster 2x4xv100 --errors x -> --errors: 'x' is not a list of fractions such as 0,0.1,0.5
schedule trace.csv --cluster 2x4xv100 --errors -1 -> --errors: '-1' is not a list of fractions such as 0,0.1,0.5
schedule trace.csv --cluster 2x4xv100 --errors nan -> --errors: 'nan' is not a list of fractions such as 0,0.1,0.5
schedule trace.csv --cluster 2x4xv100 --residuals missing.json -> missing.json: cannot be read (No such file or directory)
schedule trace.csv --cluster 2x4xv100 --residuals errors_empty.json -> errors_empty.json: not a result of foretrain evaluate --json (KeyError: 'runs')
schedule trace.csv --cluster 2x4xv100 --residuals errors_zero.json -> errors_zero.json: not a result of foretrain evaluate --json (ZeroDivisionError: float division
schedule trace.csv --cluster 2x4xv100 --residuals errors_none.json -> errors_none.json: holds no predicted step_time_s or total_time_s
schedule trace.csv --cluster 2x4xv100 --residuals errors_number.json -> errors_number.json: not a result of foretrain evaluate --json (TypeError: 'int' object is not
schedule trace.csv --cluster 2x4xv100 --residuals broken.json -> broken.json: not a result of foretrain evaluate --json (JSONDecodeError: Expecting value: line
schedule trace.csv --cluster 2x4xv100 --checkpoint x -> --checkpoint: 'x' is not a time such as "3h", "1d 12h" or "90 min"
schedule trace.csv --cluster 2x4xv100 --restart x -> --restart: 'x' is not a time such as "3h", "1d 12h" or "90 min"
schedule trace.csv --cluster 2x4xv100 --checkpoint-every 0 -> settings.checkpoint_every_s: 0.0 is not a time above 0
schedule trace.csv --cluster 2x4xv100 --checkpoint-every x -> --checkpoint-every: 'x' is not a time such as "3h", "1d 12h" or "90 min"
schedule trace.csv --cluster 2x4xv100 --job-mtbf 0 -> failures.job_mtbf_gpu_s: 0.0 is not a number greater than zero
schedule trace.csv --cluster 2x4xv100 --job-mtbf 1s -> job_mtbf: 1 s is too short: in the 1 min 40 s between two checkpoints job 'a' on 1 GPU fails
schedule trace.csv --cluster 2x4xv100 --job-mtbf x -> --job-mtbf: 'x' is not a time such as "3h", "1d 12h" or "90 min"
schedule trace.csv --cluster 2x4xv100 --node-mtbf 0 -> failures.node_mtbf_s: 0.0 is not a number greater than zero
schedule trace.csv --cluster 2x4xv100 --node-mtbf 1s -> node_mtbf: 1 s is too short: in the 1 min 40 s between two checkpoints job 'a' on 1 GPU fails
schedule trace.csv --cluster 2x4xv100 --node-mtbf x -> --node-mtbf: 'x' is not a time such as "3h", "1d 12h" or "90 min"
schedule trace.csv --cluster 2x4xv100 --repair 0 -> failures.repair_s: 0.0 is not a number greater than zero
schedule trace.csv --cluster 2x4xv100 --repair x -> --repair: 'x' is not a time such as "3h", "1d 12h" or "90 min"
schedule trace.csv --cluster 2x4xv100 --outages missing.csv -> missing.csv: cannot be read (No such file or directory)
schedule trace.csv --cluster 2x4xv100 --outages outages_text.csv -> outages_text.csv:2: not an outage with time_s, node and repair_s
schedule trace.csv --cluster 2x4xv100 --outages outages_column.csv -> outages_column.csv: has no column repair_s; an outage has time_s, node and repair_s
schedule trace.csv --cluster 2x4xv100 --outages outages_negative.csv -> outages_negative.csv:2: outage: (-1.0, 0, 5.0) is not one: time_s and node must be at least 0 and repair_s above 0, all of them
schedule trace.csv --cluster 2x4xv100 --outages outages_infinite.csv -> outages_infinite.csv:2: outage: (1.0, 0, inf) is not one: time_s and node must be at least 0 and repair_s above 0, all of them
schedule trace.csv --cluster 2x4xv100 --seeds 0 -> seeds: 0 is not a whole number of at least 1
schedule trace.csv --cluster 2x4xv100 --seeds x -> --seeds: 'x' is not a valid integer
schedule trace.csv --cluster 2x4xv100 --processes 0 -> processes: 0 is not a whole number of at least 1
schedule trace.csv --cluster 2x4xv100 --log x.txt -> --log: 'x.txt' is not a file that ends in one of .csv, .parquet
schedule --generate jobs=x --cluster 2x4xv100 -> generate.jobs: 'x' is not a number
schedule --generate jobs=3,jobs=4 --cluster 2x4xv100 -> generate.jobs: '4' is a second value; give one
schedule --generate jobs=0 --cluster 2x4xv100 -> generate.jobs: 0 is not above zero
schedule --generate colour=3 --cluster 2x4xv100 -> generate: 'colour=3' is not one of jobs, gap, median, spread, groups, elastic, seed = a value
schedule --generate jobs=3,gap=x --cluster 2x4xv100 -> generate.gap: 'x' is not a time such as "3h", "1d 12h" or "90 min"
schedule --generate jobs=3,spread=-1 --cluster 2x4xv100 -> generate.spread: -1.0 is not a number from 0 to 10
schedule --generate jobs=3,elastic=2 --cluster 2x4xv100 -> generate.elastic: 2.0 is not a share from 0 to 1
schedule --generate jobs=3,spread=nan --cluster 2x4xv100 -> generate.spread: nan is not a number from 0 to 10
schedule --generate jobs=3,gap=0s --cluster 2x4xv100 -> generate.gap_s: 0.0 is not above zero
schedule --generate jobs --cluster 2x4xv100 -> generate.jobs: '' is not a number
schedule --generate jobs=3,spread=inf --cluster 2x4xv100 -> generate.spread: inf is not a number from 0 to 10
schedule --generate jobs=3,spread=1000 --cluster 2x4xv100 -> generate.spread: 1000.0 is not a number from 0 to 10
fly -> No such command 'fly'
--colour -> No such option: --colour
predict job.json --predictor s_driple -> s_driple: not a driple of this version (it has no 'columns'); fit it again
predict job.json --predictor s_scaledl -> s_scaledl: not a scaledl of this version (it has no 'node_columns'); fit it again
predict job.json --predictor s_predictddl -> s_predictddl: the features are others than this version computes; fit it again
schedule trace.csv --cluster 2x4xv100 --policy fifo --log folder.csv -> folder.csv: cannot be written (Is a directory)
schedule trace.csv --cluster 2x4xv100 --policy fifo --log folder.parquet -> folder.parquet: cannot be written (Is a directory)
schedule trace.csv --cluster 2x4xv100 --policy fifo --trace folder.json -> folder.json: cannot be written (Is a directory)
schedule trace.csv --cluster 2x4xv100 --html folder.html -> folder.html: cannot be written (Is a directory)
schedule trace.csv --cluster 2x4xv100 --outages outages_nan.csv -> outages_nan.csv:2: outage: (nan, 0, 5.0) is not one: time_s and node must be at least 0 and repair_s above 0, all of them finite
schedule trace.csv --cluster 2x4xv100 --predictor roofline --templates missing --processes 1 -> templates: missing holds no job files (*.toml)
schedule trace.csv --cluster 2x4xv100 --predictor nope --templates templates --processes 1 -> templates: templates holds no job files (*.toml)
predict graph.json.zst --devices 3 --batch 4 -> training.global_batch: 4 does not divide over plan.data = 3
predict graph.json.zst --device cpu -> cluster.cores_per_device: missing; device 'cpu' needs a whole number of at least 1
evaluate runs.jsonl empty.jsonl -> empty.jsonl: empty; a runs file has one run per line
evaluate runs.jsonl --predictor cut_deletepop -> cut_deletepop/operators.safetensors: cannot be read as fitted operator models
advise cpu_runs.jsonl --deadline 1h --predictor deletepop --workers 1.5x -> workers: '1.5x' is not whole numbers with commas between them
fit ernest cpu_runs.jsonl -o empty.json -> empty.json: cannot be written (empty.json is not a directory)
fit ernest cpu_runs.jsonl -o empty.json/out -> empty.json/out: cannot be written (empty.json is not a directory)
measure steps jobs.jsonl -o s.jsonl --device cpu --seconds 0 -> --seconds: 0.0 is not a time above 0
measure steps jobs.jsonl -o s.jsonl --device cpu --seconds inf -> --seconds: inf is not a time above 0
measure pack empty.parquet -o p.parquet --device cpu -> operators: the files hold no measured operator
design ops.jsonl --count 5 --operators -> count: 5 is not between 1 and the 1 candidates
"""
_IMPORTS = "import sys\n\nimport torch\nfrom torch import nn\n\n"
_X = "(torch.randn(batch, 8),)"


def _returning(value: str) -> str:
    return f"def build(batch):\n    return {value}\n"


def _module(forward: str, decorator: str = "") -> str:
    return (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"        self.a = nn.Linear(8, 4)\n{decorator}    def forward(self, x):\n        {forward}\n\n"
        f"{_returning(f'Net(), {_X}')}"
    )


MODELS = {
    # what runs when the file is read
    "syntax": "def build(batch:\n    pass\n",
    "indent": "def build(batch):\nreturn 1\n",
    "raises": "raise RuntimeError('on import')\n" + _returning("3"),
    "imports": "import not_there\n" + _returning("3"),
    "exits": "sys.exit(3)\n" + _returning("3"),
    "exits_quietly": "raise SystemExit\n" + _returning("3"),
    "asks": "name = input('name? ')\n" + _returning("3"),
    "recurses": "def f():\n    return f()\n\n\nf()\n" + _returning("3"),
    # what the function returns
    "none": _returning("None"),
    "number": _returning("3"),
    "text": _returning("'net'"),
    "table": _returning("{'model': nn.Linear(8, 4)}"),
    "listed": _returning(f"[nn.Linear(8, 4), {_X}]"),
    "two": _returning("nn.Linear(8, 4), nn.Linear(8, 4)"),
    "three": _returning("nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 4)"),
    "four": _returning(f"nn.Linear(8, 4), {_X}, None, None"),
    "nothing": _returning("()"),
    "class": _returning("nn.Linear"),
    "tensor": _returning("torch.randn(batch)"),
    "generator": "def build(batch):\n    yield nn.Linear(8, 4)\n",
    "coroutine": "async def build(batch):\n    return nn.Linear(8, 4)\n",
    "value": "build = 3\n",
    "in_int": _returning("nn.Linear(8, 4), 3"),
    "in_float": _returning("nn.Linear(8, 4), 3.5"),
    "in_text": _returning("nn.Linear(8, 4), 'x'"),
    "in_none": _returning("nn.Linear(8, 4), None"),
    "in_empty": _returning("nn.Linear(8, 4), ()"),
    "in_fixed": _returning("nn.Linear(8, 4), (torch.randn(7, 8),)"),
    "in_wide": _returning("nn.Linear(8, 4), (torch.randn(batch, 9),)"),
    "in_many": _returning("nn.Linear(8, 4), (torch.randn(batch, 8), torch.randn(batch, 8))"),
    "in_named": _returning("nn.Linear(8, 4), {'nope': torch.randn(batch, 8)}"),
    "in_module": _returning("nn.Linear(8, 4), (nn.Linear(8, 4),)"),
    "loss_int": _returning(f"nn.Linear(8, 4), {_X}, 3"),
    "loss_text": _returning(f"nn.Linear(8, 4), {_X}, 'mse'"),
    "loss_vector": _returning(f"nn.Linear(8, 4), {_X}, lambda y: y.sum(1)"),
    "loss_none": _returning(f"nn.Linear(8, 4), {_X}, lambda y: None"),
    "loss_float": _returning(f"nn.Linear(8, 4), {_X}, lambda y: 3.0"),
    "loss_detached": _returning(f"nn.Linear(8, 4), {_X}, lambda y: y.detach().sum()"),
    "loss_raises": _returning(f"nn.Linear(8, 4), {_X}, lambda y: 1 / 0"),
    "loss_takes": _returning(f"nn.Linear(8, 4), {_X}, lambda a, b, c: a"),
    "loss_index": _returning(f"nn.Linear(8, 4), {_X}, lambda y: y.argmax()"),
    # what the module is
    "no_weights": _returning(f"nn.ReLU(), {_X}"),
    "frozen": f"def build(batch):\n    return nn.Linear(8, 4).requires_grad_(False), {_X}\n",
    "no_grad": _module("return self.a(x)", "    @torch.no_grad()\n"),
    "forward_raises": _module("raise RuntimeError('no forward')"),
    "forward_none": _module("self.a(x)"),
    "forward_text": _module("return 'y'"),
    "forward_exits": _module("sys.exit(4)"),
    "forward_recurses": _module("return self.forward(x)"),
    "forward_typo": _module("return self.b(x)"),
    "no_forward": "class Net(nn.Module):\n    pass\n\n\n" + _returning(f"Net(), {_X}"),
    "layers": _returning(f"nn.Sequential(nn.Linear(8, 4), nn.Linear(5, 2)), {_X}"),
    "no_super": "class Net(nn.Module):\n    def __init__(self):\n        self.a = nn.Linear(8, 4)\n\n\n"
    + _returning(f"Net(), {_X}"),
    # what the function does
    "fails": "def build(batch):\n    raise ValueError('bad width')\n",
    "fails_at_length": "def build(batch):\n    raise ValueError('first\\nsecond\\nthird')\n",
    "fails_silently": "def build(batch):\n    raise ValueError\n",
    "asserts": "def build(batch):\n    assert batch == 3\n",
    "leaves": "def build(batch):\n    sys.exit(5)\n",
    "reads": "def build(batch):\n    return input()\n",
    "calls_itself": "def build(batch):\n    return build(batch)\n",
    "needs": "class Net(nn.Module):\n    def __init__(self, width):\n        super().__init__()\n",
    "other": "class Net:\n    pass\n",
    "noisy": "import warnings\n\nwarnings.warn('noise')\nprint('noise')\n\n\ndef build(batch):\n"
    "    warnings.warn('more')\n    print('more')\n    return 3\n",
    "fine": _returning(f"nn.Linear(8, 4), {_X}"),
}

MODEL_ROWS = r"""
syntax.py:build -> model syntax.py: SyntaxError: '(' was never closed (line 6)
indent.py:build -> model indent.py: SyntaxError: expected an indented block after function definition on line 6
raises.py:build -> model raises.py: RuntimeError: on import
imports.py:build -> model imports.py: No module named 'not_there'
exits.py:build -> model exits.py: it calls sys.exit(3)
exits_quietly.py:build -> model exits_quietly.py: it calls sys.exit()
asks.py:build -> model asks.py: EOFError: EOF when reading a line
recurses.py:build -> model recurses.py: RecursionError: maximum recursion depth exceeded
none.py:build -> model none.py:build: returned NoneType; a module, (module, inputs) or (module, inputs, loss)
number.py:build -> model number.py:build: returned int; a module, (module, inputs) or (module, inputs, loss) is
text.py:build -> model text.py:build: returned str; a module, (module, inputs) or (module, inputs, loss) is
table.py:build -> model table.py:build: returned dict; a module, (module, inputs) or (module, inputs, loss) is
listed.py:build -> model listed.py:build: returned list; a module, (module, inputs) or (module, inputs, loss) is
two.py:build -> model two.py:build: returned inputs of type Linear; a tensor, a tuple or a dict of tensors is
three.py:build -> model three.py:build: returned inputs of type Linear; a tensor, a tuple or a dict of tensors
four.py:build -> model four.py:build: returned tuple; a module, (module, inputs) or (module, inputs, loss) is
nothing.py:build -> model nothing.py:build: returned tuple; a module, (module, inputs) or (module, inputs, loss)
class.py:build -> model class.py:build: returned type; a module, (module, inputs) or (module, inputs, loss) is
tensor.py:build -> model tensor.py:build: returned Tensor; a module, (module, inputs) or (module, inputs, loss)
generator.py:build -> model generator.py:build: returned generator; a module, (module, inputs) or (module, inputs
coroutine.py:build -> model coroutine.py:build: returned coroutine; a module, (module, inputs) or (module, inputs
in_int.py:build -> model in_int.py:build: returned inputs of type int; a tensor, a tuple or a dict of tensors is
in_float.py:build -> model in_float.py:build: returned inputs of type float; a tensor, a tuple or a dict of tensors
in_text.py:build -> model in_text.py:build: returned inputs of type str; a tensor, a tuple or a dict of tensors is
in_none.py:build -> training.image: missing; the model function returned no inputs, so give training.image or
in_empty.py:build -> module (the model itself): TypeError: Linear.forward() missing 1 required positional argument:
in_fixed.py:build -> training.global_batch: model in_fixed.py:build returns inputs of shape [7, 8] whatever the
in_wide.py:build -> module (the model itself): RuntimeError: a and b must have same reduction dim, but got [32, 9]
in_many.py:build -> module (the model itself): TypeError: Linear.forward() takes 2 positional arguments but 3 were
in_named.py:build -> module (the model itself): TypeError: Linear.forward() got an unexpected keyword argument
in_module.py:build -> module (the model itself): TypeError: linear(): argument 'input' (position 1) must be Tensor
loss_int.py:build -> model loss_int.py:build: returned a loss of type int; a function of the module's output is
loss_text.py:build -> model loss_text.py:build: returned a loss of type str; a function of the module's output is
loss_vector.py:build -> loss: it gives a tensor of shape [32]; one number is allowed
loss_none.py:build -> loss: missing; the model's output has no .loss and no loss was given
loss_float.py:build -> loss: it gives float; a tensor of one number is allowed
loss_detached.py:build -> loss: it does not depend on any weight that is trained, so there is no gradient
loss_raises.py:build -> module (the model itself): ZeroDivisionError: division by zero
loss_takes.py:build -> model loss_takes.py:build: its loss is called with the module's output alone
loss_index.py:build -> loss: it does not depend on any weight that is trained, so there is no gradient
no_weights.py:build -> model: it has no trainable parameter; use training.mode = 'infer'
frozen.py:build -> model: it has no trainable parameter; use training.mode = 'infer'
no_grad.py:build -> loss: it does not depend on any weight that is trained, so there is no gradient
forward_raises.py:build -> module (the model itself): RuntimeError: no forward
forward_none.py:build -> loss: an output of type NoneType has no default loss; let the function return (module, inputs
forward_text.py:build -> loss: an output of type str has no default loss; let the function return (module, inputs, loss)
forward_exits.py:build -> module (the model itself): it calls sys.exit(4)
forward_recurses.py:build -> module (the model itself): RecursionError: maximum recursion depth exceeded
forward_typo.py:build -> module (the model itself): AttributeError: 'Net' object has no attribute 'b'
no_forward.py:build -> model: it has no trainable parameter; use training.mode = 'infer'
layers.py:build -> module 1: RuntimeError: a and b must have same reduction dim, but got [32, 4] X [5, 2].
no_super.py:build -> model no_super.py:build: AttributeError: cannot assign module before Module.__init__() call
fails.py:build -> model fails.py:build: ValueError: bad width
fails_at_length.py:build -> model fails_at_length.py:build: ValueError: first
fails_silently.py:build -> model fails_silently.py:build: ValueError: ValueError
asserts.py:build -> model asserts.py:build: AssertionError: AssertionError
leaves.py:build -> model leaves.py:build: it calls sys.exit(5)
reads.py:build -> model reads.py:build: EOFError: EOF when reading a line
calls_itself.py:build -> model calls_itself.py:build: RecursionError: maximum recursion depth exceeded
needs.py:Net -> model.args.width: missing; the class Net needs width
other.py:Net -> model other.py:Net: the class is no torch.nn.Module; name one, or a function that takes batch
noisy.py:build -> model noisy.py:build: returned int; a module, (module, inputs) or (module, inputs, loss) is
fine.py:biuld -> model.name: 'biuld' is not a name of fine.py; it has build
missing.py:build -> model.name: 'missing.py' cannot be read: there is no such file
folder.py:build -> model.name: 'folder.py' cannot be read: it is a folder
fine.py:build --image 32 -> training.image: [3, 32, 32] is not what model fine.py:build is given: inputs of [32, 8]
fine.py:build --sequence 32 -> training.sequence: 32 is not what model fine.py:build is given: inputs of [32, 8]
fine.py:build --classes 33 -> training.classes: 33 is not what model fine.py:build has: no weight is 33 wide
fine.py:build --batch 0 -> training.global_batch: 0 is not a number greater than zero
fine.py:build --source graph -> fine.py:build: cannot be read (No such file or directory)
empty.onnx -> empty.onnx: holds no ONNX graph
cut.onnx -> cut.onnx: cannot be read as an ONNX file: Error parsing message with type 'onnx.ModelProto':
missing.onnx -> model.name: 'missing.onnx' cannot be read: there is no such file
folder.onnx -> model.name: 'folder.onnx' cannot be read: it is a folder
"""
PYTHON_ROWS = r"""
foretrain.predict("graph.json.zst", batch=float("nan")) -> training.global_batch: nan is not
foretrain.predict("graph.json.zst", predictor=3) -> predictor: an int is not a predictor, its name, or the path of one
foretrain.predict("graph.json.zst", catalog=3) -> catalog: an int is not a catalogue, or the path of one
Job.load("missing.toml") -> missing.toml: cannot be read (No such file or directory)
foretrain.predict("graph.json.zst", batch=0) -> training.global_batch: 0 is not a number greater than zero
foretrain.predict("graph.json.zst", device="nope") -> cluster.device: 'nope' is not one of foretrain catalog devices
foretrain.predict("graph.json.zst", predictor="nope") -> predictor: 'nope' is not one of cherrypick, deletepop, driple, ernest, flops, joined, predictddl
foretrain.predict("graph.json.zst", predictor="s_broken") -> s_broken/predictor.json: not JSON
foretrain.predict("graph.json.zst", devices=-1) -> devices: -1 is not a whole number of at least 1
foretrain.predict("graph.json.zst", nodes=0) -> cluster.nodes: 0 is not a whole number of at least 1
foretrain.predict("missing.json.zst") -> model.name: 'missing.json.zst' cannot be read: there is no such file
Job.load(Path("missing.toml")) -> missing.toml: cannot be read (No such file or directory)
Job.load(Path("folder.json")) -> folder.json: cannot be read (Is a directory)
Job.load(Path("deep.json")) -> deep.json: not JSON (it is nested too deeply)
Job.read(3) -> job: 3 is not a table with model, training and cluster
Job.read({"model": 3}) -> training: missing; a job has the sections model, training and cluster (and plan)
predictors.get("nope") -> predictor: 'nope' is not one of cherrypick, deletepop, driple, ernest, flops, joined, predictddl
predictors.get("s_version") -> s_version/predictor.json: format 'foretrain-predictor/9' is not 'foretrain-predictor/1'; fit
predictors.get(Path("s_nothing")) -> predictor: the folder s_nothing has no predictor.json; foretrain fit makes one
predictors.get("p_syntax.py:P") -> predictor p_syntax.py:P: cannot be loaded (SyntaxError: invalid syntax (p_syntax.py, line 1))
foretrain.graph.OpGraph.load(Path("missing.json.zst")) -> missing.json.zst: cannot be read (No such file or directory)
foretrain.graph.OpGraph.load(Path("g_cut.json.zst")) -> g_cut.json.zst: not a foretrain graph file
foretrain.graph.OpGraph.load(Path("g_old.json.zst")) -> g_old.json.zst: format 'foretrain-graph/0' is not 'foretrain-graph/1'; capture the model again
foretrain.catalog.Catalog.load(Path("cat_broken.toml")) -> cat_broken.toml: not TOML
foretrain.catalog.Catalog.load().device("nope") -> cluster.device: 'nope' is not one of foretrain catalog devices
foretrain.units.parse_seconds("soon", "deadline") -> deadline: 'soon' is not a time such as "3h", "1d 12h" or "90 min"
foretrain.units.parse_bytes("lots", "memory") -> memory: 'lots' is not a size such as "80 GiB" or "25 MB"
foretrain.units.parse_rate("400", "bandwidth") -> bandwidth: '400' is not a rate such as "900 GB/s" or "400 Gb/s"
foretrain.units.parse_rate(400, "bandwidth") -> bandwidth: 400 is not a rate with its unit, such as "400 Gb/s", or bytes per second of at
foretrain.units.parse_price("cheap", "price") -> price: 'cheap' is not a price per hour such as "$4.10/h"
foretrain.evaluate.evaluate([]) -> runs: no file given; name at least one
foretrain.evaluate.evaluate([Path("missing.jsonl")]) -> missing.jsonl: cannot be read (No such file or directory)
foretrain.evaluate.evaluate([Path("runs.jsonl")], split="nope") -> split: 'nope' is not one of extrapolate, extrapolate:batch, extrapolate:cores
foretrain.callbacks.Recorder("a.jsonl", job="missing.toml") -> missing.toml: cannot be read (No such file or directory)
foretrain.callbacks.Recorder("a.jsonl", job={"model": 3}) -> job.model: 3 is not a table of keys and values
"""

# Files that the rows name

JOB: dict[str, Any] = {
    "model": {"source": "graph", "name": "graph.json.zst"},
    "training": {"global_batch": 4},
    "cluster": {"device": "h100-sxm-80gb"},
    "plan": {},
}
CPU_JOB = {
    **JOB,
    "training": {"global_batch": 4, "samples": 64},
    "cluster": {"device": "cpu", "cores_per_device": 1},
}
RUN: dict[str, Any] = {"job": JOB, "measured": {"step_time_s": 0.001}}
OPERATOR: dict[str, Any] = {
    "key": "k", "name": "mm", "overload": "default", "phase": "forward", "precision": "",
    "inputs": [[[4, 4], "float32", None], [[4, 4], "float32", None]], "args": {"self": "%0", "mat2": "%1"},
    "flops": 128, "bytes": 192, "uses": 1,
}  # fmt: skip
MEASURED = {
    **OPERATOR, "cold_s": 1e-5, "warm_s": 1e-5, "host_s": 1e-5, "kernels": 1, "kernel_names": ["k"]
}  # fmt: skip
FIGURES = {
    "nan": "NaN", "inf": "Infinity", "ninf": "-Infinity", "neg": "-1", "zero": "0", "text": '"fast"',
    "null": "null", "list": "[1]", "bool": "true", "huge": "1e999",
}  # fmt: skip
DEVICE = '[devices.mine]\nfp32 = 1e13\nmemory_bytes = "16 GB"\nmemory_bytes_per_s = "1 TB/s"\n'
BINARY = bytes(range(256))

TEXTS: dict[str, str | bytes] = {
    "job.json": json.dumps(JOB),
    "job.toml": '[model]\nsource = "graph"\nname = "graph.json.zst"\n[training]\nglobal_batch = 4\n'
    '[cluster]\ndevice = "h100"\n',
    "jobs.jsonl": json.dumps(JOB) + "\n",
    "runs.jsonl": json.dumps(RUN) + "\n",
    "cpu_runs.jsonl": "".join(
        json.dumps({"job": CPU_JOB, "measured": {"step_time_s": 0.1 + i / 10, "epoch_time_s": 2.0 + i}})
        + "\n"
        for i in range(5)
    ),
    **{f"empty.{end}": "" for end in ("jsonl", "toml", "json", "csv", "json.zst", "parquet", "onnx")},
    **{f"binary.{end}": BINARY for end in ("jsonl", "json", "toml", "csv")},
    "blank.jsonl": "\n \n",
    "broken.json": '{"model":',
    "broken.toml": "[model\nx =",
    "broken.jsonl": '{"job":\n',
    "list.json": "[1, 2]",
    "text.json": '"job"',
    "null.json": "null",
    "deep.json": "[" * 100_000,
    "deep.jsonl": "[" * 100_000 + "\n",
    "deep.toml": "a = " + "[" * 20_000,
    "utf16.json": json.dumps(JOB).encode("utf-16"),
    "twice.toml": "[model]\nsource = 'graph'\nsource = 'timm'\n",
    # runs
    **{f"run_{name}.jsonl": json.dumps(RUN).replace("0.001", text) + "\n" for name, text in FIGURES.items()},
    "run_unknown.jsonl": json.dumps({"job": JOB, "measured": {"steptime": 1.0}}) + "\n",
    "run_unmeasured.jsonl": json.dumps({"job": JOB, "measured": {}}) + "\n",
    "run_jobless.jsonl": json.dumps({"measured": {"step_time_s": 1}}) + "\n",
    "run_extra.jsonl": json.dumps({**RUN, "notes": 1}) + "\n",
    "run_bad_job.jsonl": json.dumps({**RUN, "job": {"model": 3}}) + "\n",
    "run_provenance.jsonl": json.dumps({**RUN, "provenance": 3}) + "\n",
    "run_table.jsonl": "[]\n",
    "run_measured_list.jsonl": json.dumps({"job": JOB, "measured": [1]}) + "\n",
    "broken.jsonl.zst": b"nonsense",
    "cut.jsonl.zst": zstandard.compress(json.dumps(RUN).encode() * 50)[:30],
    # catalogues
    "cat_broken.toml": "[devices.x",
    "cat_unknown.toml": "[gpus.x]\nfp32 = 1\n",
    "cat_missing.toml": "[devices.mine]\nfp32 = 1e13\n",
    "cat_text.toml": DEVICE.replace("1e13", '"fast"'),
    "cat_negative.toml": DEVICE.replace("1e13", "-1"),
    "cat_infinite.toml": DEVICE.replace("1e13", "inf"),
    "cat_key.toml": DEVICE + "tensor_cores = 3\n",
    "cat_memory.toml": DEVICE.replace('"16 GB"', '"lots"'),
    "cat_alias.toml": DEVICE + "aliases = 3\n",
    "cat_node.toml": '[nodes.n]\ndevice = "nope"\ndevices = 8\n',
    "cat_empty_node.toml": '[nodes.n]\ndevice = "h100"\ndevices = 0\n',
    "cat_price.toml": '[prices.h100-sxm-80gb]\nper_hour = "cheap"\n',
    "cat_negative_price.toml": "[prices.h100-sxm-80gb]\nper_hour = -3\n",
    "cat_price_of_nothing.toml": "[prices.nothing]\nper_hour = 3\n",
    "cat_table.toml": "devices = 3\n",
    "cat_entry.toml": "[devices]\nmine = 3\n",
    # operators
    "ops.jsonl": json.dumps(OPERATOR) + "\n",
    "measured.jsonl": json.dumps(MEASURED) + "\n",
    "m_lacks.jsonl": json.dumps({key: value for key, value in MEASURED.items() if key != "host_s"}) + "\n",
    "m_list.jsonl": "[1]\n",
    "m_failed.jsonl": json.dumps({**OPERATOR, "error": "x"}) + "\n",
    "m.jsonl.gz": b"not gzip",
    "m_cut.jsonl.gz": gzip.compress((json.dumps(MEASURED) + "\n").encode() * 100)[:50],
    "not.parquet": b"PAR1 nonsense",
    # schedules
    "trace.csv": "name,arrival_s,gpus,duration_s\na,0,1,100\nb,10,2,200\n",
    "trace_head.csv": "name,arrival_s,gpus,duration_s\n",
    "trace_unknown.csv": "a,b\n1,2\n",
    "trace_text.csv": "name,arrival_s,gpus,duration_s\na,x,1,100\n",
    "trace_negative.csv": "name,arrival_s,gpus,duration_s\na,0,-1,100\n",
    "trace_infinite.csv": "name,arrival_s,gpus,duration_s\na,0,1,inf\n",
    "nodes_text.csv": "gpu,model\nx,v100\n",
    "nodes_none.csv": "gpu,model\n0,v100\n",
    "nodes_columns.csv": "a,b\n1,2\n",
    "cluster_device.toml": "[cluster]\ndevice = 'nope'\n",
    "cluster_nodes.toml": "[cluster]\ndevice = 'v100'\nnodes = 0\n",
    "speeds_list.json": "[]",
    "speeds_text.json": '{"v100": {"(\'a\', 1)": {"null": "x"}}}',
    "errors_empty.json": "{}",
    "errors_none.json": '{"runs": []}',
    "errors_number.json": '{"runs": 3}',
    "errors_zero.json": '{"runs": [{"quantity": "step_time_s", "predicted": 1, "measured": 0, "predictor": "a"}]}',
    "outages_text.csv": "time_s,node,repair_s\n1,0,x\n",
    "outages_column.csv": "time_s,node\n1,0\n",
    "outages_negative.csv": "time_s,node,repair_s\n-1,0,5\n",
    "outages_infinite.csv": "time_s,node,repair_s\n1,0,inf\n",
    "outages_nan.csv": "time_s,node,repair_s\nnan,0,5\n",
    "policy.py": "class P: pass\n",
    "policy_syntax.py": "class P(\n",
    "policy_exit.py": "import sys; sys.exit()\n",
    # campaigns
    "c_broken.toml": "x=",
    "c_key.toml": "models=['resnet18']\nbatch=2\ncolour=3\n",
    "c_models.toml": "batch=2\n",
    "c_batch.toml": "models=['resnet18']\n",
    "c_zero.toml": "models=['resnet18']\nbatch=[0]\n",
    "c_text.toml": "models=['resnet18']\nbatch=['x']\n",
    "c_grid.toml": "grid=3\n",
    "c_sync.toml": "models=['resnet18']\nbatch=2\nsync='magic'\n",
    "c_links.toml": "models=['resnet18']\nbatch=2\nlinks=['fast']\n",
    "c_model.toml": "models=[3]\nbatch=2\n",
    "c_ok.toml": "models=['resnet18']\nbatch=2\n",
    # tables
    "t.csv": "a,b,cost_s\n1,2,3\n2,3,4\n3,4,5\n4,5,6\n",
    "t_text.csv": "a,b\nx,y\n",
    "t_ragged.csv": "a,b\n1,2,3\n",
    "t_negative.csv": "a,cost_s\n-1,1\n2,2\n3,3\n",
    "t_cost.csv": "a,cost_s\n1,-1\n2,0\n",
    "t_nan.csv": "a,cost_s\nnan,1\n2,2\n",
    "t_head.csv": "a,b\n",
    "t_list.jsonl": "[1]\n",
    "t_lacks.jsonl": '{"a":1}\n{"b":2}\n',
    "t.jsonl": '{"a":1,"cost_s":1}\n{"a":2,"cost_s":2}\n',
    "cut.onnx": b"\x08\x07\x12\x04te",
    # predictors in files
    "p_syntax.py": "class P(:\n",
    "p_empty.py": "x = 1\n",
    "p_function.py": "def P(): pass\n",
    "p_class.py": "class P: pass\n",
    "p_raises.py": "raise RuntimeError('no')\n",
    "p_exits.py": "import sys; sys.exit(3)\n",
    "p_imports.py": "import not_there\n",
    "p_abstract.py": "from foretrain.predictors.base import Predictor\n"
    "class P(Predictor):\n    name = 'p'\n    quantities = frozenset()\n",
}

OPERATOR_EDITS: dict[str, dict[str, Any]] = {
    "shape": {"inputs": [["x", "float32", None]]}, "negative": {"inputs": [[[-4, 4], "float32", None]]},
    "dtype": {"inputs": [[[4], "float99", None]]}, "inputs": {"inputs": 3}, "name": {"name": 3},
    "args": {"args": 3}, "phase": {"phase": "sideways"}, "strides": {"inputs": [[[4], "float32", "x"]]},
    "uses": {"uses": "x"}, "two": {"inputs": [[[4], "float32"]]},
}  # fmt: skip
MEASURED_EDITS: dict[str, dict[str, Any]] = {
    "nan": {"cold_s": float("nan")}, "inf": {"warm_s": float("inf")}, "negative": {"host_s": -1},
    "text": {"cold_s": "x"}, "null": {"cold_s": None}, "name": {"name": 3}, "inputs": {"inputs": 3},
    "kernel_names": {"kernel_names": 3}, "kernel_name": {"kernel_names": [3]}, "args": {"args": []},
    "flops": {"flops": "x"}, "key": {"key": 3}, "device": {"device": 3}, "devices": {"device": ["x"]},
}  # fmt: skip
SAVED: dict[str, Any] = {
    "s_broken": "{", "s_list": "[]", "s_empty": "", "s_binary": BINARY,
    "s_version": {"format": "foretrain-predictor/9", "predictor": "ernest"},
    "s_nameless": {"format": "foretrain-predictor/1"},
    "s_number": {"format": "foretrain-predictor/1", "predictor": 3},
    "s_unknown": {"format": "foretrain-predictor/1", "predictor": "nope"},
    **{f"s_{name}": {"format": "foretrain-predictor/1", "predictor": name} for name in predictors.names()},
}  # fmt: skip
GRAPH_EDITS: dict[str, dict[str, Any]] = {
    "old": {"format": "foretrain-graph/0"}, "text_samples": {"samples": "many"}, "no_samples": {"samples": 0},
    "no_ops": {"ops": []}, "odd_ops": {"ops": [1, 2]}, "no_buffers": {"buffers": []},
}  # fmt: skip
FOLDERS = (
    "folder.toml", "folder.jsonl", "folder.json", "folder.csv", "folder.parquet", "folder.onnx", "folder.db",
    "folder.html", "folder.zst", "folder.py", "s_nothing", "s_folder/predictor.json", "templates",
)  # fmt: skip


def write_files(folder: Path) -> None:
    for name in FOLDERS:
        (folder / name).mkdir(parents=True)
    for name, content in TEXTS.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for kind, base, edits in (("o", OPERATOR, OPERATOR_EDITS), ("m", MEASURED, MEASURED_EDITS)):
        for name, edit in edits.items():
            (folder / f"{kind}_{name}.jsonl").write_text(json.dumps({**base, **edit}) + "\n")
    for name, document in SAVED.items():
        (folder / name).mkdir()
        content = document if isinstance(document, str | bytes) else json.dumps(document)
        (folder / name / "predictor.json").write_bytes(
            content if isinstance(content, bytes) else content.encode()
        )
    for name in ("deletepop", "predictddl"):
        shutil.copytree(Path(predictors.__file__).with_name(name) / "fitted", folder / f"cut_{name}")
        for file in (folder / f"cut_{name}").glob("*.safetensors"):
            file.write_bytes(file.read_bytes()[:1000])
    graph = to_json(one_product())
    one_product().save(folder / "graph.json.zst")
    for name, edit in GRAPH_EDITS.items():
        (folder / f"g_{name}.json.zst").write_bytes(
            zstandard.compress(json.dumps({**graph, **edit}).encode())
        )
    (folder / "g_cut.json.zst").write_bytes((folder / "graph.json.zst").read_bytes()[:100])
    (folder / "g_other.json.zst").write_bytes(zstandard.compress(b'{"a": 1}'))
    (folder / "g_list.json.zst").write_bytes(zstandard.compress(b"[]"))
    pyarrow.parquet.write_table(pyarrow.table({"a": np.arange(2)}), folder / "other.parquet")
    for name, body in MODELS.items():
        (folder / f"{name}.py").write_text(_IMPORTS + body)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    write_files(folder)
    return folder


@pytest.fixture(autouse=True)
def _there(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    monkeypatch.setenv("FORETRAIN_CACHE", str(files / "cache"))


# Rows


def rows(text: str) -> list[Any]:
    found = [line.partition(" -> ") for line in text.strip().splitlines() if not line.startswith("#")]
    return [pytest.param(left.strip(), right.strip(), id=left.strip()[:120]) for left, _, right in found]


def refused(words: list[str]) -> str:
    """The one line that a command answers with."""
    result = run(*words)
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code != 0, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("foretrain: ")
    assert result.stderr.count("\n") == 1, result.stderr
    return str(result.stderr).removeprefix("foretrain: ").removesuffix("\n")


def edited(edits: str) -> dict[str, Any]:
    """The job with fields set to JSON values; ``-`` takes one out."""
    job: dict[str, Any] = copy.deepcopy(JOB)
    for edit in edits.split(" ; "):
        path, _, text = edit.partition(" = ")
        *parents, last = path.split(".")
        section = job
        for parent in parents:
            section = section[parent]
        if text == "-":
            section.pop(last, None)
        else:
            section[last] = json.loads(text)
    return job


@pytest.mark.parametrize(("edits", "answer"), rows(JOB_ROWS))
def test_a_job_that_cannot_be_is_refused_in_one_line(edits: str, answer: str, files: Path) -> None:
    (files / "edited.json").write_text(json.dumps(edited(edits)))
    assert answer in refused(["predict", "edited.json"])


@pytest.mark.parametrize(("command", "answer"), rows(COMMAND_ROWS))
def test_a_command_that_cannot_be_is_refused_in_one_line(command: str, answer: str) -> None:
    assert answer in refused(shlex.split(command))


@pytest.mark.parametrize(("name", "answer"), rows(MODEL_ROWS))
def test_a_model_that_cannot_be_is_refused_in_one_line(name: str, answer: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    assert answer in refused(["predict", *shlex.split(name)])


@pytest.mark.parametrize(("expression", "answer"), rows(PYTHON_ROWS))
def test_a_call_that_cannot_be_is_refused_in_one_line(expression: str, answer: str) -> None:
    with pytest.raises(ForetrainError) as error:
        eval(expression, {"foretrain": foretrain, "Job": Job, "Path": Path, "predictors": predictors})
    assert answer in str(error.value)
    assert "\n" not in str(error.value)


BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("collectives.py --data nowhere", "argument --data: 'nowhere' is not there"),
        ("distributed.py --data nowhere", "argument --data: 'nowhere' is not there"),
        ("distributed.py --data folder.json", "folder.json/runs/llm_foundry_mpt_a100.jsonl: cannot be read"),
        ("scheduling.py speed --data nowhere", "argument --data: 'nowhere' is not there"),
        ("scheduling.py speed --data folder.json", "traces/philly_sia_processed.csv.gz: cannot be read"),
        ("tables.py --data nowhere --out out", "argument --data: 'nowhere' is not there"),
        ("startup.py nowhere.jsonl", "argument runs: 'nowhere.jsonl' is not there"),
        ("startup.py run_nan.jsonl", "run_nan.jsonl:1: measured.step_time_s: nan is not"),
    ],
)
def test_a_benchmark_says_in_one_line_what_is_not_there(
    words: str, answer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *rest = words.split()
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", [name, *rest])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
    assert end.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert answer in line


def test_a_benchmark_that_needs_a_zoo_tells_its_options_without_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setattr(sys, "argv", ["random_workloads.py", "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(BENCHMARKS / "random_workloads.py"), run_name="__main__")
    assert end.value.code == 0
    assert "--count" in capsys.readouterr().out


def test_there_are_300_rows_at_least() -> None:
    every = [rows(text) for text in (JOB_ROWS, COMMAND_ROWS, MODEL_ROWS, PYTHON_ROWS)]
    assert sum(map(len, every)) >= 300
    assert all(row.values[1] for each in every for row in each)
