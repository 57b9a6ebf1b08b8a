"""Loads ONNX files as modules on the meta device: ``module.load_onnx`` is the way in."""
