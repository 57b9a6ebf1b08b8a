"""An ONNX file becomes an nn.Module on the meta device: ``module.load_onnx`` is the way in."""
