"""The rates that a run has measured of its machine, in place of those of the machine file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from megatrain.hardware import HardwareSpec
from megatrain.model.profile.anatomy import Anatomy
from megatrain.model.profile.timing import LayerSeconds
from megatrain.plan.cost.rates import UPDATE_BYTES, Rates, other_rates


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The rates of one step; None where the step has not used a lane, or not for long enough to tell."""

    fetch_bytes_per_s: float | None = None
    offload_bytes_per_s: float | None = None
    update_bytes_per_s: float | None = None
    compute_scale: float | None = None
    """Seconds of compute over those predicted."""

    @classmethod
    def of(
        cls,
        lane_seconds: Mapping[str, float],
        lane_bytes: Mapping[str, float],
        predicted_compute_s: float,
        *,
        least_s: float = 1e-3,
    ) -> Measured:
        """Divide the work of a step's lanes by the time that they took.

        Args:
            lane_seconds: The seconds in which each lane worked, by its name; waits are not counted.
            lane_bytes: The bytes of `fetch` (restores too), `offload` (saves too) and `host`.
            predicted_compute_s: The seconds of compute by the plan.
            least_s: The seconds that a lane has to have worked, at least, for its rate to be taken.
        """

        def rate(nbytes: str, *lanes: str) -> float | None:
            seconds = sum(lane_seconds.get(lane, 0.0) for lane in lanes)
            return lane_bytes[nbytes] / seconds if seconds > least_s and lane_bytes[nbytes] else None

        compute_s = lane_seconds.get("compute", 0.0)
        return cls(
            fetch_bytes_per_s=rate("fetch", "fetch", "restore"),
            offload_bytes_per_s=rate("offload", "offload", "save"),
            update_bytes_per_s=rate("host", "host"),
            compute_scale=compute_s / predicted_compute_s if compute_s > least_s else None,
        )

    @classmethod
    def of_layers(cls, rates: Rates, anatomy: Anatomy, timed: Sequence[LayerSeconds]) -> Measured:
        """Compare layers that were timed alone with what their work comes to at the rates of a machine."""
        taken_s = predicted_s = 0.0
        for kind in timed:
            layer = anatomy.layers[kind.numbers[0]]
            taken_s += len(kind.numbers) * (kind.forward_s + kind.backward_s)
            predicted_s += len(kind.numbers) * (
                rates.forward_s(layer.forward) + rates.backward_s(layer.backward)
            )
        return cls(compute_scale=taken_s / predicted_s if predicted_s else None)

    def applied(self, spec: HardwareSpec) -> HardwareSpec:
        """Return the machine with what was measured."""
        changes: dict[str, object] = {}
        if self.fetch_bytes_per_s is not None:
            changes["h2d_bytes_per_s"] = self.fetch_bytes_per_s
        if self.offload_bytes_per_s is not None:
            changes["d2h_bytes_per_s"] = self.offload_bytes_per_s
        if self.update_bytes_per_s is not None:
            changes["update_params_per_s"] = {spec.num_cores: self.update_bytes_per_s / UPDATE_BYTES}
            changes["compressed_params_per_s"] = other_rates(self.update_bytes_per_s)
        if self.compute_scale is not None:
            slower = self.compute_scale
            for name in (
                "matmul_flops_per_s",
                "attention_flops_per_s",
                "attention_backward_flops_per_s",
            ):
                rates: Mapping[str, float] = getattr(spec, name)
                changes[name] = {dtype: rate / slower for dtype, rate in rates.items()}
            changes["device_bytes_per_s"] = spec.device_bytes_per_s / slower
        return replace(spec, **changes)  # type: ignore[arg-type]

    def differs(self, other: Measured, share: float) -> str:
        """Name the rate that differs most from another measurement; empty if none does by `share`."""
        most, name = share, ""
        for field in fields(self):
            now, then = getattr(self, field.name), getattr(other, field.name)
            if now is None or then is None:
                continue
            change = max(now / then, then / now) - 1
            if change > most:
                most, name = (
                    change,
                    f"{_NAMES[field.name]} {_show(field.name, then)} -> {_show(field.name, now)}",
                )
        return name


_NAMES = {
    "fetch_bytes_per_s": "copies to the device",
    "offload_bytes_per_s": "copies to the host",
    "update_bytes_per_s": "updates",
    "compute_scale": "compute over plan",
}


def _show(name: str, value: float) -> str:
    return f"{value:.2f}" if name == "compute_scale" else f"{value / 1e9:.3g} GB/s"
