"""Pictures of what ``gpucoll-bench --json`` wrote, drawn by matplotlib without its global state.

::

    from gpucoll.bench.pictures import heat_map, save

    save(heat_map(json.loads(path.read_text()), "in_place", theme="print"), Path("ratios.svg"))

The functions take the content of one file or of several, and return a `Picture`. `save` writes it
to a file, `to_svg` returns it as an element of a page. Colours are those of `THEMES`. `why_not`
says in advance why a picture cannot be saved; only drawing imports matplotlib, which
``pip install 'gpucoll[plot]'`` installs.
"""

from gpucoll.bench.pictures.headline import Bar, bar_of, headline
from gpucoll.bench.pictures.heat_map import heat_map
from gpucoll.bench.pictures.lines import lines
from gpucoll.bench.pictures.multiples import overview, small_multiples
from gpucoll.bench.pictures.saving import SUFFIXES, Picture, save, to_svg, why_not
from gpucoll.bench.pictures.series import NothingToDrawError, calls_of, digest_of, fullest_side
from gpucoll.bench.pictures.theme import THEMES

__all__ = [
    "SUFFIXES",
    "THEMES",
    "Bar",
    "NothingToDrawError",
    "Picture",
    "bar_of",
    "calls_of",
    "digest_of",
    "fullest_side",
    "headline",
    "heat_map",
    "lines",
    "overview",
    "save",
    "small_multiples",
    "to_svg",
    "why_not",
]
