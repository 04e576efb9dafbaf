"""Measures of how the library is built, for `measure_house.py`."""

from house._figures import measure as measure
from house._graphs import find_floors as find_floors
from house._graphs import Floors as Floors
from house._graphs import folder_graph as folder_graph
from house._graphs import most_mates as most_mates
from house._graphs import room_graph as room_graph
from house._names import equal_classes as equal_classes
from house._names import equal_names as equal_names
from house._names import is_headless as is_headless
from house._names import names_in_ing as names_in_ing
from house._sources import by_folder as by_folder
from house._sources import docstrings as docstrings
from house._sources import parse_sources as parse_sources
from house._sources import read_sources as read_sources
from house._sources import Source as Source
from house._tables import draw_table as draw_table
from house._tables import make_tables as make_tables
from house._tables import notes as notes
from house._tables import put_beside as put_beside
from house._tables import with_sub_rooms as with_sub_rooms
from house._updates import besides as besides
from house._updates import trace_updates as trace_updates
