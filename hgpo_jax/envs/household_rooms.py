"""What the generated rooms are made of: receptacles, objects, usual places.

Facts about what fits where and what can be heated, cooled or cleaned come from
ALFRED's tables in alfworld (MIT, (c) 2020 Mohit Shridhar and others); rooms
and usual places are ours.
"""

from __future__ import annotations

import functools

from hgpo_jax.envs import alfworld_package

KINDS = (
    'pick_and_place_simple',
    'look_at_obj_in_light',
    'pick_clean_then_place_in_recep',
    'pick_heat_then_place_in_recep',
    'pick_cool_then_place_in_recep',
    'pick_two_obj_and_place',
)

# What a task kind does to the object, at which receptacle type.
APPLIANCE = {
    'pick_clean_then_place_in_recep': ('clean', 'SinkBasin'),
    'pick_heat_then_place_in_recep': ('heat', 'Microwave'),
    'pick_cool_then_place_in_recep': ('cool', 'Fridge'),
}
ABLE = {'clean': 'Cleanable', 'heat': 'Heatable', 'cool': 'Coolable'}

OPENABLE = frozenset(['Cabinet', 'Drawer', 'Fridge', 'Microwave', 'Safe'])
SOMETIMES_STUCK = frozenset(['Cabinet', 'Drawer'])
BASINS = {'SinkBasin': 'Sink', 'BathtubBasin': 'Bathtub'}
LAMP_STANDS = frozenset(['Desk', 'SideTable', 'Dresser', 'Shelf'])
# The domain's actions name these constants, so every problem declares them.
CONSTANT_RTYPES = ('Fridge', 'Microwave', 'SinkBasin')
CONSTANT_OTYPES = ('Knife', 'ButterKnife')
RECEPTACLE_OBJECTS = frozenset(
    ['Bowl', 'Box', 'Cup', 'Mug', 'Pan', 'Plate', 'Pot']
)

# Room -> receptacle type -> most instances there.
ROOMS = {
    'kitchen': {
        'Cabinet': 6,
        'CounterTop': 3,
        'Drawer': 4,
        'Fridge': 1,
        'GarbageCan': 1,
        'Microwave': 1,
        'Shelf': 3,
        'SinkBasin': 1,
        'StoveBurner': 4,
        'DiningTable': 1,
        'CoffeeMachine': 1,
        'Toaster': 1,
        'SideTable': 1,
    },
    'bedroom': {
        'ArmChair': 1,
        'Bed': 1,
        'Desk': 1,
        'Drawer': 5,
        'Dresser': 1,
        'GarbageCan': 1,
        'LaundryHamper': 1,
        'Safe': 1,
        'Shelf': 4,
        'SideTable': 2,
    },
    'living room': {
        'ArmChair': 2,
        'Cabinet': 3,
        'CoffeeTable': 1,
        'DiningTable': 1,
        'Drawer': 4,
        'Dresser': 1,
        'GarbageCan': 1,
        'Ottoman': 1,
        'Safe': 1,
        'Shelf': 3,
        'SideTable': 2,
        'Sofa': 1,
    },
    'bathroom': {
        'BathtubBasin': 1,
        'Cabinet': 4,
        'CounterTop': 1,
        'Drawer': 3,
        'GarbageCan': 1,
        'HandTowelHolder': 2,
        'Shelf': 2,
        'SideTable': 1,
        'SinkBasin': 2,
        'Toilet': 1,
        'ToiletPaperHanger': 1,
        'TowelHolder': 1,
    },
}

