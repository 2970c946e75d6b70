"""GRPO whose gradient is the balanced one of several rewards."""

from __future__ import annotations

import contextlib
import logging
import textwrap
from typing import Any

import torch
from torch import Tensor, nn
from trl import GRPOTrainer

import gradbalance as gb

from .advantages import advantages_per_reward, mixed
from .balance import Balance, metrics
from .balanced_grpo_config import BalancedGRPOConfig
from .losses import RewardLosses, losses_by_reward, number, with_value
from .private import check_setup, inputs_without_grad, linear_in_advantages, log_metrics
from .rewards import SilenceWatch, balanced_rewards
from .state import BalanceState

logger = logging.getLogger(__name__)

PER_REWARD = "advantages_per_reward"


class BalancedGRPOTrainer(GRPOTrainer):
    r"""``trl.GRPOTrainer`` that balances the gradients of its reward functions.

    Plain GRPO adds the rewards up before there is a gradient. Here every reward has advantages A_k of its own and with
    them a gradient ``g_k = grad(L(A_k) - L(0))`` of TRL's loss L, and a balancer finds weights c from their Gramian;
    the step follows ``sum_k c_k g_k + grad L(0)``. KL penalty, entropy bonus and auxiliary losses do not depend on the
    advantages, so they are in L(0), outside the balancing. A reward function that returns None for a completion has no
    say about it.

    On steps that refresh the weights the gradient of every reward is collected: where only linear layers are trained
    (LoRA) from one backward pass on-policy and two off-policy, however many rewards there are. Other steps are ordinary
    ones: TRL's loss at the mixed advantages ``sum_k c_k A_k`` where it is linear in them, else
    ``L(0) + sum_k c_k (L(A_k) - L(0))`` on one forward. Both are exact for every ``loss_type``.

    Args:
        model: And all other arguments: as in ``trl.GRPOTrainer``.
        reward_funcs: As in TRL. Weight 0 in ``args.reward_weights`` leaves a reward out of the balancing.
        args: A :class:`BalancedGRPOConfig`; made with its defaults if left out.
        balancer: Any callable from a Gramian to weights, such as ``gradbalance.MGDA()``. None:
            ``gradbalance.MARBLE`` with the interval and the smoothing of ``args``, and ``args.reward_weights`` as its
            preference.

    Attributes:
        balancer: The one in use.
        balance_info: :class:`gradbalance.BalanceInfo` of the last refresh; None before the first.

    Metrics, in every logger of the Trainer: ``balance/{reward}/coef``, and on refreshes ``balance/{reward}/grad_norm``
    and ``balance/worst_cosine``.

    Raises:
        InvalidArgumentError: A setup in which per-reward gradients cannot be had: reentrant checkpointing, DeepSpeed
            and FSDP (with a balancer that needs them), DataParallel; or reward weights that fit no balancer.
    """

    _tag_names = ["trl", "grpo", "gradbalance"]  # noqa: RUF012 (as in TRL)
    _name = "Balanced GRPO"
    _paper = {  # noqa: RUF012
        "title": "MARBLE: Multi-Aspect Reward Balance for Diffusion RL",
        "id": "2605.06507",
        "citation": textwrap.dedent("""\
            @article{zhao2026marble,
                title        = {{MARBLE: Multi-Aspect Reward Balance for Diffusion RL}},
                author       = {Canyu Zhao and Hao Chen and Yunze Tong and Yu Qiao and Jiacheng Li and Chunhua Shen},
                year         = 2026,
                eprint       = {arXiv:2605.06507},
            }"""),
    }

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: BalancedGRPOConfig | None = None,
        *others: Any,
        balancer: gb.Balancer | None = None,
        **kwargs: Any,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = BalancedGRPOConfig(f"{name.split('/')[-1] or 'model'}-BalancedGRPO")
        if not isinstance(args, BalancedGRPOConfig):
            raise gb.InvalidArgumentError(
                f"`args` should be a gradbalance_trl.BalancedGRPOConfig, which takes all options of GRPOConfig. Found "
                f"{type(args).__name__}."
            )
        super().__init__(model, reward_funcs, args, *others, **kwargs)
        self.rewards = balanced_rewards(self.reward_func_names, self.reward_weights.tolist())
        self.balancer = self._default_balancer(args) if balancer is None else balancer
        if balancer is not None and self.rewards.preference is not None:
            raise gb.InvalidArgumentError(
                "`reward_weights` other than 0 should be equal with a balancer of your own. Found "
                f"{args.reward_weights}. Give the priorities to the balancer: gradbalance.MGDA(preference=...), "
                "gradbalance.Fixed(weights)."
            )
        self._balance = Balance(self.rewards.names, self.balancer, args.balance_refresh)  # type: ignore[arg-type]
        check_setup(self, needs_rows=self._balance.ever_needs_rows)
        self.balance_info: gb.BalanceInfo | None = None
        self._silence = SilenceWatch(self.rewards.names)
        self._rows: gb.BalancedOptimizer | None = None
        self._collected = False
        self._checked_kinds: set[bool] = set()
        self._rewards_per_func: Tensor | None = None
        self._run: object = None
        self.add_callback(BalanceState)

    def _default_balancer(self, args: BalancedGRPOConfig) -> gb.MARBLE:
        return gb.MARBLE(
            interval=args.balance_interval, ema_decay=args.balance_ema_decay, preference=self.rewards.preference
        )

    # ---- from rewards to advantages ------------------------------------------------------------------------------

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        rewards: Tensor = super()._calculate_rewards(*args, **kwargs)
        self._rewards_per_func = rewards
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        rewards, self._rewards_per_func = self._rewards_per_func, None
        if self.model.training:
            assert rewards is not None
            advantages = advantages_per_reward(
                rewards[:, list(self.rewards.columns)], self.num_generations, self.scale_rewards, self.rewards.names
            )
            self._silence.look(advantages)
            local = len(output["advantages"])
            start = self.accelerator.process_index * local
            # A first dimension of samples: TRL shuffles and splits it with the rest of the batch.
            output[PER_REWARD] = advantages[start : start + local]
        return output

    # ---- one micro-batch -----------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As in TRL; the first one of a run takes up the state of a checkpoint."""
        if self._run is not self.state:
            self._start_run()
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """The loss whose backward pass gives the balanced gradient; on a refresh the gradient is collected here."""
        if PER_REWARD not in inputs or not self.model.training:
            evaluated: Tensor = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            return evaluated
        # TRL keeps the batch for its next iterations.
        inputs = dict(inputs)
        advantages = inputs.pop(PER_REWARD)
        weights = self._balance.weights
        inputs["advantages"] = mixed(advantages, weights)
        refresh = self._balance.needs_rows
        linear = linear_in_advantages(self, inputs)
        if not refresh:
            if self.accelerator.sync_gradients:
                log_metrics(self, metrics(self._balance, None, weights))
            if linear:
                ordinary: Tensor = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
                return ordinary
            losses = self._losses_by_reward(model, inputs, advantages, linear)
            return with_value(losses.by_reward.scalarize(weights) + losses.rest, losses.value)
        return self._refresh(model, inputs, advantages, weights, linear)

    def _losses_by_reward(
        self, model: nn.Module, inputs: dict[str, Any], advantages: Tensor, linear: bool
    ) -> RewardLosses:
        losses = losses_by_reward(
            self,
            lambda given: super(BalancedGRPOTrainer, self).compute_loss(model, {**inputs, "advantages": given}),
            advantages,
            inputs["advantages"],
            self.rewards.names,
            linear=linear,
            check=linear not in self._checked_kinds,
        )
        self._checked_kinds.add(linear)
        return losses

    def _refresh(
        self, model: nn.Module, inputs: dict[str, Any], advantages: Tensor, weights: Tensor, linear: bool
    ) -> Tensor:
        assert self._rows is not None
        if not self._collected:
            # What a window left behind that ended without an optimizer step. Its gradients are gone by now.
            self._rows.zero_grad()
            self._collected = True
        write = self._balance.refresh == "write"
        # A window that is written by hand must not leave the reducer of data parallelism waiting for its backward pass.
        unsynced = self.accelerator.no_sync(model) if write else contextlib.nullcontext()
        with unsynced, inputs_without_grad(self.accelerator.unwrap_model(model)):
            losses = self._losses_by_reward(model, inputs, advantages, linear)
        if not write:
            step = with_value(losses.by_reward.scalarize(weights) + losses.rest, losses.value)
            self.accelerator.backward(step, retain_graph=True)
        scale = 1.0 if self.accelerator.scaler is None else self.accelerator.scaler.scale(torch.ones_like(losses.value))
        by_reward = gb.AffineLoss(losses.by_reward.terms * scale, losses.by_reward.coefficients, self.rewards.names)
        rest = losses.rest * scale if write and not losses.rest_is_zero else None
        self._rows.backward(by_reward, extra_loss=rest)
        if self.accelerator.sync_gradients:
            info = self._rows.balance()
            self.balance_info = info
            log_metrics(self, metrics(self._balance, info, info.weights if write else weights))
        return number(losses.value)

    # ---- runs and steps ------------------------------------------------------------------------------------------

    def _start_run(self) -> None:
        """Connect to the callbacks and the state of this run: of a checkpoint, or of the run before."""
        (callback,) = (c for c in self.callback_handler.callbacks if isinstance(c, BalanceState))
        saved = BalanceState.found_in(self.state.stateful_callbacks)
        if saved is not None:
            self._balance.load_state_dict(saved)
        elif self.state.global_step > 0:
            logger.warning(
                "the checkpoint holds no state of a balancer: it is of no BalancedGRPOTrainer. Balancing starts anew."
            )
        callback.save, callback.stepped = self._balance.state_dict, self._stepped
        # When it saves, the Trainer expects an entry for every callback.
        self.state.stateful_callbacks.setdefault(BalanceState.__name__, callback.state())
        trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._rows = gb.BalancedOptimizer(
            _Stepless(trainable), self._balance, module=self.model, scaler=self.accelerator.scaler, ranks="ddp"
        )
        self._collected = False
        self._run = self.state

    def _stepped(self, skipped: bool) -> None:
        assert self._rows is not None
        collected, self._collected = self._collected, False
        # A fused optimizer skips overflows by itself, and the Trainer does not hear of it.
        overflow = collected and self.balance_info is not None and self.balance_info.overflow
        if skipped or overflow:
            return
        if collected:
            self._rows.step()
        else:
            self._balance.step()


class _Stepless(torch.optim.Optimizer):
    """Holds the trained parameters for the rows; the Trainer's own optimizer steps them."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        """Nothing."""
