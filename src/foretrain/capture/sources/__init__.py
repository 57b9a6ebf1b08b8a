"""Builds models wherever they come from: timm, torchvision, transformers, diffusion models, Python files,
ONNX files."""
