"""Settings of the optimizer Muon."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from .fields import Section, at_least, between, flag, one_of, opt


@dataclass(frozen=True, kw_only=True)
class MuonConfig(Section):
    """Settings of Muon. `OptimConfig` inherits them, so their section is `optim`."""

    muon_momentum: float = opt(0.95, "Muon's momentum", between(0, 1))
    muon_nesterov: bool = opt(True, "use Nesterov momentum in Muon")
    muon_ns_steps: int = opt(5, "number of Newton-Schulz iterations with which Muon orthogonalises", between(1, 99))
    muon_ns_dtype: str = opt(
        "auto",
        "number format of Muon's Newton-Schulz iterations: auto is bf16 with --precision bf16 and fp8, else the format "
        "of the weights; torch.optim.Muon always uses bf16",
        one_of("auto", "fp32", "bf16"),
    )
    muon_adjust_lr_fn: str = opt(
        "match_rms_adamw",
        "factor on the learning rate of a matrix with o rows and i columns in Muon: match_rms_adamw (0.2 sqrt(max(o, "
        "i)), with which learning rates of AdamW fit) or original (sqrt(max(1, o / i)))",
        one_of("match_rms_adamw", "original"),
    )
    muon_lr_factor: float = opt(
        1.0,
        "factor on --lr and --min-lr for the matrices that Muon steps, e.g. with --muon-adjust-lr-fn original",
        at_least(0),
    )

    def _problems(self) -> Iterator[str]:
        optimizer = vars(self)["optimizer"]  # a setting of `OptimConfig`
        given = [f.name for f in fields(MuonConfig) if getattr(self, f.name) != f.default]
        if given and optimizer != "muon":
            yield f"{flag(given[0])} is for --optimizer muon, not for {optimizer}; leave it out"
