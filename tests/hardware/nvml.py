"""An object that answers like the module `pynvml`, for one device at 0000:3B:00.0."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

PROPERTIES = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
"""As torch describes that device."""


class NVMLError(Exception):
    pass


class FakeNvml:
    """Answers what its attributes say; a question that is `None` is not supported."""

    NVMLError = NVMLError

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, Any] = {
            "PowerUsage": 300_000,
            "PowerManagementLimit": 350_000,
            "PowerManagementLimitConstraints": (100_000, 400_000),
            "Temperature": 61,
            "TotalEnergyConsumption": 5_000_000,
            "CurrentClocksEventReasons": 0,
            "EccMode": (1, 1),
            "corrected": 7,
            "uncorrected": 0,
            **answers,
        }
        self.asked: list[str] = []
        self.has_driver = True

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise NVMLError("Driver Not Loaded")

    def nvmlSystemGetDriverVersion(self) -> str:
        return "575.1"

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> str:
        if bus_id != "0000:3b:00.0":
            raise NVMLError("Not Found")
        return "handle"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-12ab":
            raise NVMLError("Not Found")
        return "handle"

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, counter: int) -> int:
        assert counter == 0, "since the driver was loaded"
        return int(self._answer(handle, "uncorrected" if kind else "corrected"))

    def __getattr__(self, name: str) -> Any:
        question = name.removeprefix("nvmlDeviceGet")
        if question == name or question not in self.answers:
            raise AttributeError(name)
        return lambda handle, *_: self._answer(handle, question)

    def _answer(self, handle: str, question: str) -> Any:
        assert handle == "handle"
        self.asked.append(question)
        if self.answers[question] is None:
            raise NVMLError("Not Supported")
        return self.answers[question]
