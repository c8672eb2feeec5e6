"""Records behave as the dataclasses of the standard library do."""

import copy
import dataclasses
import inspect
import pickle
from dataclasses import FrozenInstanceError
from typing import ClassVar

import pytest

from legroom.records import dataclass, field


@dataclass(frozen=True, slots=True)
class Base:
    kind: ClassVar[str] = "base"
    size: int
    name: str = "x"


@dataclass(frozen=True, slots=True)
class Derived(Base):
    kind: ClassVar[str] = "derived"
    parts: tuple[int, ...] = ()
    hidden: dict[str, int] = field(default_factory=dict, compare=False, repr=False, hash=False)

    def doubled(self) -> int:
        return 2 * self.size


@dataclass(frozen=True)
class Plain:
    size: int
    low: int = -1
    held: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.low == -1:
            object.__setattr__(self, "low", self.size)


@dataclass
class Changing:
    at: int = 0


def test_fields_come_from_the_bases_first_and_class_variables_do_not_count():
    assert [one.name for one in dataclasses.fields(Derived)] == ["size", "name", "parts", "hidden"]
    assert Derived(1).kind == "derived"


def test_positional_keyword_and_default_arguments_work():
    made = Derived(3, parts=(1, 2))
    assert (made.size, made.name, made.parts, made.hidden, made.doubled()) == (3, "x", (1, 2), {}, 6)
    with pytest.raises(TypeError):
        Derived()
    with pytest.raises(TypeError):
        Derived(1, no_such=2)


def test_nothing_can_be_changed_or_deleted():
    for made in (Derived(1), Plain(1)):
        with pytest.raises(FrozenInstanceError):
            made.size = 2
        with pytest.raises(FrozenInstanceError):
            del made.size


def test_slots_leave_no_room_for_other_attributes():
    assert not hasattr(Derived(1), "__dict__")


@pytest.mark.parametrize("made", [Base(1), Derived(1, "y", (2,)), Plain(4)])
def test_it_is_what_the_standard_library_would_have_made(made):
    kind = type(made)
    fields = [
        (
            one.name,
            one.type,
            dataclasses.field(
                default=one.default,
                default_factory=one.default_factory,
                compare=one.compare,
                repr=one.repr,
                hash=one.hash,
            ),
        )
        for one in dataclasses.fields(kind)
    ]
    namespace = {"__post_init__": kind.__post_init__} if hasattr(kind, "__post_init__") else {}
    standard = dataclasses.make_dataclass(kind.__name__, fields, frozen=True, namespace=namespace)
    twin = standard(**{one.name: getattr(made, one.name) for one in dataclasses.fields(made)})
    assert repr(made) == repr(twin)
    assert dataclasses.asdict(made) == dataclasses.asdict(twin)
    assert kind.__match_args__ == standard.__match_args__
    assert inspect.signature(kind).parameters.keys() == inspect.signature(standard).parameters.keys()
    assert dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen


def test_what_cannot_be_hashed_says_so():
    with pytest.raises(TypeError, match="unhashable"):
        hash(Plain(1))


def test_a_subclass_without_the_decorator_still_refuses_changes():
    class Loose(Base):
        pass

    with pytest.raises(FrozenInstanceError):
        Loose(1).size = 2


def test_methods_that_a_class_writes_itself_are_kept():
    @dataclass(frozen=True, slots=True)
    class Own:
        size: int

        def __eq__(self, other):
            return isinstance(other, Own)

        def __hash__(self):
            return 7

        def __repr__(self):
            return "own"

    assert (Own(1) == Own(2), hash(Own(1)), repr(Own(1))) == (True, 7, "own")


def test_equality_and_hash_follow_the_compared_fields():
    assert Derived(1, hidden={"a": 1}) == Derived(1, hidden={"b": 2})
    assert hash(Derived(1, hidden={"a": 1})) == hash(Derived(1))
    assert Derived(1) != Derived(2)
    assert Base(1) != Derived(1)


def test_it_shows_itself_as_a_dataclass_does():
    assert repr(Derived(1)) == "Derived(size=1, name='x', parts=())"


def test_replace_asdict_match_and_post_init_work():
    assert dataclasses.replace(Derived(1), size=5) == Derived(5)
    assert dataclasses.asdict(Plain(2)) == {"size": 2, "low": 2, "held": {}}
    match Base(7):
        case Base(size, name):
            assert (size, name) == (7, "x")


def test_default_factories_are_called_each_time():
    assert Plain(1).held is not Plain(1).held


def test_copies_and_pickles_are_equal():
    for made in (Derived(4, parts=(1,), hidden={"a": 1}), Plain(3)):
        assert copy.deepcopy(made) == made
        assert pickle.loads(pickle.dumps(made)) == made


def test_what_is_not_frozen_is_left_to_the_standard_library():
    made = Changing()
    made.at = 3
    assert made == Changing(3)
