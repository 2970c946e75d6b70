from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, StableDiffusion3Pipeline
from torch import Tensor

import gradbalance as gb
from gradbalance.errors import InvalidArgumentError, StateError
from gradbalance_diffusers import generator
from gradbalance_diffusers.embeddings import PromptEmbeddings
from gradbalance_diffusers.nft import interpolate_noise, kl_term, nft_terms
from gradbalance_diffusers.policy import LORA_FILE, SD3Policy
from gradbalance_diffusers.sampling import sample_latents

Loader = Callable[..., SD3Policy]
PipelineLoader = Callable[[], StableDiffusion3Pipeline]


def inputs(batch: int = 3, seed: int = 0) -> tuple[Tensor, Tensor, PromptEmbeddings]:
    g = torch.Generator().manual_seed(seed)
    embeddings = PromptEmbeddings(torch.randn(batch, 12, 32, generator=g), torch.randn(batch, 32, generator=g))
    return torch.randn(batch, 4, 8, 8, generator=g), torch.linspace(0.2, 1.0, batch), embeddings


def velocity(policy: SD3Policy, role: str) -> Tensor:
    with torch.no_grad(), policy.role(role):
        return policy.velocity(*inputs())


class TestParameters:
    def test_only_the_joint_attention_is_adapted(self, policy: SD3Policy) -> None:
        # Block 0: 8 projections; block 1, the last, has no output projection of the text stream.
        assert len(policy.parameters) == 2 * (8 + 7)
        assert any("attn2.to_q" in name for name, _ in policy.transformer.named_modules())
        assert not any("attn2" in name for name in policy.parameters)

    def test_names_are_sorted_and_shared_by_both_roles(self, policy: SD3Policy) -> None:
        assert list(policy.parameters) == sorted(policy.parameters) == list(policy.old_parameters)
        assert all(p is not q for p, q in zip(policy.parameters.values(), policy.old_parameters.values(), strict=True))

    def test_nothing_else_is_trainable(self, policy: SD3Policy) -> None:
        trained = {id(p) for p in policy.parameters.values()}
        modules = [m for m in policy.pipeline.components.values() if isinstance(m, torch.nn.Module)]
        assert {id(p) for m in modules for p in m.parameters() if p.requires_grad} == trained

    def test_initialization(self, load_policy: Loader) -> None:
        state = torch.get_rng_state()
        one, same, other = load_policy(seed=3), load_policy(seed=3), load_policy(seed=4)
        assert torch.equal(torch.get_rng_state(), state)
        name = "transformer_blocks.0.attn.to_q.lora_A.weight"
        assert torch.equal(one.parameters[name], same.parameters[name])
        assert not torch.equal(one.parameters[name], other.parameters[name])
        assert all(not p.any() for key, p in one.parameters.items() if "lora_B" in key)
        assert all(torch.equal(p, one.old_parameters[key]) for key, p in one.parameters.items())
        factors = torch.cat([p.detach().flatten() for key, p in one.parameters.items() if "lora_A" in key])
        assert float(factors.std()) == pytest.approx(1 / 4, rel=0.1)

    def test_low_precision_base_keeps_float32_adapters(self, pipeline_path: Path) -> None:
        pipeline = generator.load_pipeline(pipeline_path, torch_dtype=torch.bfloat16)
        policy = SD3Policy(pipeline, rank=4, max_sequence_length=0)
        assert policy.dtype == torch.bfloat16
        assert {p.dtype for p in (*policy.parameters.values(), *policy.old_parameters.values())} == {torch.float32}
        prediction = policy.velocity(*inputs())
        assert prediction.dtype == torch.float32
        prediction.square().mean().backward()
        gradients = [p.grad for name, p in policy.parameters.items() if "lora_B" in name]
        assert all(g is not None and g.dtype == torch.float32 for g in gradients)
        assert any(g.any() for g in gradients)


