"""Test the identity under which a model's pages are stored, and what changes this identity."""

# mypy: allow-untyped-calls
from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any, Self

import accelerate  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
from torch.ao.quantization import quantize_dynamic
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from tests.adapters.tiny import ask, generate, open_store, plain, random_prompt, strong, tiny_llama
from tests.support import lanes
from tierstore.adapters.huggingface import TierStoreCache, model_identity, page_spec, page_specs


def test_geometry_comes_from_the_config() -> None:
    config = LlamaConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2)
    spec = page_spec(config, 16, torch.bfloat16, "m")
    assert spec.shape == (3, 2, 16, 2, 8)
    assert (spec.dtype, spec.model) == ("bfloat16", "m")
    assert page_spec(LlamaConfig(head_dim=6), 16, "float16", "m").head_dim == 6


def test_latent_attention_is_refused() -> None:
    config = LlamaConfig()
    config.kv_lora_rank = 64
    with pytest.raises(ValueError, match="kv_lora_rank"):
        page_spec(config, 16, "float32", "m")


def test_model_of_another_family_is_refused_naming_what_it_lacks() -> None:
    with pytest.raises(ValueError, match="has no num_hidden_layers"):
        page_spec(GPT2Config(), 16, "float32", "m")


def test_identity_survives_saving_loading_and_the_choice_of_attention(tmp_path: Path) -> None:
    model = tiny_llama()
    identity = model_identity(model)
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="sdpa")
    assert model_identity(again) == identity
    model.set_attn_implementation("eager")
    assert model_identity(model) == identity


def test_identity_changes_with_one_weight_the_config_or_the_dtype() -> None:
    # F010, F015
    seen = {model_identity(tiny_llama())}
    edited = tiny_llama()
    with torch.no_grad():
        edited.model.layers[2].self_attn.v_proj.weight[0, 0] += 1e-3
    seen.add(model_identity(edited))
    other = tiny_llama()
    other.config.rms_norm_eps = 1e-3
    seen.add(model_identity(other))
    seen.add(model_identity(tiny_llama().double()))
    assert len(seen) == 4


