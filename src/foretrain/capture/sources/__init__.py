"""Where models come from: timm, torchvision, transformers, diffusion models, Python files, ONNX files."""