class TestRoles:
    def test_three_roles_three_outputs(self, policy: SD3Policy) -> None:
        default, old, reference = (velocity(policy, role) for role in ("default", "old", "reference"))
        assert not torch.allclose(default, old)
        assert not torch.allclose(default, reference)
        assert not torch.allclose(old, reference)

    def test_reference_is_the_base_model(self, policy: SD3Policy, load_pipeline: PipelineLoader) -> None:
        latents, sigma, embeddings = inputs()
        with torch.no_grad():
            expected = load_pipeline().transformer(
                hidden_states=latents,
                timestep=sigma * 1000,
                encoder_hidden_states=embeddings.prompt_embeds,
                pooled_projections=embeddings.pooled,
                return_dict=False,
            )[0]
        assert torch.equal(velocity(policy, "reference"), expected)

    def test_roles_nest_and_come_back(self, policy: SD3Policy) -> None:
        default, old = velocity(policy, "default"), velocity(policy, "old")
        with policy.role("old"):
            with policy.role("reference"):
                assert policy.active_role == "reference"
            assert policy.active_role == "old"
            assert torch.equal(policy.velocity(*inputs()), old)
        assert policy.active_role == "default"
        assert torch.equal(velocity(policy, "default"), default)

    def test_role_comes_back_after_an_error(self, policy: SD3Policy) -> None:
        with pytest.raises(KeyError), policy.role("old"), policy.role("reference"):
            raise KeyError
        assert policy.active_role == "default"
        policy.verify_role()

    def test_requires_grad_never_changes(self, policy: SD3Policy) -> None:
        for role in ("old", "reference", "default", "reference", "old"):
            with policy.role(role):
                assert all(p.requires_grad for p in policy.parameters.values())
                assert not any(p.requires_grad for p in policy.old_parameters.values())
                assert policy.velocity(*inputs()).requires_grad is (role == "default")

    def test_unknown_role(self, policy: SD3Policy) -> None:
        with pytest.raises(InvalidArgumentError, match=r"'default', 'old', 'reference'.*'new'"), policy.role("new"):
            pass

    @pytest.mark.parametrize("checkpointing", [False, True])
    @pytest.mark.parametrize("role", ["old", "reference"])
    def test_backward_in_another_role_gives_the_right_gradient(
        self, load_random_policy: Loader, role: str, checkpointing: bool
    ) -> None:
        plain = load_random_policy()
        plain.velocity(*inputs()).square().mean().backward()
        policy = load_random_policy(gradient_checkpointing=checkpointing)
        loss = policy.velocity(*inputs()).square().mean()
        with policy.role(role):
            policy.velocity(*inputs())
            loss.backward()
            assert policy.active_role == role
        policy.verify_role()
        for name, parameter in policy.parameters.items():
            torch.testing.assert_close(parameter.grad, plain.parameters[name].grad, rtol=1e-5, atol=1e-8)
        assert all(p.grad is None for p in policy.old_parameters.values())

    def test_checkpointing_runs_blocks_again(self, load_random_policy: Loader) -> None:
        policy = load_random_policy(gradient_checkpointing=True)
        runs = []
        policy.transformer.transformer_blocks[0].register_forward_pre_hook(lambda *_: runs.append(policy.active_role))
        loss = policy.velocity(*inputs()).square().mean()
        with policy.role("old"):
            loss.backward()
        assert runs == ["default", "default"]

    def test_same_weights_give_the_same_bits_under_autocast(self, policy: SD3Policy) -> None:
        policy.synchronize_old()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            new = policy.velocity(*inputs())
            with torch.no_grad(), policy.role("old"):
                old = policy.velocity(*inputs())
        assert new.dtype == torch.float32
        assert torch.equal(new.detach(), old)

    def test_outside_switching_is_noticed(self, policy: SD3Policy) -> None:
        policy.transformer.set_adapter("old")
        with pytest.raises(StateError, match=r"'default'.*'old'"):
            policy.velocity(*inputs())

    def test_outside_disabling_is_noticed(self, policy: SD3Policy) -> None:
        policy.transformer.disable_adapters()
        with pytest.raises(StateError, match="reference"):
            policy.velocity(*inputs())

    def test_outside_freezing_is_noticed(self, policy: SD3Policy) -> None:
        policy.transformer.requires_grad_(False)
        with pytest.raises(StateError, match="requires_grad=True"):
            policy.velocity(*inputs())

    def test_outside_casting_is_noticed(self, policy: SD3Policy) -> None:
        policy.pipeline.to(torch.bfloat16)
        with pytest.raises(StateError, match="float32"):
            policy.velocity(*inputs())


class TestOldPolicy:
    def test_synchronize(self, policy: SD3Policy) -> None:
        policy.synchronize_old()
        assert torch.equal(velocity(policy, "default"), velocity(policy, "old"))

    @pytest.mark.parametrize("decay", [0.0, 0.3, 0.95, 1.0])
    def test_blend(self, policy: SD3Policy, decay: float) -> None:
        before = {name: p.clone() for name, p in policy.old_parameters.items()}
        policy.blend_old(decay)
        for name, parameter in policy.old_parameters.items():
            expected = decay * before[name] + (1 - decay) * policy.parameters[name].detach()
            torch.testing.assert_close(parameter.detach(), expected)
        if decay == 1.0:
            assert all(torch.equal(p, before[name]) for name, p in policy.old_parameters.items())
        if decay == 0.0:
            assert all(torch.equal(p, policy.parameters[name]) for name, p in policy.old_parameters.items())

    @pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan")])
    def test_decay_out_of_range(self, policy: SD3Policy, decay: float) -> None:
        with pytest.raises(InvalidArgumentError, match="decay"):
            policy.blend_old(decay)


