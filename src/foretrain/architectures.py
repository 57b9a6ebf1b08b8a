"""Names the architecture family of a model, which shares its building blocks."""

from __future__ import annotations

import re

from foretrain.workload import Model

_VARIANTS = frozenset({"tf", "wide", "legacy", "quantized", "test", "dm", "nf", "eca", "ese", "gc"})
"""First words of timm and torchvision names that mark a variant of the architecture named after them."""

_FAMILIES: dict[str, str] = {
    "darknet": "cs cspdarknet cspresnet cspresnext darknetaa sedarknet",
    "densenet": "densenetblur",
    "efficientnet": "mobilenet mnasnet semnasnet spnasnet mixnet fbnet fbnetc tinynet lcnet hardcorenas",
    "hiera": "hieradet sam",
    "inception": "googlenet",
    "maxvit": "maxxvit coatnet coatnext",
    "metaformer": "caformer convformer poolformer",
    "mixer": "gmixer gmlp resmlp",
    "nasnet": "nasnetalarge pnasnet",
    "regnet": "regnetv regnetx regnety regnetz haloregnetz",
    "resnet": "res resnext resnetaa resnetblur resnetrs resnest senet seresnet seresnetaa seresnext "
    "seresnextaa skresnet skresnext ecaresnet ecaresnetlight ecaresnext gcresnet gcresnext tresnet botnet "
    "botnext sebotnet halo halonet halonext sehalonet lamhalobotnet lambda bat",
    "rexnet": "rexnetr",
    "tinyvit": "tiny",
    "vit": "deit beit eva flexivit samvit aim naflexvit",
}
"""Names that share the building blocks of a better-known architecture, in timm its module or its builder."""
_FAMILY_OF = {relative: name for name, relatives in _FAMILIES.items() for relative in relatives.split()}


def family(model: Model) -> str:
    """The architecture family: models that a predictor must not have seen when it is scored on one of them.

    transformers: the ``model_type``. timm and torchvision, in one namespace: the letters that the name starts
    with, after variant words (``wide_``, ``tf_``) and without the v of a version, relatives joined
    (``seresnet50`` and ``resnext50`` are ``resnet``); so is the class of a module that was in hand, which is
    its title. Others: their name.

    >>> names = ("resnetrs50", "wide_resnet50_2", "tf_efficientnetv2_s.in1k")
    >>> [family(Model(source="timm", name=name)) for name in names]
    ['resnet', 'resnet', 'efficientnet']
    """
    if model.source == "transformers":
        return str((model.config or {}).get("model_type", model.name))
    named = model.source in ("timm", "torchvision")
    if not named and (model.source != "graph" or model.title is None):
        return str(model.name)
    name = str(model.name if named else model.label.partition(" ")[0])
    words = name.rpartition("/")[2].partition(".")[0].lower().split("_")
    while len(words) > 1 and words[0] in _VARIANTS:
        words.pop(0)
    start = re.match(r"[a-z]+?(?=v?\d|$)", words[0])
    return _FAMILY_OF.get(start[0], start[0]) if start else words[0]
