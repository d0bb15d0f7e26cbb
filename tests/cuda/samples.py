"""Samples for kernels besides the ops' own: rows of whole 16-byte vectors, repeats, large sizes."""

from xtrain.engine.op import Sample, Spec, ids, normal, positive

HEADS = {"heads": 2, "kv_heads": 1, "eps": 1e-6, "theta": 10000.0}
ADAMW = {"decayed": 40, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}

WHOLE_VECTORS = {
    "rms_norm": [
        Sample("vectors", (normal(5, 64), normal(64)), {"eps": 1e-6}, 64),
        Sample("two_warps", (normal(1, 1284), normal(1284)), {"eps": 1e-6}, 1284),
    ],
    "add_rms_norm": [
        Sample("vectors", (normal(5, 64), normal(5, 64), normal(64)), {"eps": 1e-6}, 64),
    ],
    "qk_norm_rope": [
        Sample("vectors", (normal(1, 3, 128), normal(32), normal(32), ids(9, 1, 3)), HEADS, 32),
        Sample("vectors_no_norm", (normal(2, 2, 128), None, None, ids(9, 2, 2)), HEADS, 32),
    ],
    "swiglu": [Sample("vectors", (normal(3, 48, scale=3.0),))],
    "dropout": [Sample("vectors", (normal(4, 16), Spec((4,), "key")), {"p": 0.3, "site": 5})],
    "softmax": [Sample("vectors", (normal(3, 40, scale=4.0),), {}, 40)],
    "embedding": [Sample("vectors", (normal(7, 16), ids(3, 2, 18)), {}, 36)],
    "global_norm": [Sample("vectors", (normal(1000),), {}, 1000)],
    "adamw": [
        Sample(
            "vectors",
            (*[normal(64)] * 2, normal(64, scale=0.1), positive(64), Spec((5,), "hyper", 1), None),
            ADAMW,
        )
    ],
}

GAIN = {"dtype": "float32"}  # a gain stays fp32 beside bf16 heads
LARGE_ATTRS = {"heads": 40, "kv_heads": 10, "eps": 1e-6, "theta": 10000.0}
LARGE = {  # shapes of a training step, with fewer tokens
    "rms_norm": [Sample("v9", (normal(3000, 1280), normal(1280)), {"eps": 1e-6}, 3000)],
    "add_rms_norm": [
        Sample(
            "v9",
            (normal(3000, 1280), normal(3000, 1280), normal(1280)),
            {"eps": 1e-6},
            3000,
        ),
        Sample(
            "v12",
            (normal(1501, 1792), normal(1501, 1792), normal(1792, **GAIN)),
            {"eps": 1e-6},
            1501,
        ),
    ],
    "qk_norm_rope": [
        Sample(
            "v9",
            (normal(3, 300, 1920), normal(32), normal(32), ids(1024, 3, 300)),
            LARGE_ATTRS,
            36000,
        ),
        Sample(
            "v9_fp32_gains",
            (normal(3, 301, 1920), normal(32, **GAIN), normal(32, **GAIN), ids(1024, 3, 301)),
            LARGE_ATTRS,
            36000,
        ),
        Sample(
            "v12_fp32_gains",
            (normal(2, 99, 2688), normal(64, **GAIN), normal(64, **GAIN), ids(1024, 2, 99)),
            {**LARGE_ATTRS, "heads": 28, "kv_heads": 7},
            5600,
        ),
        Sample("no_norm", (normal(2, 70, 1920), None, None, ids(99, 2, 70)), LARGE_ATTRS, 32),
    ],
    "swiglu": [Sample("v9", (normal(999, 8192),)), Sample("v12", (normal(99, 10752),))],
    "embedding": [Sample("v9", (normal(500, 1280), ids(500, 4, 1000)), {}, 20)],
    "global_norm": [Sample("long", (normal(3_000_001),), {}, 3_000_001)],
    "adamw": [
        Sample(
            "long",
            (
                *[normal(1_000_064)] * 2,
                normal(1_000_064, scale=0.1),
                positive(1_000_064),
                Spec((5,), "hyper", 1),
                None,
            ),
            {**ADAMW, "decayed": 700_032},
        )
    ],
}
