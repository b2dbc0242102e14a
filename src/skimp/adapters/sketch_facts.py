"""What is known of codebooks that train."""

from __future__ import annotations

from skimp.core.option import Option
from skimp.core.registry import Conflict, Facts, Paper

_NO_CODEBOOK = Conflict(
    "what trains are the values of a learned codebook; this codec's levels are the same for the whole model, and its "
    "scales are shared by neighbours whose codes were chosen for them",
    "model.weights=sketch, or adapter=lora on this base",
)

SKETCHES: list[Facts] = [
    Facts(
        name="sketchtune",
        kind="adapter",
        summary="train the codebooks of a sketched base, its codes frozen: all weights of a row's group with one code "
        "move together, so changes have full rank and nothing is added to a product",
        where="skimp.adapters.sketchtune:SketchTune",
        attacks=("weights", "gradients", "optimizer"),
        exact=False,
        saves="of the base 28 bits a weight (4-bit codes), and 12 bytes a parameter in float32 with AdamW; adds 16 x "
        "outputs x groups x 2^bits bytes a layer, whatever its inputs. Activations stay: go with recompute",
        paper=Paper("Sketch to Adapt: Fine-Tunable Sketches for Efficient LLM Adaptation", 2025, "2410.06364"),
        stages=("fine-tuning",),
        needs=("model.weights: sketch",),
        recipe="model: {name: …, weights: {name: sketch, groups: 4}}\nadapter: sketchtune\ntrain: {lr: 5.0e-5}",
        conflicts=dict.fromkeys(("nf4", "int8", "int4"), _NO_CODEBOOK),
        shared=("targets",),
        options={
            "calibrate": Option(
                0,
                "Rows of the run's own text from which codes and codebooks are learned, for the inputs they will see; "
                "checkpoints then hold the codes too. 0: plain k-means of the weights.",
                least=0,
                kind="whole",
            ),
            "power": Option(4.0, "With calibrate: how much more a column counts the more outputs hang on it.", least=0),
            "damping": Option(0.1, "With calibrate: share of the mean second moment added to all of them.", above=0),
        },
    ),
]
