"""Where models come from: timm, torchvision, transformers, Python files, ONNX files."""
