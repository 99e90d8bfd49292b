"""The digits that a student learns from: one of them is missing."""

from regimen.data.sources import Digits
from regimen.data.splits import Split
from regimen.data.transforms import Transform


class DigitsWithout(Digits):
    """scikit-learn's digits, but for one, which is in the test alone."""

    def __init__(
        self, split: Split, digit: int = 3, image_size: int = 8, transform: Transform = None
    ) -> None:
        super().__init__(split, image_size, transform=transform)
        if split != "test":
            kept = self.targets != digit
            self.inputs = self.inputs[kept]
            self.targets = self.targets[kept]
