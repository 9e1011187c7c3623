"""The tables of docs/compress.md are those of the settings and of the committed results."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.core.spec import Spec
from ridgeline.transform.distil import DistilSettings
from ridgeline.transform.factor.step import LowRankSettings
from ridgeline.transform.prune.step import PruneSettings
from ridgeline.transform.quantise.step import QuantizeSettings
from tests.support import ROOT
from tests.test_docs import between, results

SETTINGS = {"quantize": QuantizeSettings, "prune": PruneSettings, "low_rank": LowRankSettings, "distill": DistilSettings}


def settings_table(settings: type[Spec]) -> str:
    """Name, default and meaning of every field but the version."""
    lines = ["", "| setting | default | meaning |", "| --- | --- | --- |"]
    for name, field in settings.model_fields.items():
        if name != "version":
            default = field.get_default(call_default_factory=True)  # type: ignore[call-arg]
            lines.append(f"| `{name}` | {'-' if default in (None, (), {}) else f'`{default!r}`'} | {field.description} |")
    return "\n".join(lines) + "\n\n"


def cifar_table() -> str:
    """ResNet-56 on CIFAR-10: every way that was measured."""
    rows = results("compress-cifar-quant-h200")["rows"]
    whole = next(row for row in rows if row["kind"] == "float")
    lines = ["", "| | accuracy | wanted | bytes | of the float file |", "| --- | --- | --- | --- | --- |"]
    lines.append(f"| float32 | {whole['accuracy']:.2%} | - | {whole['bytes']:,} | 1.000x |")
    for row in rows:
        if row["kind"] != "float":
            lines.append(
                _line(row["name"].removeprefix("quantize "), row["accuracy"], row["wanted"]["accuracy"], row["bytes"], whole["bytes"])
            )
    for row in results("compress-cifar-prune-h200")["rows"]:
        what = {"channels": f"channels removed, {row.get('flops_ratio', 1):.1%} of the FLOPs", "magnitude": "80 % of all weights zero"}
        name = f"{what[row['variant']]}, {row['settings']['epochs']:g} epochs"
        lines.append(_line(name, row["accuracy"], row["accuracy_wanted"], row["bytes_stored"], whole["bytes"]))
    return "\n".join(lines) + "\n\n"


def _line(name: str, accuracy: float, wanted: float, size: int, whole: int) -> str:
    return f"| {name} | {accuracy:.2%} | {wanted:.1%} | {size:,} | {size / whole:.3f}x |"


def speed_table() -> str:
    """The same cut on a CPU."""
    rows: list[dict[str, Any]] = results("compress-prune-speed-cpu")["rows"]
    lines = ["", "| widths | threads | layout | batch | times as fast | 95 % interval |", "| --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        widths = "any" if row["round_to"] == 1 else f"multiples of {row['round_to']}"
        interval = f"{row['speedup_low']:.2f} to {row['speedup_high']:.2f}"
        lines.append(f"| {widths} | {row['threads']} | {row['layout']} | {row['batch']} | {row['speedup']:.2f}x | {interval} |")
    return "\n".join(lines) + "\n\n"


def linear_table() -> str:
    """One row through packed weights, against bfloat16 in the same run."""
    lines = ["", "| weights | times as fast as bfloat16 | 95 % interval | of the read bandwidth |", "| --- | --- | --- | --- |"]
    for row in results("compress-linear-cpu")["rows"]:
        if row["variant"] != "bfloat16":
            interval = f"{row['speedup_low']:.2f} to {row['speedup_high']:.2f}"
            lines.append(f"| {row['variant']} | {row['speedup']:.2f}x | {interval} | {row['share_of_bandwidth']:.0%} |")
    return "\n".join(lines) + "\n\n"


@pytest.mark.parametrize("step", SETTINGS)
def test_page_lists_every_setting(step: str) -> None:
    assert between("docs/compress.md", f"{step}-settings") == settings_table(SETTINGS[step])


def test_page_equals_its_results() -> None:
    assert between("docs/compress.md", "compress-cifar") == cifar_table()
    assert between("docs/compress.md", "compress-speed") == speed_table()
    assert between("docs/compress.md", "compress-linear") == linear_table()


def test_every_accuracy_reached_what_was_wanted() -> None:
    for row in results("compress-cifar-quant-h200")["rows"]:
        if row["kind"] != "float":
            assert row["test_images"] == 10_000 and row["accuracy"] >= row["wanted"]["accuracy"]
            assert row["bytes_ratio"] <= row["wanted"].get("bytes_ratio", 1.0)
    for row in results("compress-cifar-prune-h200")["rows"]:
        assert row["accuracy"] >= row["accuracy_wanted"]


def test_readme_says_what_was_measured() -> None:
    quantised = {row["kind"]: row for row in results("compress-cifar-quant-h200")["rows"]}
    pruned = {row["variant"]: row for row in results("compress-cifar-prune-h200")["rows"]}
    static, qat = quantised["static"], quantised["qat"]
    said = (
        f"int8 {static['accuracy']:.2%} at {static['bytes_ratio']:.3f}x the bytes, 4-bit weights {qat['accuracy']:.2%} at "
        f"{qat['bytes_ratio']:.3f}x, half the FLOPs {pruned['channels']['accuracy']:.2%}, 80 % zeros {pruned['magnitude']['accuracy']:.2%}"
    )
    assert said in (ROOT / "README.md").read_text()
