"""Makes bodies of requests with something wrong in them, for tests and benchmarks of the server."""

from __future__ import annotations

import json
import random
from typing import Any

GRAPH_JOB: dict[str, Any] = {
    "model": {"source": "graph", "name": "product.json.zst"},
    "training": {"global_batch": 4},
    "cluster": {"device": "a100-sxm-80gb"},
}
NONSENSE: list[Any] = [
    None, True, -1, 0, 1e308, 10**30, 0.5, "", "x", "\0", "é" * 50, [], [[]], {}, {"": {}}, {"a": [None]},
    "../../etc/passwd", [1, "two"], {"source": "graph"}, "1e999", -0.0,
]  # fmt: skip


def malformed(draw: random.Random) -> bytes:
    """The body of a request with something wrong in it."""
    kind = draw.randrange(4)
    if kind == 0:
        return draw.randbytes(draw.randrange(60))
    body: dict[str, Any] = json.loads(json.dumps({"job": GRAPH_JOB, "options": {}, "predictor": "roofline"}))
    if kind == 1:
        text = json.dumps(body)
        return text[: draw.randrange(len(text))].encode()
    spot: Any = body
    while isinstance(spot, dict) and spot:
        key = draw.choice(list(spot))
        if not isinstance(spot[key], dict) or draw.random() < 0.4:
            spot[key if draw.random() < 0.8 else draw.choice(["x", "", "model"])] = draw.choice(NONSENSE)
            break
        spot = spot[key]
    return json.dumps(body).encode()
