"""Names what models of transformers are trained for, and finds the class of a configuration for a task."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import torch

from foretrain.errors import InputError, unknown

AUTO_CLASSES = {
    "image-text-to-text": "AutoModelForImageTextToText",
    "speech-seq2seq": "AutoModelForSpeechSeq2Seq",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "masked-lm": "AutoModelForMaskedLM",
    "causal-lm": "AutoModelForCausalLM",
    "zero-shot-image-classification": "AutoModelForZeroShotImageClassification",
    "image-classification": "AutoModelForImageClassification",
    "video-classification": "AutoModelForVideoClassification",
    "object-detection": "AutoModelForObjectDetection",
    "universal-segmentation": "AutoModelForUniversalSegmentation",
    "instance-segmentation": "AutoModelForInstanceSegmentation",
    "semantic-segmentation": "AutoModelForSemanticSegmentation",
    "image-segmentation": "AutoModelForImageSegmentation",
    "mask-generation": "AutoModelForMaskGeneration",
    "depth-estimation": "AutoModelForDepthEstimation",
    "normal-estimation": "AutoModelForNormalEstimation",
    "pointmap-estimation": "AutoModelForPointmapEstimation",
    "pose-estimation": "AutoModelForPoseEstimation",
    "keypoint-detection": "AutoModelForKeypointDetection",
    "keypoint-matching": "AutoModelForKeypointMatching",
    "image-to-image": "AutoModelForImageToImage",
    "image-matting": "AutoModelForImageMatting",
    "text-recognition": "AutoModelForTextRecognition",
    "table-recognition": "AutoModelForTableRecognition",
    "ctc": "AutoModelForCTC",
    "rnnt": "AutoModelForRNNT",
    "tdt": "AutoModelForTDT",
    "audio-classification": "AutoModelForAudioClassification",
    "time-series-prediction": "AutoModelForTimeSeriesPrediction",
    "text-to-spectrogram": "AutoModelForTextToSpectrogram",
    "zero-shot-object-detection": "AutoModelForZeroShotObjectDetection",
    "multimodal-lm": "AutoModelForMultimodalLM",
    "visual-question-answering": "AutoModelForVisualQuestionAnswering",
    "document-question-answering": "AutoModelForDocumentQuestionAnswering",
    "table-question-answering": "AutoModelForTableQuestionAnswering",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "multiple-choice": "AutoModelForMultipleChoice",
    "next-sentence-prediction": "AutoModelForNextSentencePrediction",
    "masked-image-modeling": "AutoModelForMaskedImageModeling",
    "audio-frame-classification": "AutoModelForAudioFrameClassification",
    "audio-xvector": "AutoModelForAudioXVector",
    "pretraining": "AutoModelForPreTraining",
    "text-to-waveform": "AutoModelForTextToWaveform",
    "text-encoding": "AutoModelForTextEncoding",
    "audio-tokenization": "AutoModelForAudioTokenization",
    "base": "AutoModel",
}
"""The library's class for each task; of those that a model type has, the first is what it is trained for
where the job names none."""

CLASSIFIES = frozenset(task for task in AUTO_CLASSES if task.endswith("-classification")) | {
    "semantic-segmentation",
    "object-detection",
    "audio-xvector",
}
"""Tasks whose models have as many outputs as the job has classes."""


def tasks_of(transformers: Any, config: Any) -> list[str]:
    """The tasks that a configuration has a class for, the usual one first."""
    own = _made_for(transformers, config)
    named = [
        task
        for task in AUTO_CLASSES
        if _auto(transformers, task, config) is not None or _own_class(own, config, task) is not None
    ]
    if getattr(config, "is_encoder_decoder", False):
        named.sort(key=lambda task: task not in ("speech-seq2seq", "seq2seq-lm"))
    elif "multimodal-lm" in named:
        named.sort(key=lambda task: task == "seq2seq-lm")
    return named


def choose_task(transformers: Any, config: Any, asked: str | None) -> tuple[str, list[str]]:
    """The task that is asked for, or the usual one of the model type; and all that it has."""
    if asked is not None and asked not in AUTO_CLASSES:
        raise unknown("model.task", asked, AUTO_CLASSES)
    tasks = tasks_of(transformers, config)
    if not tasks:
        raise InputError(
            f"model.config.model_type: {config.model_type} has no forward pass of its own; name the type of "
            "the model that it is a part of, or of its part that is trained"
        )
    if asked is not None and asked not in tasks:
        raise InputError(
            f"model.task: {asked!r} is not a task of {config.model_type}; it has {', '.join(tasks)}"
        )
    return asked or tasks[0], tasks


def build_class(transformers: Any, config: Any, task: str, **options: Any) -> torch.nn.Module:
    """The model of a configuration for a task."""
    module: torch.nn.Module
    auto = _auto(transformers, task, config)
    if auto is not None and type(config) not in auto._model_mapping:  # a type with two names
        module = auto._model_mapping[type(config)]._from_config(config, **options)
        return module
    if auto is not None:
        classes = auto._model_mapping[type(config)]
        if isinstance(classes, tuple) and not config.architectures:
            config.architectures = [classes[0].__name__]
        module = auto.from_config(config, **options)
        return module
    own = _own_class(_made_for(transformers, config), config, task)
    module = own._from_config(config, **options)
    return module


def _auto(transformers: Any, task: str, config: Any) -> Any:
    """The library's automatic class for the task where it knows this configuration."""
    auto = getattr(transformers, AUTO_CLASSES[task], None)
    try:
        known = auto is not None and auto._model_mapping.get(type(config), None)
    except ValueError:  # the library's table names a class that it does not have
        return None
    first = known[0] if isinstance(known, tuple) else known
    return auto if first and _computes(first) else None


def _computes(model: Any) -> bool:
    """Whether a class has a forward pass of its own; one that another library must be installed for tells so
    when it is built."""
    try:
        return bool(model.forward is not torch.nn.Module.forward)
    except ImportError:
        return True


def _own_class(own: list[Any], config: Any, task: str) -> Any:
    """The class that no automatic class knows: a tower or a decoder of a larger model, a head for a task."""
    if task == "base":
        stem = type(config).__name__.removesuffix("Config")
        usual = (f"{stem}Model", stem, f"{stem}ForConditionalGeneration", f"{stem}ForRetrieval")
        own = sorted(own, key=lambda one: usual.index(one.__name__) if one.__name__ in usual else len(usual))
        return next(iter(own), None)
    endings = _HEADS.get(task, ())
    return next((one for one in own if endings and one.__name__.endswith(endings)), None)


_HEADS = {"time-series-prediction": ("ForPrediction",)}
"""How classes for a task are named that the library lists nowhere."""


def _made_for(transformers: Any, config: Any) -> list[Any]:
    """The classes beside a configuration that are built from it and compute something."""
    package = importlib.import_module(type(config).__module__.rpartition(".")[0])
    folder = Path(inspect.getfile(type(config))).parent
    modules = [
        importlib.import_module(f"{package.__name__}.{path.stem}")
        for path in sorted(folder.glob("modeling_*.py"))
    ]
    return [
        value
        for module in modules
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, transformers.PreTrainedModel)
        and value.__module__ == module.__name__
        and _is_made_for(value, type(config))
    ]


def _is_made_for(model: Any, config: type) -> bool:
    """Whether a class computes something and is built from this very configuration."""
    if not _computes(model):
        return False
    annotation = inspect.signature(model.__init__).parameters.get("config")
    return annotation is not None and (
        annotation.annotation in (config, config.__name__)
        or (annotation.annotation is inspect.Parameter.empty and model.config_class is config)
    )
