"""Tests of changes of weights and adapters while a store is open: each version of a model reuses only its own pages."""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import wraps
from pathlib import Path
from types import MethodType
from typing import Any

import peft
import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP

from tests.adapters.tiny import NEW, PAGE, open_store, plain, random_prompt, tiny_llama
from tierstore.adapters.huggingface import (
    PrefixCache,
    TierStoreCache,
    cache_argument,
    model_identity,
    page_specs,
)
from tierstore.config import load_config
from tierstore.store import TierStore

# PEFT uses a name that transformers has deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning"),
]

PROMPT = random_prompt(5 * PAGE + 3)
WHOLE = len(PROMPT) - 1


def lora(**more: Any) -> peft.LoraConfig:
    return peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM", **more
    )


def with_adapters() -> Any:
    """Return a PEFT model with an active adapter "one" and an inactive adapter "two". All calls return equal models."""
    model = tiny_llama()
    torch.manual_seed(7)
    found = peft.get_peft_model(model, lora(), adapter_name="one")
    found.add_adapter("two", lora())
    found.set_adapter("one")
    return found.eval()


def plain_answer(model: Any) -> list[int]:
    inner: Any = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    return plain(inner, PROMPT)


def answer(model: Any, cache: TierStoreCache) -> list[int]:
    given: dict[str, Any] = {cache_argument(model): cache}
    ids = torch.tensor([PROMPT])
    out = model.generate(input_ids=ids, do_sample=False, max_new_tokens=NEW, pad_token_id=0, **given)
    return [int(token) for token in out[0, len(PROMPT) :]]


def reused(store: TierStore, model: Any, **options: Any) -> int:
    """Check that the model answers correctly when it uses the store, and return the number of reused tokens."""
    wanted = plain_answer(model)
    with TierStoreCache(store, PROMPT, model=model, **options) as cache:
        assert answer(model, cache) == wanted
        return cache.reused_tokens


@pytest.fixture
def model() -> Any:
    return with_adapters()


@pytest.fixture
def store(model: Any) -> Iterator[TierStore]:
    with open_store(model, hbm=96) as found:
        yield found


def test_each_adapter_finds_its_own_pages_again_after_switching_back(store: TierStore, model: Any) -> None:
    assert [reused(store, model) for _ in range(2)] == [0, WHOLE]
    model.set_adapter("two")
    assert [reused(store, model) for _ in range(2)] == [0, WHOLE]
    with model.disable_adapter():
        assert [reused(store, model) for _ in range(2)] == [0, WHOLE]
    model.set_adapter("one")
    assert reused(store, model) == WHOLE
    with model.disable_adapter():
        assert reused(store, model) == WHOLE


def test_pages_of_an_adapter_are_found_after_a_restart_by_that_adapter_only(tmp_path: Path) -> None:
    first = with_adapters()
    with open_store(first, hbm=64, disk=tmp_path) as store:
        reused(store, first)
        first.set_adapter("two")
        reused(store, first)
    again = with_adapters()
    with open_store(again, hbm=64, disk=tmp_path) as store:
        with again.disable_adapter():
            assert reused(store, again) == 0
        again.set_adapter("two")
        assert reused(store, again) >= 5 * PAGE


def test_an_adapter_trained_again_under_its_old_name_finds_nothing_after_a_restart(tmp_path: Path) -> None:
    for seed in (1, 2):
        model = with_adapters()
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B.one" in name:
                    parameter.normal_()
        with open_store(model, hbm=64, disk=tmp_path) as store:
            assert reused(store, model) == 0


def test_a_store_of_the_plain_model_serves_a_peft_model_with_its_adapters_off() -> None:
    model = tiny_llama()
    with open_store(model, hbm=64) as store:
        reused(store, model)
        torch.manual_seed(7)
        wrapped: Any = peft.get_peft_model(model, lora(), adapter_name="one").eval()
        assert reused(store, wrapped) == 0
        with wrapped.disable_adapter():
            assert reused(store, wrapped) == WHOLE
    assert model_identity(wrapped) != model_identity(tiny_llama())
    with wrapped.disable_adapter():
        assert model_identity(wrapped) == model_identity(tiny_llama())


def test_loading_and_deleting_another_adapter_loses_no_page(store: TierStore, model: Any) -> None:
    reused(store, model)
    model.add_adapter("three", lora())
    assert reused(store, model) == WHOLE
    model.delete_adapter("two")
    assert reused(store, model) == WHOLE


def merge(model: Any) -> None:
    model.merge_adapter()


def scale(model: Any) -> None:
    model.get_base_model().model.layers[0].self_attn.q_proj.set_scale("one", 5.0)


def mix(model: Any) -> None:
    model.add_weighted_adapter(["one", "two"], [0.5, 0.5], "mixed", combination_type="linear")
    model.set_adapter("mixed")


