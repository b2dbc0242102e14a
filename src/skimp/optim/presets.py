"""The named members of the projected family: each says its composition, and nothing else.

Options that all share are in `Projected`; here are the papers' defaults and what is a preset's own. AdamW's places of
eps and decay hold (eps after the bias correction, decay before the update), so that with the identity for a projector
the weights are those of `adamw` to the bit; `as_released` gives the places of the released GaLore.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from skimp.optim.bases import Gaussian, Subspace
from skimp.optim.fisher import Fisher
from skimp.optim.inner import Adam, Codec
from skimp.optim.inner_rules import inner_of
from skimp.optim.ldadam import Interpolated
from skimp.optim.online_pca import OnlinePCA
from skimp.optim.posts import Residual, ScaleRaw, SignRest
from skimp.optim.projected import Projected
from skimp.optim.rows import How, Rows
from skimp.optim.stages import Policy, Projector, Stages
from skimp.optim.two_sided import TwoSided

Method = Literal["exact", "random"]
# Micro-batches can be added up (`adds_up`) where the rule needs nothing of a gradient but its projection.
#: What every preset takes beside its own: the papers' values are those of pre-training.
COMMON: dict[str, Any] = {
    "lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "rank": 0, "refresh": 200, "scale": 0.25
}  # fmt: skip


class GaLore(Projected):
    """GaLore: Adam (or another `inner`) on Pᵀ·G, P the leading singular vectors of a gradient, anew every `refresh`."""

    rule: ClassVar[str] = "galore"
    adds_up: ClassVar[bool] = True
    states: ClassVar[Codec] = "fp32"

    def __init__(
        self, params: Any, *, svd: Method = "exact", policy: Policy = "keep", states: Codec | None = None,
        inner: str = "adam", as_released: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        states = states or self.states
        stages = Stages(
            Subspace(svd), inner_of(inner, states, as_released), (), None, policy, states=states,
            decay_after=as_released,
        )  # fmt: skip
        super().__init__(params, stages, **COMMON | options)


class GaLore8bit(GaLore):
    """GaLore with block-wise 8-bit moments."""

    rule: ClassVar[str] = "galore8bit"
    states: ClassVar[Codec] = "int8"


class GaLore2(Projected):
    """GaLore 2: the same rule, its basis by a randomised SVD, warm from the last one."""

    rule: ClassVar[str] = "galore2"
    adds_up: ClassVar[bool] = True

    def __init__(
        self, params: Any, *, power: int = 1, warm: bool = True, policy: Policy = "keep", states: Codec = "fp32",
        **options: Any,
    ) -> None:  # fmt: skip
        basis = Subspace("random", warm=warm, power=power)
        super().__init__(params, Stages(basis, Adam(states), (), None, policy, states=states), **COMMON | options)


class QGaLore(Projected):
    """Q-GaLore: P in 4 (or 8) bits, 8-bit moments, and a period that doubles while bases stay alike.

    It also trains weights that are kept in int8 codes, by their stand-ins (`core.coded_trained`): the paper's third
    part. bf16 weights are rounded at random as in every rule of the family.
    """

    rule: ClassVar[str] = "q-galore"
    trains_codes: ClassVar[bool] = True
    adds_up: ClassVar[bool] = True

    def __init__(
        self, params: Any, *, bits: int = 4, svd: Method = "random", states: Codec = "int8", **options: Any
    ) -> None:
        basis = Subspace(svd, warm=False, bits=bits)
        super().__init__(params, Stages(basis, Adam(states), states=states, lazy=True), **COMMON | options)


class OnlineSubspaceDescent(Projected):
    """Online Subspace Descent: P follows the gradients by a step of PCA after each step; no SVD after the first."""

    rule: ClassVar[str] = "online-subspace-descent"

    def __init__(
        self, params: Any, *, pca_rate: float = 0.005, ortho: float = 0.1, states: Codec = "fp32", **options: Any
    ) -> None:
        stages = Stages(OnlinePCA(rate=pca_rate, ortho=ortho), Adam(states), states=states)
        options = COMMON | {"refresh": 2**62, "stagger": False} | options
        super().__init__(params, stages, **{"peak_lr": float(options["lr"])} | options)


class NaturalGaLore(Projected):
    """Natural GaLore: the projected gradient is multiplied by the inverse Fisher of the last `history` before Adam."""

    rule: ClassVar[str] = "natural-galore"
    adds_up: ClassVar[bool] = True

    def __init__(
        self, params: Any, *, history: int = 20, damping: float = 1e-3, sides: Literal["one", "both"] = "both",
        svd: Method = "random", states: Codec = "fp32", **options: Any,
    ) -> None:  # fmt: skip
        basis: Projector = TwoSided(svd, warm=False) if sides == "both" else Subspace(svd)
        super().__init__(
            params, Stages(basis, Adam(states), (Fisher(history, damping),), states=states), **COMMON | options
        )


class Grass(Projected):
    """Grass: Adam on the r rows of the gradient that matter; the moments begin anew with every selection."""

    rule: ClassVar[str] = "grass"
    adds_up: ClassVar[bool] = True

    def __init__(
        self, params: Any, *, rows: How = "top", replace: bool = False, decay_rest: bool = True, states: Codec = "fp32",
        **options: Any,
    ) -> None:  # fmt: skip
        stages = Stages(Rows(rows, replace, decay_rest), Adam(states), (), None, "reset", states=states)
        super().__init__(params, stages, **COMMON | options)


class Apollo(Projected):
    """APOLLO: the raw gradient, every channel scaled as Adam scaled its random projection."""

    rule: ClassVar[str] = "apollo"
    by: ClassVar[Literal["channel", "tensor"]] = "channel"
    defaults_of: ClassVar[dict[str, Any]] = {"scale": 1.0}

    def __init__(
        self, params: Any, *, growth: float = 1.01, early: bool = False, states: Codec = "fp32", **options: Any
    ) -> None:
        stages = Stages(Gaussian(), Adam(states), (), ScaleRaw(self.by, growth, early), states=states)
        super().__init__(params, stages, **COMMON | self.defaults_of | options)


class ApolloMini(Apollo):
    """APOLLO-Mini: rank 1 and one factor for the whole matrix."""

    rule: ClassVar[str] = "apollo-mini"
    by: ClassVar[Literal["channel", "tensor"]] = "tensor"
    defaults_of: ClassVar[dict[str, Any]] = {"rank": 1, "scale": 128.0}


class Fira(Projected):
    """Fira: GaLore and, beside it, what was projected away, scaled and limited in growth."""

    rule: ClassVar[str] = "fira"

    def __init__(
        self, params: Any, *, svd: Method = "exact", growth: float = 1.01, as_released: bool = False,
        states: Codec = "fp32", **options: Any,
    ) -> None:  # fmt: skip
        stages = Stages(Subspace(svd), Adam(states), (), Residual(growth, as_released), states=states)
        super().__init__(params, stages, **COMMON | options)


class LDAdam(Projected):
    """LDAdam: a new basis every step, moments carried over, everything left out fed back."""

    rule: ClassVar[str] = "ldadam"

    def __init__(self, params: Any, *, rho: float = 0.908, **options: Any) -> None:
        stages = Stages(Interpolated("exact", rho=rho), Adam(), (), None, "rotate", feedback=True)
        own = {"rank": 16, "scale": 1.0, "betas": (0.908, 0.99), "lr": 1e-3, "refresh": 1, "stagger": False}
        super().__init__(params, stages, **COMMON | own | options)


class Frugal(Projected):
    """FRUGAL: Adam on a random share of rows, signs for the rest; drawn anew, and reset, every `refresh` steps."""

    rule: ClassVar[str] = "frugal"

    def __init__(
        self, params: Any, *, rest: float = 1.0, rows: How = "uniform", states: Codec = "fp32", **options: Any
    ) -> None:
        stages = Stages(Rows(rows), Adam(states), (), SignRest(rest), "reset", states=states)
        super().__init__(params, stages, **COMMON | {"lr": 1e-3, "scale": 1.0} | options)
