"""Types of numbers with bounds, which pydantic checks when it builds a dataclass."""

from typing import Annotated, TypeAlias

from annotated_types import Ge, Le, Lt

Count: TypeAlias = Annotated[int, Ge(0)]
Positive: TypeAlias = Annotated[int, Ge(1)]
Position: TypeAlias = Annotated[int, Ge(1), Le(2**53)]
Amount: TypeAlias = Annotated[float, Ge(0)]
Share: TypeAlias = Annotated[float, Ge(0), Lt(1)]
