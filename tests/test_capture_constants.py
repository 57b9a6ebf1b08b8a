"""Questions of a model to its tensors: answered where the values do not depend on weights, refused by name
where they do."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from foretrain.capture import capture
from foretrain.capture.tracing import constants, values
from foretrain.capture.tracing.constants import assume
from foretrain.errors import CaptureError
from foretrain.graph import OpGraph

ROWS = torch.zeros(4, 8)


@pytest.fixture(autouse=True)
def no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not known stays so: no second trace computes it."""
    monkeypatch.setattr(values, "with_values_if_needed", lambda trace: trace(False))


class Ask(nn.Module):
    """Multiplies its weight by the answer that a question to the inputs gives."""

    def __init__(self, question: Callable[..., Any]) -> None:
        super().__init__()
        self.weight, self.question = nn.Parameter(torch.ones(8)), question

    def forward(self, *inputs: Tensor) -> Any:
        return self.weight * self.question(*inputs)


def ask(question: Callable[..., Any], *inputs: Tensor) -> Any:
    """The answer, as the trace shows it."""
    graph = capture(nn.Sequential(Ask(question)) if len(inputs) == 1 else Ask(question), inputs, total)
    (answer,) = [
        op.operator.args["other"] for op in graph.ops if op.operator.name == "mul" and op.phase == "forward"
    ]
    return answer


def total(output: Tensor) -> Tensor:
    return output.sum()


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (lambda x: int(torch.arange(7, device=x.device)[-1]), 6),
        (lambda x: (torch.arange(7, device=x.device).max() + 1).item(), 7),
        (lambda x: 2 if torch.ones(3, 3, device=x.device).bool().all() else 3, 2),
        (lambda x: 2 if torch.ones(3, 3, device=x.device).tril().triu().sum() == 3 else 3, 2),
        (lambda x: torch.arange(3, device=x.device).tolist()[2], 2),
        (lambda x: int(torch.arange(3, device=x.device).numpy()[2]), 2),
        (lambda x: int(f"{torch.arange(3, device=x.device)[2]}"), 2),
        (lambda x: torch.nonzero(torch.eye(3, device=x.device)).shape[0], 3),
        (lambda x: torch.unique(torch.arange(4, device=x.device) // 2).shape[0], 2),
        (lambda x: torch.zeros(2, device=x.device).fill_(3).sum().item(), 6),
        (lambda x: torch.full((x.shape[0],), 2, device=x.device).cumsum(0)[-1].item(), 8),
        (lambda x: torch.tensor([3, 4], device=x.device).sum().item(), 7),
        (lambda x: torch.tensor([torch.arange(3, device=x.device)[2], 1], device=x.device).sum().item(), 3),
        (lambda x: torch.arange(6, device=x.device).view(2, 3)[:, [0, 2]].sum().item(), 10),
        (lambda x: torch.arange(6, device=x.device)[[1, 4]].sum().item(), 5),
        (lambda x: torch.arange(2, device=x.device).expand(2**22, 2).view(-1, 2, 2)[-1].sum().item(), 2),
        (lambda x: torch.unique_consecutive(torch.arange(4, device=x.device) // 2).shape[0], 2),
        (lambda x: torch.zeros(3, device="cpu").copy_(torch.arange(3.0, device=x.device)).sum().item(), 3),
    ],
)
def test_questions_to_positions_and_masks_are_answered(
    question: Callable[[Tensor], Any], answer: float
) -> None:
    assert ask(question, ROWS) == answer


@pytest.mark.parametrize(("mask", "answer"), [(torch.ones(2, 3), 2), (torch.tensor([[1, 1], [1, 0]]), 3)])
def test_integer_inputs_are_known(mask: Tensor, answer: int) -> None:
    assert ask(lambda mask: 2 if mask.all() else 3, mask.bool()) == answer
    assert ask(lambda ids: 2 if (ids != 0).all() else 3, mask.long()) == answer


def test_a_known_tensor_can_be_moved_to_the_cpu() -> None:
    assert ask(lambda x: int(torch.arange(3, device=x.device).cpu()[2]), ROWS) == 2


def test_a_known_mask_selects_rows() -> None:
    assert ask(lambda x: x[torch.arange(4, device=x.device) != 1].shape[0], ROWS) == 3


# Refused


@pytest.mark.parametrize(
    ("question", "inputs"),
    [
        (lambda x: 2 if x.sum() > 0 else 3, ROWS),
        (lambda x: x[0, 0].item(), ROWS),
        (lambda ids: int(ids.max()), torch.empty(3, dtype=torch.long, device="meta")),
        (lambda ids: 2 if ids.new_empty(3).any() else 3, torch.ones(3, dtype=torch.long)),
    ],
    ids=["if", "item", "unknown ids", "unwritten"],
)
def test_a_question_to_unknown_data_names_the_module_and_the_line(
    question: Callable[[Tensor], Any], inputs: Tensor
) -> None:
    with pytest.raises(
        CaptureError,
        match=r"^module 0: control flow that depends on data "
        r"[^\n]* \(at \S*test_capture_constants\.py:\d+\)$",
    ):
        ask(question, inputs)


def test_the_line_is_the_one_that_asks() -> None:
    def question(x: Tensor) -> int:
        return 2 if x.sum() > 0 else 3

    with pytest.raises(CaptureError, match=rf":{question.__code__.co_firstlineno + 1} in question\)$"):
        ask(question, ROWS)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.distributions.Beta(x.exp(), x.exp()).rsample(),
        lambda x: torch.distributions.Poisson(x.exp()).log_prob(torch.poisson(x.exp()).detach()),
        lambda x: torch.distributions.RelaxedOneHotCategorical(torch.tensor(0.5), logits=x).rsample(),
        lambda x: nn.functional.gaussian_nll_loss(x, x.detach(), x.exp()),
    ],
)
def test_what_torch_checks_of_its_arguments_is_right(draw: Callable[[Tensor], Tensor]) -> None:
    class Draws(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return draw(super().forward(x)).sum()

    assert capture(Draws(8, 8), ROWS).ops


def test_a_loop_that_waits_for_another_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "_MOST_ANSWERS", 100)

    def question(x: Tensor) -> int:
        while (x > 0).any():
            pass
        return 2

    with pytest.raises(CaptureError, match="control flow that depends on data"):
        ask(question, ROWS)