@pytest.mark.parametrize("change", [merge, scale, mix])
def test_an_adapter_that_is_merged_scaled_or_mixed_reads_no_older_page(
    store: TierStore, model: Any, change: Callable[[Any], None]
) -> None:
    reused(store, model)
    change(model)
    assert [reused(store, model) for _ in range(2)] == [0, WHOLE]


def test_adapters_injected_into_the_model_itself_are_noticed() -> None:
    """Inject adapters with PEFT, because ``add_adapter`` of transformers needs a newer PEFT than is available."""
    model: Any = tiny_llama()

    def layers() -> list[Any]:
        return [each for each in model.modules() if isinstance(each, BaseTunerLayer)]

    with open_store(model, hbm=96) as store:
        reused(store, model)
        torch.manual_seed(7)
        peft.inject_adapter_in_model(lora(), model, "one")
        assert reused(store, model) == 0
        peft.inject_adapter_in_model(lora(), model, "two")
        for layer in layers():
            layer.set_adapter("two")
        assert reused(store, model) == 0
        for layer in layers():
            layer.enable_adapters(enabled=False)
        assert reused(store, model) == WHOLE
        for layer in layers():
            layer.enable_adapters(enabled=True)
            layer.set_adapter("one")
        assert reused(store, model) == WHOLE


def load_state(model: LlamaForCausalLM) -> None:
    model.load_state_dict(tiny_llama(seed=3).state_dict())


def load_state_by_assigning(model: LlamaForCausalLM) -> None:
    model.load_state_dict(tiny_llama(seed=3).state_dict(), assign=True)


def step(model: LlamaForCausalLM) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.tensor([PROMPT]), labels=torch.tensor([PROMPT]), use_cache=False).loss.backward()
    optimiser.step()


def copy_data(model: LlamaForCausalLM) -> None:
    model.model.layers[1].self_attn.v_proj.weight.data.copy_(torch.randn(16, 32))


def replace_parameter(model: LlamaForCausalLM) -> None:
    model.model.layers[1].self_attn.v_proj.weight = torch.nn.Parameter(torch.randn(16, 32))


def edit_one_row(model: LlamaForCausalLM) -> None:
    with torch.no_grad():
        model.model.embed_tokens.weight[PROMPT[0]] += 1


def set_scaling(model: LlamaForCausalLM) -> None:
    model.model.layers[1].self_attn.scaling = 0.1


def hook(model: LlamaForCausalLM) -> None:
    shift = torch.randn(32)
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output + shift)


def patch_forward(model: LlamaForCausalLM) -> None:
    forward = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda given: forward(given) * 1.5


@pytest.mark.parametrize(
    "change",
    [
        load_state,
        load_state_by_assigning,
        step,
        copy_data,
        replace_parameter,
        edit_one_row,
        set_scaling,
        hook,
        patch_forward,
    ],
)
def test_weights_that_change_in_place_read_no_older_page(change: Callable[[LlamaForCausalLM], None]) -> None:
    model = tiny_llama()
    with open_store(model, hbm=96) as store:
        assert [reused(store, model) for _ in range(2)] == [0, WHOLE]
        change(model)
        assert [reused(store, model) for _ in range(2)] == [0, WHOLE]


FACTORS = {"first": 1.0}


class Scaled(torch.nn.Module):
    """A user's module whose results also depend on a class attribute and on a global variable of its file."""

    FACTOR = 1.0

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(given)
        return found * self.FACTOR * FACTORS["first"]


def set_a_global(patch: pytest.MonkeyPatch, model: LlamaForCausalLM) -> None:
    patch.setitem(FACTORS, "first", 2.0)


def set_an_attribute_of_the_class(patch: pytest.MonkeyPatch, model: LlamaForCausalLM) -> None:
    patch.setattr(Scaled, "FACTOR", 2.0)


def replace_forward_of_the_class(patch: pytest.MonkeyPatch, model: LlamaForCausalLM) -> None:
    patch.setattr(Scaled, "forward", lambda self, given: self.inner(given) * 3)


