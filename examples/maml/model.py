"""A network that adapts itself to a task before it answers (Finn et al., 2017)."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import mse_loss

Weights = dict[str, Tensor]


class Maml(nn.Module):
    """Answer for each task with weights that `inner_steps` gradient steps have adapted to it.

    The steps are part of the forward pass, so that the outer gradient goes through them: it is of
    second order, as in equation 1 of the paper.
    """

    def __init__(self, width: int = 40, inner_lr: float = 0.01, inner_steps: int = 1) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(1, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )
        self._inner_lr = inner_lr
        self._inner_steps = inner_steps

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the values [n, points] at the query points of n tasks."""
        support_x, support_y, query_x = inputs
        answers: Tensor = vmap(self._adapted_answer)(support_x, support_y, query_x)
        return answers

    def _adapted_answer(self, support_x: Tensor, support_y: Tensor, query_x: Tensor) -> Tensor:
        weights: Weights = dict(self.network.named_parameters())
        for _ in range(self._inner_steps):
            # Also in an evaluation: torch.func.grad does not care for a no_grad around it.
            gradients = grad(self._loss)(weights, support_x, support_y)
            weights = {
                name: weight - self._inner_lr * gradients[name] for name, weight in weights.items()
            }
        return self._answer(weights, query_x).squeeze(1)

    def _loss(self, weights: Weights, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(self._answer(weights, x), y)

    def _answer(self, weights: Weights, x: Tensor) -> Tensor:
        answer: Tensor = functional_call(self.network, weights, (x,))
        return answer