# Guessed

IDS = torch.empty(6, dtype=torch.long, device="meta")


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (lambda x: x[x > 0].shape[0], 16),
        (lambda x: torch.nonzero(x).shape[0], 32),
        (lambda x: x[x[:, 0] != 1].shape[0], 4),
        (lambda x: x[~(x[:, 0] == 1)].shape[0], 4),
        (lambda x: 3 if x.isnan().any() or x.isinf().any() else 2, 2),
        (lambda x: 2 if (x[:, 1:] >= x[:, :-1]).all() else 3, 2),
        (lambda x: 2 if ((x.expand(2**18, 4, 8) == 0.0).sum() == x.numel()).item() else 3, 3),
        (lambda x: torch.masked_select(x, torch.arange(8, device=x.device) < 3).shape[0], 12),
        (lambda x: x.max(1)[1].bincount(minlength=4).max().item(), 1),
        (lambda x: (x.argsort(1).sum(1) == 28).sum().item(), 4),
        (lambda x: torch.unique(x).shape[0], 32),
    ],
)
def test_data_that_shapes_depend_on_is_guessed_and_said_to_be(
    question: Callable[[Tensor], Any], answer: int
) -> None:
    assert ask(question, ROWS) == answer


def test_ids_that_nobody_knows_are_no_padding_and_differ() -> None:
    assert ask(lambda ids: 3 if (ids == 0).any() else 2, IDS) == 2
    assert ask(lambda ids: torch.unique(ids)[0].dim() + torch.unique(ids).shape[0], IDS) == 6