class TestFiles:
    @pytest.mark.parametrize("role", ["default", "old"])
    def test_plain_diffusers_gives_the_same_images(
        self, load_random_policy: Loader, load_pipeline: PipelineLoader, tmp_path: Path, role: str
    ) -> None:
        policy = load_random_policy(rank=4, alpha=10)  # alpha != rank: the scale must travel with the file
        _, _, embeddings = inputs(2)
        with policy.role(role):
            expected = sample_latents(policy, embeddings, steps=3, seeds=[5, 6], solver="euler", height=16, width=16)
        policy.save_lora(tmp_path, role)
        pipe = load_pipeline()
        pipe.load_lora_weights(tmp_path)
        pipe.set_progress_bar_config(disable=True)
        arguments = {
            "prompt_embeds": embeddings.prompt_embeds,
            "pooled_prompt_embeds": embeddings.pooled,
            "num_inference_steps": 3,
            "guidance_scale": 1.0,
        }
        generators = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
        found = pipe(**arguments, generator=generators, output_type="latent").images
        assert torch.equal(found, expected)
        generators = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
        images = pipe(**arguments, generator=generators, output_type="pt").images
        assert torch.equal(images, policy.decode(expected))

    def test_load_is_exact_and_leaves_parameters_trainable(
        self, policy: SD3Policy, load_policy: Loader, tmp_path: Path
    ) -> None:
        policy.save_lora(tmp_path / "default", "default")
        policy.save_lora(tmp_path / "old", "old")
        fresh = load_policy()
        fresh.load_lora(tmp_path / "default", "default")
        fresh.load_lora(tmp_path / "old", "old")
        for role in ("default", "old"):
            expected, found = policy.lora_state_dict(role), fresh.lora_state_dict(role)
            assert list(found) == list(expected)
            assert all(torch.equal(found[name], expected[name]) for name in expected)
        optimizer = torch.optim.SGD(fresh.parameters.values(), lr=1.0)
        fresh.velocity(*inputs()).square().mean().backward()
        optimizer.step()
        after = fresh.lora_state_dict()
        same = [name for name, tensor in policy.lora_state_dict().items() if torch.equal(after[name], tensor)]
        # The last block has no output of the text stream, so nothing depends on the queries of that stream.
        assert all("transformer_blocks.1.attn.add_q_proj" in name for name in same)

    def test_state_dict_is_a_copy(self, policy: SD3Policy) -> None:
        name = next(iter(policy.parameters))
        before = policy.parameters[name].detach().clone()
        policy.lora_state_dict()[f"transformer.{name}"].zero_()
        assert torch.equal(policy.parameters[name], before)

    def test_no_file(self, policy: SD3Policy, tmp_path: Path) -> None:
        with pytest.raises(InvalidArgumentError, match=LORA_FILE):
            policy.load_lora(tmp_path)

    def test_truncated_file_changes_nothing(self, policy: SD3Policy, tmp_path: Path) -> None:
        policy.save_lora(tmp_path)
        path = tmp_path / LORA_FILE
        path.write_bytes(path.read_bytes()[:-100])
        before = policy.lora_state_dict()
        with pytest.raises(InvalidArgumentError, match="readable"):
            policy.load_lora(tmp_path)
        assert all(torch.equal(before[name], tensor) for name, tensor in policy.lora_state_dict().items())

    def test_other_rank(self, policy: SD3Policy, load_policy: Loader, tmp_path: Path) -> None:
        policy.save_lora(tmp_path)
        with pytest.raises(InvalidArgumentError, match="rank"):
            load_policy(rank=2).load_lora(tmp_path)

    def test_other_modules(self, policy: SD3Policy, load_policy: Loader, tmp_path: Path) -> None:
        policy.save_lora(tmp_path)
        with pytest.raises(InvalidArgumentError, match="not known"):
            load_policy(target_modules=["attn.to_q"]).load_lora(tmp_path)

    def test_reference_has_no_weights(self, policy: SD3Policy, tmp_path: Path) -> None:
        with pytest.raises(InvalidArgumentError, match="reference"):
            policy.save_lora(tmp_path, "reference")


