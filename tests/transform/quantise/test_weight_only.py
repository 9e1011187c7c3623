"""Whole models: which layers are packed, calibration in running order, GPTQ and AWQ against rounding to nearest, shared tables."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import Tensor, nn

from ridgeline.core.errors import OptionError, TransformError
from ridgeline.transform.compare import count_parameters
from ridgeline.transform.quantise.awq import channel_scale, fold_, search
from ridgeline.transform.quantise.calibrate import Stage, input_rows, stages
from ridgeline.transform.quantise.gptq import output_error
from ridgeline.transform.quantise.grid import Grid, dequantise, quantise
from ridgeline.transform.quantise.packed import PackedConv2d, PackedEmbedding, PackedLinear
from ridgeline.transform.quantise.weight_only import WeightSettings, chosen_layers, quantise_weights_, storage_only, total_bytes
from ridgeline.workload.models.decoder import CausalLM, DecoderConfig

INT4 = {"bits": 4, "symmetric": False, "granularity": "group", "group": 16, "scale_type": "float16"}


def decoder(seed: int = 0) -> CausalLM:
    torch.manual_seed(seed)
    model = CausalLM(DecoderConfig(3, 64, 96, 4, 2, 80, 1e4, tied=True)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.mul_(torch.rand_like(parameter) * 4 + 0.2)  # channels of very different size, as real models have
    return model


def tokens(count: int = 6) -> list[tuple[Tensor, Tensor]]:
    make = torch.Generator().manual_seed(1)
    return [(torch.randint(80, (2, 24), generator=make), torch.arange(24)) for _ in range(count)]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4), nn.Flatten(), nn.Linear(8 * 6 * 6, 32), nn.ReLU(),
        nn.Linear(32, 10),
    ).eval()  # fmt: skip


def images() -> list[tuple[Tensor]]:
    make = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 3, 8, 8, generator=make),) for _ in range(4)]


def test_names_choose_layers() -> None:
    model = decoder()
    everything = chosen_layers(model, WeightSettings())
    assert len(everything) == 21 and "lm_head" not in everything  # it shares its weight with the embedding
    assert chosen_layers(model, WeightSettings(only=("*.mlp.*",), skip=("*down_proj", "model.layers.0.*"))) == [
        f"model.layers.{layer}.mlp.{name}_proj" for layer in (1, 2) for name in ("gate", "up")
    ]
    with pytest.raises(TransformError, match="no layer to quantise"):
        quantise_weights_(model, WeightSettings(only=("conv*",)))


@pytest.mark.parametrize("form", ["uniform", "log", "codebook", "nf4"])
def test_rounding_to_nearest(form: str) -> None:
    model, plain = network(), network()
    granularity = "tensor" if form == "codebook" else "channel"  # a table a channel outweighs these small layers
    rows = quantise_weights_(model, WeightSettings(**{**INT4, "granularity": granularity}, format=form))  # type: ignore[arg-type]
    assert [row.name for row in rows] == ["0", "2", "4", "6"]
    assert [type(model[i]) for i in (0, 2, 4, 6)] == [PackedConv2d, PackedConv2d, PackedLinear, PackedLinear]
    for row in rows:
        layer = model.get_submodule(row.name)
        original = plain.get_submodule(row.name).weight.detach()
        assert isinstance(layer, PackedConv2d | PackedLinear) and row.bytes == layer.packed_bytes() < row.float_bytes / 2
        noise = float((layer.dequantised() - original).square().sum())
        assert row.sqnr_db == pytest.approx(10 * float(torch.log10(original.square().sum() / noise)), abs=1e-3)
        assert row.error is None and row.weights == original.numel()
    x = images()[0][0]
    with torch.no_grad():
        assert float((model(x) - plain(x)).norm() / plain(x).norm()) < 0.5
    assert total_bytes(rows)[1] == sum(p.nbytes for name, p in plain.named_parameters() if name.endswith("weight"))
    assert {"0", "2"} <= set(storage_only(rows))
    json.dumps([row.to_dict() for row in rows])


def test_bad_weights_name_their_layer() -> None:
    model = network()
    with torch.no_grad():
        model[4].weight[3, 3] = float("nan")
    with pytest.raises(TransformError, match=r"quantise 4: 1 of 9216 weights"):
        quantise_weights_(model, WeightSettings())


def test_what_is_refused() -> None:
    for options in ({"algorithm": "hqq"}, {"format": "fp4"}, {"algorithm": "gptq", "format": "nf4"}):
        with pytest.raises(OptionError):
            WeightSettings(**options)  # type: ignore[arg-type]
    with pytest.raises(TransformError, match="gptq without calibration"):
        quantise_weights_(network(), WeightSettings(algorithm="gptq"))
    with pytest.raises(TransformError, match="calibration without inputs"):
        quantise_weights_(network(), WeightSettings(algorithm="gptq"), [])
    with pytest.raises(TransformError, match="one layer"):
        quantise_weights_(nn.Linear(4, 4), WeightSettings())


def collected(model: nn.Module, names: list[str], inputs: list[tuple[Tensor, ...]]) -> dict[str, Stage]:
    return {name: stage for stage in stages(model, names, inputs) for name in stage.names}


def by_hand(model: nn.Module, name: str, inputs: list[tuple[Tensor, ...]]) -> Tensor:
    """Σ x xᵀ of one layer from plain whole-model passes."""
    rows: list[Tensor] = []
    layer = model.get_submodule(name)
    hook = layer.register_forward_pre_hook(lambda module, args: rows.append(input_rows(module, args[0])))
    with torch.no_grad():
        for one in inputs:
            model(*one)
    hook.remove()
    x = torch.cat(rows).double()
    return x.t() @ x


def test_statistics_of_an_unchanged_model_are_those_of_whole_passes() -> None:
    model = decoder()
    names = chosen_layers(model, WeightSettings())
    found = collected(model, names, tokens())
    assert set(found) == set(names)
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "model.layers.2.self_attn.o_proj"):
        assert torch.allclose(found[name].statistics.gram, by_hand(model, name, tokens()), rtol=1e-4, atol=1e-3)
    shared = found["model.layers.1.mlp.up_proj"]
    assert set(shared.names) == {"model.layers.1.mlp.up_proj", "model.layers.1.mlp.gate_proj"}
    assert shared.source == "model.layers.1.post_attention_layernorm"
    assert found["model.layers.1.self_attn.o_proj"].source is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_later_layers_see_what_replaced_layers_give() -> None:
    model = decoder()
    names = chosen_layers(model, WeightSettings())
    target = "model.layers.2.mlp.down_proj"
    for stage in stages(model, names, tokens()):
        if target in stage.names:
            assert torch.allclose(stage.statistics.gram, by_hand(model, target, tokens()), rtol=1e-4, atol=1e-3)
            return
        for name in stage.names:
            with torch.no_grad():
                model.get_submodule(name).weight.mul_(0.7)
    pytest.fail("the layer was never reached")


def test_a_model_whose_blocks_do_not_feed_each_other_is_run_whole() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Sequential(nn.Linear(6, 6)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([part(x) for part in self.parts]).sum(0)

    model, inputs = Branches(), [(torch.randn(5, 6),)]
    found = collected(model, [f"parts.{i}.0" for i in range(3)], inputs)
    assert len(found) == 3 and all(stage.check is None for stage in found.values())
    for name, stage in found.items():
        assert torch.allclose(stage.statistics.gram, by_hand(model, name, inputs), atol=1e-4)


@pytest.mark.parametrize(
    "options", [{"padding": 1, "stride": 2}, {"padding": "same", "dilation": 2}, {"padding": 2, "padding_mode": "circular"}]
)
def test_patches_of_a_convolution(options: dict[str, object]) -> None:
    layer = nn.Conv2d(3, 5, 3, bias=False, **options)  # type: ignore[arg-type]
    x = torch.randn(2, 3, 7, 8)
    out = layer(x).flatten(2).transpose(1, 2).reshape(-1, 5)
    assert torch.allclose(input_rows(layer, x) @ layer.weight.flatten(1).t(), out, atol=1e-5)


def loss_of(model: nn.Module, reference: nn.Module) -> float:
    with torch.no_grad():
        return sum(float((model(*one) - reference(*one)).square().mean()) for one in tokens())


def test_gptq_and_awq_beat_rounding_on_a_decoder() -> None:
    reference = decoder()
    found, rows = {}, {}
    for algorithm in ("rtn", "gptq", "awq"):
        model = copy.deepcopy(reference)
        rows[algorithm] = quantise_weights_(model, WeightSettings(**INT4, algorithm=algorithm), tokens())  # type: ignore[arg-type]
        found[algorithm] = loss_of(model, reference)
        assert all(isinstance(model.get_submodule(row.name), PackedLinear) for row in rows[algorithm])
    assert found["gptq"] < 0.7 * found["rtn"]
    assert found["awq"] < 0.95 * found["rtn"]
    assert all(row.error is not None and row.error > 0 for row in rows["gptq"])
    assert any("folded" in row.note for row in rows["awq"]) and any("run time" in row.note for row in rows["awq"])


def test_gptq_treats_convolutions_and_says_what_it_cannot() -> None:
    reference, model = network(), network()
    rows = {row.name: row for row in quantise_weights_(model, WeightSettings(bits=3, algorithm="gptq"), images())}
    assert rows["2"].note.startswith("rounded to nearest") and rows["2"].error is None
    assert rows["0"].note == "" and rows["0"].error is not None
    plain = network()
    quantise_weights_(plain, WeightSettings(bits=3))
    gram = by_hand(reference, "4", images())
    errors = [output_error(reference[4].weight, one[4].dequantised(), gram) for one in (model, plain)]
    assert errors[0] < 0.7 * errors[1]


def test_modes_are_restored() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 4)).train()
    before = model[1].running_mean.clone()
    quantise_weights_(model, WeightSettings(algorithm="gptq"), [(torch.randn(16, 8) + 3,)])
    assert torch.equal(model[1].running_mean, before) and all(module.training for module in model.modules())


def test_tables_are_packed_once_for_input_and_output() -> None:
    model, plain = decoder(), decoder()
    rows = quantise_weights_(model, WeightSettings(tables=True))
    table, head = model.model.embed_tokens, model.lm_head
    assert isinstance(table, PackedEmbedding) and isinstance(head, PackedLinear)
    assert table.packed is head.packed and table.scale is head.scale
    assert rows[-1].note == "shares the table's tensors"
    one = tokens()[0]
    with torch.no_grad():
        assert float((model(*one) - plain(*one)).norm() / plain(*one).norm()) < 0.05
    from ridgeline.transform.saved import stored_bytes

    assert stored_bytes(model) < 0.35 * stored_bytes(plain)


def test_search_finds_a_scale_where_channels_differ() -> None:
    make = torch.Generator().manual_seed(0)
    size = torch.logspace(-1.5, 1.5, 32)
    x = torch.randn(500, 32, generator=make) * size
    weight = torch.randn(16, 32, generator=make)
    gram, magnitude = x.t().double() @ x.double(), x.abs().sum(0)
    grid = Grid(3, False, "channel")
    found = search([weight], gram, magnitude, grid)
    assert 0 < found.alpha < 1 and found.error < 0.5 * found.plain_error
    back = dequantise(quantise(weight * found.scale, grid)) / found.scale
    exact = (x.double() @ (back - weight).double().t()).square().sum()
    assert found.error == pytest.approx(float(exact), rel=1e-4)
    flat = search([weight], torch.eye(32, dtype=torch.float64), torch.ones(32), grid)
    assert flat.alpha == 0 and torch.equal(flat.scale, torch.ones(32))


def test_channel_scale() -> None:
    scale = channel_scale(torch.tensor([1.0, 4.0, 0.0, 0.25]), 0.5)
    assert torch.allclose(scale, torch.tensor([1.0, 2.0, 1.0, 0.5]))
    assert torch.equal(channel_scale(torch.zeros(3), 0.5), torch.ones(3))


def test_folding_keeps_the_function_or_is_undone() -> None:
    class Two(nn.Module):
        """A norm read by a linear layer and, if `leak`, by the output as well."""

        def __init__(self, leak: bool) -> None:
            super().__init__()
            self.norm, self.linear, self.leak = nn.LayerNorm(8), nn.Linear(8, 8), leak

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            out: Tensor = self.linear(y) + (y if self.leak else 0)
            return out

    torch.manual_seed(0)
    x, scale = torch.randn(4, 8), torch.rand(8) + 0.5
    for leak in (False, True):
        model = Two(leak)
        nn.init.normal_(model.norm.bias)
        before, weight = model(x), model.linear.weight.clone()
        assert fold_(model.norm, [model.linear], scale, lambda model=model: model(x)) is not leak
        assert torch.allclose(model(x), before, atol=1e-5)
        assert torch.allclose(model.linear.weight, weight if leak else weight * scale)
    assert not fold_(None, [nn.Linear(8, 8)], scale, lambda: x)
    assert not fold_(nn.LayerNorm(8, elementwise_affine=False), [nn.Linear(8, 8)], scale, lambda: x)


class Twice(nn.Module):
    """One layer in two places, one table in two embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.again = nn.Linear(16, 16)
        self.here, self.there = nn.Embedding(32, 16), nn.Embedding(32, 16)
        self.there.weight = self.here.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.again(self.first(self.here(tokens) + self.there(tokens)).relu())


def test_what_is_shared_is_packed_in_every_place_and_stays_shared() -> None:
    model = Twice()
    quantise_weights_(model, WeightSettings(tables=True))
    assert isinstance(model.first, PackedLinear) and model.first is model.again
    assert isinstance(model.there, PackedEmbedding) and model.here.packed is model.there.packed and model.here.scale is model.there.scale


def test_a_shared_table_counts_once() -> None:
    for made in (Twice, decoder):
        model = made()
        before = count_parameters(model)
        quantise_weights_(model, WeightSettings(tables=True))
        assert count_parameters(model) == before
