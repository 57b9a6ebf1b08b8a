"""A model in; the name of the architecture family that it shares building blocks with out."""

from __future__ import annotations

import re

from foretrain.job import Model

_VARIANTS = frozenset({"tf", "wide", "legacy", "quantized", "test", "dm", "nf", "eca", "ese", "gc"})
"""First words of timm and torchvision names that mark a variant of the architecture named after them."""

_RELATIVES: dict[str, str] = {
    relative: name for name, relatives in {
        "densenet": "densenetblur", "rexnet": "rexnetr", "inception": "googlenet", "tinyvit": "tiny", "hiera": "hieradet sam",
        "resnet": "res resnext resnetaa resnetblur resnetrs resnest senet seresnet seresnetaa seresnext seresnextaa skresnet skresnext "
        "ecaresnet ecaresnetlight ecaresnext gcresnet gcresnext tresnet botnet botnext sebotnet halo halonet halonext sehalonet "
        "lamhalobotnet lambda bat",
        "efficientnet": "mobilenet mnasnet semnasnet spnasnet mixnet fbnet fbnetc tinynet lcnet hardcorenas",
        "vit": "deit beit eva flexivit samvit aim naflexvit",
        "regnet": "regnetv regnetx regnety regnetz haloregnetz",
        "darknet": "cs cspdarknet cspresnet cspresnext darknetaa sedarknet",
        "maxvit": "maxxvit coatnet coatnext",
        "metaformer": "caformer convformer poolformer",
        "mixer": "gmixer gmlp resmlp",
        "nasnet": "nasnetalarge pnasnet",
    }.items() for relative in relatives.split()
}  # fmt: skip
"""Names that share the building blocks of a better-known architecture (in timm: its module or its builder)."""


def family(model: Model) -> str:
    """The architecture family: models that a predictor must not have seen when it is scored on one of them.

    transformers: the ``model_type``. timm and torchvision, in one namespace: the letters that the name starts with, after
    variant words (``wide_``, ``tf_``) and without the v of a version, relatives joined (``seresnet50`` and ``resnext50`` are
    ``resnet``). Others: their name.

    >>> [family(Model(source="timm", name=name)) for name in ("resnetrs50", "wide_resnet50_2", "tf_efficientnetv2_s.in1k")]
    ['resnet', 'resnet', 'efficientnet']
    """
    if model.source == "transformers":
        return str((model.config or {}).get("model_type", model.name))
    if model.source not in ("timm", "torchvision"):
        return str(model.name)
    words = str(model.name).rpartition("/")[2].partition(".")[0].lower().split("_")
    while len(words) > 1 and words[0] in _VARIANTS:
        words.pop(0)
    start = re.match(r"[a-z]+?(?=v?\d|$)", words[0])
    return _RELATIVES.get(start[0], start[0]) if start else words[0]