class TestPipeline:
    def test_folder_without_t5(self, pipeline_path: Path) -> None:
        policy = SD3Policy(generator.load_pipeline(pipeline_path, device="cpu", local_files_only=True), rank=2)
        assert policy.pipeline.text_encoder_3 is None

    @pytest.mark.parametrize("load_t5", [True, False])
    def test_folder_with_t5(self, t5_pipeline_path: Path, load_t5: bool) -> None:
        policy = SD3Policy(generator.load_pipeline(t5_pipeline_path, load_t5=load_t5), rank=2)
        assert (policy.pipeline.text_encoder_3 is not None) is load_t5

    def test_decode(self, policy: SD3Policy) -> None:
        latents = torch.randn(5, 4, 8, 8, generator=torch.Generator().manual_seed(1)) * 3
        images = policy.decode(latents)
        assert images.shape == (5, 3, 16, 16)
        assert images.dtype == torch.float32
        assert 0 <= float(images.min()) < float(images.max()) <= 1
        torch.testing.assert_close(policy.decode(latents, batch_size=2), images)

    def test_batch_sizes_must_agree(self, policy: SD3Policy) -> None:
        latents, sigma, embeddings = inputs()
        for arguments in ((latents[:2], sigma, embeddings), (latents, sigma[:2], embeddings)):
            with pytest.raises(InvalidArgumentError, match="same B"):
                policy.velocity(*arguments)

    def test_not_a_pipeline(self) -> None:
        with pytest.raises(InvalidArgumentError, match="StableDiffusion3Pipeline"):
            SD3Policy(object())

    def test_other_scheduler(self, load_pipeline: PipelineLoader) -> None:
        pipeline = load_pipeline()
        pipeline.scheduler = DPMSolverMultistepScheduler()
        with pytest.raises(InvalidArgumentError, match="FlowMatchEulerDiscreteScheduler"):
            SD3Policy(pipeline)

    def test_adapters_present(self, policy: SD3Policy) -> None:
        with pytest.raises(InvalidArgumentError, match="fuse_lora"):
            SD3Policy(policy.pipeline)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"rank": 0}, "rank"),
            ({"alpha": 0}, "alpha"),
            ({"init": "zeros"}, "init"),
            ({"target_modules": ["attn.to_x"]}, "attn.to_x"),
            ({"target_modules": []}, "target_modules"),
        ],
    )
    def test_bad_lora_arguments(self, load_policy: Loader, arguments: dict, message: str) -> None:
        with pytest.raises(InvalidArgumentError, match=message):
            load_policy(**arguments)


class TestBalancing:
    """Per-objective gradients of the policy's own loss, with frozen roles at work between forward and backward."""

    def balanced_gradient(self, policy: SD3Policy, collector: str) -> dict[str, Tensor]:
        optimizer = gb.BalancedOptimizer(
            torch.optim.SGD(policy.parameters.values(), lr=1.0),
            gb.MGDA(normalize=True),
            module=policy.transformer,
            collector=collector,
        )
        g = torch.Generator().manual_seed(3)
        x0, sigma, embeddings = inputs(4)
        noise, r = torch.randn(x0.shape, generator=g), torch.rand(4, 3, generator=g)
        noisy = interpolate_noise(x0, noise, sigma)
        with torch.no_grad(), policy.role("old"):
            old = policy.velocity(noisy, sigma, embeddings)
        prediction = policy.velocity(noisy, sigma, embeddings)
        with torch.no_grad(), policy.role("reference"):
            reference = policy.velocity(noisy, sigma, embeddings)
        plus, minus = nft_terms(x0, noise, sigma, prediction, old, guidance_beta=0.1)
        mask = torch.rand(4, 3, generator=g) < 0.8
        loss = gb.AffineLoss.interpolate(plus, minus, r, mask, center=True)
        with policy.role("old"):
            optimizer.backward(loss, extra_loss=loss.common + 0.1 * kl_term(prediction, reference).mean())
            optimizer.balance()
        return {name: p.grad.clone() for name, p in policy.parameters.items()}

    @pytest.mark.parametrize("checkpointing", [False, True])
    def test_collectors_agree(self, load_random_policy: Loader, checkpointing: bool) -> None:
        expected = self.balanced_gradient(load_random_policy(), "passes")
        for collector in ("passes", "linear"):
            policy = load_random_policy(gradient_checkpointing=checkpointing)
            found = self.balanced_gradient(policy, collector)
            largest = max(float(tensor.abs().max()) for tensor in expected.values())
            for name, tensor in found.items():
                torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-5 * largest)