def wrap_forward_of_transformers(patch: pytest.MonkeyPatch, model: LlamaForCausalLM) -> None:
    forward = LlamaMLP.forward

    @wraps(forward)
    def more(self: Any, given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = forward(self, given)
        return found * 1.5

    patch.setattr(LlamaMLP, "forward", more)


def replace_a_function_of_transformers(patch: pytest.MonkeyPatch, model: LlamaForCausalLM) -> None:
    rotate = modeling_llama.apply_rotary_pos_emb

    def other(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = rotate(*args)
        return q, k * 1.5

    patch.setattr(modeling_llama, "apply_rotary_pos_emb", other)


def hook_all_modules(patch: pytest.MonkeyPatch, model: LlamaForCausalLM) -> None:
    def hook(module: torch.nn.Module, args: Any, output: Any) -> Any:
        return output * 1.5 if isinstance(module, torch.nn.Linear) else None

    patch.setitem(torch.nn.modules.module._global_forward_hooks, -1, hook)


def hook_that_names_its_output(patch: pytest.MonkeyPatch, model: LlamaForCausalLM) -> None:
    def hook(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        torch.mul(output, 1.5, out=output)

    model.model.layers[0].mlp.register_forward_hook(hook)


def shrink(given: torch.Tensor) -> None:
    given.mul_(0.5)


def hook_that_calls_what_writes(patch: pytest.MonkeyPatch, model: LlamaForCausalLM) -> None:
    def hook(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        shrink(output)

    model.model.layers[0].mlp.register_forward_hook(hook)


def write_a_transposed_weight(patch: pytest.MonkeyPatch, model: LlamaForCausalLM) -> None:
    model.model.layers[1].self_attn.v_proj.weight.data.mul_(2)


@pytest.mark.parametrize(
    "change",
    [
        set_a_global,
        set_an_attribute_of_the_class,
        replace_forward_of_the_class,
        wrap_forward_of_transformers,
        replace_a_function_of_transformers,
        hook_all_modules,
        hook_that_names_its_output,
        hook_that_calls_what_writes,
        write_a_transposed_weight,
    ],
)
def test_changed_code_or_state_outside_the_model_reads_no_older_page(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch, LlamaForCausalLM], None]
) -> None:
    model = tiny_llama()
    model.model.layers[0].mlp = Scaled(model.model.layers[0].mlp)
    weight = model.model.layers[1].self_attn.v_proj.weight.detach()
    model.model.layers[1].self_attn.v_proj.weight = torch.nn.Parameter(weight.t().contiguous().t())
    with open_store(model, hbm=96) as store:
        assert [reused(store, model) for _ in range(2)] == [0, WHOLE]
        before = model_identity(model)
        change(monkeypatch, model)
        assert model_identity(model) != before
        assert [reused(store, model) for _ in range(2)] == [0, WHOLE]


def test_weights_without_a_version_counter_are_identified_by_their_bytes() -> None:
    with torch.inference_mode():
        model = tiny_llama()
    with open_store(model, hbm=96) as store, torch.inference_mode():
        assert [reused(store, model) for _ in range(2)] == [0, WHOLE]
        model.model.layers[0].self_attn.v_proj.weight.mul_(2)
        assert [reused(store, model) for _ in range(2)] == [0, WHOLE]


def test_two_wrappers_of_one_function_have_two_identities() -> None:
    def identity(factor: float) -> str:
        model = tiny_llama()
        mlp: Any = model.model.layers[0].mlp
        forward = type(mlp).forward
        more = (
            (lambda self, given: forward(self, given) * 2)
            if factor == 2
            else (lambda self, given: forward(self, given) * 3)
        )
        mlp.forward = MethodType(wraps(forward)(more), mlp)
        return model_identity(model)

    assert len({identity(2), identity(3), model_identity(tiny_llama())}) == 3


def test_model_with_active_dropout_is_refused_and_stores_nothing() -> None:
    model = tiny_llama()
    wrapped: Any = peft.get_peft_model(model, lora(lora_dropout=0.3), adapter_name="one")
    with open_store(wrapped, hbm=96) as store:
        # PEFT leaves new adapters in training mode.
        with pytest.raises(ValueError, match=r"is in training mode.*model.eval"):
            TierStoreCache(store, PROMPT, model=wrapped)
        wrapped.eval()
        assert reused(store, wrapped) == 0
        with TierStoreCache(store, PROMPT, model=wrapped) as cache:
            wrapped.train()
            with pytest.raises(ValueError, match=r"have changed|switched to training mode"):
                answer(wrapped, cache)


def test_weights_that_come_back_find_their_pages_again() -> None:
    model = tiny_llama()
    before = deepcopy(model.state_dict())
    with open_store(model, hbm=96) as store:
        reused(store, model)
        load_state(model)
        reused(store, model)
        model.load_state_dict(before)
        assert reused(store, model) == WHOLE


def test_a_draft_model_that_changes_reads_no_older_page() -> None:
    model, draft = tiny_llama(), tiny_llama(num_layers=1, seed=1)
    with open_store(model, hbm=64, draft=draft) as store:
        found = []
        for _ in range(2):
            for _ in range(2):
                with TierStoreCache(store, PROMPT, model=model, draft=draft) as cache:
                    given: dict[str, Any] = {cache_argument(model): cache}
                    model.generate(
                        torch.tensor([PROMPT]), assistant_model=cache.draft_model, max_new_tokens=3, **given
                    )
                    found.append(cache.reused_tokens > 0)
            with torch.no_grad():
                draft.model.layers[0].self_attn.v_proj.weight.mul_(2)
        assert found == [False, True, False, True]


def test_a_cache_created_before_a_switch_is_refused_and_stores_nothing(store: TierStore, model: Any) -> None:
    with TierStoreCache(store, PROMPT, model=model) as cache:
        model.set_adapter("two")
        with pytest.raises(ValueError, match="have changed since this TierStoreCache was created"):
            answer(model, cache)
    model.set_adapter("one")
    assert reused(store, model) == 0
    model.set_adapter("two")
    assert reused(store, model) == 0


def test_session_open_across_an_adapter_switch_drops_its_kept_page(store: TierStore, model: Any) -> None:
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0}
    with PrefixCache(store, model) as home:
        session = home.session("chat")
        session.append(PROMPT)
        session.generate(**options)
        assert session.keeps_page
        model.set_adapter("two")
        before = list(session.tokens)
        answer = session.generate(**options)
        assert session.turns[-1].reused_tokens == 0
        assert answer == plain(model.get_base_model(), before, max_new_tokens=4)
        assert home.keys(before) != store.keys(before)
        model.set_adapter("one")
        assert home.keys(before) == store.keys(before)


def test_adapters_and_changes_are_distinguished_under_a_given_model_id(tmp_path: Path) -> None:
    def opened(model: Any) -> TierStore:
        specs = page_specs(model, PAGE, model_id="mine")
        nbytes = sum(spec.page_nbytes for spec in specs)
        config = {
            "hbm": {"capacity": 96 * nbytes, "device": "cpu"},
            "nvme": {"path": str(tmp_path), "capacity": "64MiB"},
        }
        return TierStore.open(load_config(config), specs)

    first = with_adapters()
    with opened(first) as store:
        assert reused(store, first) == 0
    again = with_adapters()
    again.set_adapter("two")
    with opened(again) as store:
        assert reused(store, again) == 0
        again.set_adapter("one")
        assert reused(store, again) >= 5 * PAGE
        with again.disable_adapter():
            assert reused(store, again) == 0
        copy_data(again.get_base_model())
        assert [reused(store, again) for _ in range(2)] == [0, WHOLE]


def test_learned_prompts_are_refused() -> None:
    config = peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    wrapped: Any = peft.get_peft_model(tiny_llama(), config)
    with pytest.raises(ValueError, match="learns its prompts"):
        page_specs(wrapped, PAGE)


def x_lora(folder: Path) -> Any:
    with_adapters().save_pretrained(folder)
    model = tiny_llama()
    model.config.use_cache = False
    return peft.XLoraConfig(
        task_type="CAUSAL_LM", hidden_size=32, xlora_depth=1, adapters={"0": str(folder / "one")}
    )


def a_lora(folder: Path) -> Any:
    return lora(alora_invocation_tokens=[90, 91])


@pytest.mark.parametrize("config", [x_lora, a_lora])
def test_adapters_that_depend_on_the_whole_input_are_refused(
    config: Callable[[Path], Any], tmp_path: Path
) -> None:
    """Later tokens select these adapters or decide whether one is used, so a token's K depends on later tokens."""
    model = tiny_llama()
    model.config.use_cache = False
    wrapped: Any = peft.get_peft_model(model, config(tmp_path)).eval()
    with pytest.raises(ValueError, match=r"'default' of the PEFT model .*depend on later tokens"):
        page_specs(wrapped, PAGE)


def test_adapters_named_for_a_single_request_are_refused(store: TierStore, model: Any) -> None:
    ids = torch.tensor([PROMPT])
    with (
        TierStoreCache(store, PROMPT, model=model) as cache,
        pytest.raises(ValueError, match=r"set_adapter, not with adapter_names="),
    ):
        model.generate(
            input_ids=ids, max_new_tokens=2, adapter_names=["two"], **{cache_argument(model): cache}
        )
    assert store.match(store.keys(PROMPT)).num_pages == 0


def test_a_peft_model_may_be_the_model_of_sessions_and_the_draft_model() -> None:
    model, draft = with_adapters(), with_adapters()
    draft.set_adapter("two")
    with open_store(model, hbm=96, draft=draft) as store, PrefixCache(store, model, draft=draft) as cache:
        session = cache.session("a")
        session.append(PROMPT)
        assert session.generate(max_new_tokens=NEW, do_sample=False) == plain_answer(model)
        session.append([5, 6])
        session.generate(max_new_tokens=2, do_sample=False)
        assert session.turns[-1].reused_tokens >= len(PROMPT)


def test_extra_still_separates_requests(store: TierStore, model: Any) -> None:
    assert reused(store, model, extra=("mine",)) == 0
    assert reused(store, model) == 0
    assert reused(store, model, extra=("mine",)) == WHOLE
