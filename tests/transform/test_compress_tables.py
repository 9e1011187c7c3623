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
WANTED_OF_LANGUAGE = {"int8": "at most +0.5%", "int4-gptq": "at most 0.7x", "int4-gptq-clip": "at most 0.7x"}


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


def distil_table() -> str:
    """ResNet-20 with and without its teacher, a line a seed, then the mean."""
    lines = ["", "| seed | without a teacher | taught by ResNet-56 | gain | wanted |", "| --- | --- | --- | --- | --- |"]
    for row in results("compress-cifar-distil-h200")["rows"]:
        both = f"{row['plain_accuracy']:.2%} | {row['distilled_accuracy']:.2%}"
        wanted = f"{row['wanted_points']:.2f} points" if "what" in row else "-"
        lines.append(f"| {row.get('seed', 'mean')} | {both} | {row['gain_points']:+.2f} points | {wanted} |")
    return "\n".join(lines) + "\n\n"


def language_rows(name: str) -> dict[str, dict[str, Any]]:
    return {row["variant"]: row for row in results(name)["rows"] if "perplexity" in row}


def language_table() -> str:
    """Every variant on the test text: perplexity, bytes, tokens a second; then what the file's own blocks say."""
    rows = language_rows("compress-llm-h200")
    whole = rows["bf16"]
    head = ("weights", "perplexity", "rise", "of round-to-nearest's rise", "wanted", "bytes", "of the bfloat16 file", "tokens/s", "layers")
    lines = ["", f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for name, row in rows.items():
        rise = f"{row['perplexity']:.3f} | {_rise(row)} | {WANTED_OF_LANGUAGE.get(name, '-')}"
        size = f"{row['file_bytes']:,} | {row['file_bytes'] / whole['file_bytes']:.3f}x"
        packed = "-" if name == "bf16" else row["layers_packed"]
        lines.append(f"| {name} | {rise} | {size} | {row['decode_tokens_per_s']:.0f} | {packed} |")
    blocks = next(row for row in results("compress-llm-h200")["rows"] if "blocks" in row)
    slower = whole["decode_tokens_per_s"] / rows["nf4"]["decode_tokens_per_s"]
    notes = (
        f"{whole['tokens']:,} tokens are scored. Tokens/s: one sequence, one token a pass, as a CUDA graph, one reading of 50 passes each. "
        f"4 bits are not faster than bfloat16 here, and `nf4`, which no kernel runs packed, takes {slower:.1f} times as long. Rounding the "
        f"file's weights again in asymmetric groups of 32 gives {blocks['equal_blocks']:,} of its {blocks['blocks']:,} blocks back exactly."
    )
    return "\n".join(lines) + f"\n\n{notes}\n\n"


def language_choice_table() -> str:
    """The variants on validation text, where the choice was made."""
    lines = ["", "| weights | perplexity | rise | of round-to-nearest's rise |", "| --- | --- | --- | --- |"]
    for name, row in language_rows("compress-llm-valid-h200").items():
        lines.append(f"| {name} | {row['perplexity']:.3f} | {_rise(row)} |")
    return "\n".join(lines) + "\n\n"


def _rise(row: dict[str, Any]) -> str:
    """Over bfloat16 in per cent, and as a share of what rounding to nearest adds."""
    share = "-" if row["rise_over_rtn"] is None else f"{row['rise_over_rtn']:.3f}x"
    return f"{'-' if row['variant'] == 'bf16' else format(row['rise_percent'], '+.2f') + '%'} | {share}"


@pytest.mark.parametrize("step", SETTINGS)
def test_page_lists_every_setting(step: str) -> None:
    assert between("docs/compress.md", f"{step}-settings") == settings_table(SETTINGS[step])


def test_page_equals_its_results() -> None:
    assert between("docs/compress.md", "compress-cifar") == cifar_table()
    assert between("docs/compress.md", "compress-speed") == speed_table()
    assert between("docs/compress.md", "compress-linear") == linear_table()
    assert between("docs/compress.md", "compress-distil") == distil_table()
    assert between("docs/compress.md", "compress-llm") == language_table()
    assert between("docs/compress.md", "compress-llm-valid") == language_choice_table()


def test_every_accuracy_reached_what_was_wanted() -> None:
    for row in results("compress-cifar-quant-h200")["rows"]:
        if row["kind"] != "float":
            assert row["test_images"] == 10_000 and row["accuracy"] >= row["wanted"]["accuracy"]
            assert row["bytes_ratio"] <= row["wanted"].get("bytes_ratio", 1.0)
    for row in results("compress-cifar-prune-h200")["rows"]:
        assert row["accuracy"] >= row["accuracy_wanted"]


def test_distillation_reached_what_was_wanted() -> None:
    *seeds, mean = results("compress-cifar-distil-h200")["rows"]
    assert [row["seed"] for row in seeds] == mean["seeds"] == [0, 1, 2] and all(row["test_images"] == 10_000 for row in seeds)
    assert len({str(row["settings"]) for row in seeds}) == 1
    for name in ("plain_accuracy", "distilled_accuracy", "gain_points"):
        assert mean[name] == pytest.approx(sum(row[name] for row in seeds) / 3)
    assert mean["gain_points"] == pytest.approx(100 * (mean["distilled_accuracy"] - mean["plain_accuracy"]))
    assert mean["gain_points"] >= mean["wanted_points"] == 0.4


def test_language_model_reached_what_was_wanted() -> None:
    rows = language_rows("compress-llm-h200")
    base, rtn = rows["bf16"]["perplexity"], rows["int4-rtn"]["perplexity"]
    assert rows["int8"]["perplexity"] / base - 1 <= 0.005
    for name in ("int4-gptq", "int4-gptq-clip"):
        share = (rows[name]["perplexity"] - base) / (rtn - base)
        assert share == pytest.approx(rows[name]["rise_over_rtn"]) and share <= 0.7
    blocks = next(row for row in results("compress-llm-h200")["rows"] if "blocks" in row)
    assert blocks["equal_blocks"] == blocks["blocks"] and blocks["different_values"] == 0


def test_page_recommends_what_the_validation_text_chose() -> None:
    chosen = min((row for name, row in language_rows("compress-llm-valid-h200").items() if name.startswith("int4")), key=_perplexity)
    tested = language_rows("compress-llm-h200")
    assert chosen["variant"] == "int4-gptq-clip" and chosen["settings"] == tested["int4-gptq-clip"]["settings"]
    assert chosen["settings"]["algorithm"] == "gptq" and chosen["settings"]["clip"] and chosen["settings"]["damping"] == 0.05
    assert 'for 4 bits use `algorithm="gptq", clip=True`' in (ROOT / "docs" / "compress.md").read_text()
    plain = tested["bf16"]["decode_tokens_per_s"]
    assert all(row["decode_tokens_per_s"] < plain for name, row in tested.items() if name.startswith(("int4", "nf4")))


def _perplexity(row: dict[str, Any]) -> float:
    return float(row["perplexity"])


def test_readme_says_what_was_measured() -> None:
    quantised = {row["kind"]: row for row in results("compress-cifar-quant-h200")["rows"]}
    pruned = {row["variant"]: row for row in results("compress-cifar-prune-h200")["rows"]}
    static, qat = quantised["static"], quantised["qat"]
    said = (
        f"int8 {static['accuracy']:.2%} at {static['bytes_ratio']:.3f}x the bytes, 4-bit weights {qat['accuracy']:.2%} at "
        f"{qat['bytes_ratio']:.3f}x, half the FLOPs {pruned['channels']['accuracy']:.2%}, 80 % zeros {pruned['magnitude']['accuracy']:.2%}"
    )
    readme = (ROOT / "README.md").read_text()
    assert said in readme
    mean = results("compress-cifar-distil-h200")["rows"][-1]
    assert (
        f"{mean['distilled_accuracy']:.2%} against {mean['plain_accuracy']:.2%} by the same training without a teacher, "
        f"{mean['gain_points']:+.2f} points"
    ) in readme
    rows = language_rows("compress-llm-h200")
    share = {name: row["file_bytes"] / rows["bf16"]["file_bytes"] for name, row in rows.items()}
    rise = {name: row["rise_percent"] for name, row in rows.items()}
    assert (
        f"bfloat16 {rows['bf16']['perplexity']:.2f}; int8 {rise['int8']:+.2f}% at {share['int8']:.3f}x the bytes; int4 in groups of 64 at "
        f"{share['int4-gptq']:.3f}x: rounded to nearest {rise['int4-rtn']:+.1f}%, GPTQ {rise['int4-gptq']:+.1f}%, "
        f"GPTQ with `clip` {rise['int4-gptq-clip']:+.1f}%"
    ) in readme
    speed = {name: row["decode_tokens_per_s"] for name, row in rows.items()}
    four = [value for name, value in speed.items() if name.startswith("int4")]
    said = f"{min(four):.0f} to {max(four):.0f} tokens/s one at a time against {speed['bf16']:.0f} in bfloat16 (int8: {speed['int8']:.0f})"
    assert said in readme