def identity_as_it_was(model: PreTrainedModel) -> str:
    """Return a model's identity in version 0.1.0 (commit b711246), which must not change for plain models."""
    stored = {"_name_or_path", "_attn_implementation", "attn_implementation", "architectures"}
    stored |= {"transformers_version", "dtype"}
    config = {key: value for key, value in model.config.to_dict().items() if key not in stored}
    digest = hashlib.sha256()

    def feed(raw: bytes | memoryview) -> None:
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)

    feed(type(model).__name__.encode())
    feed(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        feed(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        feed(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tiny(kind: str) -> PreTrainedModel:
    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "head_dim": 8,
    }
    config = AutoConfig.for_model(kind, **sizes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return strong(model)


@pytest.mark.parametrize(
    "kind", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "glm"]
)
@pytest.mark.parametrize("dtype", lanes.some([torch.float32, torch.bfloat16], (torch.bfloat16,).__contains__))
def test_plain_models_keep_the_identity_that_names_their_directories(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = tiny(kind).to(dtype)  # type: ignore[arg-type]
    was = identity_as_it_was(model)
    assert model_identity(model) == was
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager")
    assert model_identity(loaded) == identity_as_it_was(loaded)
    generate(loaded, [1, 2, 3, 4], None, max_new_tokens=2)
    assert model_identity(loaded) == identity_as_it_was(loaded)


def test_pages_of_a_model_and_its_draft_keep_their_names() -> None:
    model, draft = tiny_llama(), tiny_llama(num_layers=1, seed=1)
    names = [spec.model for spec in page_specs(model, 16, draft=draft)]
    assert names == [identity_as_it_was(model), identity_as_it_was(draft)]


def test_settings_of_generate_do_not_change_the_identity() -> None:
    model = tiny_llama()
    assert model.generation_config is not None
    model.generation_config.temperature = 0.3
    model.train(mode=False)
    model.requires_grad_(False)
    model.name_or_path = "elsewhere"
    assert model_identity(model) == identity_as_it_was(model)


def test_dynamically_quantised_models_are_identified_by_their_packed_weights() -> None:
    def quantised(scale: float) -> PreTrainedModel:
        model = tiny_llama()
        with torch.no_grad():
            model.model.layers[1].self_attn.v_proj.weight[0] *= scale
        found: PreTrainedModel = quantize_dynamic(model, {torch.nn.Linear})
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [model_identity(quantised(scale)) for scale in (1.0, 0.5, 1.0)]
    assert found[0] == found[2] != found[1]


def projection(model: LlamaForCausalLM) -> Any:
    return model.model.layers[0].self_attn.q_proj


def with_tensor(model: LlamaForCausalLM, value: float) -> None:
    projection(model).shift = torch.full((3,), value)


def with_tensors_in_containers(model: LlamaForCausalLM, value: float) -> None:
    projection(model).shifts = [torch.zeros(3), {"one": (torch.full((2,), value),)}]


def with_array(model: LlamaForCausalLM, value: float) -> None:
    projection(model).table = np.full(4, value)


def with_object_of_tensors(model: LlamaForCausalLM, value: float) -> None:
    """Attach an object that holds tensors, as bitsandbytes does for the quantization state of packed weights."""
    projection(model).weight_state = SimpleNamespace(absmax=torch.full((3,), value), blocksize=64)


def with_hook(model: LlamaForCausalLM, value: float) -> None:
    steering = torch.full((32,), value)
    projection(model).register_forward_hook(lambda module, args, output: output + steering)


def with_hook_that_writes_in_place(model: LlamaForCausalLM, value: float) -> None:
    def hook(module: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        output.mul_(value)

    projection(model).register_forward_hook(hook)


def with_other_forward(model: LlamaForCausalLM, value: float) -> None:
    forward = projection(model).forward
    projection(model).forward = lambda given: forward(given) * value


def with_partial_forward(model: LlamaForCausalLM, value: float) -> None:
    def scaled(scale: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return given * scale

    projection(model).forward = partial(scaled, torch.tensor(value))


def with_other_scaling(model: LlamaForCausalLM, value: float) -> None:
    model.model.layers[1].self_attn.scaling = value


def with_parametrization(model: LlamaForCausalLM, value: float) -> None:
    class Times(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = value

        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * self.factor

    torch.nn.utils.parametrize.register_parametrization(projection(model), "weight", Times())


def with_extra_state(model: LlamaForCausalLM, value: float) -> None:
    class Keeper(torch.nn.Module):
        __slots__ = ()

        def get_extra_state(self) -> dict[str, float]:
            return {"scale": value}

    model.model.layers[0].keeper = Keeper()


def with_quantised_module(model: LlamaForCausalLM, value: float) -> None:
    weight = torch.quantize_per_tensor(torch.full((4, 4), value), 0.01, 0, torch.qint8)
    linear = torch.ao.nn.quantized.Linear(4, 4)
    linear.set_weight_bias(weight, None)
    model.model.layers[0].mlp.more = linear


def with_sparse_weight(model: LlamaForCausalLM, value: float) -> None:
    dense = projection(model).weight.detach() * value
    projection(model).weight = torch.nn.Parameter(dense.to_sparse(), requires_grad=False)


@pytest.mark.parametrize(
    "change",
    [
        with_tensor,
        with_tensors_in_containers,
        with_array,
        with_object_of_tensors,
        with_hook,
        with_hook_that_writes_in_place,
        with_other_forward,
        with_partial_forward,
        with_other_scaling,
        with_parametrization,
        with_extra_state,
        with_quantised_module,
        with_sparse_weight,
    ],
)
def test_state_beside_parameters_and_buffers_is_part_of_the_identity(
    change: Callable[[LlamaForCausalLM, float], None],
) -> None:
    def of(value: float) -> str:
        model = tiny_llama()
        change(model, value)
        return model_identity(model)

    first = of(0.5)
    assert of(0.5) == first
    assert len({first, of(0.75), model_identity(tiny_llama())}) == 3


def test_read_only_hooks_do_not_change_the_identity() -> None:
    model, seen = tiny_llama(), []

    def note(module: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        seen.append(output.shape)

    projection(model).register_forward_hook(note)
    assert model_identity(model) == identity_as_it_was(model)


def test_which_weights_are_tied_is_part_of_the_identity() -> None:
    def tied(to: str) -> str:
        model = tiny_llama()
        first, second = (model.model.layers[i].self_attn for i in (0, 1))
        first.o_proj.weight = torch.nn.Parameter(first.q_proj.weight.detach().clone())
        second.q_proj.weight = getattr(first, to).weight
        return model_identity(model)

    assert tied("q_proj") != tied("o_proj")


def test_user_defined_model_class_is_identified_by_its_source(tmp_path: Path) -> None:
    def of(scale: float) -> str:
        folder = tmp_path / str(scale)
        folder.mkdir()
        (folder / "modeling_own.py").write_text(
            "from transformers import LlamaForCausalLM\n"
            "class OwnForCausalLM(LlamaForCausalLM):\n"
            f"    SCALE = {scale}\n"
        )
        spec = spec_from_file_location("modeling_own", folder / "modeling_own.py")
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "modeling_own", module)
            model = tiny_llama()
            model.__class__ = module.OwnForCausalLM
            return model_identity(model)

    assert of(1.0) != of(2.0)


def test_unreadable_attributes_are_refused_by_path_unless_model_id_is_given() -> None:
    model = tiny_llama()
    projection(model).guard = Lock()
    with pytest.raises(ValueError, match=r"layers.0.self_attn.q_proj.guard is a _thread.lock.*model_id"):
        page_specs(model, 16)
    (spec,) = page_specs(model, 16, model_id="mine-1")
    assert spec.model == "mine-1"


def never_loaded(model: Any, folder: Path) -> str:
    model.model.layers[1].to("meta")
    return "layers.1.self_attn.q_proj.weight and 8 more weights"


def offloaded_to_disk(model: Any, folder: Path) -> str:
    accelerate.disk_offload(model, folder, execution_device=torch.device("cpu"))
    return "embed_tokens.weight and 29 more weights"


def offloaded_to_memory(model: Any, folder: Path) -> str:
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    return "embed_tokens.weight and 29 more weights"


def spread_over_disk(model: Any, folder: Path) -> str:
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk"}
    accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=folder)
    return "layers.1.self_attn.q_proj.weight and 17 more weights"


@pytest.mark.parametrize("put_away", [never_loaded, offloaded_to_disk, offloaded_to_memory, spread_over_disk])
def test_weights_that_are_not_in_memory_are_refused_before_a_store_is_opened(
    put_away: Callable[[Any, Path], str], tmp_path: Path
) -> None:
    model = tiny_llama()
    told = f"{put_away(model, tmp_path)} are on the meta device.*without offloading"
    with pytest.raises(ValueError, match=told):
        page_specs(model, 16)
    with pytest.raises(ValueError, match=told):
        page_specs(model, 16, model_id="mine-1")
    with pytest.raises(ValueError, match=told):
        model_identity(model)


def test_a_model_that_is_offloaded_after_its_store_was_opened_is_refused(tmp_path: Path) -> None:
    model = tiny_llama()
    with open_store(model) as store:
        accelerate.disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
        with pytest.raises(ValueError, match=r"on the meta device.*without offloading"):
            TierStoreCache(store, random_prompt(9), model=model)


class Int8Weight(torch.Tensor):
    """A weight tensor made of 8-bit codes and a scale per row, as in torchao."""

    codes: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scales.dtype)
        return made

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: object) -> Self:
        return cls(inner["codes"], inner["scales"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Dequantize the weights for every operation except ``detach``."""
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scales)
        plain = [each.codes * each.scales if isinstance(each, cls) else each for each in args]
        return func(*plain, **(kwargs or {}))


def in_codes(model: LlamaForCausalLM) -> None:
    """Quantize every linear layer of the decoder, as ``torchao.quantization.quantize_`` does."""
    for module in model.model.modules():
        if isinstance(module, torch.nn.Linear):
            scales = module.weight.detach().abs().amax(1, keepdim=True) / 127
            codes = (module.weight.detach() / scales).round().to(torch.int8)
            module.weight = torch.nn.Parameter(Int8Weight(codes, scales), requires_grad=False)


def by_torchao(model: LlamaForCausalLM) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig(version=2))


@pytest.mark.parametrize("quantise", [in_codes, by_torchao])
def test_quantised_tensor_subclass_weights_are_served_and_identified(
    quantise: Callable[[LlamaForCausalLM], None],
) -> None:
    prompt = random_prompt(30)
    model = tiny_llama()
    of_floats = model_identity(model)
    quantise(model)
    assert model_identity(model) != of_floats
    with open_store(model) as store:
        answers = [ask(store, model, prompt) for _ in range(2)]
        assert [cache.reused_tokens for _, cache in answers] == [0, len(prompt) - 1]
        assert answers[0][0] == answers[1][0] == plain(model, prompt)
        weight: Any = model.model.layers[1].self_attn.v_proj.weight
        names, _ = weight.__tensor_flatten__()
        with torch.no_grad():
            getattr(weight, next(name for name in names if "scale" in name)).mul_(-1)
        answer, cache = ask(store, model, prompt)
        assert cache.reused_tokens == 0, "another weight, so other pages"
        assert answer == plain(model, prompt)


def test_compiled_wrapper_is_refused_and_the_error_names_the_alternative() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled: Any = torch.compile(tiny_llama())
    with pytest.raises(ValueError, match=r"OptimizedModule.*pass the model that was compiled"):
        page_specs(compiled, 16)