# Room -> object type -> receptacle types where it usually lies there.
USUAL_PLACES = {
    'kitchen': {
        'Apple': ('CounterTop', 'DiningTable', 'Fridge'),
        'Bowl': ('Cabinet', 'Shelf', 'DiningTable'),
        'Bread': ('CounterTop', 'DiningTable'),
        'ButterKnife': ('Drawer', 'CounterTop'),
        'Cup': ('Cabinet', 'Shelf', 'SinkBasin'),
        'DishSponge': ('SinkBasin', 'CounterTop'),
        'Egg': ('Fridge',),
        'Fork': ('Drawer', 'DiningTable'),
        'Kettle': ('StoveBurner',),
        'Knife': ('Drawer', 'CounterTop'),
        'Ladle': ('Drawer', 'CounterTop'),
        'Lettuce': ('Fridge',),
        'Mug': ('Cabinet', 'CoffeeMachine', 'Shelf'),
        'Pan': ('StoveBurner',),
        'PepperShaker': ('Cabinet', 'CounterTop', 'Shelf'),
        'Plate': ('Cabinet', 'Shelf', 'DiningTable'),
        'Pot': ('StoveBurner',),
        'Potato': ('Fridge', 'CounterTop'),
        'SaltShaker': ('Cabinet', 'CounterTop', 'Shelf'),
        'SoapBottle': ('CounterTop', 'Cabinet'),
        'Spatula': ('Drawer', 'CounterTop'),
        'Spoon': ('Drawer', 'DiningTable'),
        'Tomato': ('Fridge', 'CounterTop'),
        'WineBottle': ('Fridge', 'Cabinet'),
    },
    'bedroom': {
        'AlarmClock': ('Desk', 'SideTable'),
        'BaseballBat': ('Bed',),
        'BasketBall': ('ArmChair', 'Dresser'),
        'Book': ('Bed', 'Shelf', 'Desk'),
        'Box': ('Dresser', 'ArmChair'),
        'CD': ('Desk', 'Drawer', 'Shelf'),
        'CellPhone': ('Bed', 'Desk', 'SideTable'),
        'Cloth': ('LaundryHamper', 'Dresser'),
        'CreditCard': ('Drawer', 'Desk'),
        'KeyChain': ('Drawer', 'SideTable'),
        'Laptop': ('Desk', 'Bed'),
        'Mug': ('Desk', 'SideTable'),
        'Pen': ('Desk', 'Drawer'),
        'Pencil': ('Desk', 'Drawer'),
        'Pillow': ('Bed',),
        'Statue': ('Shelf', 'Dresser'),
        'TennisRacket': ('Bed', 'Dresser'),
        'TissueBox': ('SideTable', 'Dresser'),
        'Vase': ('Shelf', 'Dresser'),
        'Watch': ('Safe', 'Drawer'),
    },
    'living room': {
        'Book': ('Sofa', 'CoffeeTable', 'Shelf'),
        'Box': ('Sofa', 'ArmChair'),
        'Candle': ('CoffeeTable', 'Shelf'),
        'CellPhone': ('Sofa', 'ArmChair'),
        'CreditCard': ('Drawer', 'ArmChair'),
        'KeyChain': ('Drawer', 'Safe'),
        'Laptop': ('CoffeeTable', 'Sofa'),
        'Newspaper': ('Sofa', 'CoffeeTable', 'ArmChair'),
        'Pillow': ('Sofa', 'ArmChair'),
        'Plate': ('DiningTable', 'CoffeeTable'),
        'RemoteControl': ('Sofa', 'ArmChair'),
        'Statue': ('Shelf', 'Dresser'),
        'TissueBox': ('SideTable', 'CoffeeTable'),
        'Vase': ('Shelf', 'Cabinet'),
        'Watch': ('Safe', 'Drawer'),
        'WateringCan': ('SideTable', 'Dresser'),
    },
    'bathroom': {
        'Candle': ('Toilet', 'CounterTop'),
        'Cloth': ('Cabinet', 'BathtubBasin'),
        'DishSponge': ('BathtubBasin', 'SinkBasin'),
        'HandTowel': ('HandTowelHolder',),
        'SoapBar': ('SinkBasin', 'BathtubBasin'),
        'SoapBottle': ('Toilet', 'CounterTop'),
        'SprayBottle': ('Cabinet', 'CounterTop'),
        'TissueBox': ('Toilet', 'CounterTop'),
        'ToiletPaper': ('ToiletPaperHanger', 'Cabinet'),
    },
}


@functools.lru_cache(maxsize=1)
def alfred_tables() -> (
    tuple[dict[str, frozenset[str]], dict[str, frozenset[str]]]
):
  """ALFRED's tables: what a receptacle type may hold, what can be done."""
  constants = alfworld_package.load('alfworld.gen.constants')
  holds = constants.VAL_RECEPTACLE_OBJECTS
  able = constants.VAL_ACTION_OBJECTS
  return (
      {k: frozenset(v) for k, v in holds.items()},
      {k: frozenset(v) for k, v in able.items()},
  )