def test_a_guess_is_an_assumption_of_what_rests_on_it_alone() -> None:
    def asks(rest: bool) -> OpGraph:
        def question(x: Tensor) -> int:
            unknown, known = x > 0, torch.arange(4, device=x.device) > 1
            return int((unknown if rest else known).sum().item())

        return capture(Ask(question), (ROWS,), total)

    assert "assumptions" not in asks(rest=False).info
    assert len(asks(rest=True).info["assumptions"]) == 1


def test_a_checkpointed_part_meets_the_same_guess_again() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def part(self, x: Tensor) -> Any:
            drawn = torch.rand(x.shape[0], device=x.device) > 0.5
            return self.layer(x[drawn]).sum() + self.layer(x[x[:, 0] > 0]).sum()

        def forward(self, x: Tensor) -> Any:
            with set_checkpoint_early_stop(False):
                return checkpoint(self.part, x, use_reentrant=False)

    graph = capture(Kept(), torch.zeros(64, 8), total)
    rows = [op.operator.inputs[1].shape[0] for op in graph.ops if op.operator.name == "addmm"]
    assert rows[:2] == rows[2:]
    assert rows[1] == 32


class Chance(nn.Module):
    """Leaves out layers, rows and features as chance has it, in the three ways that Python knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(20))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() < 0.5 or torch.rand(1).item() < 0.5 or numpy.random.rand() < 0.1:
                x = layer(x)
        return x[torch.rand(x.shape[0], device=x.device) > 0.5]


def test_chance_is_the_same_in_every_trace_and_goes_on_as_it_was() -> None:
    def traced(seed: int) -> tuple[list[str], float]:
        random.seed(seed)
        torch.manual_seed(seed)
        numpy.random.seed(seed)
        graph = capture(Chance(), torch.zeros(64, 8), total)
        return [str(op.operator) + op.layer for op in graph.ops], random.random() + torch.rand(1).item()

    (ops, after), (others, later) = traced(1), traced(2)
    assert ops == others
    assert after != later


def test_an_index_made_of_a_real_mask_is_never_read_from_memory_that_nobody_wrote() -> None:
    mask = torch.tensor([True, False, True, True])
    assert ask(lambda x: torch.arange(4)[mask].sum().item(), ROWS) == 5


class Library(Ask):
    """A model whose code is that of a library that is known."""

    __module__ = "transformers.models.made_up"


@pytest.mark.parametrize(
    ("question", "answer", "assumed"),
    [
        (lambda x: 2 if (x * x).isfinite().all() else 3, 2, "for equality"),
        (lambda x: 2 if (x * x).isnan().any() else 3, 3, None),
        (lambda x: 2 if (x * x).bool().any() else 3, 3, "checks of values .* are taken as passed"),
        (lambda x: 2 if (x * x > 1).any() else 3, 3, "checks of values .* are taken as passed"),
        (lambda x: 2 if torch.equal(x, x + 1) else 3, 3, None),
        (lambda x: torch.empty(2, dtype=torch.long, device=x.device).fill_(4).sum().item(), 8, None),
    ],
)
def test_questions_of_a_known_library_are_answered_and_what_is_assumed_is_named(
    question: Callable[[Tensor], Any], answer: int, assumed: str | None
) -> None:
    graph = capture(Library(question), (ROWS,), total)
    (given,) = [
        op.operator.args["other"]
        for op in graph.ops
        if op.operator.name == "mul" and op.phase == "forward" and isinstance(op.operator.args["other"], int)
    ]
    notes = " ".join(graph.info.get("assumptions", ()))
    assert given == answer
    assert re.search(assumed, notes) if assumed else not notes


# Writes


def copied(a: Tensor, x: Tensor) -> None:
    a.copy_(x)


def one_row(a: Tensor, x: Tensor) -> None:
    a[0] = x[0]


def through_a_view(a: Tensor, x: Tensor) -> None:
    a.view(-1)[:1].copy_(x[0, :1])


def as_out(a: Tensor, x: Tensor) -> None:
    torch.add(x, x, out=a)


def foreach(a: Tensor, x: Tensor) -> None:
    torch._foreach_add_([a], [x])


@pytest.mark.parametrize(
    "write",
    [
        copied,
        one_row,
        through_a_view,
        as_out,
        pytest.param(foreach),
    ],
)
def test_unknown_data_written_into_a_known_tensor_makes_it_unknown(
    write: Callable[[Tensor, Tensor], None],
) -> None:
    def question(x: Tensor) -> int:
        known = torch.zeros(4, 8, device=x.device)
        write(known, x)
        return 2 if known.any() else 3

    with pytest.raises(CaptureError, match="control flow that depends on data"):
        ask(question, ROWS)


def test_known_data_written_into_a_known_tensor_is_known() -> None:
    def question(x: Tensor) -> Any:
        known = torch.zeros(4, 8, device=x.device)
        known[0] = 1
        return known.sum().item()

    assert ask(question, ROWS) == 8


# Routing


class Experts(nn.Module):
    """A mixture of experts as most are written: topk, then a loop over the rows that chose each."""

    def __init__(self, experts: int = 4, chosen: int = 2) -> None:
        super().__init__()
        self.gate, self.chosen = nn.Linear(8, experts), chosen
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights, choice = self.gate(x).softmax(-1).topk(self.chosen, dim=-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, rank = torch.where(choice == number)
            result.index_add_(0, rows, expert(x[rows]) * weights[rows, rank, None])
        return result


def rows_per_expert(graph: OpGraph) -> list[int]:
    products = [op for op in graph.ops if op.operator.name == "addmm" and op.layer.startswith("experts")]
    return [op.operator.inputs[1].shape[0] for op in products]


@pytest.mark.parametrize("chosen", [1, 2])
def test_the_choices_of_a_router_are_balanced_and_said_to_be(chosen: int) -> None:
    graph = capture(Experts(chosen=chosen), torch.zeros(16, 8), total)
    assert rows_per_expert(graph) == [16 * chosen // 4] * 4
    assert graph.info["assumptions"] == [
        "choices that depend on data (the routing to experts) are taken as balanced"
    ]


def test_a_model_without_routing_assumes_nothing() -> None:
    assert "assumptions" not in capture(nn.Linear(8, 5), ROWS).info


class Steps(nn.Module):
    """A scratch tensor beside a router, layer after layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.gate(x)
        for _ in range(20):
            scratch = torch.zeros(4, device=x.device)
            scratch.add_(x[:, 0])
            del scratch
            result = result + torch.nonzero(self.gate(x).topk(1)[1] == 0).shape[0]
        return result


def test_a_scratch_tensor_that_is_gone_makes_no_other_tensor_unknown() -> None:
    assert capture(Steps(), ROWS, total).info["assumptions"]


def test_numbers_that_a_model_writes_down_are_known_on_its_device() -> None:
    def places(x: Tensor) -> float:
        scale = torch.tensor([2.0, 3.0], device=x.device)
        return float(torch.as_tensor([1.0, 2.0], device=x.device).add(scale).sum())

    assert ask(places, ROWS) == 8.0


def test_a_random_order_is_an_order() -> None:
    assert ask(lambda x: int(torch.randperm(5, device=x.device).sort()[0][3]), ROWS) == 3


def test_what_a_loader_assumes_is_answered_and_shapes_follow_from_it() -> None:
    def kept(x: Tensor) -> int:
        scores = x.sum(1)
        assume(scores, torch.tensor([0.1, 0.9, 0.8, 0.2]))
        return len(scores[scores > 0.5])

    assert ask(kept, ROWS) == 2
